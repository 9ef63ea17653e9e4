"""A plain life of requests, nothing disturbed: what every planted bug has to survive.

A bug that breaks this would be caught by anything at all - an import, the first assertion - and
says nothing about the tests. `python -m tests.mutants.smoke` exits with 0 if all is well.
"""

import importlib
import sys

from gateway.core.stream import Fed, StreamState
from gateway.core.types import FinishReason as StreamEnd
from scheduler_svc.core.types import FinishReason
from tests.builders import make_core, make_request
from tests.cluster import Cluster

# Imported for nothing but to see that they can be.
MODULES = (
    "gateway.engine",
    "gateway.adapters.queue_redis",
    "gateway.adapters.tokens_grpc",
    "gpu_worker.executor",
    "gpu_worker.replica",
    "gpu_worker.session",
    "gpu_worker.token_hub",
    "scheduler_svc.term",
    "scheduler_svc.adapters.inbox_redis",
    "scheduler_svc.adapters.outbox_redis",
    "scheduler_svc.adapters.worker_link",
)


def core_works() -> None:
    """Three requests of a few tokens on one idle worker, one after the other and side by side."""
    cluster = Cluster(make_core(max_inflight_steps=2))
    cluster.join()
    cluster.arrive(make_request("a", prompt=5, max_tokens=4))
    cluster.run()
    cluster.arrive(make_request("b", prompt=6, max_tokens=3))
    cluster.arrive(make_request("c", prompt=7, max_tokens=5))
    cluster.run()
    for name in "abc":
        assert cluster.end(name) is FinishReason.LENGTH, name
    cluster.assert_idle()


def stream_works() -> None:
    """Two batches and an end."""
    stream = StreamState()
    assert stream.feed(1, 0, (5, 6)) is Fed.NEWS
    assert stream.feed(1, 2, (7,), StreamEnd.STOP) is Fed.NEWS
    assert stream.take() == [5, 6, 7]
    assert stream.end is not None


def main() -> int:
    """Raises what is wrong."""
    for module in MODULES:
        importlib.import_module(module)
    core_works()
    stream_works()
    return 0


if __name__ == "__main__":
    sys.exit(main())

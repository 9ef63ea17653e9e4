"""Random histories in which blocks are always short: requests swap out, come back, end meanwhile.

Everything is drawn from one seed. The Cluster checks the core's promises after each event, and
FakeWorkers check that each row finds the contents of exactly its own tokens.
"""

from dataclasses import replace
from random import Random
from typing import Any

from scheduler_svc.core.events import StepFailed, WorkerDraining
from scheduler_svc.core.types import FaultScope, FinishReason, PreemptionMode, RequestId, WorkerId
from tests.builders import expected_output, make_core, make_request
from tests.cluster import MS, Cluster

MODES = ("swap", "auto", "recompute")
NUM_EVENTS = 120
# Four tokens cost as much as swapping one and a half blocks out and in.
COSTS: dict[str, Any] = {"token_us": 3.0, "swap_gb_per_s": 1.0}


class History:
    """One history; `play` runs it and lets everything end."""

    def __init__(self, seed: int, *, mode: str, depth: int, **config: Any) -> None:
        self.random = Random(seed)
        self.names: list[str] = []
        options = {
            "scheduling_policy": self.pick("fcfs", "fair", "static"),
            "prefill_chunk_tokens": self.pick(0, 3),
            "enable_prefix_caching": self.pick(True, True, False),
            "watermark": self.pick(0.0, 0.1),
            "max_preemptions": self.pick(1, 3, 50),
            "static_batch_size": self.pick(2, 4, 8),
        }
        self.cluster = Cluster(
            make_core(preemption_mode=mode, max_inflight_steps=depth, **(options | config))
        )
        self.join("w0")
        if self.pick(True, False, False):
            self.join("w1")

    def pick(self, *choices: Any) -> Any:
        """One of these."""
        return self.random.choice(choices)

    def join(self, name: str) -> None:
        """A worker whose blocks hold about a third of what its slots may need."""
        self.cluster.join(
            name,
            num_slots=self.pick(4, 6),
            num_blocks=self.pick(10, 14),
            num_host_blocks=self.pick(0, 4, 30, 30),
            block_size=self.pick(4, 4, 2),
            max_num_batched_tokens=self.pick(6, 32),
            **COSTS,
        )

    def play(self, num_events: int = NUM_EVENTS) -> None:
        """So many events, then a healthy worker comes on which all that is left can end."""
        for _ in range(num_events):
            self.event()
        self.cluster.join("w1", num_blocks=14, num_host_blocks=30, **COSTS)
        self.cluster.run(max_steps=4000)
        for _ in range(3):
            for name, stream in zip(self.names, self.streams(), strict=True):
                if stream.end is None:
                    # Its worker died with the end, or its gateway holds a higher attempt.
                    self.cluster.supersede(name)
            self.cluster.run(max_steps=4000)
        for name, stream in zip(self.names, self.streams(), strict=True):
            output, reason = expected_output(stream.arrival)
            assert stream.tokens == output[: len(stream.tokens)]
            assert stream.end is not None, f"{name} did not end"
            if stream.end in (FinishReason.STOP, FinishReason.LENGTH):
                assert (stream.tokens, stream.end) == (output, reason)
        self.cluster.assert_idle()

    def streams(self) -> list[Any]:
        """As the gateway sees them."""
        return list(self.cluster.gateway.streams.values())

    def event(self) -> None:
        """What happens next."""
        busy = [worker for worker in self.cluster.workers.values() if worker.plans]
        draw = self.random.random()
        if draw < 0.12 or not self.names:
            self.arrive()
        elif draw < 0.15:
            self.disturb()
        elif draw < 0.18:
            self.end_one()
        elif busy:
            name = self.pick(*busy).worker_id
            self.cluster.step(name, num_done=self.pick(99, 99, 0, 0, 1))
        else:
            self.cluster.advance(MS)

    def arrive(self) -> None:
        """One request or several; at times they are samples of one prompt."""
        count = self.pick(1, 2, 4)
        group = b"%d" % len(self.names) if self.pick(True, False, False) else b""
        prompt = self.random.randint(1, 14)
        for index in range(count):
            self.names.append(f"r{len(self.names)}")
            self.cluster.arrive(
                make_request(
                    self.names[-1],
                    prompt=prompt if group else self.random.randint(1, 14),
                    max_tokens=self.random.randint(1, 24),
                    stop_after=self.pick(None, None, 5),
                    family=self.pick(None, None, 0, 1) if not group else 0,
                    sample_group=group,
                    sample_index=index if group else 0,
                    priority=self.pick(0, 0, 0, -1, 1),
                    tenant=self.pick("a", "b"),
                    deadline_ns=self.pick(None, None, None, self.cluster.now_ns + 30 * MS),
                    num_logprobs=self.pick(None, None, None, 1),
                    prompt_logprobs=self.pick(False, False, True),
                )
            )

    def end_one(self) -> None:
        """A client is gone, or its gateway asks anew."""
        open_ = [n for n in self.names if self.cluster.end(n) is None]
        if not open_:
            return
        name = self.pick(*open_)
        what = self.pick("cancel", "supersede", "worker ends it")
        if what == "cancel":
            self.cluster.cancel(name)
        elif what == "supersede":
            self.cluster.supersede(name)
        else:
            # The core may hear it from a row that is missing, if that was to sample.
            for worker in self.cluster.workers.values():
                worker.cancel(RequestId(name.encode()))
            self.cluster.gateway.streams[RequestId(name.encode())].end = FinishReason.CANCELLED

    def disturb(self) -> None:
        """A step fails, a worker is lost, drains, or comes (anew)."""
        busy = [worker for worker in self.cluster.workers.values() if worker.plans]
        draw = self.random.random()
        name = self.pick("w0", "w1")
        if draw < 0.5 and busy:
            failing = self.pick(*busy)
            event = failing.next_result(
                now_ns=self.cluster.now_ns, fail=True, num_done=self.pick(99, 0, 1)
            )
            assert isinstance(event, StepFailed)
            if self.random.random() < 0.1:
                event = replace(event, scope=FaultScope.WORKER)
            self.cluster.feed(event)
        elif draw < 0.6 and WorkerId(name) in self.cluster.workers:
            self.cluster.lose(name)
        elif draw < 0.7:
            self.cluster.feed(WorkerDraining(now_ns=self.cluster.now_ns, worker_id=WorkerId(name)))
        elif draw < 0.9:
            self.join(name)

    @property
    def num_swaps(self) -> int:
        """Preemptions by swap."""
        return self.cluster.core.stats.preemptions[PreemptionMode.SWAP]

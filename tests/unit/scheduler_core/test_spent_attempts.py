"""A worker that lies about attempts may end a request, but costs no honest worker its session."""

import pytest

from scheduler_svc.core.types import MAX_ATTEMPT, FinishReason, RequestId
from tests.builders import make_core, make_request, make_worker
from tests.cluster import Cluster

A = RequestId(b"a")


def cluster() -> Cluster:
    return Cluster(make_core(max_inflight_steps=1))


def lie(c: Cluster, attempt: int) -> None:
    """A worker that no gateway reads joins and says that it has had `a` under this attempt."""
    if A in c.gateway.streams:
        c.gateway.streams[A].attempt = attempt
    c.join_as(make_worker("liar", snapshot_attempts={A: attempt}, gateways=(), now_ns=c.now_ns))


def assert_ended(c: Cluster) -> None:
    [finish] = c.finishes.values()
    assert (finish.reason, finish.notify) == (FinishReason.ERROR, True)
    assert finish.message == "no attempt is left"
    c.run()
    c.assert_idle()


@pytest.mark.parametrize("num_steps", [0, 3])
def test_one_that_waits_or_runs_ends_where_no_attempt_is_left(num_steps: int) -> None:
    c = cluster()
    if num_steps:
        c.begin("w")
    c.arrive(make_request("a", max_tokens=8))
    if num_steps:
        c.steps(num_steps, "w")
    lie(c, MAX_ATTEMPT)
    c.round()
    c.run()
    assert_ended(c)


def test_one_that_arrives_later_ends_too() -> None:
    c = cluster()
    c.begin("w")
    lie(c, MAX_ATTEMPT)
    c.arrive(make_request("a", max_tokens=8))
    assert_ended(c)


def test_the_last_attempt_is_played_but_not_moved() -> None:
    c = cluster()
    c.begin("w")
    c.arrive(make_request("a", max_tokens=8))
    c.step("w")
    lie(c, MAX_ATTEMPT - 1)
    c.steps(2, "w")
    assert c.end("a") is None
    c.lose("w")
    c.begin("w")
    assert_ended(c)


def test_one_that_supersedes_the_last_attempt_ends() -> None:
    c = cluster()
    c.arrive(make_request("a", max_tokens=8))
    lie(c, MAX_ATTEMPT - 1)
    c.supersede("a")
    assert_ended(c)


def test_attempts_that_its_gateway_asked_for_are_no_losses() -> None:
    """A gateway asks anew for all it has in doubt: those were never tried."""
    c = Cluster(make_core(max_inflight_steps=1, max_attempts=2))
    c.arrive(make_request("a", max_tokens=50))
    for _ in range(5):
        c.supersede("a")
    c.begin()
    c.step()
    c.lose("w")
    c.join("w")
    assert c.end("a") is None
    c.supersede("a")
    c.step()
    c.lose("w")
    assert c.end("a") is FinishReason.ERROR
    assert "tried 2 times" in c.finish("a", 7).message

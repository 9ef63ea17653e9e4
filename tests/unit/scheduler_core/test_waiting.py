"""The waiting queue: by priority class, then by arrival."""

import random
from array import array

import pytest

from scheduler_svc.core.request import Request
from scheduler_svc.core.tenants import Tenant
from scheduler_svc.core.types import RequestId, SamplingSpec
from scheduler_svc.core.waiting import WaitingQueue


def make(
    sequence: int,
    priority: int = 0,
    deadline_ns: int | None = None,
    tenant: Tenant | None = None,
) -> Request:
    return Request(
        request_id=RequestId(b"%d" % sequence),
        entry_id=str(sequence),
        entry_attempt=1,
        attempt=1,
        gateway_id="g",
        reply_to=b"",
        token_ids=array("I", [1]),
        prompt_len=1,
        sampling=SamplingSpec(max_tokens=1),
        tenant=tenant or Tenant("t"),
        deadline_ns=deadline_ns,
        cache_salt=b"",
        traceparent="",
        rank=(priority, sequence),
        arrived_ns=0,
        emit_from=0,
    )


def test_lower_classes_first_then_first_come() -> None:
    queue = WaitingQueue()
    requests = [make(i, priority=p) for i, p in enumerate([1, 0, 1, -1, 0])]
    for request in random.Random(0).sample(requests, len(requests)):
        queue.add(request)
    assert [r.rank[1] for r in queue] == [3, 1, 4, 0, 2]


def test_one_that_comes_back_takes_its_old_place() -> None:
    queue = WaitingQueue()
    requests = [make(i) for i in range(4)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[1])
    assert requests[1] not in queue
    assert len(queue) == 3
    queue.add(requests[1])
    assert list(queue) == requests


def test_membership_is_by_identity() -> None:
    queue = WaitingQueue()
    queue.add(make(1))
    assert make(1) not in queue


def test_waiting_twice_or_leaving_twice_is_a_bug() -> None:
    queue, request = WaitingQueue(), make(1)
    queue.add(request)
    with pytest.raises(AssertionError, match="waits twice"):
        queue.add(request)
    queue.remove(request)
    with pytest.raises((AssertionError, KeyError)):
        queue.remove(request)

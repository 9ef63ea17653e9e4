"""What is remembered of attempts, and for how many requests."""

from scheduler_svc.core.attempts import AttemptMemory
from scheduler_svc.core.types import RequestId

A, B, C = (RequestId(name) for name in (b"a", b"b", b"c"))


def test_the_highest_attempt_counts_and_is_taken_once() -> None:
    memory = AttemptMemory()
    memory.note(A, 4)
    memory.note(A, 2)
    assert (memory.take(A), memory.take(A), memory.take(B)) == (4, 0, 0)


def test_the_one_noted_longest_ago_is_forgotten_first() -> None:
    memory = AttemptMemory(max_remembered=2)
    memory.note(A, 3)
    memory.note(B, 3)
    memory.note(A, 1)
    memory.note(C, 3)
    assert [memory.take(request_id) for request_id in (A, B, C)] == [3, 0, 3]

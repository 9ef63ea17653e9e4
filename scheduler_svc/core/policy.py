"""Order and admission, as pure functions. Each scheduling policy is a few lines here."""

from collections.abc import Iterable

from scheduler_svc.core.request import Request


def may_admit(policy: str, *, num_running: int, num_admitted: int, static_batch_size: int) -> bool:
    """Whether a worker may take one more request into this step.

    fcfs admits whenever there is room. static fills an empty worker with one batch and waits until
    all of it has ended.
    """
    if policy == "static":
        return num_running == num_admitted and num_admitted < static_batch_size
    return True


def choose_victim(running: Iterable[Request]) -> Request:
    """The request that loses its blocks when one is missing: the lowest-ranked."""
    return max(running, key=lambda request: request.rank)


def placement_cost(*, num_uncached: int, num_pending_prefill: int, num_running: int) -> int:
    """Lower is better: prefill tokens that would stand before the first token, plus decode load.

    A running request counts like a block of prefill, so that equal prompts spread and a prefix hit
    still wins over a slightly emptier worker.
    """
    return num_uncached + num_pending_prefill + 16 * num_running

"""Order and admission, as pure functions. Each scheduling policy is a few lines here.

- `fcfs` admits whenever there is room, in the order of ranks.
- `fair` does the same, but asks tenants in the order of their service; see tenants.
- `static` fills an empty worker with one batch and waits until all of it has ended.

Within a tenant, or in all with `fcfs` and `static`, a request's rank decides: its class and its
arrival.
"""

from collections.abc import Sequence

from scheduler_svc.core.request import Rank, Request
from scheduler_svc.core.types import CostProfile

POLICIES = ("fcfs", "fair", "static")


def rank(*, priority: int, arrived_ns: int, sequence: int, ageing_ns: int) -> Rank:
    """Order of requests, lower goes first.

    A class is a head start: one class is worth `ageing_ns` of waiting. So a request is passed by a
    better class only if that arrives within ageing_ns per class after it: nobody starves, and the
    order of two requests never changes. Without ageing classes are strict.
    """
    if ageing_ns == 0:
        return priority, sequence
    return arrived_ns + priority * ageing_ns, sequence


def may_admit(policy: str, *, num_running: int, num_admitted: int, static_batch_size: int) -> bool:
    """Whether a worker may take one more request into this step."""
    if policy == "static":
        return num_running == num_admitted and num_admitted < static_batch_size
    return True


def may_lead(*, counter: float, least: float, max_lead: int) -> bool:
    """Whether a tenant may be served while one that waits has had less and can't be served now.

    With `fair`. max_lead is one context: what is passed then differs by a bounded amount, however
    often something small fits and something large does not.
    """
    return counter - least < max_lead


def choose_victim(policy: str, ranked: Sequence[Request]) -> Request:
    """The request that loses its blocks when one is missing: the lowest-ranked.

    With `fair` that of the tenant that has been served most.
    """
    if policy == "fair":
        return max(ranked, key=lambda request: (request.tenant.counter, request.rank))
    return ranked[-1]


def placement_cost(*, num_uncached: int, num_pending_prefill: int, num_running: int) -> int:
    """Lower is better: prefill tokens that would stand before the first token, plus decode load.

    A running request counts like a block of prefill, so that equal prompts spread and a prefix hit
    still wins over a slightly emptier worker.
    """
    return num_uncached + num_pending_prefill + 16 * num_running


def is_too_late(
    *,
    now_ns: int,
    deadline_ns: int | None,
    num_uncached: int,
    min_tokens: int,
    budget_tokens: int,
    cost: CostProfile,
) -> bool:
    """Whether the deadline can't be kept even by a request that runs alone.

    At least its tokens have to be computed and its min_tokens sampled at the worker's speed. Such a
    request is not admitted before others.
    """
    if deadline_ns is None:
        return False
    num_steps = -(-num_uncached // budget_tokens) + max(0, min_tokens - 1)
    needed_us = num_steps * cost.step_us + num_uncached * cost.token_us
    return now_ns + needed_us * 1000 > deadline_ns


def prefill_allowance(
    *, max_gap_ns: int, num_decodes: int, floor_tokens: int, cost: CostProfile
) -> int | None:
    """Prefill tokens that a step with decodes may hold so that it ends within the gap.

    None for no limit, as long as the cost is unknown. At least floor_tokens are always allowed, so
    that a prompt gets on however short the gap is.
    """
    if cost.token_us == 0.0:
        return None
    left_us = max_gap_ns / 1000 - cost.step_us - num_decodes * cost.token_us
    return max(floor_tokens, int(left_us / cost.token_us))


def waits_to_fork(policy: str, *, num_blocks: int, num_holds: int, max_holds: int) -> bool:
    """Whether a sample waits until another one has filled num_blocks that both can share.

    One block is enough, whatever the work: it is one less for each sample. With `static` it would
    miss its batch.
    """
    return policy != "static" and num_blocks > 0 and num_holds < max_holds


def holds_back(
    policy: str,
    *,
    num_coming: int,
    num_holds: int,
    min_tokens: int,
    max_holds: int,
    cost: CostProfile,
) -> bool:
    """Whether a request waits until a running one has filled num_coming tokens that both share.

    Worth it if they are at least as much work as the fixed time of the step that it waits for.
    With `static` it would miss its batch.
    """
    if policy == "static" or min_tokens == 0 or num_holds >= max_holds:
        return False
    is_worth_it = cost.token_us == 0.0 or num_coming * cost.token_us >= cost.step_us
    return num_coming >= min_tokens and is_worth_it

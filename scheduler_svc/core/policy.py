"""Order and admission, as pure functions. Each scheduling policy is a few lines here.

- `fcfs` admits whenever there is room, in the order of ranks.
- `fair` does the same, but asks tenants in the order of their service; see tenants.
- `static` fills an empty worker with one batch and waits until all of it has ended.

Within a tenant, or in all with `fcfs` and `static`, a request's rank decides: its class and its
arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.request import Rank, Request
from scheduler_svc.core.types import CostProfile, PreemptionMode

POLICIES = ("fcfs", "fair", "static")
PREEMPTION_MODES = ("auto", "swap", "recompute")
# `auto` keeps to the way it went last on a worker unless the other is cheaper by this share.
_CHEAPER_BY = 0.2


def rank(*, priority: int, arrived_ns: int, sequence: int, ageing_ns: int) -> Rank:
    """Order of requests, lower goes first.

    A class is a head start: one class is worth `ageing_ns` of waiting. So a request is passed by a
    better class only if that arrives within ageing_ns per class after it: nobody starves, and the
    order of two requests never changes. Without ageing classes are strict.
    """
    if ageing_ns == 0:
        return priority, sequence
    return arrived_ns + priority * ageing_ns, sequence


def max_admissions(policy: str, *, num_seats: int, num_running: int, static_batch_size: int) -> int:
    """How many requests a worker with so many free slots may take into a step at most."""
    if policy == "static":
        return 0 if num_running else min(num_seats, static_batch_size)
    return num_seats


def may_lead(*, counter: float, least: float, max_lead: int) -> bool:
    """Whether a tenant may be served while one that waits has had less and can't be served now.

    With `fair`. max_lead is one context: what is passed then differs by a bounded amount, however
    often something small fits and something large does not.
    """
    return counter - least < max_lead


def turn(policy: str, request: Request) -> tuple[float, Rank]:
    """Place in the order of service, lower goes first: the tenant's service before the rank."""
    return (request.tenant.counter if policy == "fair" else 0.0), request.rank


def choose_victim(policy: str, ranked: Sequence[Request], *, max_preemptions: int) -> Request:
    """The request that loses its blocks when one is missing: the lowest-ranked.

    With `fair` that of the tenant that has been served most. One that has been preempted
    max_preemptions times is left alone as long as there is another.
    """
    candidates = [request for request in ranked if request.num_preemptions < max_preemptions]
    return max(candidates or ranked, key=lambda request: turn(policy, request))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionCost:
    """What a preemption by either way takes from the worker, in microseconds.

    None where it can't be told, or can't be done.
    """

    swap_us: float | None
    recompute_us: float | None


def preemption_cost(
    *,
    num_bytes: int,
    num_uncached: int,
    cost: CostProfile,
    swap_gb_per_s: float = 0.0,
    token_us: float = 0.0,
) -> PreemptionCost:
    """num_bytes go to the host and come back, or num_uncached tokens are computed anew.

    swap_gb_per_s and token_us, if not 0, stand for what the worker has measured.
    """
    out, into = cost.swap_out_gb_per_s, cost.swap_in_gb_per_s
    out, into = (swap_gb_per_s or out), (swap_gb_per_s or into)
    token_us = token_us or cost.token_us
    known = num_bytes > 0 and out > 0.0 and into > 0.0
    return PreemptionCost(
        swap_us=(num_bytes / out + num_bytes / into) / 1000.0 if known else None,
        recompute_us=num_uncached * token_us if token_us > 0.0 else None,
    )


def choose_preemption(
    mode: str, cost: PreemptionCost, *, last: PreemptionMode | None
) -> PreemptionMode:
    """Swap or recompute, where both can be done. `last` is how it went last on the worker.

    With `auto` the cheaper one, but the last one until the other is clearly cheaper; recompute as
    long as the cost of either is unknown.
    """
    if mode != "auto":
        return PreemptionMode(mode)
    if cost.swap_us is None or cost.recompute_us is None:
        return PreemptionMode.RECOMPUTE
    swap_us, recompute_us = cost.swap_us, cost.recompute_us
    if last is PreemptionMode.SWAP:
        swap_us *= 1.0 - _CHEAPER_BY
    elif last is PreemptionMode.RECOMPUTE:
        recompute_us *= 1.0 - _CHEAPER_BY
    return PreemptionMode.SWAP if swap_us < recompute_us else PreemptionMode.RECOMPUTE


def return_margin(*, num_running: int, watermark: int) -> int:
    """Blocks that must stay free when a swapped request comes back.

    One for each request that runs beside it: they fill one each before the next preemption, so
    that what comes back does not leave again at once. An idle worker needs none.
    """
    return max(num_running, watermark) if num_running else 0


def placement_cost(num_uncached: int, num_pending: int, num_running: int) -> int:
    """Lower is better: tokens that would stand before the first token, plus decode load.

    num_pending are prefill tokens that no plan has, and all tokens of plans that have not returned:
    without these a worker looks free whose next steps are full.

    A running request counts like a block of prefill, so that equal prompts spread and a prefix hit
    still wins over a slightly emptier worker.
    """
    return num_uncached + num_pending + 16 * num_running


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

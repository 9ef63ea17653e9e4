"""The published bound of `fair` (docs/scheduling.md), over 1,000 adversarial histories.

Service is counted here anew, from what goes into the core and comes out of it: the tokens that a
request's first admission has to compute, and each token that a step gives. While two tenants wait
without a break, their service by weight may differ by at most twice the bound, whatever they send.
"""

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from scheduler_svc.core.events import (
    RequestArrived,
    RequestCancelled,
    StepCompleted,
    StepFailed,
    WorkerLost,
)
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.ready import Ready, StepPlan
from scheduler_svc.core.types import (
    FaultScope,
    FinishReason,
    PreemptionMode,
    RequestId,
    Slot,
    WorkerId,
)
from tests.builders import make_core, make_request, make_worker
from tests.cluster import MS

NUM_TESTS, HISTORIES_EACH, NUM_ROUNDS = 20, 50, 120
SLOTS, CONTEXT, MAX_PROMPT, MAX_OUTPUT = 3, 20, 14, 5
WORKER = WorkerId("w")
# What tenants send: lengths of prompts and outputs, and how many they keep waiting.
MOODS = {
    "greedy": ((1, MAX_PROMPT), (1, MAX_OUTPUT), 9),
    "readers": ((10, MAX_PROMPT), (1, 1), 4),
    "writers": ((1, 2), (MAX_OUTPUT, MAX_OUTPUT), 4),
    "giants": ((MAX_PROMPT, MAX_PROMPT), (MAX_OUTPUT, MAX_OUTPUT), 3),
    "small": ((1, 3), (1, 2), 9),
    "late": ((1, MAX_PROMPT), (1, MAX_OUTPUT), 9),
    "bursts": ((1, MAX_PROMPT), (1, MAX_OUTPUT), 9),
    "rare": ((1, MAX_PROMPT), (1, MAX_OUTPUT), 9),
}


@dataclass(slots=True)
class Held:
    """A request that has not ended."""

    tenant: str
    max_tokens: int
    is_admitted: bool = False
    num_output: int = 0


@dataclass(slots=True)
class Pair:
    """Two tenants: how far their service has moved apart since both began to wait."""

    lowest: float = 0.0
    highest: float = 0.0
    waits: bool = False


@dataclass(slots=True)
class History:
    """One seeded history of a core with one worker, and the service it has given."""

    pick: random.Random
    depth: int
    weights: dict[str, float]
    held: dict[RequestId, Held] = field(default_factory=dict)
    service: dict[str, float] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    slots: dict[Slot, tuple[RequestId, int]] = field(default_factory=dict)
    counts: dict[Slot, int] = field(default_factory=dict)
    now_ns: int = 0
    num_arrived: int = 0
    num_served: int = 0
    num_swaps: int = 0
    worst: float = 0.0

    def play(self) -> None:
        """Random rounds; after each the pairs are looked at."""
        pick = self.pick
        core = make_core(
            scheduling_policy="fair",
            max_inflight_steps=self.depth,
            max_skips=pick.choice((1, 4, 16)),
            prefill_chunk_tokens=pick.choice((0, 5)),
            priority_ageing_ns=pick.choice((0, 5 * MS)),
            preemption_mode="swap",
        )
        self.service = dict.fromkeys(self.weights, 0.0)
        pairs = {pair: Pair() for pair in itertools.combinations(self.weights, 2)}
        joined = make_worker(
            num_slots=SLOTS,
            num_blocks=pick.choice((5, 7, 14)),
            block_size=4,
            max_num_batched_tokens=pick.choice((16, 40)),
            max_model_len=CONTEXT,
            num_host_blocks=pick.choice((0, 4, 12)),
        )
        core.feed(joined)
        moods = {name: pick.choice(tuple(MOODS)) for name in self.weights}
        for number in range(NUM_ROUNDS):
            self.now_ns += MS
            for name, mood in moods.items():
                for arrival in self.arrivals(name, mood, number):
                    core.feed(arrival)
            for event in self.disturbances():
                core.feed(event)
                if isinstance(event, WorkerLost):
                    self.plans.clear()
                    self.slots.clear()
                    core.feed(joined)
            if self.plans:
                core.feed(self.answer())
            self.follow(core.take_ready())
            if number % 8 == 0:
                check_all(core)
            for (one, other), pair in pairs.items():
                self.compare(one, other, pair)
        self.num_swaps = core.stats.preemptions[PreemptionMode.SWAP]

    def arrivals(self, name: str, mood: str, number: int) -> Iterable[RequestArrived]:
        """What a tenant sends; see MOODS."""
        pick = self.pick
        prompts, outputs, most_waiting = MOODS[mood]
        count = 2 if self.waiting(name) < most_waiting else 0
        if mood == "bursts":
            count = 8 if number % 23 == 11 else 0
        elif mood == "late":
            count *= number > NUM_ROUNDS // 2
        elif mood == "rare":
            count = int(pick.random() < 0.2)
        for _ in range(count):
            self.num_arrived += 1
            arrival = make_request(
                f"{name}{self.num_arrived}",
                prompt=pick.randint(*prompts),
                max_tokens=pick.randint(*outputs),
                family=pick.choice((None, None, 1)),
                priority=pick.choice((0, 0, -3, 5)),
                tenant=name,
                tenant_weight=self.weights[name],
                now_ns=self.now_ns,
            )
            self.held[arrival.request_id] = Held(name, arrival.sampling.max_tokens)
            yield arrival

    def disturbances(self) -> Iterable[RequestCancelled | StepFailed | WorkerLost]:
        """Clients that leave, steps that fail, now and then a lost worker."""
        chance = self.pick.random()
        if chance < 0.05 and self.held:
            request_id = self.pick.choice(sorted(self.held))
            yield RequestCancelled(now_ns=self.now_ns, request_id=request_id)
        elif chance < 0.07 and self.plans:
            step = self.plans[0].step
            self.plans.clear()
            yield StepFailed(
                now_ns=self.now_ns,
                worker_id=WORKER,
                step=step,
                scope=FaultScope.STEP,
                reason="planted",
            )
        elif chance < 0.075:
            yield WorkerLost(now_ns=self.now_ns, worker_id=WORKER)

    def answer(self) -> StepCompleted:
        """The oldest plan's result. A row samples when its known tokens are all computed."""
        plan = self.plans.pop(0)
        if plan.reset:
            self.slots.clear()
            self.counts.clear()
        for slot in plan.releases:
            del self.slots[slot]
            self.counts.pop(slot, None)
        for admit in plan.admits:
            left = len(admit.token_ids) - admit.num_computed_tokens
            self.slots[admit.slot] = (admit.request_id, left)
        for slot, count in plan.changed:
            self.counts[slot] = count
        tokens, finished = [], []
        for slot, count in self.counts.items():
            if count == 0:
                continue
            request_id, left = self.slots[slot]
            self.slots[slot] = (request_id, max(1, left - count))
            if left > count:
                continue
            tokens.append((slot, 7))
            held = self.held.get(request_id)
            if held is None:
                continue
            held.num_output += 1
            self.serve(held.tenant, 1)
            if held.num_output == held.max_tokens:
                finished.append((slot, FinishReason.LENGTH))
            elif self.pick.random() < 0.03:
                finished.append((slot, FinishReason.STOP))
        return StepCompleted(
            now_ns=self.now_ns,
            worker_id=WORKER,
            step=plan.step,
            slots=tuple(slot for slot, _ in tokens),
            token_ids=tuple(token for _, token in tokens),
            finished=tuple(finished),
            operations_done=tuple(operation.op_id for operation in plan.operations),
        )

    def follow(self, ready: Ready) -> None:
        """Counts first admissions, forgets what has ended."""
        for plan in ready.plans:
            self.plans.append(plan)
            # A plan for several steps is answered step by step.
            nothing: dict[str, Any] = dict.fromkeys(
                ("releases", "admits", "changed", "growth", "operations"), ()
            )
            self.plans += [
                replace(plan, step=plan.step + i, reset=False, **nothing)
                for i in range(1, plan.num_steps)
            ]
            for admit in plan.admits:
                held = self.held[admit.request_id]
                if not held.is_admitted:
                    held.is_admitted = True
                    self.serve(held.tenant, len(admit.token_ids) - admit.num_computed_tokens)
        for finish in ready.finishes:
            del self.held[finish.request_id]
            self.num_served += 1

    def serve(self, tenant: str, num_tokens: int) -> None:
        self.service[tenant] += num_tokens / self.weights[tenant]

    def waiting(self, tenant: str) -> int:
        """Requests of the tenant that have never been admitted."""
        return sum(h.tenant == tenant and not h.is_admitted for h in self.held.values())

    def compare(self, one: str, other: str, pair: Pair) -> None:
        """Begins a stretch in which both wait, or holds the bound in it."""
        if not (self.waiting(one) and self.waiting(other)):
            pair.waits = False
            return
        apart = self.service[one] - self.service[other]
        if not pair.waits:
            pair.waits, pair.lowest, pair.highest = True, apart, apart
        pair.lowest, pair.highest = min(pair.lowest, apart), max(pair.highest, apart)
        weight = min(self.weights[one], self.weights[other])
        bound = CONTEXT + (MAX_PROMPT + SLOTS * (MAX_OUTPUT + self.depth)) / weight
        self.worst = max(self.worst, (pair.highest - pair.lowest) / (2 * bound))
        assert pair.highest - pair.lowest <= 2 * bound


# One part is among the quick tests, half of them in `make test`, all in `make check`.
PARTS = [
    0,
    *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, NUM_TESTS // 2)),
    *(pytest.param(part, marks=pytest.mark.soak) for part in range(NUM_TESTS // 2, NUM_TESTS)),
]


@pytest.mark.parametrize("part", PARTS)
def test_tenants_that_wait_get_what_their_weights_say(part: int) -> None:
    worst, num_served, num_swaps = 0.0, 0, 0
    for seed in range(part * HISTORIES_EACH, (part + 1) * HISTORIES_EACH):
        pick = random.Random(seed)
        weights = {name: pick.choice((0.5, 1.0, 1.0, 4.0)) for name in "abcd"[: 2 + seed % 3]}
        history = History(pick, pick.choice((1, 2, 4)), weights)
        history.play()
        worst, num_served = max(worst, history.worst), num_served + history.num_served
        num_swaps += history.num_swaps
    assert num_served > HISTORIES_EACH * 10
    assert num_swaps > HISTORIES_EACH / 2
    assert worst > 0.2, "the histories have come nowhere near the bound"

"""Real result messages, changed at random on their way: the scheduler and other workers go on.

Each history has an honest worker and a lying one. What a lying worker's message holds goes through
the codec, the worker's life and the core as in the process; whatever refuses it costs that worker.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from quire.v1 import common_pb2, worker_pb2

from scheduler_svc import codec
from scheduler_svc.adapters.loss_rules import WorkerHealth
from scheduler_svc.adapters.worker_life import ProtocolError, WorkerLife
from scheduler_svc.core.events import StepCompleted, StepFailed
from scheduler_svc.core.ready import Ready
from scheduler_svc.core.types import CostProfile, RequestId, WorkerId
from scheduler_svc.ports import StepReport
from tests.builders import Emission, expected_output, make_core, make_request
from tests.cluster import MS, Cluster, FakeGateway

NUM_EVENTS = 200
HONEST, LIAR = WorkerId("honest"), WorkerId("liar")
NUMBERS = (0, 1, 2, 5, 8, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)


@dataclass(slots=True)
class LaxGateway(FakeGateway):
    """Looks at no tokens of requests that a lie may have spoilt."""

    spoilt: set[RequestId] = field(default_factory=set)

    def receive(self, emission: Emission) -> None:
        if emission.request_id not in self.spoilt:
            FakeGateway.receive(self, emission)


class WiredCluster(Cluster):
    """Plans pass through each worker's life as well."""

    def __init__(self, **config: Any) -> None:
        super().__init__(make_core(**config))
        self.gateway: LaxGateway = LaxGateway()
        self.lives: dict[WorkerId, WorkerLife] = {}

    def round(self) -> Ready:
        ready = super().round()
        for plan in ready.plans:
            if plan.reset:
                self.lives[plan.worker_id] = WorkerLife(
                    worker_id=plan.worker_id,
                    epoch=1,
                    incarnation=1,
                    health=WorkerHealth(cost=CostProfile(), grace_ns=1, now_ns=0),
                    gateway_ids=frozenset(),
                )
            assert self.lives[plan.worker_id].plan(plan, self.now_ns) is not None
        return ready


def message_of(event: StepCompleted | StepFailed) -> worker_pb2.SessionResponse:
    """As the worker would send it."""
    result = worker_pb2.StepResult(epoch=1, step=event.step, operations_done=event.operations_done)
    if isinstance(event, StepFailed):
        result.faults.add(scope=worker_pb2.Fault.SCOPE_STEP, message=event.reason)
        return worker_pb2.SessionResponse(result=result)
    result.slots.extend(event.slots)
    result.token_ids.extend(event.token_ids)
    result.finished_slots.extend(slot for slot, _ in event.finished)
    for _, reason in event.finished:
        result.finish_reasons.append(common_pb2.FinishReason.ValueType(reason))
    result.num_wasted_rows = event.num_wasted_rows
    return worker_pb2.SessionResponse(result=result)


class History:
    """Drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.cluster = WiredCluster(
            max_inflight_steps=self.pick(2, 4, 8),
            preemption_mode="swap",
            prefill_chunk_tokens=self.pick(0, 3),
            scheduling_policy=self.pick("fcfs", "fair"),
            watermark=0.0,
        )
        self.names: list[str] = []
        self.num_lies = self.num_refused = 0
        self.has_lied = False
        self.join(HONEST)
        self.join(LIAR)

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def join(self, name: WorkerId) -> None:
        self.cluster.join(name, num_slots=6, num_blocks=9, num_host_blocks=20)

    def play(self) -> None:
        for _ in range(NUM_EVENTS):
            self.event()
        if LIAR in self.cluster.workers:
            self.cluster.lose(LIAR)
        self.cluster.run(max_steps=4000)
        for request_id, stream in self.cluster.gateway.streams.items():
            if request_id not in self.cluster.gateway.spoilt:
                assert (stream.tokens, stream.end) == expected_output(stream.arrival)
        self.cluster.assert_idle()

    def event(self) -> None:
        draw = self.random.random()
        honest, liar = (self.cluster.workers.get(name) for name in (HONEST, LIAR))
        assert honest is not None, "the honest worker was given up"
        if draw < 0.25:
            self.arrive()
        elif liar is None:
            self.has_lied = False
            self.join(LIAR)
        elif draw < 0.4 and honest.plans:
            self.cluster.step(HONEST, num_done=self.pick(99, 0, 1))
        elif liar.plans:
            self.answer()
        else:
            self.cluster.advance(MS)

    def arrive(self) -> None:
        self.names.append(f"r{len(self.names)}")
        arrival = make_request(
            self.names[-1],
            prompt=self.random.randint(1, 12),
            max_tokens=self.random.randint(1, 20),
            stop_after=self.pick(None, None, 3),
            family=self.pick(None, 0),
        )
        self.cluster.arrive(arrival)

    def answer(self) -> None:
        """The liar's next result, true or not."""
        cluster, lies = self.cluster, self.random.random() < 0.3
        cluster.now_ns += MS
        if lies:
            self.spoil()
        try:
            event = cluster.result(
                LIAR, fail=self.random.random() < 0.1, num_done=self.pick(99, 0, 1)
            )
        except AssertionError:
            # It can't make sense of what follows from its lies.
            assert self.has_lied
            self.spoil()
            cluster.lose(LIAR)
            return
        message = message_of(event)
        raw = self.changed(message) if lies else message.SerializeToString()
        self.has_lied |= lies
        self.num_lies += lies
        try:
            report = codec.decode_worker_message(raw)
            if not isinstance(report, StepReport):
                return
            told = cluster.lives[LIAR].event(report, cluster.now_ns)
        except (codec.MalformedError, ProtocolError):
            assert self.has_lied
            self.num_refused += 1
            self.spoil()
            cluster.lose(LIAR)
            return
        if told is None:
            return
        life = cluster.lives[LIAR]
        life.returned(cluster.now_ns)
        cluster.feed(told)
        if cluster.given_up:
            assert self.has_lied or isinstance(told, StepFailed)
            self.num_refused += 1
            cluster.given_up.clear()

    def spoil(self) -> None:
        """What the liar holds is spoilt from now on."""
        liar = self.cluster.workers[LIAR]
        spoilt = self.cluster.gateway.spoilt
        spoilt.update(row.admit.request_id for row in liar.slots.values())
        spoilt.update(admit.request_id for plan in liar.plans for admit in plan.admits)

    # Lies

    def changed(self, message: worker_pb2.SessionResponse) -> bytes:
        """The message with one or two things changed."""
        if self.random.random() < 0.15:
            return self.garbled(message.SerializeToString())
        for _ in range(self.pick(1, 1, 2)):
            change = self.pick(
                self.change_rows, self.change_rows, self.change_ends, self.change_ends,
                self.change_operations, self.change_operations, self.change_number,
                self.change_column, self.add_fault,
            )  # fmt: skip
            change(message.result)
        return message.SerializeToString()

    def garbled(self, raw: bytes) -> bytes:
        place = self.random.randrange(len(raw))
        if self.random.random() < 0.3:
            return raw[:place]
        return raw[:place] + self.random.randbytes(self.pick(1, 1, 3)) + raw[place + 1 :]

    def change_rows(self, result: worker_pb2.StepResult) -> None:
        rows = list(zip(result.slots, result.token_ids, strict=False))
        what = self.pick("add", "drop", "repeat", "shuffle", "token")
        place = self.random.randrange(len(rows)) if rows else 0
        if what == "add" or not rows:
            rows.append((self.pick(0, 1, 2, 3, 4, 5, 6, 2**32 - 1), self.pick(*NUMBERS)))
        elif what == "drop":
            del rows[place]
        elif what == "repeat":
            rows.insert(0, rows[place])
        elif what == "shuffle":
            self.random.shuffle(rows)
        else:
            rows[place] = (rows[place][0], self.pick(*NUMBERS))
        result.slots[:] = [slot for slot, _ in rows]
        result.token_ids[:] = [token for _, token in rows]

    def change_ends(self, result: worker_pb2.StepResult) -> None:
        ends = list(zip(result.finished_slots, result.finish_reasons, strict=False))
        if ends and self.random.random() < 0.5:
            ends.pop(self.random.randrange(len(ends)))
        else:
            slot = self.pick(*(list(result.slots) or [0]), 0, 1, 2, 9, 2**32 - 1)
            ends.append((slot, self.pick(0, 1, 2, 3, 4, 5, 6, 7, 99)))
        result.finished_slots[:] = [slot for slot, _ in ends]
        result.finish_reasons[:] = [reason for _, reason in ends]

    def change_operations(self, result: worker_pb2.StepResult) -> None:
        """Of those that are there the ones not done, or not even begun."""
        liar = self.cluster.workers[LIAR]
        coming = [o.op_id for plan in liar.plans for o in plan.operations]
        known = [*coming, *coming, *liar.memory.in_flight, *result.operations_done]
        if result.operations_done and self.random.random() < 0.3:
            del result.operations_done[0]
        result.operations_done.append(self.pick(*known, 0, 1, 2**20 + 1, 2**64 - 1))

    def change_number(self, result: worker_pb2.StepResult) -> None:
        name = self.pick("epoch", "step", "num_wasted_rows", "idle_us", "total_us", "forward_us")
        number = self.pick(*NUMBERS)
        target = result if name in ("epoch", "step", "num_wasted_rows") else result.times
        setattr(target, name, number)

    def change_column(self, result: worker_pb2.StepResult) -> None:
        name = self.pick("slots", "token_ids", "finished_slots", "finish_reasons")
        column = getattr(result, name)
        if column and self.random.random() < 0.5:
            column.pop()
        else:
            column.append(self.pick(0, 1, 2, 5))

    def add_fault(self, result: worker_pb2.StepResult) -> None:
        result.faults.add(
            scope=self.pick(0, 1, 2, 3, 77), code=self.pick(0, 1, 9), slot=self.pick(0, 2**32 - 1)
        )


@pytest.mark.parametrize("part", range(4))
def test_whatever_a_worker_says_the_others_go_on(part: int) -> None:
    num_lies = num_refused = 0
    for seed in range(part * 4, part * 4 + 4):
        history = History(seed)
        history.play()
        num_lies += history.num_lies
        num_refused += history.num_refused
    assert num_lies > 40
    assert num_refused > 10


LONG = "x" * 257
STOP = common_pb2.FinishReason.FINISH_REASON_STOP
HELLO: dict[str, Any] = {
    "worker_id": "w",
    "incarnation": 1,
    "num_slots": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 1024,
}


def group(**fields: Any) -> worker_pb2.CacheGroup:
    return worker_pb2.CacheGroup(**({"block_size": 4, "num_device_blocks": 64} | fields))


@pytest.mark.parametrize(
    "message",
    [
        {"refused": worker_pb2.Refused(highest_epoch=2**52 + 1)},
        {"cancels": worker_pb2.Cancels(request_ids=[b""] * (2**16 + 1))},
        {"subscriptions": worker_pb2.Subscriptions(gateway_ids=["g"] * 4097)},
        {"snapshot": worker_pb2.Snapshot(slots=[worker_pb2.SlotState(request_id=b"x" * 17)])},
        {
            "snapshot": worker_pb2.Snapshot(
                recent_finishes=[
                    worker_pb2.FinishedRequest(request_id=b"x" * 16, attempt=2**32 - 1)
                ]
            )
        },
        {"result": worker_pb2.StepResult(slots=[0], token_ids=[2**31])},
        {"result": worker_pb2.StepResult(slots=[0] * 16385, token_ids=[0] * 16385)},
        {"result": worker_pb2.StepResult(faults=[worker_pb2.Fault()] * 16385)},
        {
            "result": worker_pb2.StepResult(
                finished_slots=[0] * 16385, finish_reasons=[STOP] * 16385
            )
        },
        {"result": worker_pb2.StepResult(operations_done=range(2**16 + 1))},
        {"hello": worker_pb2.Hello(cache_groups=[group(block_size=2**16 + 1)], **HELLO)},
    ],
)
def test_a_message_out_of_its_bounds_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(codec.MalformedError):
        codec.decode_worker_message(worker_pb2.SessionResponse(**message).SerializeToString())


def test_a_strangers_name_costs_the_worker_that_hears_it_nothing() -> None:
    """Anybody may subscribe under any name; no gateway has such a one."""
    names = ["a", "", "€" * 86, LONG]
    for said in (
        worker_pb2.SessionResponse(subscriptions=worker_pb2.Subscriptions(gateway_ids=names)),
        worker_pb2.SessionResponse(snapshot=worker_pb2.Snapshot(gateway_ids=names)),
    ):
        heard: Any = codec.decode_worker_message(said.SerializeToString())
        assert heard.gateway_ids == frozenset("a")


def decoded_hello(hello: worker_pb2.Hello) -> Any:
    message = worker_pb2.SessionResponse(hello=hello)
    return codec.decode_worker_message(message.SerializeToString())


def test_what_a_worker_offers_beyond_all_bounds_is_left_unused() -> None:
    most = 2**32 - 1
    fields: dict[str, Any] = HELLO | {"num_slots": most, "max_model_len": most}
    groups = [group(num_device_blocks=most, num_host_blocks=most)]
    capacity = decoded_hello(worker_pb2.Hello(cache_groups=groups, **fields)).capacity
    assert (capacity.num_slots, capacity.max_model_len) == (2**14, 2**20)
    assert (capacity.num_blocks, capacity.num_host_blocks) == (2**22, 2**22)


@pytest.mark.parametrize("cost", [0.0, 1e-6, 1.0, 1e9])
@pytest.mark.parametrize("bandwidth", [1e-6, 1e9])
def test_no_cost_that_a_worker_tells_is_too_much_for_the_core(
    cost: float, bandwidth: float
) -> None:
    profile = worker_pb2.CostProfile(
        step_us=cost, token_us=cost, swap_out_gb_per_s=bandwidth, swap_in_gb_per_s=1 / bandwidth
    )
    offered = decoded_hello(
        worker_pb2.Hello(cache_groups=[group(num_device_blocks=8)], cost=profile, **HELLO)
    )
    assert offered.cost.step_us == cost
    c = Cluster(make_core(max_prefill_gap_ns=1))
    c.join("w", num_blocks=6, num_host_blocks=8, token_us=cost, swap_gb_per_s=bandwidth)
    c.arrive_together(*(make_request(n, prompt=10, max_tokens=8, deadline_ns=2**62) for n in "ab"))
    c.run()
    assert c.core.stats.num_preemptions
    c.assert_idle()


@pytest.mark.parametrize("cost", [1e-7, 1e10, -1.0, float("inf"), float("nan"), 1e-320, 1e308])
def test_a_cost_that_cannot_be_is_not_known(cost: float) -> None:
    profile = worker_pb2.CostProfile(step_us=cost, token_us=cost, swap_in_gb_per_s=cost)
    offered = decoded_hello(worker_pb2.Hello(cache_groups=[group()], cost=profile, **HELLO))
    assert offered.cost == CostProfile()

"""python -m scheduler_svc.sim.load: the shipped core under the load of a whole cluster.

Shipped: the core, fed and asked as the driver does. Modelled: all else; see load_worker. Plans and
results take half a round trip each; the way of tokens to clients costs nothing. A request's length
is known to nobody before its last token, as with an EOS: it asks for twice as many tokens. With
`known_lengths` it asks for exactly what it gets.

The core is checked once in CHECK_EVERY rounds, with the insides of one worker after the other, and
whole at the end; with `fair` its bound at ends of requests (see fairness). Its CPU time is that of
one round in TIMED_EVERY, times as many. It is given arrivals while fewer than MAX_WAITING have not
been admitted once; the others wait outside, as in the queue.
"""

import argparse
import gc
import heapq
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler_svc.core import CoreConfig, Ready, SchedulerCore
from scheduler_svc.core.events import BecameLeader, Event, RequestArrived, Tick, WorkerJoined
from scheduler_svc.core.invariants import check_all
from scheduler_svc.core.ready import Finish, StepPlan
from scheduler_svc.core.types import (
    CostProfile,
    PreemptionMode,
    RequestId,
    SamplingSpec,
    WorkerCapacity,
    WorkerId,
)
from scheduler_svc.sim import cost as costs
from scheduler_svc.sim import fairness, report
from scheduler_svc.sim.arrivals import (
    GENERATORS,
    Arrival,
    ArrivalError,
    Source,
    Traffic,
    faster,
    generate,
    mean_rate_per_s,
    open_source,
    prompt_token_ids,
)
from scheduler_svc.sim.cost import StepCost
from scheduler_svc.sim.load_worker import VOCAB_SIZE, LoadWorker, Stepped
from scheduler_svc.sim.runlog import Phase, RequestLog, RunLog, Span, StepLog
from scheduler_svc.sim.scatter import Draws, Scatter

MAX_WAITING = 4096
CHECK_EVERY = 5_000
TIMED_EVERY = 8
GATEWAY = "gateway"
MIN_TIMER_S = 0.001
_WAITING_PHASES = (Phase.WAITING, Phase.SWAPPED, Phase.PREEMPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal workers, and the configuration of their scheduler."""

    num_workers: int = 1
    num_slots: int = 256
    num_blocks: int = 8192
    num_host_blocks: int = 0
    block_size: int = 16
    block_bytes: int = 2_097_152
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32_768
    round_trip_s: float = 0.001
    cost: StepCost = costs.PRESETS["h100"]
    config: CoreConfig = field(default_factory=CoreConfig)
    known_lengths: bool = False
    scatter: Scatter = field(default_factory=Scatter)

    @property
    def limits(self) -> fairness.Limits:
        """On which the bound of `fair` depends."""
        return fairness.Limits(
            max_model_len=self.max_model_len, num_slots=self.num_slots * self.num_workers
        )


class Load:
    """One run. `run` may be called once."""

    def __init__(self, cluster: Cluster, source: Source) -> None:
        self.log = RunLog(
            num_workers=cluster.num_workers,
            num_blocks=cluster.num_blocks,
            block_size=cluster.block_size,
        )
        self._cluster = cluster
        self._prefix_tokens = source.prefix_block_tokens
        self._arrivals: Iterator[Arrival] = iter(source)
        self._core = SchedulerCore(cluster.config)
        is_fair = cluster.config.scheduling_policy == "fair"
        self._watch = fairness.Watch(self._core, cluster.limits) if is_fair else None
        self._num_outputs: dict[int, int] = {}
        self._workers: dict[WorkerId, LoadWorker] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_pushed = 0
        self._fed: list[Event] = []
        self._outside: deque[tuple[int, Arrival]] = deque()
        self._num_new = 0  # fed, and not admitted once
        self._admitted: set[int] = set()
        self._last_token_s: dict[int, float] = {}
        self._phases: dict[int, tuple[Phase, float]] = {}
        self._num_rounds = 0
        self._to_check: deque[WorkerId] = deque()  # whose insides are checked next
        self._wake_at_s: float | None = None
        self._now_s = 0.0

    def run(self) -> RunLog:
        """To the end of the last request. AssertionError if the core breaks a promise."""
        self._feed(BecameLeader(now_ns=0, epoch=1))
        for number in range(self._cluster.num_workers):
            self._join(f"worker-{number}")
        self._next_arrival(0)
        self._round()
        while self._events:
            when_s = self._events[0][0]
            self._now_s = max(self._now_s, when_s)
            while self._events and self._events[0][0] <= self._now_s:
                heapq.heappop(self._events)[2](self._now_s)
            if self._fed:
                self._round()
        self._close()
        return self.log

    def _at(self, when_s: float, do: Callable[[float], None]) -> None:
        self._num_pushed += 1
        heapq.heappush(self._events, (when_s, self._num_pushed, do))

    def _feed(self, event: Event) -> None:
        self._fed.append(event)

    def _now_ns(self) -> int:
        return round(self._now_s * 1e9)

    def _join(self, name: str) -> None:
        of = self._cluster
        joined = WorkerJoined(
            now_ns=0,
            worker_id=WorkerId(name),
            capacity=WorkerCapacity(
                num_slots=of.num_slots,
                num_blocks=of.num_blocks,
                num_host_blocks=of.num_host_blocks,
                block_size=of.block_size,
                block_bytes=of.block_bytes,
                max_num_batched_tokens=of.max_num_batched_tokens,
                max_model_len=of.max_model_len,
            ),
            cost=_profile(of.cost),
            gateway_ids=frozenset((GATEWAY,)),
        )
        draws = Draws(of.scatter, name)
        self._workers[joined.worker_id] = LoadWorker(joined, of.cost, self._num_outputs, draws)
        self._to_check.append(joined.worker_id)
        self._feed(joined)

    # Arrivals

    def _next_arrival(self, number: int) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._at(arrival.at, lambda _: self._arrives(number, arrival))

    def _arrives(self, number: int, arrival: Arrival) -> None:
        self.log.requests.append(
            RequestLog(
                index=number,
                tenant=arrival.tenant,
                worker="",
                arrived_s=self._now_s,
                num_prompt_tokens=arrival.num_prompt_tokens,
            )
        )
        self._turn_to(number, Phase.WAITING)
        self._outside.append((number, arrival))
        self._let_in()
        self._next_arrival(number + 1)

    def _let_in(self) -> None:
        while self._outside and self._num_new < MAX_WAITING:
            number, arrival = self._outside.popleft()
            prompt = prompt_token_ids(arrival, number, self._prefix_tokens, VOCAB_SIZE)
            room = self._cluster.max_model_len - len(prompt)
            self._num_outputs[number] = min(arrival.num_output_tokens, room)
            self._num_new += 1
            if self._watch is not None:
                self._watch.arrives(len(prompt), self._num_outputs[number])
            self._feed(
                RequestArrived(
                    now_ns=self._now_ns(),
                    request_id=RequestId(number.to_bytes(16)),
                    entry_id=str(number),
                    gateway_id=GATEWAY,
                    prompt_token_ids=prompt,
                    sampling=SamplingSpec(max_tokens=self._asks_for(arrival, room)),
                    priority=arrival.priority,
                    tenant=arrival.tenant,
                    cache_salt=arrival.tenant.encode(),
                )
            )

    def _asks_for(self, arrival: Arrival, room: int) -> int:
        """Its max_tokens, where so many tokens fit behind its prompt."""
        if self._cluster.known_lengths:
            return max(1, min(arrival.num_output_tokens, room))
        return max(1, min(2 * arrival.num_output_tokens + 16, room))

    # Rounds of the core

    def _round(self) -> None:
        if self._wake_at_s is not None and self._now_s >= self._wake_at_s:
            self._fed.append(Tick(now_ns=self._now_ns()))
        # A look at the clock costs a tenth of what is timed.
        is_timed = self._num_rounds % TIMED_EVERY == 0
        begin_s = time.process_time() if is_timed else 0.0
        for event in self._fed:
            self._core.feed(event)
        ready = self._core.take_ready()
        if is_timed:
            self.log.core_cpu_s += TIMED_EVERY * (time.process_time() - begin_s)
        self._fed.clear()
        self._num_rounds += 1
        if self._num_rounds % CHECK_EVERY == 0:
            self._to_check.rotate(-1)
            check_all(self._core, self._to_check[-1])
        self._act(ready)
        if self._outside:
            self._let_in()

    def _act(self, ready: Ready) -> None:
        for plan in ready.plans:
            self._look_at(plan)
            worker = self._workers[plan.worker_id]
            worker.take(plan, self._now_s + worker.draws.half_trip_s(self._cluster.round_trip_s))
            if not worker.computing:
                worker.computing = True
                self._begin(worker, plan.step)
        for finish in ready.finishes:
            self._finished(finish)
        wake_s = None if ready.wake_at_ns is None else ready.wake_at_ns / 1e9
        if wake_s is not None and wake_s != self._wake_at_s:
            self._at(max(wake_s, self._now_s + MIN_TIMER_S), self._wake)
        self._wake_at_s = wake_s

    def _wake(self, now_s: float) -> None:
        if self._wake_at_s is not None and now_s >= self._wake_at_s and not self._fed:
            self._feed(Tick(now_ns=self._now_ns()))

    def _begin(self, worker: LoadWorker, step: int) -> None:
        arrived_s = worker.plans[0][0]
        begin_s = max(arrived_s, worker.free_s)
        half_s = worker.draws.half_trip_s(self._cluster.round_trip_s)
        stepped = worker.compute(step, begin_s, half_s)
        self._at(stepped.end_s, lambda _: self._ended(worker, step))
        self._at(worker.last_return_s, lambda _: self._returned(worker, stepped))

    def _ended(self, worker: LoadWorker, step: int) -> None:
        worker.computing = bool(worker.plans)
        if worker.plans:
            self._begin(worker, step + 1)

    # What is written down

    def _look_at(self, plan: StepPlan) -> None:
        for preemption in plan.preemptions:
            number = int.from_bytes(preemption.request_id)
            swapped = preemption.mode is PreemptionMode.SWAP
            self._turn_to(number, Phase.SWAPPED if swapped else Phase.PREEMPTED)
        for admit in plan.admits:
            number = int.from_bytes(admit.request_id)
            if number not in self._admitted:
                self._admitted.add(number)
                self._num_new -= 1
            self.log.requests[number].worker = plan.worker_id
            computes = len(admit.token_ids) - admit.num_computed_tokens > 1
            self._turn_to(number, Phase.PREFILL if computes else Phase.DECODE)

    def _returned(self, worker: LoadWorker, stepped: Stepped) -> None:
        now_s, log, numbers = self._now_s, self.log, stepped.requests
        # Mostly all had their last token at one time: no turn for each.
        before_s = list(map(self._last_token_s.get, numbers))
        self._last_token_s.update(dict.fromkeys(numbers, now_s))
        for one_s in dict.fromkeys(before_s):
            if one_s is not None:
                log.token_gaps.add(now_s - one_s, before_s.count(one_s))
            else:
                for number, was_s in zip(numbers, before_s, strict=True):
                    if was_s is None:
                        log.requests[number].first_token_s = now_s
        if min(numbers, default=log.max_timelines) < log.max_timelines:
            for number in numbers:
                self._turn_to(number, Phase.DECODE)
        self._feed(stepped.completed)
        self._write_step(worker, stepped)

    def _write_step(self, worker: LoadWorker, stepped: Stepped) -> None:
        log = self.log
        if not log.wants_step():
            log.num_steps += 1
            return
        seen = self._core.glance(worker.worker_id)
        log.step(
            StepLog(
                end_s=stepped.end_s,
                worker=worker.worker_id,
                duration_s=stepped.end_s - stepped.begin_s,
                num_prefill_rows=stepped.num_prefill_rows,
                num_decode_rows=stepped.num_decode_rows,
                num_prefill_tokens=stepped.num_prefill_tokens,
                num_swapped=seen.worker.num_swapped,
                num_waiting=seen.num_waiting + len(self._outside),
                num_blocks_used=seen.worker.num_blocks_used,
            )
        )

    def _finished(self, finish: Finish) -> None:
        number = int.from_bytes(finish.request_id)
        of = self.log.requests[number]
        of.finished_s = self._now_s
        of.finish_reason = finish.reason.name
        of.num_output_tokens = finish.num_output_tokens
        of.num_cached_tokens = finish.num_cached_tokens
        of.num_preemptions = finish.num_preemptions
        self._end_phase(number)
        self._last_token_s.pop(number, None)
        del self._num_outputs[number]
        if number not in self._admitted:
            self._num_new -= 1
        self._admitted.discard(number)
        served = self.log.tokens_by_tenant
        tokens = finish.num_prompt_tokens + finish.num_output_tokens
        served[of.tenant] = served.get(of.tenant, 0) + tokens
        if self._watch is not None:
            self._watch.ended()

    def _turn_to(self, number: int, phase: Phase) -> None:
        if number >= self.log.max_timelines:
            return
        now = self._phases.get(number)
        if now is not None and now[0] is phase:
            return
        self._end_phase(number)
        self._phases[number] = phase, self._now_s

    def _end_phase(self, number: int) -> None:
        before = self._phases.pop(number, None)
        if before is not None and self._now_s > before[1]:
            span = Span(phase=before[0], begin_s=before[1], end_s=self._now_s)
            self.log.requests[number].spans.append(span)

    def _close(self) -> None:
        check_all(self._core)
        stats, log = self._core.stats, self.log
        open_ = [of.index for of in log.requests if of.finished_s is None]
        assert not open_, f"{len(open_)} requests have no end: {open_[:5]}"
        log.duration_s = self._now_s
        log.num_fairness_looks = self._watch.num_looks if self._watch is not None else 0
        log.prefix_queries, log.prefix_hits = stats.prefix_queries, stats.prefix_hits
        log.preemptions = {mode.value: count for mode, count in stats.preemptions.items()}


def _profile(cost: StepCost) -> CostProfile:
    """What such a worker would have measured at its start."""
    copies = 1.0 / cost.copied_byte_s / 1e9 if cost.copied_byte_s else 0.0
    return CostProfile(
        step_us=(cost.fixed_s + cost.weights_s) * 1e6,
        token_us=cost.prefill_token_s * 1e6,
        swap_out_gb_per_s=copies,
        swap_in_gb_per_s=copies,
    )


def run_load(cluster: Cluster, source: Source) -> RunLog:
    """Runs a source's requests through a cluster."""
    return Load(cluster, source).run()


def _source(args: argparse.Namespace) -> Source:
    if args.source in GENERATORS:
        rate = args.rate or 10.0
        traffic = Traffic(seed=args.seed, count=args.requests or 1000, rate_per_s=rate)
        return generate(args.source, traffic)
    source = open_source(Path(args.source))
    if args.requests:
        source = repeated(source, args.requests)
    if args.rate:
        source = faster(source, args.rate / mean_rate_per_s(source))
    return source


def repeated(source: Source, count: int) -> Source:
    """`count` arrivals of a source, which begins anew behind its end as often as it takes.

    A source without any is an ArrivalError.
    """

    def passes() -> Iterator[Arrival]:
        left, shift_s = count, 0.0
        while left:
            before, last_s = left, 0.0
            for arrival in source:
                if not left:
                    return
                left -= 1
                last_s = arrival.at
                yield Arrival(
                    at=arrival.at + shift_s,
                    num_prompt_tokens=arrival.num_prompt_tokens,
                    num_output_tokens=arrival.num_output_tokens,
                    tenant=arrival.tenant,
                    prefix_ids=arrival.prefix_ids,
                    priority=arrival.priority,
                )
            if left == before:
                raise ArrivalError(f"{source.name}: it has no requests")
            shift_s += last_s + 1e-3

    return Source(name=source.name, prefix_block_tokens=source.prefix_block_tokens, passes=passes)


def main(argv: Sequence[str]) -> int:
    """Runs a load and prints its table."""
    parser = argparse.ArgumentParser(prog="python -m scheduler_svc.sim.load", description=__doc__)
    parser.add_argument("source", help=f"a file, or one of {', '.join(GENERATORS)}")
    parser.add_argument("--requests", type=int, help="so many; a file begins anew at its end")
    parser.add_argument("--rate", type=float, help="requests per second")
    parser.add_argument("--seed", type=int, default=0, help="of a generator")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cost", choices=tuple(costs.PRESETS), default="h100")
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--host-blocks", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args(argv)
    cluster = Cluster(
        num_workers=args.workers,
        num_host_blocks=args.host_blocks,
        cost=costs.PRESETS[args.cost],
        config=CoreConfig(scheduling_policy=args.policy),
    )
    source = _source(args)
    # Of what a run makes hardly anything is garbage in cycles: it is looked for less often.
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    begin_s = time.process_time()
    log = run_load(cluster, source)
    seconds = time.process_time() - begin_s
    of = report.summarize(log, cluster.limits if args.policy == "fair" else None)
    sys.stdout.write(report.table({source.name: of}) + "\n")
    sys.stdout.write(
        f"{log.num_steps:,} steps of {args.workers} workers, {log.duration_s:,.0f} virtual seconds "
        f"in {seconds:,.1f} s of CPU, of which the core {log.core_cpu_s:,.1f} s\n"
    )
    if args.policy == "fair":
        sys.stdout.write(f"the bound of fair held each of {log.num_fairness_looks:,} times\n")
    if args.json:
        report.write_json(args.json, {source.name: of}, {"argv": list(argv)})
    if args.png:
        from scheduler_svc.sim import timeline

        timeline.write(args.png, log, source.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

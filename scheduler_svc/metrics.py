"""Prometheus metrics of the scheduler.

Counters and gauges are read from the core when they are scraped; histograms see every finish, plan
and result. Names that start with `vllm:` mean what they mean there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler_svc.core.ready import CoreStats, CoreView, Finish, Ready
from scheduler_svc.step_histogram import StepHistogram
from servicekit.metrics import LATENCY_BUCKETS_S, SIZE_BUCKETS, STEP_BUCKETS_S

_PREEMPTION_BUCKETS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """State at one scrape; the core's part is None while this process does not lead."""

    stats: CoreStats | None
    view: CoreView | None
    num_finishes_pending: int
    num_events_queued: int
    # None where it can't be told: throughput.py.
    time_to_drain_s: float | None = None


class SchedulerMetrics:
    """Implements ports.RoundObserver and ports.LinkObserver."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, sample: Callable[[], Sample]
    ) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)
            return metric.labels(model_name)

        def step_histogram(name: str, text: str, buckets: tuple[float, ...]) -> StepHistogram:
            labels = {"model_name": model_name}
            return StepHistogram(name, text, labels=labels, bounds=buckets, registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=registry).labels(model_name)

        self._queue_time = histogram(
            "vllm:request_queue_time_seconds", "Arrival to first plan.", LATENCY_BUCKETS_S
        )
        self._prefill_time = histogram(
            "vllm:request_prefill_time_seconds", "First plan to first token.", LATENCY_BUCKETS_S
        )
        self._decode_time = histogram(
            "vllm:request_decode_time_seconds", "First token to the end.", LATENCY_BUCKETS_S
        )
        self._preemptions = histogram(
            "vllm:request_num_preemptions", "Preemptions of a request.", _PREEMPTION_BUCKETS
        )
        self._step_tokens = step_histogram(
            "vllm:iteration_tokens_total", "Tokens planned in a step.", SIZE_BUCKETS
        )
        self._plan_bytes = step_histogram("quire:plan_bytes", "Size of a plan.", SIZE_BUCKETS)
        self._plan_to_result = step_histogram(
            "quire:plan_to_result_seconds", "Plan sent to result received.", STEP_BUCKETS_S
        )
        self._plan_time = step_histogram(
            "quire:plan_seconds", "Time in the core, per round of events.", STEP_BUCKETS_S
        )
        self._worker_idle = step_histogram(
            "quire:worker_idle_seconds", "A worker's wait for its next plan.", STEP_BUCKETS_S
        )
        self._model_name = model_name
        self._waited = Counter(
            "quire:request_wait_seconds",
            "Waiting of requests that have ended, by what they waited for.",
            ["model_name", "reason"],
            registry=registry,
        )
        self._preempted = counter(
            "quire:preempted_seconds", "From preemptions to the next token, of ended requests."
        )
        self._set_back = counter(
            "quire:set_back_seconds", "From lost work to the next token, of ended requests."
        )
        self._lost = counter("quire:worker_lost", "Workers declared lost.")
        self._stale = counter("quire:stale_results", "Results of an older life, dropped.")
        self._mismatches = counter("quire:digest_mismatches", "Plans refused for their digest.")
        registry.register(_CoreCollector(model_name, sample))

    def round_done(self, ready: Ready, core_s: float) -> None:
        """A round of the driver."""
        self._plan_time.observe(core_s)
        for plan in ready.plans:
            for _ in range(plan.num_steps):
                self._step_tokens.observe(plan.num_scheduled_tokens)
        for finish in ready.finishes:
            self._finished(finish)

    def _finished(self, finish: Finish) -> None:
        self._preemptions.observe(finish.num_preemptions)
        for wait, duration_ns in finish.account.waited:
            self._waited.labels(self._model_name, wait.name.lower()).inc(duration_ns / 1e9)
        self._preempted.inc(finish.account.preempted_ns / 1e9)
        self._set_back.inc(finish.account.set_back_ns / 1e9)
        if finish.first_scheduled_ns is None:
            return
        self._queue_time.observe((finish.first_scheduled_ns - finish.arrived_ns) / 1e9)
        if finish.first_token_ns is None:
            return
        self._prefill_time.observe((finish.first_token_ns - finish.first_scheduled_ns) / 1e9)
        self._decode_time.observe((finish.finished_ns - finish.first_token_ns) / 1e9)

    def plan_sent(self, num_bytes: int) -> None:
        """A plan was handed to its session."""
        self._plan_bytes.observe(num_bytes)

    def step_returned(self, seconds: float, idle_us: int) -> None:
        """A result came."""
        self._plan_to_result.observe(seconds)
        self._worker_idle.observe(idle_us / 1e6)

    def stale_result(self) -> None:
        """A result was dropped before the core."""
        self._stale.inc()

    def digest_mismatch(self) -> None:
        """A worker's tables differ from the core's."""
        self._mismatches.inc()

    def worker_lost(self) -> None:
        """A worker was declared lost."""
        self._lost.inc()


class _CoreCollector(Collector):
    """Reads the core at scrape."""

    def __init__(self, model_name: str, sample: Callable[[], Sample]) -> None:
        self._model_name = model_name
        self._sample = sample

    def describe(self) -> Iterable[Metric]:
        """Names only, so that registering does not read the core."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, with zeros while this process does not lead; but time to drain only where
        it can be told, since a zero would say that there is no work."""
        sample = self._sample()
        stats = sample.stats or CoreStats()
        view = sample.view or CoreView(
            epoch=0, num_waiting=0, num_running=0, backlog_tokens=0, workers=()
        )
        num_used = sum(worker.num_blocks_used for worker in view.workers)
        num_blocks = sum(worker.num_blocks for worker in view.workers)
        num_host_used = sum(worker.num_host_blocks_used for worker in view.workers)
        num_host_blocks = sum(worker.num_host_blocks for worker in view.workers)
        in_flight = sum(worker.num_steps_in_flight for worker in view.workers)
        share = num_used / num_blocks if num_blocks else 0.0
        host_share = num_host_used / num_host_blocks if num_host_blocks else 0.0
        gauges = (
            ("vllm:num_requests_running", "Requests in slots.", view.num_running),
            ("vllm:num_requests_waiting", "Requests without a slot.", view.num_waiting),
            ("vllm:num_requests_swapped", "Requests in host memory.", view.num_swapped),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", share),
            ("vllm:cpu_cache_usage_perc", "Share of host KV blocks in use, 0 to 1.", host_share),
            ("quire:host_blocks_used", "Host KV blocks of requests and copies.", num_host_used),
            ("quire:host_blocks", "Host KV blocks of all workers.", num_host_blocks),
            ("quire:blocks_used", "KV blocks owned by requests.", num_used),
            ("quire:blocks", "KV blocks of all workers.", num_blocks),
            ("quire:slots_used", "Slots owned by requests.", view.num_running),
            ("quire:steps_in_flight", "Plans that have not returned.", in_flight),
            ("quire:workers", "Workers with a session.", len(view.workers)),
            ("quire:backlog_tokens", "Tokens still to compute at most.", view.backlog_tokens),
            ("quire:epoch", "Epoch of this leader, 0 for a standby.", view.epoch),
            ("quire:finishes_pending", "Ends to write to Redis.", sample.num_finishes_pending),
            ("quire:events_queued", "Events before the core.", sample.num_events_queued),
        )
        for name, text, value in gauges:
            yield self._family(GaugeMetricFamily(name, text, labels=["model_name"]), value)
        counters = (
            ("vllm:num_preemptions", "Preemptions.", stats.num_preemptions),
            ("quire:swaps_void", "Swapped requests that began anew.", stats.num_swaps_void),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("quire:requests_held_back", "Waited for a shared prefix.", stats.num_held_back),
            ("quire:forks", "Samples begun from another's blocks.", stats.num_forks),
            ("quire:copied_blocks", "Blocks copied on write.", stats.num_copied_blocks),
            ("quire:scheduler_prompt_tokens", "Prompt tokens computed.", stats.num_prompt_tokens),
            ("quire:scheduler_generation_tokens", "Tokens sampled.", stats.num_generation_tokens),
            ("quire:requests_recovered", "Moved from lost workers.", stats.num_recovered),
            ("quire:requests_superseded", "Replaced by gateways.", stats.num_superseded),
            ("quire:core_stale_results", "Results the core dropped.", stats.num_stale_results),
            ("quire:bad_results", "Results that can't be.", stats.num_bad_results),
            ("quire:stale_tokens", "Tokens of ended requests.", stats.num_stale_tokens),
            ("quire:stale_arrivals", "Repeated queue entries.", stats.num_stale_arrivals),
            ("quire:wasted_rows", "Planned rows that had ended.", stats.num_wasted_rows),
            ("quire:failed_steps", "Steps not computed.", stats.num_failed_steps),
            ("quire:steps", "Steps planned.", stats.num_steps),
            ("quire:chunked_prefills", "Prompt chunks planned.", stats.num_chunked_prefills),
        )
        for name, text, value in counters:
            yield self._family(CounterMetricFamily(name, text, labels=["model_name"]), value)
        if sample.time_to_drain_s is not None:
            to_drain = GaugeMetricFamily(
                "quire:time_to_drain_seconds",
                "Backlog over the speed that the workers have shown; absent if there is neither.",
                labels=["model_name"],
            )
            yield self._family(to_drain, sample.time_to_drain_s)
        yield from self._by_label(stats)
        yield from self._depths(view)

    def _by_label(self, stats: CoreStats) -> Iterator[Metric]:
        yield self._labelled(
            "quire:prefix_looks",
            "Requests by why their first look into the prefix cache found no more.",
            "stop",
            {stop.name.lower(): count for stop, count in stats.prefix_stops.items()},
        )
        yield self._labelled(
            "quire:preemptions",
            "Preemptions by what became of the work.",
            "mode",
            {mode.value: count for mode, count in stats.preemptions.items()},
        )
        yield self._labelled(
            "quire:swap_blocks",
            "KV blocks copied to host memory and back.",
            "direction",
            {"out": stats.num_blocks_swapped_out, "in": stats.num_blocks_swapped_in},
        )

    def _labelled(
        self, name: str, text: str, label: str, counts: Mapping[str, int]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for value, count in counts.items():
            family.add_metric([self._model_name, value], count)
        return family

    def _depths(self, view: CoreView) -> Iterator[Metric]:
        labels = ["model_name", "worker_id"]
        depth = GaugeMetricFamily(
            "quire:inflight_steps", "Most plans that may be in flight now.", labels=labels
        )
        round_trip = GaugeMetricFamily(
            "quire:round_trip_seconds",
            "From a plan to its result, less the worker's own time.",
            labels=labels,
        )
        for worker in view.workers:
            depth.add_metric([self._model_name, worker.worker_id], worker.max_steps_in_flight)
            seconds = worker.round_trip_us / 1e6
            round_trip.add_metric([self._model_name, worker.worker_id], seconds)
        yield depth
        yield round_trip

    def _family(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float
    ) -> GaugeMetricFamily | CounterMetricFamily:
        family.add_metric([self._model_name], value)
        return family

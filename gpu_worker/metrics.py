"""Prometheus metrics of a worker. The vllm: names mean what they mean there."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gpu_worker.executor import StepOutcome
from gpu_worker.messages import FaultScope
from gpu_worker.ports import OperationKind, RunnerInfo
from servicekit.metrics import SIZE_BUCKETS

_PARTS = ("idle", "apply", "forward", "sample")
# A quarter apart where the small parts of a step lie: a median taken from them is worth something.
_STEP_BUCKETS_S = (
    *(round(base * 10.0**power, 7) for power in (-4, -3, -2) for base in
      (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)),
    0.1, 0.125, 0.16, 0.2, 0.25, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8,
)  # fmt: skip


class WorkerMetrics:
    """Owns the registry's series; all carry model_name."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name
        self._label = {"model_name": model_name}
        names = ["model_name"]
        step_seconds = Histogram(
            "quire:worker_step_seconds",
            "Time of a step by part; idle is the wait for the plan.",
            [*names, "part"],
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        )
        self._parts = [step_seconds.labels(model_name, part) for part in _PARTS]
        self._outside = Histogram(
            "quire:worker_step_outside_forward_seconds",
            "From the end of a step to the end of the next that computed tokens, less the forward: "
            "the wait for the plan, applying, sampling, booking; publishing as far as it delays.",
            names,
            buckets=_STEP_BUCKETS_S,
            registry=registry,
        ).labels(model_name)
        self._idle = self._counter("quire:worker_idle_seconds", "Time between steps.")
        self._steps = self._counter("quire:worker_steps", "Plans taken, refused ones included.")
        self._batches = self._counter("quire:token_batches", "Batches put into outboxes.")
        self._dropped_batches = self._counter(
            "quire:token_batches_dropped", "Batches dropped at an outbox's bound."
        )
        self._dropped_cancels = self._counter(
            "quire:cancels_dropped", "Cancels dropped at the bound."
        )
        self._refusals = Counter(
            "quire:plan_refusals",
            "Steps that were not computed, by fault code.",
            [*names, "code"],
            registry=registry,
        )
        operation_blocks = Counter(
            "quire:worker_operation_blocks",
            "Blocks of copies that were begun, by kind.",
            [*names, "kind"],
            registry=registry,
        )
        self._operation_blocks = {
            kind: operation_blocks.labels(model_name, kind.name.lower()) for kind in OperationKind
        }
        self._tokens = Histogram(
            "vllm:iteration_tokens_total",
            "Tokens computed in a step.",
            names,
            buckets=SIZE_BUCKETS,
            registry=registry,
        ).labels(model_name)

    def watch(self, *, slots_used: Callable[[], int], outbox_batches: Callable[[], int]) -> None:
        """Gauges that are read when they are asked for."""
        self._gauge("quire:slots_used", "Rows that have not ended.").set_function(slots_used)
        self._gauge("quire:outbox_batches", "Batches kept for gateways.").set_function(
            outbox_batches
        )

    def loaded(self, info: RunnerInfo) -> None:
        """Says what the cache is."""
        group = info.cache_group
        Gauge(
            "vllm:cache_config_info",
            "The KV cache.",
            ["model_name", "block_size", "num_gpu_blocks", "num_cpu_blocks"],
            registry=self._registry,
        ).labels(
            self._model_name,
            str(group.block_size),
            str(group.num_blocks),
            str(group.num_host_blocks),
        ).set(1)

    def step_ended(self, outcome: StepOutcome) -> None:
        """Counts a step."""
        times = outcome.result.times
        parts = (times.idle_us, times.apply_us, times.forward_us, times.sample_us)
        for histogram, part_us in zip(self._parts, parts, strict=True):
            histogram.observe(part_us / 1e6)
        if outcome.num_tokens:
            self._outside.observe(max(0, outcome.cycle_us - times.forward_us) / 1e6)
        self._idle.inc(times.idle_us / 1e6)
        self._steps.inc()
        self._tokens.observe(outcome.num_tokens)
        self._batches.inc(len(outcome.batches))
        for operation in outcome.operations:
            kind = OperationKind(operation.kind)
            self._operation_blocks[kind].inc(len(operation.target_blocks))
        for fault in outcome.result.faults:
            if fault.scope is not FaultScope.REQUEST:
                self._refusals.labels(self._model_name, fault.code.name.lower()).inc()

    def batches_dropped(self, count: int) -> None:
        """Outboxes were full."""
        self._dropped_batches.inc(count)

    def cancel_dropped(self) -> None:
        """Too many cancels were waiting."""
        self._dropped_cancels.inc()

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(name, text, ["model_name"], registry=self._registry)
        return family.labels(self._model_name)

    def _gauge(self, name: str, text: str) -> Gauge:
        family = Gauge(name, text, ["model_name"], registry=self._registry)
        return family.labels(self._model_name)

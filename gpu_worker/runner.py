"""Owns the model on its device: loads it, sizes the cache, warms up, computes steps.

A step: rows -> flat arrays (batch) -> device -> forward, which stores keys and values and attends
over the blocks -> logits of the sampling rows -> tokens (sampler). Where logprobs are wanted,
scoring takes them from the same logits. Nothing of a request outlives the step but its blocks.
Everything here runs on one thread, the executor's.
"""

import ctypes
import gc
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gpu_worker import block_copies, kv_cache, models, sampler, scoring
from gpu_worker.attention import Backend, PagedContext, StepTables, make_backend
from gpu_worker.batch import BatchBuilder, BatchLimits, FlatBatch
from gpu_worker.pages_ahead import PagesAhead
from gpu_worker.ports import (
    BrokenDeviceError,
    CacheGroupSpec,
    ModelRunner,
    Operation,
    OutOfDeviceMemoryError,
    RunnerInfo,
    SamplingSpec,
    ScheduledRow,
    StepOutput,
)
from servicekit.model_files import model_digest, model_dir

if TYPE_CHECKING:
    from gpu_worker.settings import WorkerSettings

CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS, BIG_GPU_BATCHED_TOKENS = 256, 2048, 8192
BIG_GPU_BYTES = 70 * kv_cache.GIB
WARM_UP_RUNS, MEASURED_RUNS = 1, 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A step takes about step_us + tokens * token_us."""

    step_us: float
    token_us: float


class TorchRunner:
    """Computes steps of one model; see ports.ModelRunner."""

    def __init__(
        self,
        *,
        model: models.LoadedModel,
        context: PagedContext,
        copies: block_copies.BlockCopies,
        info: RunnerInfo,
        pages: PagesAhead | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._pages = pages
        self._copies = copies
        self._info = info
        self._builder = BatchBuilder(
            BatchLimits(
                num_blocks=info.cache_group.num_blocks,
                block_size=info.cache_group.block_size,
                vocab_size=info.vocab_size,
                max_model_len=info.max_model_len,
            )
        )

    @property
    def info(self) -> RunnerInfo:
        """What the loaded model offers."""
        return self._info

    def begin_operations(self, operations: Sequence[Operation]) -> None:
        """See ports.ModelRunner."""
        self._copies.begin(operations)

    def finished_operations(self, *, wait: bool) -> Sequence[int]:
        """See ports.ModelRunner."""
        return self._copies.finished(wait=wait)

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        """Computes one step; see ports.ModelRunner for what it raises."""
        began = time.perf_counter_ns()
        batch = self._builder.build(rows)
        applied = time.perf_counter_ns()
        if self._pages is not None and batch.rows:
            highest = int(batch.slot_mapping.max())
            self._pages.reach(highest // self._info.cache_group.block_size)
        sampling = [rows[index] for index in batch.sampling_rows]
        failures = dict(batch.failures)
        with _device_errors():
            stopwatch = _Stopwatch(self._model.device)
            logits, known = self._logits(batch, rows)
            stopwatch.stop()
            sampled = sampler.sample(
                logits, [(row.sampling, row.output_position, row.history) for row in sampling]
            )
            failures |= {batch.sampling_rows[at]: reason for at, reason in sampled.failures}
            chosen = dict(zip(batch.sampling_rows, sampled.token_ids, strict=True))
            logprobs, unscored = scoring.step_logprobs(rows, batch, known, logits, chosen)
            forward_us = stopwatch.elapsed_us()
        for index, reason in unscored.items():
            failures.setdefault(index, reason)
            chosen[index] = None
        rest_us = (time.perf_counter_ns() - applied) // 1000 - forward_us
        return StepOutput(
            token_ids=tuple(chosen.get(i) for i, row in enumerate(rows) if row.samples),
            failures=tuple(sorted(failures.items())),
            logprobs=tuple(logprobs.items()),
            apply_us=(applied - began) // 1000,
            forward_us=forward_us,
            sample_us=max(0, rest_us),
        )

    def _logits(
        self, batch: FlatBatch, rows: Sequence[ScheduledRow]
    ) -> tuple[torch.Tensor, scoring.Scores | None]:
        """Logits of the sampling rows, and scores of known tokens.

        Does not wait for the device: the tokens' way back does.
        """
        device = self._model.device
        known: scoring.Scores | None = None
        if not batch.rows:
            return torch.empty((0, self._info.vocab_size), device=device), known
        token_ids, positions, slots, logits_indices, tables, lens, starts = (
            torch.from_numpy(array).to(device)
            for array in (
                batch.token_ids,
                batch.positions,
                batch.slot_mapping,
                batch.logits_indices,
                batch.block_tables,
                batch.seq_lens,
                batch.query_start_loc,
            )
        )
        step = StepTables(
            slot_mapping=slots,
            block_tables=tables,
            seq_lens=lens,
            query_start_loc=starts,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
        if batch.scored_rows:
            logits, known = scoring.forward(self._model, self._context, step, batch, rows)
        else:
            logits = models.forward(
                self._model, self._context, step, token_ids, positions, logits_indices
            )
        return logits, known


class _Stopwatch:
    """Times a forward from its making on: by the clock, on a CUDA device by the device's events.

    There the host runs ahead, and the clock would give the forward's time to what waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: Any = None
        self._began_ns = self._stopped_ns = time.perf_counter_ns()
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> None:
        """The forward has been asked for."""
        self._stopped_ns = time.perf_counter_ns()
        if self._events is not None:
            self._events[1].record()

    def elapsed_us(self) -> int:
        """Waits until the device has come to `stop`, if nothing has waited for it yet.

        Not for the whole device: swaps run on beside this step and the next.
        """
        if self._events is None:
            return (self._stopped_ns - self._began_ns) // 1000
        began, stopped = self._events
        stopped.synchronize()
        return int(began.elapsed_time(stopped) * 1000)


class _device_errors:  # noqa: N801  # reads as a statement: with _device_errors()
    """Translates torch's exceptions into those of ports."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, RuntimeError | MemoryError):
            return
        text = str(error)
        if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or (
            "can't allocate memory" in text
        ):
            raise OutOfDeviceMemoryError(text) from error
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in text:
            raise BrokenDeviceError(text) from error


def _refuse_early(settings: "WorkerSettings", backend: str, device: torch.device) -> None:
    """Raises UnsupportedModelError for settings that no model can have here."""
    models.refuse_without_native(
        settings.model,
        backend,
        device,
        wanted=settings.fused,
        deterministic=settings.deterministic,
        quantization=settings.quantization,
    )


def load_runner(settings: "WorkerSettings", log: Any) -> TorchRunner:
    """Loads, sizes the cache, checks, warms up and measures.

    Raises UnsupportedModelError, CacheTooSmallError, HostMemoryError, ValueError or OSError with a
    message for the operator when that can't be done as configured.
    """
    keep_freed_memory()
    torch.set_num_threads(settings.num_threads or usable_cores())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = make_backend(settings.attention_backend, device)
    _refuse_early(settings, backend.name, device)
    folder = model_dir(settings.model, weights=True)
    began = time.monotonic()
    model = models.load(folder, dtype=settings.dtype, device=device, log=log)
    shape = model.kv_shape
    log.info(
        "model loaded",
        model_type=model.name,
        mib=round(model.weight_bytes / 2**20),
        layers=shape.num_layers,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        windows=sorted(set(shape.windows)),
        attention_backend=backend.name,
        threads=torch.get_num_threads(),
        seconds=round(time.monotonic() - began, 1),
    )
    model = models.fuse(
        model,
        backend.name,
        wanted=settings.fused,
        deterministic=settings.deterministic,
        quantization=settings.quantization,
        log=log,
    )
    context, copies, info = _sized(settings, model, backend, log)
    info = replace(info, model_digest=model_digest(folder))
    if info.max_model_len >= models.CHECK_TOKENS:
        cosine = models.check_parity(model, context, settings.block_size)
        log.info("paged attention agrees with eager attention", least_cosine=round(cosine, 6))
    if model.fused is not None:
        model.fused.release(model.module)
    give_back_freed_memory()
    cost = measure(TorchRunner(model=model, context=context, copies=copies, info=info))
    swap = block_copies.measure(copies)
    log.info(
        "warmed up",
        step_us=round(cost.step_us),
        token_us=round(cost.token_us, 1),
        swap_out_gb_per_s=round(swap.out_gb_per_s, 2),
        swap_in_gb_per_s=round(swap.in_gb_per_s, 2),
        weights_mib=round(models.weight_bytes(model.module) / 2**20, 1),
        packed_mib=round(model.fused.packed_bytes / 2**20, 1) if model.fused is not None else 0,
        seconds=round(time.monotonic() - began, 1),
    )
    info = replace(
        info,
        step_us=cost.step_us,
        token_us=cost.token_us,
        swap_out_gb_per_s=swap.out_gb_per_s,
        swap_in_gb_per_s=swap.in_gb_per_s,
    )
    pages = PagesAhead(context.cache) if device.type == "cpu" else None
    if pages is not None:
        pages.reach(0)  # from here on: the warm-up is measured without it
    return TorchRunner(model=model, context=context, copies=copies, info=info, pages=pages)


def _sized(
    settings: "WorkerSettings", model: models.LoadedModel, backend: Backend, log: Any
) -> tuple[PagedContext, block_copies.BlockCopies, RunnerInfo]:
    """The cache as the settings and the memory have it, and what it lets the model offer."""
    device, shape = model.device, model.kv_shape
    batched = settings.max_num_batched_tokens or default_batched_tokens(device)
    bytes_per_block = kv_cache.block_bytes(shape, settings.block_size, model.dtype)
    if device.type == "cuda":
        trial = profile(model, backend, settings.block_size, batched, settings.max_num_seqs)
        memory = kv_cache.device_cache_bytes(trial, settings.gpu_memory_utilization)
    else:
        memory = kv_cache.cpu_cache_bytes(kv_cache.available_memory_bytes())
    num_host_blocks = kv_cache.choose_num_host_blocks(
        settings.swap_space_gib, bytes_per_block, device, kv_cache.available_memory_bytes()
    )
    request = kv_cache.SizingRequest(
        num_gpu_blocks_override=settings.num_gpu_blocks_override,
        kv_cache_gib=settings.kv_cache_gib,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
    )
    num_blocks = kv_cache.choose_num_blocks(request, bytes_per_block, memory)
    longest = kv_cache.choose_max_model_len(request, model.max_position_embeddings, num_blocks)
    log.info(
        "kv cache",
        blocks=num_blocks,
        block_size=settings.block_size,
        tokens=num_blocks * settings.block_size,
        mib=round(num_blocks * bytes_per_block / 2**20),
        host_blocks=num_host_blocks,
        host_mib=round(num_host_blocks * bytes_per_block / 2**20),
        max_model_len=longest,
        max_model_len_of_model=model.max_position_embeddings,
        max_num_batched_tokens=batched,
    )
    models.fix_rotary(model, longest)
    layout = kv_cache.layout(shape, settings.block_size, num_blocks)
    cache = kv_cache.allocate(layout, model.dtype, device)
    copies = block_copies.make(cache, num_host_blocks)
    context = PagedContext(cache, backend)
    info = RunnerInfo(
        model_digest="",
        vocab_size=model.vocab_size,
        max_model_len=longest,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=batched,
        cache_group=CacheGroupSpec(
            window=0,
            block_size=settings.block_size,
            block_bytes=bytes_per_block,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
        ),
        step_us=0.0,
        token_us=0.0,
    )
    return context, copies, info


def keep_freed_memory() -> None:
    """Lets glibc keep what a step frees for the next step.

    Otherwise each large tensor of a step is mapped afresh and pays page faults: gathering blocks
    took three times as long. Nothing happens with another C library.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the most that glibc accepts
    libc.mallopt(_M_TRIM_THRESHOLD, 512 * 2**20)


def give_back_freed_memory() -> None:
    """Returns to the system what loading has freed, by the largest part weights packed since.

    `keep_freed_memory` would keep it, and steps need a fraction of it: they take that anew.
    """
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def default_batched_tokens(device: torch.device) -> int:
    """The token budget of a step where none is set."""
    if device.type != "cuda":
        return CPU_BATCHED_TOKENS
    properties = torch.cuda.get_device_properties(device)
    if properties.total_memory >= BIG_GPU_BYTES and "A100" not in properties.name:
        return BIG_GPU_BATCHED_TOKENS
    return GPU_BATCHED_TOKENS


def profile(
    model: models.LoadedModel, backend: Backend, block_size: int, batched: int, num_seqs: int
) -> kv_cache.DeviceMemory:
    """A full step over a trial cache, so that the CUDA device's peak shows what a step takes."""
    num_tokens = min(batched, model.max_position_embeddings)
    num_blocks = -(-num_tokens // block_size)
    layout = kv_cache.layout(model.kv_shape, block_size, num_blocks)
    trial_bytes = layout.total_bytes(model.dtype.itemsize)
    context = PagedContext(kv_cache.allocate(layout, model.dtype, model.device), backend)
    table = torch.arange(num_blocks, dtype=torch.int32, device=model.device)
    positions = torch.arange(num_tokens, device=model.device)
    if model.fused is not None:
        model.fused.set_positions(num_tokens)  # for the trial; the length is not settled yet
    with torch.inference_mode():
        models.forward(
            model,
            context,
            models.one_row(0, num_tokens, table, block_size),
            torch.zeros_like(positions),
            positions,
            positions[:num_seqs],
        )
    torch.cuda.synchronize(model.device)
    del context
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    return kv_cache.DeviceMemory(
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(model.device),
        peak=torch.cuda.max_memory_allocated(model.device),
        trial_cache=trial_bytes,
    )


def measure(runner: ModelRunner) -> StepCost:
    """Warms up with a decode and the largest prefill chunk, and times both."""
    info = runner.info
    size = info.cache_group.block_size
    longest = min(info.max_num_batched_tokens, info.max_model_len)
    blocks = range(-(-longest // size))
    greedy = SamplingSpec(max_tokens=1)

    def best_us(num_tokens: int) -> float:
        row = ScheduledRow(
            slot=0,
            token_ids=[1 % info.vocab_size] * num_tokens,
            start=0,
            block_ids=blocks,
            samples=True,
            output_position=0,
            sampling=greedy,
        )
        times = []
        for _ in range(WARM_UP_RUNS + MEASURED_RUNS):
            began = time.perf_counter_ns()
            runner.run([row])
            times.append((time.perf_counter_ns() - began) / 1000)
        return min(times[WARM_UP_RUNS:])

    one, many = best_us(1), best_us(longest)
    token_us = max(0.0, (many - one) / (longest - 1)) if longest > 1 else 0.0
    return StepCost(step_us=max(0.0, one - token_us), token_us=token_us)

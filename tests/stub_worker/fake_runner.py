"""A ModelRunner without torch: tokens are a pure function of what the row says.

`history` takes the next token from all tokens before it, kept in the fake's own paged cache, so
that a wrong block table, a wrong position, a lost token or a copy of blocks that is missing or out
of order changes what comes after. `seed` takes it from (seed, sample index, output position) alone,
so that a lost request repeats the same tokens on any worker even if the tables were wrong. Logprobs
are those of fake_logprobs.
"""

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from gpu_worker.ports import (
    BrokenDeviceError,
    CacheGroupSpec,
    LogprobRows,
    Operation,
    OperationKind,
    OutOfDeviceMemoryError,
    RunnerInfo,
    ScheduledRow,
    StepOutput,
)

PREFIX = "STUB_"
BLOCK_BYTES = 1024
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """How the fake behaves; each is also a variable STUB_<NAME>.

    A step sleeps step_ms + token_us per token, without the GIL. fail_at_step is `kind@N`, the Nth
    call of `run` fails once: oom, error, broken, exit, or row (one row of the step). A swap is made
    only swap_steps calls of `run` after that of its own plan, or when it is waited for; with 0 at
    once, as on a CPU.
    """

    tokens: str = "history"
    step_ms: float = 1.0
    token_us: float = 0.0
    load_s: float = 0.0
    vocab_size: int = 1024
    num_blocks: int = 4096
    num_host_blocks: int = 4096
    swap_gb_per_s: float = 10.0
    swap_steps: int = 0
    block_size: int = 16
    max_model_len: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    first_token: int = 3
    fail_at_step: str = ""
    model_digest: str = "0" * 64

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], **defaults: object) -> "FakeOptions":
        """Variables win over `defaults`. Raises ValueError for a name that is not an option."""
        types: dict[str, type] = {
            field.name: type(getattr(cls(), field.name)) for field in fields(cls)
        }
        values: dict[str, object] = dict(defaults)
        for variable, raw in environ.items():
            if not variable.startswith(PREFIX):
                continue
            name = variable.removeprefix(PREFIX).lower()
            if name not in types:
                raise ValueError(f"{variable}: the stub worker has no such option")
            values[name] = types[name](raw)
        return cls(**values)  # type: ignore[arg-type]


def fold(state: int, value: int) -> int:
    """One step of a 64-bit hash."""
    state = ((state ^ value) * 0x9E3779B97F4A7C15 + 0xD6E8FEB86659FD93) & _MASK
    return state ^ (state >> 29)


def token_from_history(
    tokens: Sequence[int], options: FakeOptions, seed: int = 0, sample_index: int = 0
) -> int:
    """What `history` makes of all known tokens; for tests that predict a stream."""
    state = _start(seed, sample_index)
    for position, token in enumerate(tokens):
        state = fold(fold(state, position), token)
    return _in_vocabulary(state, options)


def _start(seed: int, sample_index: int) -> int:
    return fold(seed, sample_index) if sample_index else seed


def token_from_seed(seed: int, sample_index: int, position: int, options: FakeOptions) -> int:
    """What `seed` makes of a row; for tests that predict a stream."""
    return _in_vocabulary(fold(fold(fold(0, seed), sample_index), position), options)


def _in_vocabulary(state: int, options: FakeOptions) -> int:
    return options.first_token + state % (options.vocab_size - options.first_token)


def fake_logprobs(token_ids: Sequence[int], num_top: int, vocab_size: int) -> LogprobRows:
    """-0.5 for each token; beside it the token itself and those after it, one less each."""
    tops = range(min(num_top, vocab_size))
    return LogprobRows(
        num_top=len(tops),
        logprobs=array("f", [-0.5] * len(token_ids)),
        top_token_ids=array("i", [(token + k) % vocab_size for token in token_ids for k in tops]),
        top_logprobs=array("f", [-0.5 - k for _ in token_ids for k in tops]),
    )


Block = list[tuple[int, int]]  # (position, token) by place; missing places hold nothing


class FakeRunner:
    """See FakeOptions. Keeps (position, token) per cache place and nothing of requests."""

    def __init__(self, options: FakeOptions) -> None:
        self.options = options
        self.num_runs = 0
        self._empty: Block = [(-1, -1)] * options.block_size
        self._device: dict[int, Block] = {}
        self._host: dict[int, Block] = {}
        self._swaps: list[tuple[int, Operation]] = []  # with the call of `run` that makes them
        self._done: list[int] = []
        self._fail_kind, _, at = options.fail_at_step.partition("@")
        self._fail_at = int(at) if at else 0
        time.sleep(options.load_s)

    @property
    def info(self) -> RunnerInfo:
        """From the options."""
        o = self.options
        return RunnerInfo(
            model_digest=o.model_digest,
            vocab_size=o.vocab_size,
            max_model_len=o.max_model_len,
            max_num_seqs=o.max_num_seqs,
            max_num_batched_tokens=o.max_num_batched_tokens,
            cache_group=CacheGroupSpec(
                window=0,
                block_size=o.block_size,
                block_bytes=BLOCK_BYTES,
                num_blocks=o.num_blocks,
                num_host_blocks=o.num_host_blocks,
            ),
            step_us=o.step_ms * 1000,
            token_us=o.token_us,
            swap_out_gb_per_s=o.swap_gb_per_s if o.num_host_blocks else 0.0,
            swap_in_gb_per_s=o.swap_gb_per_s if o.num_host_blocks else 0.0,
        )

    def begin_operations(self, operations: Sequence[Operation]) -> None:
        """Copies at once; swaps after swap_steps more calls of `run`, in their order."""
        for operation in operations:
            if operation.kind == OperationKind.COPY or not self.options.swap_steps:
                self._copy(operation)
            else:
                self._swaps.append((self.num_runs + self.options.swap_steps, operation))

    def finished_operations(self, *, wait: bool) -> Sequence[int]:
        """See ports.ModelRunner."""
        while self._swaps and (wait or self._swaps[0][0] < self.num_runs):
            self._copy(self._swaps.pop(0)[1])
        finished, self._done = self._done, []
        return finished

    def _copy(self, operation: Operation) -> None:
        kind = operation.kind
        source = self._host if kind == OperationKind.SWAP_IN else self._device
        target = self._host if kind == OperationKind.SWAP_OUT else self._device
        for block, into in zip(operation.source_blocks, operation.target_blocks, strict=True):
            target[into] = list(source.get(block, self._empty))
        self._done.append(operation.op_id)

    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        """Writes tokens where the model would write KV; reads them back through the tables."""
        begin = time.perf_counter_ns()
        self.num_runs += 1
        failures = self._fail(rows) if self.num_runs == self._fail_at else ()
        num_tokens = sum(len(row.token_ids) for row in rows)
        time.sleep(self.options.step_ms / 1000 + self.options.token_us * num_tokens / 1e6)
        for row in rows:
            self._store(row)
        failed = {index for index, _ in failures}
        tokens = {
            index: None if index in failed else self._sample(row)
            for index, row in enumerate(rows)
            if row.samples
        }
        return StepOutput(
            token_ids=tuple(tokens.values()),
            failures=failures,
            logprobs=tuple(
                (index, self._score(row, tokens.get(index)))
                for index, row in enumerate(rows)
                if row.sampling.num_logprobs is not None
            ),
            forward_us=(time.perf_counter_ns() - begin) // 1000,
        )

    def _fail(self, rows: Sequence[ScheduledRow]) -> tuple[tuple[int, str], ...]:
        match self._fail_kind:
            case "oom":
                raise OutOfDeviceMemoryError("the fake is out of memory")
            case "broken":
                raise BrokenDeviceError("the fake is broken")
            case "exit":
                raise SystemExit("the fake ends its thread")
            case "row":
                return ((len(rows) - 1, "the fake can't sample this row"),)
            case _:
                raise RuntimeError("the fake fails")

    def _store(self, row: ScheduledRow) -> None:
        size = self.options.block_size
        for position, token in enumerate(row.token_ids, row.start):
            number = row.block_ids[position // size]
            block = self._device.get(number)
            if block is None:
                block = self._device[number] = list(self._empty)
            block[position % size] = (position, token)

    def _score(self, row: ScheduledRow, token: int | None) -> LogprobRows:
        scored = [*row.scored_token_ids, *(() if token is None else (token,))]
        return fake_logprobs(scored, row.sampling.num_logprobs or 0, self.options.vocab_size)

    def _sample(self, row: ScheduledRow) -> int:
        sampling = row.sampling
        if self.options.tokens == "seed":
            return token_from_seed(
                sampling.seed, sampling.sample_index, row.output_position, self.options
            )
        size = self.options.block_size
        state = _start(sampling.seed, sampling.sample_index)
        for position in range(row.start + len(row.token_ids)):
            block = self._device.get(row.block_ids[position // size], self._empty)
            there = block[position % size]
            state = fold(fold(state, there[0] & _MASK), there[1] & _MASK)
        return _in_vocabulary(state, self.options)

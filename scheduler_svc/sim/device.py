"""The device of a simulated worker: tokens made up, memory whose content can be told.

Modelled: the model and its KV memory. The next token is a pure function of a request's seed and its
position; a token's log probability, where it is wanted, of it and all before it. Each block
remembers, for each of its tokens, a number that stands for the keys and values of that token after
all tokens before it, of that tenant; a step that reads a block with any other number in it is a
violation, whatever let it come to that: a block given out twice, a copy that is missing or late, a
cache hit on another prefix or another tenant's.

Swaps run beside the steps, one after the other: a SWAP_OUT reads its blocks when it ends, a SWAP_IN
spoils its targets when it begins.
"""

import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpu_worker.ports import (
    BrokenDeviceError,
    CacheGroupSpec,
    LogprobRows,
    Operation,
    OperationKind,
    RunnerInfo,
    ScheduledRow,
    StepOutput,
)
from scheduler_svc.sim.loop import VirtualLoop

VOCAB_SIZE = 32_000
EOS = 3
_FIRST_TOKEN = 8
_MASK = (1 << 64) - 1
_SPOILT = -1


class ViolationError(Exception):
    """A promise is broken. `rule` names it."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule, self.detail = rule, detail


@dataclass(slots=True, kw_only=True)
class Script:
    """What a request has to give: known before it begins, since tokens are a function.

    `poison` is what its first step with a row that samples does to its worker: "" nothing, "row"
    its own row fails, "step" the step fails, "device" the device breaks.
    """

    tenant: str
    prompt: list[int]
    outputs: list[int]
    poison: str = ""
    tokens: list[int] = field(init=False)
    content: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.prompt + self.outputs
        value, self.content = zlib.crc32(self.tenant.encode()), []
        for token in self.tokens:
            value = (value * 0x9E3779B97F4A7C15 + token + 1) & _MASK
            self.content.append(value)

    def logprob(self, position: int) -> float:
        """Of the token there. In 32 bits exact."""
        return -(1 + (self.content[position] >> 40) % 4096) / 256

    def likeliest(self, position: int, count: int) -> list[tuple[int, float]]:
        """The tokens most likely in its place, with their log probabilities."""
        mixed = self.content[position]
        return [((mixed >> 7 * i) % VOCAB_SIZE, -(i + 1) / 8) for i in range(count)]

    def logprob_rows(self, positions: Iterable[int], num_top: int) -> LogprobRows:
        """Of the tokens at these positions, as a model gives them."""
        rows = list(positions)
        top = [entry for position in rows for entry in self.likeliest(position, num_top)]
        return LogprobRows(
            num_top=num_top,
            logprobs=array("f", map(self.logprob, rows)),
            top_token_ids=array("i", [token for token, _ in top]),
            top_logprobs=array("f", [logprob for _, logprob in top]),
        )


def make_outputs(seed: int, max_tokens: int, stop_at: int | None) -> list[int]:
    """The tokens of a request that may have so many and, with stop_at, ends with EOS there."""
    length = max_tokens if stop_at is None else min(max_tokens, stop_at + 1)
    span, state, tokens = VOCAB_SIZE - _FIRST_TOKEN, seed & _MASK, []
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) & _MASK
        tokens.append(_FIRST_TOKEN + (state >> 33) % span)
    if stop_at is not None and length == stop_at + 1:
        tokens[-1] = EOS
    return tokens


# Seconds of a step, and of each of its tokens.
STEP_S, TOKEN_S = 0.02, 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Sizes and times of a device."""

    num_slots: int
    num_blocks: int
    num_host_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_model_len: int = 512
    block_bytes: int = 4096
    step_s: float = STEP_S
    token_s: float = TOKEN_S
    swap_bytes_per_s: float = 1e6


class SimRunner:
    """gpu_worker.ports.ModelRunner in virtual time.

    A call takes no time on the loop; `ahead_s` is how far the device's clock is ahead of it.
    """

    def __init__(
        self, loop: VirtualLoop, spec: DeviceSpec, script_of: Callable[[int, int], Script | None]
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._script_of = script_of
        # Factors by which it is slower than it should be; the largest counts.
        self.slowed: list[float] = []
        self.ahead_s = 0.0
        # Requests whose poison has worked here, by seed.
        self.poisoned: set[int] = set()
        self.num_blocks_checked = 0
        size = spec.block_size
        self._device = [[_SPOILT] * size for _ in range(spec.num_blocks)]
        self._host = [[_SPOILT] * size for _ in range(spec.num_host_blocks)]
        self._begun: dict[int, tuple[Operation, float]] = {}
        self._stream_free_s = 0.0

    @property
    def info(self) -> RunnerInfo:
        """As the spec has it."""
        spec = self._spec
        return RunnerInfo(
            model_digest="d" * 64,
            vocab_size=VOCAB_SIZE,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.num_slots,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            cache_group=CacheGroupSpec(
                window=0,
                block_size=spec.block_size,
                block_bytes=spec.block_bytes,
                num_blocks=spec.num_blocks,
                num_host_blocks=spec.num_host_blocks,
            ),
            step_us=spec.step_s * 1e6,
            token_us=spec.token_s * 1e6,
            swap_out_gb_per_s=spec.swap_bytes_per_s / 1e9 if spec.num_host_blocks else 0.0,
            swap_in_gb_per_s=spec.swap_bytes_per_s / 1e9 if spec.num_host_blocks else 0.0,
        )

    @property
    def slowness(self) -> float:
        """1 for a device in order."""
        return max(self.slowed, default=1.0)

    def now_s(self) -> float:
        """The device's clock."""
        return self._loop.time() + self.ahead_s

    def run(self, rows: Sequence[ScheduledRow]) -> StepOutput:
        """Computes a step, and checks all that it reads."""
        num_tokens = sum(len(row.token_ids) for row in rows)
        step_s = (self._spec.step_s + num_tokens * self._spec.token_s) * self.slowness
        self.ahead_s += step_s
        tokens: list[int | None] = []
        failures: list[tuple[int, str]] = []
        logprobs: list[tuple[int, LogprobRows]] = []
        for index, row in enumerate(rows):
            script = self._script_of(row.sampling.seed, row.sampling.sample_index)
            if script is None:
                raise self._violated("rows are of requests", f"no request has slot {row.slot}'s")
            self._compute(row, script)
            if script.poison and row.samples:
                self.poisoned.add(row.sampling.seed)
                if script.poison == "step":
                    raise RuntimeError("poison: the step can't be computed")
                if script.poison == "device":
                    raise BrokenDeviceError("poison: the device is broken")
                failures.append((index, "poison: the row can't be computed"))
                tokens.append(None)
            elif row.samples:
                if row.output_position >= len(script.outputs):
                    raise self._violated(
                        "a request ends once", f"output {row.output_position} is behind its end"
                    )
                tokens.append(script.outputs[row.output_position])
            if row.sampling.num_logprobs is not None:
                logprobs.append((index, self._scored(row, script)))
        return StepOutput(
            token_ids=tuple(tokens),
            failures=tuple(failures),
            logprobs=tuple(logprobs),
            forward_us=round(step_s * 1e6),
        )

    def _scored(self, row: ScheduledRow, script: Script) -> LogprobRows:
        """Of the known tokens that are asked for, and of the one that the row has sampled."""
        end = row.start + len(row.token_ids)
        first = end + 1 - row.samples - len(row.scored_token_ids)
        known = script.tokens[first : first + len(row.scored_token_ids)]
        if known != list(row.scored_token_ids):
            raise self._violated(
                "a row scores its request's tokens", f"slot {row.slot}, from {first} on"
            )
        count = len(known) + row.samples
        return script.logprob_rows(range(first, first + count), row.sampling.num_logprobs or 0)

    def _compute(self, row: ScheduledRow, script: Script) -> None:
        start, size, content = row.start, self._spec.block_size, script.content
        end = start + len(row.token_ids)
        if list(row.token_ids) != script.tokens[start:end]:
            raise self._violated(
                "a row computes its request's tokens", f"slot {row.slot}, {start} to {end}"
            )
        device, blocks = self._device, row.block_ids
        for index in range(-(-start // size)):
            first = index * size
            last = min(first + size, start)
            held = device[blocks[index]]
            self.num_blocks_checked += 1
            if held[: last - first] != content[first:last]:
                raise self._violated(
                    "a block holds what its reader's prefix demands",
                    f"slot {row.slot} reads block {blocks[index]} as its number {index}",
                )
        for position in range(start, end):
            device[blocks[position // size]][position % size] = content[position]

    def _violated(self, rule: str, detail: str) -> ViolationError:
        """The executor takes what is raised for a failed step, so the world is told, too."""
        error = ViolationError(rule, detail)
        self._loop.fail(error)
        return error

    def begin_operations(self, operations: Sequence[Operation]) -> None:
        """COPY is done at once, swaps follow each other on their stream."""
        for operation in operations:
            if operation.kind == OperationKind.COPY:
                self._copy(operation)
                self._begun[operation.op_id] = operation, self.now_s()
                continue
            num_bytes = len(operation.target_blocks) * self._spec.block_bytes
            begin_s = max(self._stream_free_s, self.now_s())
            self._stream_free_s = begin_s + num_bytes / self._spec.swap_bytes_per_s * self.slowness
            self._begun[operation.op_id] = operation, self._stream_free_s
            if operation.kind == OperationKind.SWAP_IN:
                for block in operation.target_blocks:
                    self._device[block] = [_SPOILT] * self._spec.block_size

    def finished_operations(self, *, wait: bool) -> Sequence[int]:
        """Those whose time has come; with `wait` the device's clock goes on to the last."""
        if wait and self._begun:
            last_s = max(done_s for _, done_s in self._begun.values())
            self.ahead_s = max(self.ahead_s, last_s - self._loop.time())
        now_s = self.now_s()
        done = [op_id for op_id, (_, done_s) in self._begun.items() if done_s <= now_s]
        for op_id in done:
            operation, _ = self._begun.pop(op_id)
            if operation.kind != OperationKind.COPY:
                self._copy(operation)
        return done

    def _copy(self, operation: Operation) -> None:
        source = self._host if operation.kind == OperationKind.SWAP_IN else self._device
        target = self._host if operation.kind == OperationKind.SWAP_OUT else self._device
        contents = [list(source[block]) for block in operation.source_blocks]
        for block, held in zip(operation.target_blocks, contents, strict=True):
            target[block] = held

"""A scheduler just good enough to drive runners: chunks, mixed steps, shared prefixes, preemption.

It owns the blocks of each runner and counts what it did, so that a test can say that the condition
it is about has come up. One step goes to each runner in turn.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_worker.ports import ModelRunner, SamplingSpec, ScheduledRow, StepOutput

MOST_STEPS = 20_000


@dataclass(slots=True)
class Request:
    """One request; `number` also goes over as its seed and so names its rows in recordings."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    worker: int = 0
    temperature: float = 0.0
    moves_at: int = 0  # after so many output tokens it goes to the next runner; 0: never
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def known(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.output]

    @property
    def sampling(self) -> SamplingSpec:
        """Greedy unless a temperature is given."""
        return SamplingSpec(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=self.number
        )


class Blocks:
    """Blocks of one runner. Full ones stay known by their whole prefix until they are needed."""

    def __init__(self, num_blocks: int, block_size: int, *, share: bool) -> None:
        self._size = block_size
        self._share = share
        self._free = list(range(num_blocks))
        self._users: Counter[int] = Counter()
        self._by_prefix: dict[tuple[int, ...], int] = {}
        self._prefix_of: dict[int, tuple[int, ...]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def take(self) -> int | None:
        """A block of one's own; None when all are in use."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            del self._by_prefix[self._prefix_of.pop(block)]
        else:
            return None
        self._users[block] = 1
        return block

    def num_takeable(self) -> int:
        """Blocks that `take` would give."""
        return len(self._free) + len(self._idle)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest known prefix, used once more; one token stays to be computed."""
        found: list[int] = []
        for end in range(self._size, len(tokens), self._size):
            block = self._by_prefix.get(tuple(tokens[:end]))
            if block is None:
                break
            self._users[block] += 1
            self._idle.pop(block, None)
            found.append(block)
        return found

    def filled(self, request: Request) -> None:
        """Makes the request's full blocks known."""
        if not self._share:
            return
        known = request.known
        for index in range(request.num_computed // self._size):
            prefix, block = tuple(known[: (index + 1) * self._size]), request.blocks[index]
            if prefix not in self._by_prefix and block not in self._prefix_of:
                self._by_prefix[prefix] = block
                self._prefix_of[block] = prefix

    def release(self, blocks: Sequence[int]) -> None:
        """One user less each; of a request's blocks the last ones are taken again first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._prefix_of:
                self._idle[block] = None
            else:
                self._free.append(block)


class FakeScheduler:
    """Runs requests to their end. `chunk` bounds a row's tokens in a step, `budget` the step's.

    One request is admitted per runner and step, so that a batch grows row by row; with `admit_all`
    as many as fit, so that all of its rows can be there before the first one ends.
    """

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        *,
        chunk: int = 64,
        budget: int = 128,
        max_rows: int = 8,
        share_prefixes: bool = False,
        admit_all: bool = False,
    ) -> None:
        self._runners = runners
        self._chunk, self._budget, self._max_rows = chunk, budget, max_rows
        self._admit_all = admit_all
        self._running: list[list[Request]] = [[] for _ in runners]
        self._waiting: list[Request] = []
        self._blocks = []
        for runner in runners:
            group = runner.info.cache_group
            self._blocks.append(Blocks(group.num_blocks, group.block_size, share=share_prefixes))
        self.steps = [0] * len(runners)
        self.num_chunks = 0  # parts of prompts that did not reach the prompt's end
        self.num_mixed_steps = 0
        self.most_rows = 0  # of one step
        self.most_decodes = 0  # rows of one token that samples, of one step
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_moves = 0

    def run(self, requests: Sequence[Request]) -> None:
        """All of them, the first ones first."""
        self._waiting = list(requests)
        for _ in range(MOST_STEPS):
            if not self._waiting and not any(self._running):
                return
            for worker in range(len(self._runners)):
                self._step(worker)
        raise AssertionError(f"not done after {MOST_STEPS} rounds")

    def _step(self, worker: int) -> None:
        while self._admit(worker) and self._admit_all:
            pass
        scheduled = self._schedule(worker)
        if not scheduled:
            return
        rows = [
            ScheduledRow(
                slot=slot,
                token_ids=request.known[request.num_computed : request.num_computed + length],
                start=request.num_computed,
                block_ids=tuple(request.blocks),
                samples=request.num_computed + length == len(request.known),
                output_position=len(request.output),
                sampling=request.sampling,
            )
            for slot, (request, length) in enumerate(scheduled)
        ]
        decodes = [row for row in rows if row.samples and len(row.token_ids) == 1]
        self.num_mixed_steps += 0 < len(decodes) < len(rows)
        self.most_rows = max(self.most_rows, len(rows))
        self.most_decodes = max(self.most_decodes, len(decodes))
        self.num_chunks += sum(not row.samples for row in rows)
        self.steps[worker] += 1
        self._apply(worker, scheduled, rows, self._runners[worker].run(rows))

    def _apply(
        self,
        worker: int,
        scheduled: list[tuple[Request, int]],
        rows: list[ScheduledRow],
        result: StepOutput,
    ) -> None:
        assert not result.failures, result.failures
        tokens = iter(result.token_ids)
        for (request, length), row in zip(scheduled, rows, strict=True):
            request.num_computed += length
            if row.samples:
                token = next(tokens)
                assert token is not None
                request.output.append(token)
            self._blocks[worker].filled(request)
            if len(request.output) == request.max_tokens:
                self._drop(worker, request)
            elif row.samples and len(request.output) == request.moves_at:
                self._drop(worker, request)
                request.worker = (worker + 1) % len(self._runners)
                self._waiting.insert(0, request)
                self.num_moves += 1

    def _admit(self, worker: int) -> bool:
        """Whether the next request had a row and blocks for what is known of it."""
        mine = next((r for r in self._waiting if r.worker == worker), None)
        running, blocks = self._running[worker], self._blocks[worker]
        if mine is None or len(running) == self._max_rows:
            return False
        size = self._runners[worker].info.cache_group.block_size
        needed = -(-len(mine.known) // size)
        if running and blocks.num_takeable() < needed:
            return False
        mine.blocks = blocks.match(mine.known)
        mine.num_computed = len(mine.blocks) * size
        self.num_cached_tokens += mine.num_computed
        self._waiting.remove(mine)
        running.append(mine)
        return True

    def _schedule(self, worker: int) -> list[tuple[Request, int]]:
        scheduled: list[tuple[Request, int]] = []
        left = self._budget
        for request in list(self._running[worker]):
            length = min(self._chunk, left, len(request.known) - request.num_computed)
            if length == 0 or request not in self._running[worker]:
                continue
            if self._grow(worker, request, request.num_computed + length):
                scheduled.append((request, length))
                left -= length
        still = self._running[worker]
        return [(request, length) for request, length in scheduled if request in still]

    def _grow(self, worker: int, request: Request, num_tokens: int) -> bool:
        """Blocks for so many tokens; the youngest requests make room. False: it was one itself."""
        size = self._runners[worker].info.cache_group.block_size
        while len(request.blocks) * size < num_tokens:
            block = self._blocks[worker].take()
            if block is not None:
                request.blocks.append(block)
                continue
            youngest = self._running[worker][-1]
            assert youngest is not request or len(self._running[worker]) > 1, "does not fit alone"
            self._drop(worker, youngest)
            self._waiting.insert(0, youngest)
            self.num_preemptions += 1
            if youngest is request:
                return False
        return True

    def _drop(self, worker: int, request: Request) -> None:
        self._running[worker].remove(request)
        self._blocks[worker].release(request.blocks)
        request.blocks = []
        request.num_computed = 0

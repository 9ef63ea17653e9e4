"""What a run of the load simulator leaves behind, for tables, JSON and pictures.

Bounds: token gaps go into a histogram of fixed size; at most `max_steps` steps are kept, evenly
thinned (every second one is dropped and from then on half as many are taken); phases are kept for
the first `max_timelines` requests only. Times are virtual seconds from the begin of the run.
"""

import enum
import math
from dataclasses import dataclass, field

_BUCKETS_PER_OCTAVE = 8
_SMALLEST_S = 1e-5
_NUM_BUCKETS = 8 * 30


class Phase(enum.Enum):
    """What a request is doing."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"


class GapHistogram:
    """Counts of durations from 10 us to 3 hours in buckets 9 % wide."""

    def __init__(self) -> None:
        self.counts = [0] * _NUM_BUCKETS
        self.num = 0
        self.total_s = 0.0
        self.max_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` durations of so many seconds."""
        octaves = math.log2(max(seconds, _SMALLEST_S) / _SMALLEST_S)
        self.counts[min(int(octaves * _BUCKETS_PER_OCTAVE), _NUM_BUCKETS - 1)] += count
        self.num += count
        self.total_s += seconds * count
        self.max_s = max(self.max_s, seconds)

    def percentile(self, percent: float) -> float:
        """Seconds that so many percent do not exceed, to 9 %; 0 without any."""
        wanted, seen = self.num * percent / 100, 0
        for index, count in enumerate(self.counts):
            seen += count
            if count and seen >= wanted:
                return min(self.max_s, _SMALLEST_S * 2 ** ((index + 1) / _BUCKETS_PER_OCTAVE))
        return self.max_s


@dataclass(slots=True, kw_only=True)
class Span:
    """A request was in a phase from begin_s to end_s."""

    phase: Phase
    begin_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class RequestLog:
    """One request. first_token_s and finished_s are None where there was none."""

    index: int
    tenant: str
    worker: str
    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: str = ""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    # Only of the first max_timelines requests; in order of time, without overlaps.
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One step of one worker, at its end. Rows by phase; blocks in use on that worker."""

    end_s: float
    worker: str
    duration_s: float
    num_prefill_rows: int
    num_decode_rows: int
    num_prefill_tokens: int
    num_swapped: int
    num_waiting: int
    num_blocks_used: int


@dataclass(slots=True, kw_only=True)
class RunLog:
    """A whole run. Everything but `requests` is bounded; see the module."""

    num_workers: int
    num_blocks: int  # of one worker
    block_size: int
    max_steps: int = 20_000
    max_timelines: int = 200
    requests: list[RequestLog] = field(default_factory=list)
    steps: list[StepLog] = field(default_factory=list)
    token_gaps: GapHistogram = field(default_factory=GapHistogram)
    num_steps: int = 0
    duration_s: float = 0.0
    # Of the core at the end: prompt tokens asked of and found in the prefix caches, preemptions.
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)
    # How often at least two tenants waited when the bound of `fair` was looked at.
    num_fairness_looks: int = 0
    # CPU seconds that the core has taken for all its rounds, by the real clock.
    core_cpu_s: float = 0.0
    # Served tokens by tenant (prompt and output), for fairness.
    tokens_by_tenant: dict[str, int] = field(default_factory=dict)
    _take_every: int = 1

    def wants_step(self) -> bool:
        """Whether the next step will be kept."""
        return (self.num_steps + 1) % self._take_every == 0

    def step(self, step: StepLog) -> None:
        """Keeps it, unless the steps have been thinned and it is not its turn."""
        self.num_steps += 1
        if self.num_steps % self._take_every:
            return
        self.steps.append(step)
        if len(self.steps) > self.max_steps:
            del self.steps[::2]
            self._take_every *= 2

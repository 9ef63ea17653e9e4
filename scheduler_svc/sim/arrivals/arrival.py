"""A request before anybody has seen it, and sources of them.

A source is iterated as often as one likes and holds nothing in memory: each pass reads its file or
draws its numbers anew. Arrivals come in order of time. Shared prompts are said by prefix ids: equal
ids at the same place after equal ones are the same tokens, `prefix_block_tokens` of them each; what
lies behind the last id is the request's own.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Limits of what a source may say, so that a broken file is an error and no endless run.
MAX_AT_S = 10 * 366 * 86_400.0
MAX_TOKENS = 1 << 24
MAX_PREFIX_ID = (1 << 63) - 1
MAX_PREFIX_BLOCK_TOKENS = 1 << 16
MAX_TENANT_LENGTH = 256
MAX_PRIORITY = 1_000_000


class ArrivalError(ValueError):
    """A source that can't be read; the text names file, line and field."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, in seconds from the source's beginning, and how large it is.

    It gives exactly num_output_tokens unless somebody ends it before.
    """

    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    prefix_ids: tuple[int, ...] = ()
    priority: int = 0


def problem(arrival: Arrival, prefix_block_tokens: int) -> tuple[str, str] | None:
    """The field that is out of bounds, and why; None if there is none."""
    if not 0.0 <= arrival.at <= MAX_AT_S:
        return "at", f"{arrival.at} is not between 0 and {MAX_AT_S:.0f} s"
    for field in ("num_prompt_tokens", "num_output_tokens"):
        if not 1 <= getattr(arrival, field) <= MAX_TOKENS:
            return field, f"{getattr(arrival, field)} is not between 1 and {MAX_TOKENS}"
    if len(arrival.tenant) > MAX_TENANT_LENGTH:
        return "tenant", f"longer than {MAX_TENANT_LENGTH} characters"
    most = -(-arrival.num_prompt_tokens // prefix_block_tokens)
    if len(arrival.prefix_ids) > most:
        return "prefix_ids", f"{len(arrival.prefix_ids)} blocks, but the prompt has {most}"
    if (
        arrival.prefix_ids
        and not 0 <= min(arrival.prefix_ids) <= max(arrival.prefix_ids) <= MAX_PREFIX_ID
    ):
        return "prefix_ids", f"not all between 0 and {MAX_PREFIX_ID}"
    if abs(arrival.priority) > MAX_PRIORITY:
        return "priority", f"{arrival.priority} is beyond {MAX_PRIORITY}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Arrivals in order of time. `passes` begins a new pass over all of them."""

    name: str
    prefix_block_tokens: int
    passes: Callable[[], Iterator[Arrival]]

    def __post_init__(self) -> None:
        if not 1 <= self.prefix_block_tokens <= MAX_PREFIX_BLOCK_TOKENS:
            raise ArrivalError(
                f"{self.name}: prefix_block_tokens: {self.prefix_block_tokens} is not between 1 "
                f"and {MAX_PREFIX_BLOCK_TOKENS}"
            )

    def __iter__(self) -> Iterator[Arrival]:
        return self.passes()


def first(source: Source, count: int) -> Source:
    """Its first `count` arrivals."""
    if count < 1:
        raise ArrivalError(f"{source.name}: at least one arrival is wanted, not {count}")
    return dataclasses.replace(source, passes=lambda: itertools.islice(source, count))


def faster(source: Source, factor: float) -> Source:
    """The same requests at `factor` times the rate."""
    if not 0.0 < factor < math.inf:
        raise ArrivalError(f"{source.name}: a rate is above 0 and finite, not {factor}")

    def passes() -> Iterator[Arrival]:
        for arrival in source:
            yield dataclasses.replace(arrival, at=arrival.at / factor)

    return dataclasses.replace(source, passes=passes)


def mean_rate_per_s(source: Source) -> float:
    """Requests per second over a whole pass; 0 if all come at once or there is at most one."""
    begin = end = 0.0
    count = 0
    for arrival in source:
        begin = begin if count else arrival.at
        end = arrival.at
        count += 1
    return (count - 1) / (end - begin) if end > begin else 0.0

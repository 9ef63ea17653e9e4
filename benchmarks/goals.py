"""The goals of serving SmolLM2-135M on two cores, and how far today's machine moves them.

The goals were set on a machine whose floor is REFERENCE: 2 cores of an AMD EPYC with AVX-512 and
bf16 arithmetic, torch 2.13, bf16. Another machine, or the same one on another day, has another
floor: each goal is multiplied by probe / reference of what bounds it (for a rate that rises as a
time falls, by reference / probe). Times outside the forward have no such floor and stay.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.floor import Floor
from benchmarks.measure import Point

MODEL = "smollm2-135m"
QUANTIZED = ", int8"  # behind the name of a policy that serves weights of 8 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A figure of the machine on which the goals were set."""

    meaning: str
    value: float
    unit: str
    is_time: bool = False


REFERENCE = {
    "read": Reference(meaning="memory, reading", value=29.6, unit="GB/s"),
    "copy": Reference(meaning="memory, a copy's reading and writing", value=27.5, unit="GB/s"),
    "linear 1": Reference(
        meaning="all linear layers and the head, 1 row", value=19.7, unit="ms", is_time=True
    ),
    "linear 8": Reference(
        meaning="all linear layers and the head, 8 rows", value=24.3, unit="ms", is_time=True
    ),
    "linear 32": Reference(
        meaning="all linear layers and the head, 32 rows", value=40.1, unit="ms", is_time=True
    ),
    "gathered": Reference(
        meaning="decode attention 32 x 509, gathered by torch", value=0.79, unit="GB/s"
    ),
    "blocks": Reference(
        meaning="decode attention 32 x 509, native over the blocks", value=19.0, unit="GB/s"
    ),
    # From linear layers of weights packed for oneDNN; keys and values are not in it there.
    "ceiling": Reference(meaning="ceiling of output tokens, 32 clients", value=640.0, unit="tok/s"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is to be reached; `floor` names the reference that bounds it, "" for none."""

    meaning: str
    value: float
    unit: str
    at_least: bool
    floor: str = ""


THROUGHPUT = Goal(
    meaning="output tokens, 32 clients", value=460.0, unit="tok/s", at_least=True, floor="linear 32"
)
# Nothing moves it: the ceiling is of the same day.
CEILING = Goal(
    meaning="output tokens, 32 clients, of their ceiling", value=0.7, unit="of it", at_least=True
)
THROUGHPUT_LONG = Goal(
    meaning="output tokens, 32 clients, prompts of 256 to 768",
    value=150.0,
    unit="tok/s",
    at_least=True,
    floor="linear 32",
)
GAP_MANY = Goal(
    meaning="median gap, 32 clients", value=55.0, unit="ms", at_least=False, floor="linear 32"
)
GAP_MANY_P99 = Goal(
    meaning="p99 of the gap, 32 clients", value=150.0, unit="ms", at_least=False, floor="linear 32"
)
GAP = Goal(meaning="median gap, 1 client", value=20.0, unit="ms", at_least=False, floor="linear 1")
GAP_QUANTIZED = Goal(
    meaning="median gap, 1 client, weights of 8 bits",
    value=11.0,
    unit="ms",
    at_least=False,
    floor="linear 1",
)
# A prompt is computed at once: its arithmetic bounds it, as it does with many rows.
FIRST = Goal(
    meaning="median time to the first token, 1 client, prompts of 64 to 192",
    value=100.0,
    unit="ms",
    at_least=False,
    floor="linear 32",
)
ATTENTION = Goal(
    meaning="decode attention, 32 x 509", value=15.0, unit="GB/s", at_least=True, floor="read"
)
# Of benchmarks.batching; both sides run on the same machine.
STATIC = Goal(
    meaning="output tokens, continuous over static batches of 8", value=5.0, unit="x", at_least=True
)
OUTSIDE = Goal(
    meaning="outside the forward, 32 clients, greedy", value=4.0, unit="ms", at_least=False
)
OUTSIDE_SAMPLED = Goal(
    meaning="outside the forward, 32 clients, sampled", value=8.0, unit="ms", at_least=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A goal, what the day makes of it, and what was measured (None: it was not)."""

    goal: Goal
    factor: float
    found: float | None

    @property
    def scaled(self) -> float:
        """The goal for this machine today."""
        return self.goal.value * self.factor

    @property
    def text(self) -> str:
        """Against the scaled goal."""
        if self.found is None:
            return "not measured"
        met = self.found >= self.scaled if self.goal.at_least else self.found <= self.scaled
        return "met" if met else "missed"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self.goal),
            "factor": self.factor,
            "scaled": self.scaled,
            "found": self.found,
            "verdict": self.text,
        }


def probed(floor: Floor) -> dict[str, float | None]:
    """The day's figure of each reference; None where there are no native kernels."""
    return {
        "read": floor.read_gb_per_s,
        "copy": floor.copy_gb_per_s,
        **{f"linear {rows}": floor.step_ms(rows) for rows in (1, 8, 32)},
        "gathered": floor.attention_gb_per_s["torch"],
        "blocks": floor.attention_gb_per_s.get("native"),
        "ceiling": floor.ceiling_tok_per_s,
    }


def factor(goal: Goal, floor: Floor) -> float:
    """What the goal is multiplied by."""
    if not goal.floor:
        return 1.0
    reference, today = REFERENCE[goal.floor], probed(floor)[goal.floor]
    assert today is not None, "no goal hangs on a figure that may be missing"
    ratio = today / reference.value
    rises_with_it = reference.is_time != goal.at_least
    return ratio if rises_with_it else 1.0 / ratio


def verdicts(floor: Floor, points: Sequence[Point], policy: str) -> list[Verdict]:
    """Of all goals, by the points of the policy that serves by default."""

    def point(
        level: int, *, sampled: bool = False, long: bool = False, of: str = policy
    ) -> Point | None:
        wanted = (of, "closed", level, sampled, long)
        every = ((p.policy, p.kind, p.level, p.sampled, p.long) for p in points)
        return next((p for p, is_of in zip(points, every, strict=True) if is_of == wanted), None)

    def outside(of: Point | None) -> float | None:
        return of.steps.outside_ms if of and of.steps else None

    one, many, long = point(1), point(32), point(32, long=True)
    quantized = point(1, of=f"{policy}{QUANTIZED}")
    found = (
        (THROUGHPUT, many.output_tokens_per_s if many else None),
        (CEILING, many.output_tokens_per_s / floor.ceiling_tok_per_s if many else None),
        (THROUGHPUT_LONG, long.output_tokens_per_s if long else None),
        (GAP_MANY, many.gap_p50_ms if many else None),
        (GAP_MANY_P99, many.gap_p99_ms if many else None),
        (GAP, one.gap_p50_ms if one else None),
        (GAP_QUANTIZED, quantized.gap_p50_ms if quantized else None),
        (FIRST, one.ttft_p50_ms if one else None),
        (ATTENTION, floor.attention_gb_per_s.get("native")),
        (OUTSIDE, outside(many)),
        (OUTSIDE_SAMPLED, outside(point(32, sampled=True))),
    )
    return [Verdict(goal=goal, factor=factor(goal, floor), found=value) for goal, value in found]

"""What is sent to find out how far the load simulator can be believed: five kinds of traffic.

Each kind is drawn twice, from two seeds: one half is what the cost is fitted to, the other what the
prediction is scored on. Lengths and rates suit SmolLM2-135M on two cores: about half of what they
can do, so that requests queue now and then and nothing piles up.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.workload import HIGH_TOKEN_ID, LOW_TOKEN_ID, Job
from scheduler_svc.sim.arrivals import Arrival, Source, Traffic, generate, prompt_token_ids

SECONDS, QUICK_SECONDS = 36.0, 8.0
FIT, SCORE = "fit", "score"
_NUM_IDS = HIGH_TOKEN_ID - LOW_TOKEN_ID


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A kind of traffic (see scheduler_svc.sim.arrivals), its mean rate and what scales lengths.

    Answers are `answers` times as long as that makes them.
    """

    kind: str
    rate_per_s: float
    scale: float
    answers: int = 1


WORKLOADS = (
    Workload(kind="chat", rate_per_s=2.5, scale=0.3),
    Workload(kind="long", rate_per_s=0.5, scale=0.06, answers=4),
    Workload(kind="variance", rate_per_s=2.5, scale=0.2),
    Workload(kind="bursts", rate_per_s=1.5, scale=0.3),
    Workload(kind="agents", rate_per_s=4.0, scale=0.3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One run: a workload's arrivals for so many seconds. No two halves share a token's block."""

    workload: Workload
    role: str
    seed: int
    seconds: float

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.workload.kind}, {self.role}"

    def source(self) -> Source:
        """As the simulator takes it. One tenant and one priority, as without API keys."""
        traffic = Traffic(
            seed=self.seed,
            count=math.ceil(self.workload.rate_per_s * self.seconds * 10) + 100,
            rate_per_s=self.workload.rate_per_s,
            scale=self.workload.scale,
        )
        drawn = generate(self.workload.kind, traffic)

        def passes() -> Iterator[Arrival]:
            for arrival in itertools.takewhile(lambda of: of.at < self.seconds, drawn):
                yield dataclasses.replace(
                    arrival,
                    num_output_tokens=arrival.num_output_tokens * self.workload.answers,
                    tenant="",
                    priority=0,
                )

        return dataclasses.replace(drawn, passes=passes)

    def jobs(self) -> list[Job]:
        """The same arrivals as requests; equal prefix ids are equal tokens, in this half alone."""
        source = self.source()
        shift = (self.seed * 7_919) % _NUM_IDS
        return [
            Job(
                prompt=tuple(
                    LOW_TOKEN_ID + (token + shift) % _NUM_IDS
                    for token in prompt_token_ids(
                        arrival, number, source.prefix_block_tokens, _NUM_IDS
                    )
                ),
                num_output=arrival.num_output_tokens,
            )
            for number, arrival in enumerate(source)
        ]


def halves(seed: int, seconds: float) -> list[Half]:
    """All runs in order: of each workload the half that is fitted, then the one that is scored."""
    return [
        Half(workload=workload, role=role, seed=seed * 100 + 2 * number + part, seconds=seconds)
        for number, workload in enumerate(WORKLOADS)
        for part, role in enumerate((FIT, SCORE), start=1)
    ]

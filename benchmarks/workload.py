"""What is sent: prompts of random token ids and the order of arrival, from one seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Random ids stay clear of the first ones, where vocabularies keep their special tokens.
LOW_TOKEN_ID, HIGH_TOKEN_ID = 1_000, 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Bounds of lengths in tokens, both inclusive."""

    prompt: tuple[int, int] = (64, 192)
    output: tuple[int, int] = (64, 192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: token ids in, exactly num_output tokens out. Greedy at temperature 0."""

    prompt: tuple[int, ...]
    num_output: int
    temperature: float = 0.0
    seed: int = 0

    def body(self, model: str, **more: Any) -> dict[str, Any]:
        """For /v1/completions; `more` wins."""
        sampling = {"seed": self.seed} if self.temperature else {}
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.num_output,
            "temperature": self.temperature,
            "ignore_eos": True,
            **sampling,
            **more,
        }


def jobs(seed: str, count: int, shape: Shape) -> list[Job]:
    """`count` jobs; another seed gives other prompts. No two share a first block."""
    chance = random.Random(seed)
    return [
        Job(
            prompt=tuple(
                chance.randrange(LOW_TOKEN_ID, HIGH_TOKEN_ID)
                for _ in range(chance.randint(*shape.prompt))
            ),
            num_output=chance.randint(*shape.output),
        )
        for _ in range(count)
    ]


def arrivals_s(seed: str, rate_per_s: float) -> Iterator[float]:
    """Times of a Poisson process, from 0 on, without end."""
    chance = random.Random(seed)
    at = 0.0
    while True:
        at += chance.expovariate(rate_per_s)
        yield at

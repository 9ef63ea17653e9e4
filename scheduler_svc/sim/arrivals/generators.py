"""Traffic by seed: the same seed, kind and settings give the same arrivals in every process.

    chat      short prompts and answers, some of each tenant's prompts behind its system prompt
    long      prompts of thousands of tokens, short answers
    agents    sessions of many turns: an application's system prompt, then all that was said before
    variance  short prompts; most answers are short, one in ten has a heavy tail
    bursts    chat that comes in bursts of ten times the mean rate, with silence between

Times are those of a Poisson process but for agents (turns follow each other after a time to think)
and bursts. Lengths are scaled by `scale`, so that the same kinds serve a tiny cluster and a large
one; a prefix id stands for BLOCK_TOKENS x scale tokens.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from scheduler_svc.sim.arrivals.arrival import MAX_PREFIX_ID, Arrival, ArrivalError, Source

BLOCK_TOKENS = 64
MAX_COUNT = 50_000_000
# Agents: sessions that are open at once; with so many, a new one waits for the end of one of them.
MAX_OPEN_SESSIONS = 100_000
NUM_APPLICATIONS = 4
MEAN_TURNS, MAX_TURNS = 8, 40
THINK_S = 5.0
BURST_S, BURST_FACTOR = 2.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is wanted: how many requests, the mean rate a second, and from how many tenants."""

    seed: int
    count: int
    rate_per_s: float
    num_tenants: int = 4
    scale: float = 1.0

    def validate(self) -> None:
        """Raises ArrivalError on a value out of bounds."""
        if not 1 <= self.count <= MAX_COUNT:
            raise ArrivalError(f"count: {self.count} is not between 1 and {MAX_COUNT}")
        if not 0.0 < self.rate_per_s < math.inf:
            raise ArrivalError(f"rate_per_s: {self.rate_per_s} is not above 0 and finite")
        if not 1 <= self.num_tenants <= 10_000:
            raise ArrivalError(f"num_tenants: {self.num_tenants} is not between 1 and 10000")
        if not 0.001 <= self.scale <= 100.0:
            raise ArrivalError(f"scale: {self.scale} is not between 0.001 and 100")

    @property
    def block_tokens(self) -> int:
        """Tokens that a prefix id stands for."""
        return max(1, round(BLOCK_TOKENS * self.scale))


def generate(kind: str, traffic: Traffic) -> Source:
    """A source of one of the kinds in GENERATORS."""
    traffic.validate()
    if kind not in GENERATORS:
        raise ArrivalError(f"{kind}: no kind of traffic; there are {', '.join(GENERATORS)}")
    make = GENERATORS[kind]

    def passes() -> Iterator[Arrival]:
        # Text seeds are hashed by random itself, the same in every process.
        return make(traffic, random.Random(f"{kind} {traffic.seed}"))

    return Source(
        name=f"{kind}, seed {traffic.seed}",
        prefix_block_tokens=traffic.block_tokens,
        passes=passes,
    )


def _lognormal(chance: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(chance.lognormvariate(math.log(median), sigma))))


def _scaled(traffic: Traffic, num_tokens: int) -> int:
    return max(1, round(num_tokens * traffic.scale))


def _tenant(number: int) -> str:
    return f"tenant-{number}"


def _chat_at(at: float, traffic: Traffic, chance: random.Random) -> Arrival:
    tenant = chance.randrange(traffic.num_tenants)
    own = _scaled(traffic, _lognormal(chance, 120, 0.8, 1_024))
    # A system prompt of one to four blocks, a tenant's own; a third of its requests come without.
    num_blocks = 0 if chance.random() < 1 / 3 else 1 + tenant % 4
    return Arrival(
        at=at,
        num_prompt_tokens=num_blocks * traffic.block_tokens + own,
        num_output_tokens=_scaled(traffic, _lognormal(chance, 100, 0.7, 512)),
        tenant=_tenant(tenant),
        prefix_ids=tuple(tenant * 8 + block for block in range(num_blocks)),
        priority=chance.choice((0, 0, 0, 1)),
    )


def _chat(traffic: Traffic, chance: random.Random) -> Iterator[Arrival]:
    at = 0.0
    for _ in range(traffic.count):
        at += chance.expovariate(traffic.rate_per_s)
        yield _chat_at(at, traffic, chance)


def _long(traffic: Traffic, chance: random.Random) -> Iterator[Arrival]:
    at = 0.0
    for _ in range(traffic.count):
        at += chance.expovariate(traffic.rate_per_s)
        yield Arrival(
            at=at,
            num_prompt_tokens=_scaled(traffic, chance.randint(2_000, 16_000)),
            num_output_tokens=_scaled(traffic, _lognormal(chance, 80, 0.6, 400)),
            tenant=_tenant(chance.randrange(traffic.num_tenants)),
        )


def _variance(traffic: Traffic, chance: random.Random) -> Iterator[Arrival]:
    at = 0.0
    for _ in range(traffic.count):
        at += chance.expovariate(traffic.rate_per_s)
        if chance.random() < 0.1:
            output = min(4_096, round(200 * chance.paretovariate(1.2)))
        else:
            output = chance.randint(1, 40)
        yield Arrival(
            at=at,
            num_prompt_tokens=_scaled(traffic, _lognormal(chance, 100, 0.5, 512)),
            num_output_tokens=_scaled(traffic, output),
            tenant=_tenant(chance.randrange(traffic.num_tenants)),
        )


def _bursts(traffic: Traffic, chance: random.Random) -> Iterator[Arrival]:
    """A burst, then a silence so long that the mean rate is kept."""
    inside = begin = 0.0
    for _ in range(traffic.count):
        inside += chance.expovariate(traffic.rate_per_s * BURST_FACTOR)
        ended = inside // BURST_S
        inside -= ended * BURST_S
        begin += ended * BURST_S * BURST_FACTOR
        yield _chat_at(begin + inside, traffic, chance)


@dataclass(slots=True)
class _Session:
    """An agent's conversation. Its history is named by blocks: ids that nobody else has."""

    number: int
    application: int
    turns_left: int
    num_blocks: int
    rest: int  # tokens behind the last whole block

    def next_turn(self, at: float, traffic: Traffic, chance: random.Random) -> Arrival:
        """Asks with all that was said before, and adds what was asked and answered."""
        size = traffic.block_tokens
        asked = _scaled(traffic, _lognormal(chance, 80, 0.7, 1_000))
        answered = _scaled(traffic, _lognormal(chance, 60, 0.8, 600))
        self._say(asked, size)
        system = 4 + 2 * self.application
        prefix = [self.application * 64 + block for block in range(system)]
        history = self.num_blocks - system
        # Behind the applications' ids; no session's history is longer than this.
        first = NUM_APPLICATIONS * 64 + self.number * (1 << 20)
        assert history < 1 << 20
        assert first < MAX_PREFIX_ID - (1 << 20)
        prefix += range(first, first + history)
        arrival = Arrival(
            at=at,
            num_prompt_tokens=self.num_blocks * size + self.rest,
            num_output_tokens=answered,
            tenant=_tenant(self.application % traffic.num_tenants),
            prefix_ids=tuple(prefix),
        )
        self._say(answered, size)
        self.turns_left -= 1
        return arrival

    def _say(self, num_tokens: int, size: int) -> None:
        self.rest += num_tokens
        self.num_blocks += self.rest // size
        self.rest %= size


def _agents(traffic: Traffic, chance: random.Random) -> Iterator[Arrival]:
    """Sessions begin at random moments; the next request is the earliest turn of any of them."""
    starts_per_s = traffic.rate_per_s / MEAN_TURNS
    at, number, next_start = 0.0, 0, chance.expovariate(starts_per_s)
    turns: list[tuple[float, int, _Session]] = []
    for _ in range(traffic.count):
        while len(turns) < MAX_OPEN_SESSIONS and (not turns or next_start <= turns[0][0]):
            application = chance.randrange(NUM_APPLICATIONS)
            length = min(MAX_TURNS, 1 + int(chance.expovariate(1 / (MEAN_TURNS - 0.5))))
            session = _Session(
                number=number,
                application=application,
                turns_left=length,
                num_blocks=4 + 2 * application,
                rest=0,
            )
            # Not before what has been given, if it had to wait for another session's end.
            heapq.heappush(turns, (max(at, next_start), number, session))
            number += 1
            next_start += chance.expovariate(starts_per_s)
        at, key, session = heapq.heappop(turns)
        yield session.next_turn(at, traffic, chance)
        if session.turns_left:
            think_s = 0.5 + chance.expovariate(1 / THINK_S)
            heapq.heappush(turns, (at + think_s, key, session))


GENERATORS: Mapping[str, Callable[[Traffic, random.Random], Iterator[Arrival]]] = {
    "chat": _chat,
    "long": _long,
    "agents": _agents,
    "variance": _variance,
    "bursts": _bursts,
}

"""The clients of a world: what they ask for, and what they may be given.

Modelled: the clients. All that a request asks for is drawn before it is sent, so its whole answer
is known; each piece that a client is given is compared at once. A client that is refused (the queue
is not available, or full, or the gateway leaves) asks the next gateway; one whose time has come
goes away; one whose gateway dies is not answered any more, and asks for nothing else.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from gateway.core.errors import QueueFullError, UnavailableError
from gateway.core.output import Chunk
from gateway.core.requests import RawRequest
from gateway.core.types import FinishReason, Terminal, TokenLogprob
from gateway.live import DRAINING, LiveRequest
from scheduler_svc.sim.device import EOS, VOCAB_SIZE, Script, ViolationError, make_outputs
from scheduler_svc.sim.gateway import GoneError, SimGateway
from scheduler_svc.sim.journal import Journal
from scheduler_svc.sim.loop import Process, VirtualLoop
from scheduler_svc.sim.suspects import taken_for_poison

if TYPE_CHECKING:
    from scheduler_svc.sim.places import GatewayPlace

MODEL = "sim"
ASK_AGAIN_S = 0.4
TENANTS = ("a", "b", "c")
_MAX_PREFIX, _MAX_TAIL, _MAX_TOKENS = 40, 24, 20


@dataclass(slots=True, kw_only=True)
class Asked:
    """One call of a client: n samples of one prompt. `leaves_after` is a number of tokens.

    With `num_logprobs` each token comes with its log probability and so many likely ones, with
    `echo` those of the prompt, too.
    """

    number: int
    at_s: float
    gateway: int
    tenant: str
    prompt: list[int]
    seed: int
    max_tokens: int
    scripts: list[Script]
    priority: int
    leaves_after: int | None
    num_logprobs: int | None
    echo: bool
    poison: str

    def raw(self) -> RawRequest:
        """As the gateway's interfaces make it."""
        return RawRequest(
            model=MODEL,
            token_ids=self.prompt,
            max_tokens=self.max_tokens,
            seed=self.seed,
            n=len(self.scripts),
            tenant=self.tenant,
            priority=self.priority,
            num_logprobs=self.num_logprobs,
            echo=self.echo,
        )


def draw(
    random: Random, num_requests: int, over_s: float, num_poison: int, first: int = 0
) -> list[Asked]:
    """At least so many requests that come within `over_s`; calls are numbered from `first`."""
    families = [
        [random.randrange(8, VOCAB_SIZE) for _ in range(random.randint(8, _MAX_PREFIX))]
        for _ in range(4)
    ]
    asked: list[Asked] = []
    count = 0
    while count < num_requests:
        n = random.choice((1, 1, 1, 1, 2, 3))
        count += n
        shared = random.choice(families) if random.random() < 0.6 else []
        tail = [random.randrange(8, VOCAB_SIZE) for _ in range(random.randint(1, _MAX_TAIL))]
        prompt, tenant = shared + tail, random.choice(TENANTS)
        seed, max_tokens = random.getrandbits(62), random.randint(1, _MAX_TOKENS)
        scripts = []
        for index in range(n):
            stop_at = random.randrange(_MAX_TOKENS) if random.random() < 0.4 else None
            outputs = make_outputs(seed + 7919 * index, max_tokens, stop_at)
            scripts.append(Script(tenant=tenant, prompt=prompt, outputs=outputs))
        # One call in four. By its seed, which is drawn anyway.
        num_logprobs = seed % 3 if seed % 4 == 0 else None
        asked.append(
            Asked(
                number=first + len(asked),
                at_s=random.random() * over_s,
                gateway=random.randrange(2),
                tenant=tenant,
                prompt=prompt,
                seed=seed,
                max_tokens=max_tokens,
                scripts=scripts,
                priority=random.choice((0, 0, 0, 1, -1)),
                leaves_after=random.randrange(max_tokens) if random.random() < 0.06 else None,
                num_logprobs=num_logprobs,
                echo=num_logprobs is not None and seed % 8 == 0,
                poison="",
            )
        )
    for poisoned in random.sample([a for a in asked if len(a.scripts) == 1], num_poison):
        poisoned.poison = random.choice(("row", "step", "step", "device"))
        poisoned.leaves_after = None
        for script in poisoned.scripts:
            script.poison = poisoned.poison
    return asked


def _leaves(call: Asked, answer: "Answer") -> bool:
    wanted = call.leaves_after
    return wanted is not None and len(answer.given) > wanted and not answer.left


@dataclass(slots=True, eq=False)
class Answer:
    """What one request has been given so far. `terminal` is its end as the stream holds it.

    `lost`: its gateway has died.
    """

    name: str
    script: Script
    gateway: SimGateway
    given: list[int] = field(default_factory=list)
    live: LiveRequest | None = None
    end: FinishReason | None = None
    terminal: Terminal | None = None
    left: bool = False
    lost: bool = False


class Clients:
    """All of them. `suspects` are requests that a scheduler has taken for what kills workers, or
    for what makes steps fail; it ends such a request with an error. `forgotten` are requests of
    which Redis has lost an entry or a notice; one may end at its deadline."""

    def __init__(
        self,
        loop: VirtualLoop,
        journal: Journal,
        gateways: "Sequence[GatewayPlace]",
        suspects: Set[bytes],
        forgotten: Set[bytes],
    ) -> None:
        self._suspects = suspects
        self._forgotten = forgotten
        self._process = Process(loop, "clients")
        self._loop = loop
        self._journal = journal
        self._gateways = gateways
        self._scripts: dict[tuple[int, int], Script] = {}
        self.answers: list[Answer] = []
        self.num_open = 0
        self.num_refused = 0
        self.num_scored = 0
        self.ends: Counter[str] = Counter()

    def script_of(self, seed: int, sample_index: int) -> Script | None:
        """What the request with this seed has to give."""
        return self._scripts.get((seed, sample_index))

    def start(self, asked: Sequence[Asked]) -> None:
        """They come in their time."""
        for call in asked:
            for index, script in enumerate(call.scripts):
                self._scripts[call.seed, index] = script
            self.num_open += len(call.scripts)
            self._process.start(self._guarded(call))

    def live(self) -> list[Answer]:
        """Accepted and without an end."""
        return [a for a in self.answers if a.end is None and not a.left]

    def leave(self, answer: Answer) -> None:
        """The client goes away."""
        assert answer.live is not None
        answer.left = True
        self._journal.note(answer.name, "client leaves")
        answer.gateway.engine.cancel(answer.live)

    def check_drained(self, gateway: SimGateway) -> None:
        """It is about to exit, and each of its streams must have had its end."""
        left = [a.name for a in self.answers if a.gateway is gateway and a.end is None]
        if left:
            rule = "a gateway that drains ends each of its streams"
            self._loop.fail(ViolationError(rule, f"{gateway.name} leaves {left[:6]}"))

    def disconnected(self, gateway: SimGateway) -> None:
        """Its process is gone, and with it the connections to it."""
        for answer in self.answers:
            if answer.gateway is gateway and answer.end is None:
                answer.end, answer.lost = FinishReason.CANCELLED, True
                self.num_open -= 1
                self.ends["connection lost"] += 1

    def check_ends(self) -> None:
        """Long after the last end. Raises ViolationError if a stream has gone on behind its end."""
        for answer in self.answers:
            if answer.lost:
                continue
            assert answer.live is not None
            state = answer.live.state
            if state.end is not answer.terminal or len(state.tokens) != len(answer.given):
                raise ViolationError(
                    "nothing follows a request's end",
                    f"{answer.name} ended {answer.terminal} with {len(answer.given)} tokens, and "
                    f"is now at {state.end} with {len(state.tokens)}",
                )

    async def _guarded(self, call: Asked) -> None:
        try:
            await self._call(call)
        except Exception as error:
            self._loop.fail(error)

    async def _call(self, call: Asked) -> None:
        await asyncio.sleep(call.at_s)
        gateway, lives = await self._ask(call)
        self._journal.note(gateway.name, f"accepted call {call.number} of {call.tenant}")
        for index, (live, script) in enumerate(zip(lives, call.scripts, strict=True)):
            answer = Answer(f"call {call.number}.{index}", script, gateway, live=live)
            self.answers.append(answer)
            gateway.process.start(self._read(call, answer, live))

    async def _ask(self, call: Asked) -> tuple[SimGateway, list[LiveRequest]]:
        """Asks one gateway after the other until one takes it."""
        turn = call.gateway
        while True:
            place = self._gateways[turn % len(self._gateways)]
            if place.alive:
                try:
                    return place.now, await place.now.submit(call.raw())
                except (UnavailableError, QueueFullError, GoneError):
                    self.num_refused += 1
            turn += 1
            await asyncio.sleep(ASK_AGAIN_S)

    async def _read(self, call: Asked, answer: Answer, live: LiveRequest) -> None:
        try:
            while answer.end is None:
                chunk = await answer.gateway.engine.next_chunk(live)
                self._take(call, answer, chunk)
                if chunk.end is not None:
                    answer.end, answer.terminal = chunk.end.reason, live.state.end
                    self._ended(call, answer, chunk.end.code, chunk.end.message)
                    # As the interfaces' clean-up does.
                    answer.gateway.engine.cancel(live)
                elif _leaves(call, answer):
                    self.leave(answer)
        except Exception as error:
            self._loop.fail(error)

    def _take(self, call: Asked, answer: Answer, chunk: Chunk) -> None:
        at, token_ids = len(answer.given), list(chunk.token_ids)
        answer.given.extend(token_ids)
        if self._journal.is_kept and token_ids:
            self._journal.note(answer.name, f"given {at}: {token_ids}")
        if answer.script.outputs[at : len(answer.given)] != token_ids:
            raise ViolationError(
                "clients are given each token once, in order",
                f"{answer.name} at {at}: {token_ids}, not "
                f"{answer.script.outputs[at : len(answer.given)]}",
            )
        if call.num_logprobs is not None or chunk.logprobs:
            first = len(call.prompt) + at
            self._check_scores(call, answer, range(first, first + len(token_ids)), chunk.logprobs)

    def _check_scores(
        self, call: Asked, answer: Answer, positions: range, given: Sequence[TokenLogprob]
    ) -> None:
        """Each token has its own log probability, and none is given that was not wanted."""
        script = answer.script
        wanted = [
            TokenLogprob(
                token_id=script.tokens[position],
                logprob=script.logprob(position),
                top=tuple(script.likeliest(position, call.num_logprobs)),
            )
            for position in positions
            if call.num_logprobs is not None
        ]
        if list(given) != wanted:
            raise ViolationError(
                "each token comes with its own log probability",
                f"{answer.name}, tokens {positions}: {list(given)}, not {wanted}",
            )
        self.num_scored += len(wanted)

    def _ended(self, call: Asked, answer: Answer, code: str, message: str) -> None:
        self.num_open -= 1
        reason = answer.end
        assert reason is not None
        self._journal.note(answer.name, f"ends {reason.name} {code} {message}")
        self.ends[reason.name] += 1
        if answer.left and reason is FinishReason.CANCELLED:
            return
        if code == DRAINING.code and answer.gateway.engine.draining:
            return
        outputs = answer.script.outputs
        if call.poison:
            wanted = {FinishReason.ERROR}
        elif outputs and outputs[-1] == EOS:
            wanted = {FinishReason.STOP}
        else:
            wanted = {FinishReason.LENGTH}
        assert answer.live is not None
        taken = not call.poison and taken_for_poison(message)
        if taken and answer.live.request_id in self._suspects:
            self.ends["taken for poison"] += 1
            return
        if reason is FinishReason.DEADLINE and answer.live.request_id in self._forgotten:
            self.ends["lost by Redis"] += 1
            return
        if reason not in wanted:
            raise ViolationError(
                "an undisturbed request ends by itself",
                f"{answer.name} ended {reason.name} ({code}: {message}) after "
                f"{len(answer.given)} of {len(outputs)} tokens",
            )
        if not call.poison and answer.given != outputs:
            raise ViolationError(
                "an end comes after the last token",
                f"{answer.name} was given {len(answer.given)} of {len(outputs)} tokens",
            )
        if not call.poison and call.echo:
            # The first token of a prompt follows nothing.
            positions = range(1, len(call.prompt))
            self._check_scores(call, answer, positions, answer.live.prompt_logprobs)

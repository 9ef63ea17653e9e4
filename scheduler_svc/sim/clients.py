"""The clients of a world: what they ask for, and what they may be given.

Modelled: the clients. All that a request asks for is drawn before it is sent, so its whole answer
is known; each piece that a client is given is compared at once. A client that is refused (the queue
is not available, or full) asks again; one whose time has come goes away.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from random import Random

from gateway.core.errors import QueueFullError, UnavailableError
from gateway.core.requests import RawRequest
from gateway.core.types import FinishReason, Terminal
from gateway.live import LiveRequest
from scheduler_svc.sim.device import EOS, VOCAB_SIZE, Script, ViolationError, make_outputs
from scheduler_svc.sim.gateway import SimGateway
from scheduler_svc.sim.journal import Journal
from scheduler_svc.sim.loop import VirtualLoop
from scheduler_svc.sim.suspects import taken_for_poison

MODEL = "sim"
ASK_AGAIN_S = 0.4
TENANTS = ("a", "b", "c")
_MAX_PREFIX, _MAX_TAIL, _MAX_TOKENS = 40, 24, 20


@dataclass(slots=True, kw_only=True)
class Asked:
    """One call of a client: n samples of one prompt. `leaves_after` is a number of tokens."""

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
    """What one request has been given so far. `terminal` is its end as the stream holds it."""

    name: str
    script: Script
    gateway: SimGateway
    given: list[int] = field(default_factory=list)
    live: LiveRequest | None = None
    end: FinishReason | None = None
    terminal: Terminal | None = None
    left: bool = False


class Clients:
    """All of them. `suspects` are requests that a scheduler has taken for what kills workers, or
    for what makes steps fail; it ends such a request with an error."""

    def __init__(
        self,
        loop: VirtualLoop,
        journal: Journal,
        gateways: Sequence[SimGateway],
        suspects: Set[bytes],
    ) -> None:
        self._suspects = suspects
        self._loop = loop
        self._journal = journal
        self._gateways = gateways
        self._scripts: dict[tuple[int, int], Script] = {}
        self.answers: list[Answer] = []
        self.num_open = 0
        self.num_refused = 0
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
            gateway = self._gateways[call.gateway]
            gateway.process.start(self._guarded(call, gateway))

    def live(self) -> list[Answer]:
        """Accepted and without an end."""
        return [a for a in self.answers if a.end is None and not a.left]

    def leave(self, answer: Answer) -> None:
        """The client goes away."""
        assert answer.live is not None
        answer.left = True
        self._journal.note(answer.name, "client leaves")
        answer.gateway.engine.cancel(answer.live)

    def check_ends(self) -> None:
        """Long after the last end. Raises ViolationError if a stream has gone on behind its end."""
        for answer in self.answers:
            assert answer.live is not None
            state = answer.live.state
            if state.end is not answer.terminal or len(state.tokens) != len(answer.given):
                raise ViolationError(
                    "nothing follows a request's end",
                    f"{answer.name} ended {answer.terminal} with {len(answer.given)} tokens, and "
                    f"is now at {state.end} with {len(state.tokens)}",
                )

    async def _guarded(self, call: Asked, gateway: SimGateway) -> None:
        try:
            await self._call(call, gateway)
        except Exception as error:
            self._loop.fail(error)

    async def _call(self, call: Asked, gateway: SimGateway) -> None:
        await asyncio.sleep(call.at_s)
        lives = await self._ask(call, gateway)
        self._journal.note(gateway.name, f"accepted call {call.number} of {call.tenant}")
        readers = []
        for index, (live, script) in enumerate(zip(lives, call.scripts, strict=True)):
            answer = Answer(f"call {call.number}.{index}", script, gateway, live=live)
            self.answers.append(answer)
            readers.append(gateway.process.start(self._read(call, answer, live)))
        for reader in readers:
            await reader

    async def _ask(self, call: Asked, gateway: SimGateway) -> list[LiveRequest]:
        while True:
            try:
                return await gateway.engine.submit_all([call.raw()])
            except (UnavailableError, QueueFullError):
                self.num_refused += 1
                await asyncio.sleep(ASK_AGAIN_S)

    async def _read(self, call: Asked, answer: Answer, live: LiveRequest) -> None:
        try:
            while answer.end is None:
                chunk = await answer.gateway.engine.next_chunk(live)
                self._take(answer, chunk.token_ids)
                if chunk.end is not None:
                    answer.end, answer.terminal = chunk.end.reason, live.state.end
                    self._ended(call, answer, chunk.end.code, chunk.end.message)
                    # As the interfaces' clean-up does.
                    answer.gateway.engine.cancel(live)
                elif _leaves(call, answer):
                    self.leave(answer)
        except Exception as error:
            self._loop.fail(error)

    def _take(self, answer: Answer, token_ids: Sequence[int]) -> None:
        at = len(answer.given)
        answer.given.extend(token_ids)
        if self._journal.is_kept and token_ids:
            self._journal.note(answer.name, f"given {at}: {list(token_ids)}")
        if answer.script.outputs[at : len(answer.given)] != list(token_ids):
            raise ViolationError(
                "clients are given each token once, in order",
                f"{answer.name} at {at}: {list(token_ids)}, not "
                f"{answer.script.outputs[at : len(answer.given)]}",
            )

    def _ended(self, call: Asked, answer: Answer, code: str, message: str) -> None:
        self.num_open -= 1
        reason = answer.end
        assert reason is not None
        self._journal.note(answer.name, f"ends {reason.name} {code} {message}")
        self.ends[reason.name] += 1
        if answer.left and reason is FinishReason.CANCELLED:
            return
        outputs = answer.script.outputs
        if call.poison:
            wanted = {FinishReason.ERROR}
        elif outputs and outputs[-1] == EOS:
            wanted = {FinishReason.STOP}
        else:
            wanted = {FinishReason.LENGTH}
        assert answer.live is not None
        if taken_for_poison(message) and answer.live.request_id in self._suspects:
            self.ends["taken for poison"] += 1
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

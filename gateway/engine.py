"""What all interfaces do with a request: admit it, follow its stream, end it once.

Owns the table of live requests. Everything that changes it runs on the event loop: news from
workers and notices (EventSink), the clients' side (LiveRequest), and one sweeper for silence and
deadlines. A request leaves the table at its end and its client's side reads what is left.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gateway.core import validation
from gateway.core.detokenizer import Detokenizer
from gateway.core.errors import UnavailableError
from gateway.core.output import Chunk
from gateway.core.requests import RawRequest
from gateway.core.stream import Fed
from gateway.core.types import (
    Admission,
    FinishReason,
    LogprobRows,
    ModelInfo,
    Notice,
    RequestId,
    Terminal,
    TokenBatch,
    TokenLogprob,
)
from gateway.core.wording import sentence
from gateway.doubts import Doubts
from gateway.intake import Intake, equally
from gateway.live import (
    CLIENT_GONE,
    DRAINING,
    NO_LOGPROBS,
    OVERDUE,
    LiveRequest,
    Waiter,
    slow_reader,
    stream_lost,
)
from gateway.metrics import GatewayMetrics
from gateway.ports import Fleet, RequestQueue, Sources, TokenizerPort, WorkerLink
from servicekit import logs

SWEEP_S = 0.25
RETRY_S = 0.5
# While the loop is behind, tokens wait so long at most for others to share a frame with.
HOLD_S = 0.02
MAX_STRANGERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Seconds and tokens from the settings."""

    default_deadline_s: float
    stall_s: float
    stream_buffer_tokens: int


class Engine:
    """See the module's docstring. `run` must be running."""

    def __init__(
        self,
        *,
        model: ModelInfo,
        config: EngineConfig,
        queue: RequestQueue,
        fleet: Fleet,
        tokenizer: TokenizerPort,
        metrics: GatewayMetrics,
        weight_of: Callable[[str], float] = equally,
        sources: Sources = Sources(),  # noqa: B008  # frozen
    ) -> None:
        self.model = model
        self.draining = False
        self._config = config
        self._queue = queue
        self._fleet = fleet
        self._tokenizer = tokenizer
        self._clock_s = sources.clock_s
        self._intake = Intake(tokenizer, config.default_deadline_s, weight_of, sources)
        self._live: dict[RequestId, LiveRequest] = {}
        # By the first of a call's requests: those that are live.
        self._calls: dict[RequestId, list[LiveRequest]] = {}
        self._strangers: dict[RequestId, float] = {}
        self._num_entering = 0
        self._grace_over = False
        self._idle = asyncio.Event()
        self._idle.set()
        # In the order in which they were found to want it.
        self._to_supersede: dict[LiveRequest, None] = {}
        self._supersede_news = asyncio.Event()
        # Those with tokens that nobody has been told of, and what will tell; see `on_batch`.
        self._holding = False
        self._held: dict[LiveRequest, None] = {}
        self._release: asyncio.TimerHandle | None = None
        self._doubts = Doubts(queue, lambda live: self._supersede(live, "lost", counts=False))
        self._log = logs.get_logger("gateway.engine")
        self._metrics = metrics
        metrics.watch_streams(lambda: len(self._live))

    @property
    def num_live(self) -> int:
        """Live requests."""
        return len(self._live)

    @property
    def ready(self) -> bool:
        """A new request would be served."""
        return not self.draining and self._queue.available and self._fleet.usable

    @property
    def max_model_len(self) -> int:
        """The longest prompt and output together that can be served now."""
        offered = self._fleet.max_model_len
        own = self.model.max_model_len
        return own if offered is None else min(own, offered)

    # The clients' side.

    async def submit(self, raw: RawRequest) -> LiveRequest:
        """Validates, tokenizes and queues. Raises GatewayError; a request it returns is live."""
        [live] = await self.submit_all([raw])
        return live

    async def submit_all(self, raws: Sequence[RawRequest]) -> list[LiveRequest]:
        """The prompts of one request, n samples of each: all are queued, or none.

        In the order of the choices. Raises GatewayError.
        """
        if self.draining:
            raise UnavailableError(DRAINING.message, code=DRAINING.code)
        checked = validation.check_all(raws, self.model)
        with self._entering():
            lives = await self._intake.prepare(checked, self.max_model_len)
            await self._admit(lives)
        num_samples = len(lives) // len(raws)
        for number, live in enumerate(lives):
            raw = raws[number // num_samples]
            self._log.info(
                "accepted",
                request_id=live.public_id,
                client_request_id=raw.client_request_id[:128],
                tenant=raw.tenant,
                user=raw.user or "",
                prompt_tokens=len(live.queued.prompt_token_ids),
                max_tokens=live.queued.sampling.max_tokens,
                sample_index=live.queued.sample_index,
            )
        return lives

    async def next_chunk(self, live: LiveRequest) -> Chunk:
        """The next output, once there is one; see `read`."""
        if not live.has_news:
            await Waiter().wait(live)
        return self.read(live)

    def read(self, live: LiveRequest) -> Chunk:
        """The output not read before; the chunk with an end is the last, and the request then has
        no reader any more. Ends the request at stop strings."""
        tokens, logprobs, end = live.take()
        chunk = live.assembler.push(tokens, end, logprobs)
        if chunk.end is not None:
            live.reader = None
            if chunk.end is not end:
                self._close(live, chunk.end)
        return chunk

    def cancel(self, live: LiveRequest, end: Terminal = CLIENT_GONE) -> None:
        """Ends a request from this side; nothing happens if it has ended."""
        self._close(live, end)

    def cancel_by_id(self, public_id: str) -> bool:
        """Ends a call's requests by the id its client was given; False if none is live here."""
        try:
            lives = list(self._calls.get(RequestId(bytes.fromhex(public_id)), ()))
        except ValueError:
            return False
        for live in lives:
            self._close(live, CLIENT_GONE)
        return bool(lives)

    async def encode(self, raw: RawRequest) -> list[int]:
        """The tokens of a prompt, whatever its length. Raises RequestRejected."""
        return list(await self._intake.encode(validation.check_prompt(raw, self.model)))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens. Raises RequestRejected for ids outside the vocabulary."""
        validation.check_token_ids("tokens", token_ids, self.model)
        return await self._tokenizer.decode_ids(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special ones too."""
        return self._tokenizer.token_bytes(token_id)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> Detokenizer:
        """For one run of tokens that follows the tokens `after`."""
        return self._tokenizer.detokenizer(skip_special_tokens=skip_special_tokens, after=after)

    async def drain(self, grace_s: float) -> None:
        """No new requests; the live ones, and those on their way into the queue, get grace_s, then
        an explicit end."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        self._grace_over = True
        for live in list(self._live.values()):
            self._close(live, DRAINING)

    # News (EventSink).

    def on_batch(self, batch: TokenBatch, link: WorkerLink, *, hold: bool = False) -> None:
        """Hands each request its tokens.

        With `hold` its client's side hears of them with the next batch without, or HOLD_S later:
        of first tokens and of ends at once.
        """
        now_s, self._holding = self._clock_s(), hold
        at = num_fresh = 0
        columns = zip(
            batch.attempts,
            batch.first_positions,
            batch.num_tokens,
            batch.finish_reasons,
            batch.num_cached_tokens,
            strict=True,
        )
        for i, (attempt, first, count, finish, num_cached) in enumerate(columns):
            request_id = RequestId(batch.request_ids[16 * i : 16 * i + 16])
            tokens = batch.token_ids[at : at + count]
            at += count
            live = self._live.get(request_id)
            if live is None:
                self._on_stranger(request_id, link, now_s)
                continue
            if attempt < live.state.attempt:
                continue
            live.link, live.heard_s = link, now_s
            live.num_cached_tokens = max(live.num_cached_tokens, num_cached)
            try:
                rows = batch.logprobs.get(i) if batch.logprobs else None
                num_fresh += self._feed(live, attempt, first, tokens, finish, now_s, rows)
            except Exception:
                # One request's error must not reach the others of the batch.
                self._log.exception("feed_failed", request_id=live.public_id)
                self._close(live, Terminal(reason=FinishReason.ERROR, code="internal_error"))
        self._metrics.output_tokens.inc(num_fresh)
        if not hold:
            self._wake_held()
        elif self._held and self._release is None:
            loop = asyncio.get_running_loop()
            self._release = loop.call_later(HOLD_S, self._wake_held)

    def on_gap(self, link: WorkerLink) -> None:
        """Supersedes what this worker ran; what has had no token may have had its only ones there,
        and is in doubt."""
        for live in list(self._live.values()):
            if live.link is link:
                self._supersede(live, "gap")
            elif live.link is None:
                self._doubts.add(live)

    def on_notice(self, notice: Notice) -> None:
        """Ends a request, unless the notice speaks of an attempt that is over."""
        live = self._live.get(notice.request_id)
        if live is None or notice.attempt < live.state.attempt:
            return
        end = Terminal(reason=notice.finish_reason, message=sentence(notice.message[:500]))
        if live.state.close(end) is Fed.NEWS:
            self._finished(live, tell=False)

    async def run(self) -> None:
        """The sweeper, the superseding of requests and their doubts, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep())
            group.create_task(self._supersede_all())
            group.create_task(self._doubts.run())

    # Inside.

    @contextlib.contextmanager
    def _entering(self) -> Iterator[None]:
        """What was let in before a drain is waited for, also while it is tokenized or queued."""
        self._num_entering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_entering -= 1
            self._look_whether_idle()

    def _look_whether_idle(self) -> None:
        if not self._live and not self._num_entering:
            self._idle.set()

    async def _admit(self, lives: Sequence[LiveRequest]) -> None:
        # Tokens may come before the script's answer, so the requests are live first.
        self._live.update((live.request_id, live) for live in lives)
        self._calls[lives[0].request_id] = list(lives)
        for live in lives:
            live.call_id = lives[0].request_id
        try:
            admissions = await self._queue.admit([live.queued for live in lives])
        except BaseException as error:
            for live in lives:
                # The script may have run although its answer is lost.
                may_run = isinstance(error, UnavailableError | asyncio.CancelledError)
                if may_run and live.state.end is None:
                    self._cancel_anywhere(live.request_id)
                self._forget(live)
            raise
        for live, admission in zip(lives, admissions, strict=True):
            live.admission = admission
            if self._grace_over and live.state.end is None:
                self._close(live, DRAINING)

    def _feed(
        self,
        live: LiveRequest,
        attempt: int,
        first: int,
        tokens: Sequence[int],
        finish: int,
        now_s: float,
        rows: LogprobRows | None,
    ) -> int:
        """Returns how many of the tokens are new."""
        logprobs: Sequence[TokenLogprob] | None = ()
        if live.wants_logprobs and tokens:
            logprobs = live.logprobs_of(tokens, rows)
        if logprobs is None:
            self._close(live, NO_LOGPROBS)
            return 0
        state = live.state
        held, repeated = len(state.tokens), state.num_repeated
        fed = state.feed(attempt, first, tokens, finish, logprobs)
        fresh = len(state.tokens) - held
        if state.num_repeated != repeated:
            self._metrics.repeated_tokens.inc(state.num_repeated - repeated)
        if fed is Fed.NEWS:
            if fresh:
                self._note_tokens(live, now_s)
            if state.end is not None:
                self._finished(live, tell=False)
            elif state.num_unread > self._config.stream_buffer_tokens and not live.waiting:
                self._close(live, slow_reader(state.num_unread))
            elif self._holding and held:
                self._held[live] = None
            else:
                live.wake()
        elif fed is not Fed.NOTHING:
            if fed is Fed.DIVERGED:
                self._metrics.divergences.inc()
            self._supersede(live, fed.name.lower())
        return fresh

    def _wake_held(self) -> None:
        if self._release is not None:
            self._release.cancel()
            self._release = None
        held, self._held = self._held, {}
        for live in held:
            live.wake()

    def _note_tokens(self, live: LiveRequest, now_s: float) -> None:
        if live.last_token_s:
            self._metrics.token_gap_s.observe(now_s - live.last_token_s)
        else:
            self._metrics.first_token_s.observe(now_s - live.arrived_s)
            live.first_token_s = now_s
        live.last_token_s = now_s

    def _on_stranger(self, request_id: RequestId, link: WorkerLink, now_s: float) -> None:
        """Tokens nobody waits for: the worker is told, at most once a second each."""
        if now_s - self._strangers.get(request_id, 0.0) < 1.0:
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers.clear()
        self._strangers[request_id] = now_s
        link.cancel(request_id)

    def _close(self, live: LiveRequest, end: Terminal) -> None:
        """An end that this gateway decides: the worker or the scheduler is told."""
        if live.state.close(end) is Fed.NEWS:
            self._finished(live, tell=True)

    def _finished(self, live: LiveRequest, *, tell: bool) -> None:
        end = live.state.end
        assert end is not None
        self._forget(live)
        live.wake()
        if tell:
            if live.link is not None and live.link.connected and live.runs_at(self._clock_s()):
                live.link.cancel(live.request_id)
            else:
                self._cancel_anywhere(live.request_id)
        now_s = self._clock_s()
        num_prompt, num_output = len(live.queued.prompt_token_ids), len(live.state.tokens)
        first_s = live.first_token_s - live.arrived_s if live.first_token_s else None
        self._metrics.ended(end.reason, now_s - live.arrived_s, num_prompt, num_output)
        self._log.info(
            "finished",
            request_id=live.public_id,
            reason=end.reason.name,
            code=end.code,
            output_tokens=num_output,
            attempt=live.state.attempt,
            first_token_s=first_s and round(first_s, 4),
            total_s=round(now_s - live.arrived_s, 4),
        )

    def _cancel_anywhere(self, request_id: RequestId) -> None:
        """It waits, or is computed by a worker that has sent no token of it, or none lately.

        By way of the queue alone that worker would hear of it some steps later.
        """
        self._queue.cancel(request_id)
        self._fleet.cancel(request_id)

    def _forget(self, live: LiveRequest) -> None:
        """Once or more often: a request may end before its admission is known to have failed."""
        if self._live.pop(live.request_id, None) is None:
            return
        self._to_supersede.pop(live, None)
        self._doubts.drop(live)
        call = self._calls[live.call_id]
        call.remove(live)
        if not call:
            del self._calls[live.call_id]
        self._look_whether_idle()

    def _supersede(self, live: LiveRequest, why: str, *, counts: bool = True) -> None:
        if live.superseding or live.state.end is not None:
            return
        if not live.state.supersede(counts=counts):
            self._close(live, stream_lost(why))
            return
        self._log.warning(
            "superseding", request_id=live.public_id, why=why, attempt=live.state.attempt
        )
        live.superseding = True
        # Silence is counted anew from here.
        live.last_token_s = live.last_token_s and self._clock_s()
        self._to_supersede[live] = None
        self._supersede_news.set()

    async def _supersede_all(self) -> None:
        """Puts later attempts into the queue; tries again while Redis is away."""
        while True:
            await self._supersede_news.wait()
            self._supersede_news.clear()
            for live in list(self._to_supersede):
                if live.state.end is None and live.admission is not None:
                    await self._supersede_one(live, live.admission)
            if self._to_supersede:
                await asyncio.sleep(RETRY_S)
                self._supersede_news.set()

    async def _supersede_one(self, live: LiveRequest, old: Admission) -> None:
        request = replace(
            live.queued, attempt=live.state.attempt, output_token_ids=list(live.state.tokens)
        )
        try:
            live.admission = await self._queue.supersede(old, request)
        except UnavailableError:
            return
        self._to_supersede.pop(live, None)
        live.superseding = False
        self._metrics.superseded.inc()
        if live.state.end is not None:
            # It ended while the script ran.
            self._cancel_anywhere(live.request_id)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._clock_s()
            for live in list(self._live.values()):
                if now_s > live.backstop_s:
                    self._close(live, OVERDUE)
                elif live.last_token_s and now_s - live.last_token_s > self._config.stall_s:
                    self._supersede(live, "stall")

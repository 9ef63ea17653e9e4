"""Sessions with the scheduler: who leads, which plans and results have passed, what is to be sent.

Lives on the event loop's thread. Nothing queues here without a bound: a link sends from a ring of
the last RESULT_RING results, and of heartbeats, subscriptions and draining only the newest counts.
At the bounds: a scheduler that falls RESULT_RING results behind loses its session; cancels beyond
MAX_WAITING_CANCELS are dropped and counted (a gateway repeats a cancel while tokens come); of
cancels sent, the last MAX_REPEATED_CANCELS go out again in a new session, since a broken stream
may have lost them and unknown ids are ignored.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from structlog.typing import FilteringBoundLogger

from gpu_worker.messages import (
    Cancels,
    Draining,
    FinishedRequest,
    Heartbeat,
    Open,
    SessionMessage,
    SlotState,
    Snapshot,
    StepPlan,
    StepResult,
    Subscriptions,
)

SCHEMA_REVISION = 1
RESULT_RING = 64
MAX_WAITING_CANCELS = 100_000
MAX_REPEATED_CANCELS = 4096
_CANCELS_A_MESSAGE = 1024
_SNAPSHOT_CHUNK = 4096
_T = TypeVar("_T")


class PlanQueue(Protocol):
    """What sessions ask of the executor."""

    @property
    def last_step(self) -> int: ...
    @property
    def busy(self) -> bool: ...
    def submit(self, plan: StepPlan) -> bool: ...
    def discard_plans(self) -> None: ...
    def snapshot(self) -> Snapshot: ...


class ProtocolError(Exception):
    """The scheduler broke the protocol; its session ends."""


class TooManyPlansError(ProtocolError):
    """More plans than may wait."""


class SessionEndedError(Exception):
    """The worker ends the session; the scheduler may open another."""


class EpochRefusedError(Exception):
    """The session's epoch is older than one that has been seen."""

    def __init__(self, highest_epoch: int) -> None:
        super().__init__(f"epoch is older than {highest_epoch}")
        self.highest_epoch = highest_epoch


class Link:
    """One open session. Only Sessions changes it; the stream's writer calls `next_messages`."""

    def __init__(self, epoch: int, last_sent_step: int) -> None:
        self.epoch = epoch
        self.last_sent_step = last_sent_step
        self.wake = asyncio.Event()
        self.wake.set()
        self.end_reason: str | None = None
        self.heartbeat_due = True
        self.subscriptions_due = False
        self.draining_due = False

    def end(self, reason: str) -> None:
        """The writer will raise SessionEndedError."""
        self.end_reason = self.end_reason or reason
        self.wake.set()


class Sessions:
    """State that outlives a session, and the one session that is open."""

    def __init__(
        self,
        *,
        plans: PlanQueue,
        incarnation: int,
        log: FilteringBoundLogger,
        on_dropped_cancel: Callable[[], None],
    ) -> None:
        self._plans = plans
        self._incarnation = incarnation
        self._log = log
        self._on_dropped_cancel = on_dropped_cancel
        self._link: Link | None = None
        self._highest_epoch = 0
        self._last_plan_step = 0
        self._last_result_step = 0
        self._results: deque[StepResult] = deque(maxlen=RESULT_RING)
        self._gateway_ids: Sequence[str] = ()
        self._draining = False
        self._cancels: dict[bytes, None] = {}
        self._sent_cancels: deque[bytes] = deque(maxlen=MAX_REPEATED_CANCELS)

    @property
    def last_applied_step(self) -> int:
        """Highest step received and queued in this epoch."""
        return self._last_plan_step

    @property
    def first_result_step(self) -> int:
        """Oldest result that can be sent, now or once it is there."""
        return self._results[0].step if self._results else self._last_result_step + 1

    @property
    def is_open(self) -> bool:
        """A scheduler is connected."""
        return self._link is not None

    def open(self, opening: Open) -> Link:
        """Makes this the session. Raises EpochRefusedError or ProtocolError.

        A new epoch drops what of the older one has not begun. In the same epoch a scheduler that
        means this incarnation resyncs: results after last_result_step go out again. Another begins
        anew: plans that have not begun are dropped, and so is the result of one that has.
        """
        if not (opening.min_schema_revision <= SCHEMA_REVISION <= opening.max_schema_revision):
            raise ProtocolError(f"this worker speaks schema revision {SCHEMA_REVISION}")
        if opening.epoch == 0:
            raise ProtocolError("an epoch is at least 1")
        if opening.epoch < self._highest_epoch:
            raise EpochRefusedError(self._highest_epoch)
        if self._link is not None:
            self._link.end("another session has opened")
        if opening.epoch > self._highest_epoch:
            self._highest_epoch = opening.epoch
            self._plans.discard_plans()
            self._restart_steps(0)
        knows_us = opening.incarnation == self._incarnation
        if not knows_us:
            self._plans.discard_plans()
            self._restart_steps(self._last_plan_step)
        last_sent = self._last_result_step
        if knows_us:
            # Hello names the oldest result there is; it's for the scheduler to see a gap.
            wanted = max(opening.last_result_step, self.first_result_step - 1)
            last_sent = min(wanted, self._last_result_step)
        self._link = link = Link(opening.epoch, last_sent)
        link.draining_due = self._draining
        self._cancels = dict.fromkeys([*self._sent_cancels, *self._cancels])
        self._sent_cancels.clear()
        self._log.info(
            "session opened",
            epoch=opening.epoch,
            last_applied_step=self._last_plan_step,
            resync=knows_us,
        )
        return link

    def close(self, link: Link) -> None:
        """The stream has ended."""
        if self._link is link:
            self._link = None
            self._log.info("session closed", epoch=link.epoch)

    def snapshot_chunks(self) -> list[Snapshot]:
        """The worker's state in messages well under 1 MiB."""
        whole = self._plans.snapshot()
        parts: list[tuple[Sequence[SlotState], Sequence[FinishedRequest], Sequence[str]]] = []
        for slots, finishes, gateways in itertools.zip_longest(
            _chunks(whole.slots), _chunks(whole.recent_finishes), _chunks(self._gateway_ids)
        ):
            parts.append((slots or (), finishes or (), gateways or ()))
        parts = parts or [((), (), ())]
        return [
            Snapshot(
                slots=slots,
                recent_finishes=finishes,
                gateway_ids=gateways,
                last=index == len(parts) - 1,
            )
            for index, (slots, finishes, gateways) in enumerate(parts)
        ]

    def receive(self, link: Link, plan: StepPlan) -> None:
        """Queues a plan of the open session. Raises ProtocolError or SessionEndedError."""
        if link.end_reason is not None or self._link is not link:
            raise SessionEndedError(link.end_reason or "the session is over")
        if plan.epoch != link.epoch:
            raise ProtocolError(f"plan of epoch {plan.epoch} in a session of {link.epoch}")
        if plan.step != self._last_plan_step + 1:
            if not plan.reset or plan.step == 0:
                raise ProtocolError(f"step {plan.step} follows {self._last_plan_step}")
            self._plans.discard_plans()
            self._restart_steps(plan.step - 1)
            link.last_sent_step = plan.step - 1
        if not self._plans.submit(plan):
            raise TooManyPlansError("too many plans are waiting")
        self._last_plan_step = plan.last_step

    def add_result(self, result: StepResult) -> None:
        """The next step has ended. Results of steps that a restart has left behind are dropped."""
        if result.epoch != self._highest_epoch or result.step != self._last_result_step + 1:
            self.beat()  # a scheduler may wait for the worker to be free
            return
        self._last_result_step = result.step
        self._results.append(result)
        self._wake()

    def add_cancel(self, request_id: bytes) -> None:
        """A gateway's client is gone; the scheduler is to know."""
        if len(self._cancels) >= MAX_WAITING_CANCELS:
            self._on_dropped_cancel()
            return
        self._cancels[request_id] = None
        self._wake()

    def set_gateways(self, gateway_ids: Sequence[str]) -> None:
        """The gateways whose Tokens stream is open now."""
        self._gateway_ids = gateway_ids
        if self._link is not None:
            self._link.subscriptions_due = True
            self._wake()

    def beat(self) -> None:
        """A heartbeat is due."""
        if self._link is not None:
            self._link.heartbeat_due = True
            self._wake()

    def drain(self) -> None:
        """Tells the scheduler, also one that comes later, that the worker wants to leave."""
        self._draining = True
        if self._link is not None:
            self._link.draining_due = True
            self._wake()

    def next_messages(self, link: Link) -> list[SessionMessage]:
        """What the link has to send now; counts as sent. Raises SessionEndedError."""
        if link.end_reason is not None:
            raise SessionEndedError(link.end_reason)
        messages: list[SessionMessage] = []
        if link.last_sent_step < self._last_result_step:
            if link.last_sent_step + 1 < self.first_result_step:
                raise SessionEndedError("results that the scheduler lacks are gone")
            behind = self._last_result_step - link.last_sent_step
            first = len(self._results) - behind
            messages.extend(itertools.islice(self._results, first, None))
            link.last_sent_step = self._last_result_step
        if self._cancels:
            sent = list(itertools.islice(self._cancels, _CANCELS_A_MESSAGE))
            for request_id in sent:
                del self._cancels[request_id]
            self._sent_cancels.extend(sent)
            messages.append(Cancels(request_ids=sent))
            if self._cancels:
                link.wake.set()
        if link.subscriptions_due:
            link.subscriptions_due = False
            messages.append(Subscriptions(gateway_ids=self._gateway_ids))
        if link.draining_due:
            link.draining_due = False
            messages.append(Draining())
        if link.heartbeat_due:
            link.heartbeat_due = False
            messages.append(Heartbeat(last_step=self._plans.last_step, busy=self._plans.busy))
        return messages

    def _restart_steps(self, last_step: int) -> None:
        self._last_plan_step = self._last_result_step = last_step
        self._results.clear()

    def _wake(self) -> None:
        if self._link is not None:
            self._link.wake.set()


def _chunks(values: Sequence[_T]) -> list[Sequence[_T]]:
    return [values[i : i + _SNAPSHOT_CHUNK] for i in range(0, len(values), _SNAPSHOT_CHUNK)]

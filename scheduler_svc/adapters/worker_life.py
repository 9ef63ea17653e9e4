"""What is known of a worker between WorkerJoined and WorkerLost. No IO.

Rules: plans go out in order and are kept until their results have come; results count once and in
order. The first plan of a life carries `reset`; what came before it belongs to an older life.
Bounded by the plans that the core lets be in flight. A worker that breaks the protocol loses its
stream, and its life if it does so MAX_BREACHES times without a result between: a resumed session
repeats what was lost, but also what was wrong.
"""

from collections import deque

from scheduler_svc import codec, limits
from scheduler_svc.adapters.loss_rules import WorkerHealth
from scheduler_svc.core.events import StepCompleted, StepFailed
from scheduler_svc.core.ready import StepPlan
from scheduler_svc.core.types import FaultScope, WorkerId
from scheduler_svc.ports import Hello, SnapshotChunk, StepReport

MAX_BREACHES = 2


class LinkError(Exception):
    """The session is over: the stream ended, or can't be used."""


class ProtocolError(LinkError):
    """The worker said what can't be."""


class CannotResumeError(Exception):
    """The worker that answered can't go on where this life stood; the text says why."""


class WorkerLife:
    """Mutable; owned by one link."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        epoch: int,
        incarnation: int,
        health: WorkerHealth,
        gateway_ids: frozenset[str],
    ) -> None:
        self.incarnation = incarnation
        self.health = health
        self.gateway_ids = gateway_ids
        self.draining = False
        self.last_result_step = 0
        self._worker_id = worker_id
        self._epoch = epoch
        self._first_step = 0  # 0 until the plan with `reset` has come
        # Plans with their last steps, oldest first.
        self._unreturned: deque[tuple[int, bytes]] = deque()
        self._snapshot_gateways: set[str] = set()
        # Since the last result.
        self._num_breaches = 0

    def breached(self) -> bool:
        """It has broken the protocol; returns whether that was once too often."""
        self._num_breaches += 1
        return self._num_breaches >= MAX_BREACHES

    def plan(self, plan: StepPlan, now_ns: int) -> bytes | None:
        """The plan as it goes on the wire; None if it was meant for an older life."""
        if self._first_step == 0:
            if not plan.reset:
                return None
            self._first_step = plan.step
            self.last_result_step = plan.step - 1
        raw = codec.encode_plan(plan)
        self._unreturned.append((plan.step + plan.num_steps - 1, raw))
        for step in range(plan.step, plan.step + plan.num_steps):
            self.health.sent(step, plan.num_scheduled_tokens, now_ns)
        return raw

    def resume(self, hello: Hello) -> list[bytes]:
        """The plans to send again in a new session. Raises CannotResumeError.

        A worker has all steps of a plan or none, whatever it has computed of them.
        """
        oldest_needed = self.last_result_step + 1
        applied = hello.last_applied_step
        if hello.incarnation != self.incarnation:
            raise CannotResumeError("another incarnation answered")
        if applied < self.last_result_step and self.last_result_step >= self._first_step > 0:
            raise CannotResumeError("it has forgotten steps")
        if self._first_step > 0 and applied > self._last_planned_step:
            raise CannotResumeError("it has steps that it was never sent")
        if applied >= oldest_needed > 1 and hello.first_result_step > oldest_needed:
            raise CannotResumeError("it no longer has the results")
        return [raw for last_step, raw in self._unreturned if last_step > applied]

    def event(self, report: StepReport, now_ns: int) -> StepCompleted | StepFailed | None:
        """What the core is to be told; None for a result of an older life or a repeated one.

        Raises ProtocolError for a result out of order. `returned` must follow once the core has it.
        """
        stale = report.epoch != self._epoch or report.step <= self.last_result_step
        if stale or self._first_step == 0:
            return None
        if not self._unreturned or report.step != self.last_result_step + 1:
            raise ProtocolError(f"result of step {report.step} follows {self.last_result_step}")
        for fault in report.faults:
            if fault.scope is not FaultScope.REQUEST:
                return StepFailed(
                    now_ns=now_ns,
                    worker_id=self._worker_id,
                    step=report.step,
                    scope=fault.scope,
                    reason=f"{fault.code}: {fault.message}",
                    operations_done=report.operations_done,
                )
        return StepCompleted(
            now_ns=now_ns,
            worker_id=self._worker_id,
            step=report.step,
            slots=report.slots,
            token_ids=report.token_ids,
            finished=report.finished,
            num_wasted_rows=report.num_wasted_rows,
            step_us=report.step_us,
            total_us=report.total_us,
            idle_us=report.idle_us,
            operations_done=report.operations_done,
        )

    def returned(self, now_ns: int) -> int:
        """The oldest step's result is with the core; returns the time since it was sent."""
        self.last_result_step += 1
        self._num_breaches = 0
        if self._unreturned[0][0] == self.last_result_step:
            self._unreturned.popleft()
        return self.health.returned(now_ns)

    @property
    def _last_planned_step(self) -> int:
        return self._unreturned[-1][0] if self._unreturned else self.last_result_step

    def snapshot_gateways(self, chunk: SnapshotChunk) -> frozenset[str] | None:
        """The gateways of a snapshot that follows a resync, once it is whole.

        Raises ProtocolError.
        """
        self._snapshot_gateways |= chunk.gateway_ids
        if len(self._snapshot_gateways) > limits.MAX_GATEWAYS:
            raise ProtocolError("the snapshot names too many gateways")
        if not chunk.last:
            return None
        whole = frozenset(self._snapshot_gateways)
        self._snapshot_gateways.clear()
        return whole

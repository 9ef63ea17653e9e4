"""What the scheduler may take for poison: counted beside its core, from what goes in and out.

A request that has lost MAX_LOSSES workers, or shared MAX_FAILED_STEPS steps that failed, may end
with an error although nothing is wrong with it. The counts here are at least the core's own: they
don't begin anew after a token, and a request counts as being on each worker that a plan has put it
on until the worker is lost.
"""

from collections import Counter

from scheduler_svc.core import Ready
from scheduler_svc.core.events import Event, StepFailed, WorkerJoined, WorkerLost
from scheduler_svc.core.ready import Finish
from scheduler_svc.core.types import RequestId, WorkerId
from scheduler_svc.sim.device import ViolationError

MAX_LOSSES = 3
MAX_FAILED_STEPS = 9


def taken_for_poison(message: str) -> bool:
    """Whether an end's message says so."""
    return "lost its worker" in message or "steps with the request failed" in message


class Suspects:
    """Of one core. `found` are the requests that it has ended so, of all cores of a world."""

    def __init__(self, found: set[bytes]) -> None:
        self._found = found
        self._on: dict[WorkerId, set[RequestId]] = {}
        self._num_losses: Counter[RequestId] = Counter()
        self._num_failed_steps: Counter[RequestId] = Counter()

    def event(self, event: Event) -> None:
        """Before the core is fed with it."""
        if isinstance(event, WorkerLost | WorkerJoined):
            self._lost(event.worker_id)
        elif isinstance(event, StepFailed):
            self._num_failed_steps.update(self._on.get(event.worker_id, ()))

    def ready(self, ready: Ready) -> None:
        """Raises ViolationError if a request is taken for poison that can't be."""
        for given_up in ready.given_up:
            self._lost(given_up.worker_id)
        for finish in ready.finishes:
            if taken_for_poison(finish.message):
                self._check(finish)
        for plan in ready.plans:
            here = self._on.setdefault(plan.worker_id, set())
            here.update(admit.request_id for admit in plan.admits)

    def _lost(self, worker_id: WorkerId) -> None:
        self._num_losses.update(self._on.pop(worker_id, ()))

    def _check(self, finish: Finish) -> None:
        losses = self._num_losses[finish.request_id]
        failed = self._num_failed_steps[finish.request_id]
        if losses < MAX_LOSSES and failed < MAX_FAILED_STEPS:
            raise ViolationError(
                "only what has often lost its worker is taken for poison",
                f"{finish.request_id.hex()}: {finish.message}; it has lost {losses}, and "
                f"{failed} steps with it have failed",
            )
        self._found.add(finish.request_id)

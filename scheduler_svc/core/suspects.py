"""Which requests may be what their workers die of, and how such a one is tried alone.

A request that has lost its worker twice since its last token, or was in two steps that failed, is
a **suspect**; its next token clears it. Rules:

- a suspect is admitted only where each running request has had a token since its admission, for one
  that has not may kill the worker just as well;
- from then on nothing else is admitted there until the suspect has had a token or has left;
- where it waits for that, nothing that comes after it in the queue is admitted: what runs there has
  its tokens after some steps, so its turn comes;
- one that loses its worker again, or fails as many steps as make that many workers be given up,
  ends with an error.

So the third loss, which ends a request, is never shared with another suspect, nor with one of which
nothing has been seen: of those that ran beside what kills workers each is tried, and cleared by a
token. One loss alone changes nothing: whole workers die more often than by their requests.
"""

from scheduler_svc.core.account import Wait
from scheduler_svc.core.lifecycle import RequestState
from scheduler_svc.core.request import Request
from scheduler_svc.core.worker_state import WorkerState

MAX_LOSSES_WITHOUT_TOKEN = 3
_SUSPECT_AFTER = 2


def count_loss(request: Request, max_attempts: int, now_ns: int) -> str | None:
    """It has lost its worker. Returns why it ends by that, None if it goes on."""
    num_losses = request.count_loss()
    if num_losses >= MAX_LOSSES_WITHOUT_TOKEN:
        return f"the request lost its worker {num_losses} times without a token"
    if request.num_workers_lost >= max_attempts:
        return f"the request was tried {request.num_workers_lost} times"
    _suspect(request, now_ns)
    return None


def count_failed_step(request: Request, max_step_failures: int, now_ns: int) -> str | None:
    """A step with it has failed; bounded also where others succeed between.

    As many as it takes to lose workers by it until it ends. Returns why it ends, or None.
    """
    num_failed = request.count_failed_step()
    if num_failed >= MAX_LOSSES_WITHOUT_TOKEN * max_step_failures:
        return f"{num_failed} steps with the request failed, without a token between them"
    _suspect(request, now_ns)
    return None


def _suspect(request: Request, now_ns: int) -> None:
    request.is_suspect = max(request.num_losses, request.num_failed_steps) >= _SUSPECT_AFTER
    if request.is_suspect and request.state is RequestState.WAITING:
        request.waits.turn_to(Wait.SUSPECT, now_ns)


def may_try(worker: WorkerState) -> bool:
    """Whether a suspect may be admitted on the worker."""
    return all(len(r.token_ids) > r.num_known_at_admission for r in worker.running.values())


def is_trying(worker: WorkerState) -> bool:
    """Whether a suspect runs there that has had no token yet; forgets one that has, or has left."""
    request = worker.on_trial
    if request is None:
        return False
    if worker.running.get(request.slot) is request and request.still_suspect():
        return True
    worker.on_trial = None
    return False

"""What a result can't say, given the plan that it answers. A worker that says it is given up.

The codec has checked what can be told from a message alone: lengths, ranges, ids. What is checked
here needs the rows that are in flight. What is left is between the worker and its clients: which
token a row samples and when it ends can't be known here, and harms no other worker.
"""

from scheduler_svc.core.events import StepCompleted, StepFailed
from scheduler_svc.core.flight import StepInFlight
from scheduler_svc.core.worker_state import WorkerState


def of_result(worker: WorkerState, flight: StepInFlight, event: StepCompleted) -> str | None:
    """How the result breaks the protocol; None if it does not. Most steps cost a comparison."""
    planned = flight.batch.slot_ids
    silent = _silent(flight) if flight.special else []
    if silent or event.slots != planned:
        sampled = set(event.slots)
        if len(sampled) != len(event.slots):
            return "a row samples twice"
        if not sampled.issubset(planned):
            return "a row samples that was not planned"
        if not sampled.isdisjoint(silent):
            return "a row samples in the middle of its prompt"
    if event.finished:
        ended = {slot for slot, _ in event.finished}
        if len(ended) != len(event.finished):
            return "a row ends twice"
        if not ended.issubset(planned):
            return "a row ends that was not planned"
    if event.num_wasted_rows > len(planned):
        return "more rows are wasted than were planned"
    return of_operations(worker, event) if event.operations_done else None


def _silent(flight: StepInFlight) -> list[int]:
    """Slots whose rows compute a part of their prompt that is not the last."""
    slots = flight.batch.slot_ids
    return [slots[row] for row, (_, samples) in flight.special.items() if not samples]


def of_operations(worker: WorkerState, event: StepCompleted | StepFailed) -> str | None:
    """The same for the operations that are named. Ids that are not known any more are void."""
    if worker.swap.names_too_early(event.operations_done, event.step):
        return "an operation is done before its plan"
    return None

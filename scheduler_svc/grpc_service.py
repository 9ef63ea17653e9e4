"""SchedulerService: a read-only view for administrators."""

from collections.abc import Callable
from typing import Any

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers from `snapshot`, which reads the core between two events."""

    def __init__(self, snapshot: Callable[[], scheduler_pb2.SnapshotResponse]) -> None:
        self._snapshot = snapshot

    async def Snapshot(  # noqa: N802
        self, request: scheduler_pb2.SnapshotRequest, context: Any
    ) -> scheduler_pb2.SnapshotResponse:
        """Counts and one row per worker."""
        return self._snapshot()

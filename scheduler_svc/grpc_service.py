"""SchedulerService: a read-only view for administrators."""

from collections.abc import Callable
from typing import Any

import grpc
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc

from scheduler_svc import admin_codec
from scheduler_svc.core.types import RequestId
from scheduler_svc.ports import Core

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Answers between two events: from `snapshot`, and from the core while this process leads."""

    def __init__(
        self,
        snapshot: Callable[[], scheduler_pb2.SnapshotResponse],
        core: Callable[[], Core | None],
    ) -> None:
        self._snapshot = snapshot
        self._core = core

    async def Snapshot(  # noqa: N802
        self, request: scheduler_pb2.SnapshotRequest, context: Any
    ) -> scheduler_pb2.SnapshotResponse:
        """Counts and one row per worker."""
        return self._snapshot()

    async def Explain(  # noqa: N802
        self, request: scheduler_pb2.ExplainRequest, context: Any
    ) -> scheduler_pb2.ExplainResponse:
        """A request's account."""
        if len(request.request_id) != 16:
            message = "request_id must have 16 bytes"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        core = self._core()
        if core is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this scheduler does not lead")
            raise AssertionError("abort raises")
        found = core.explain(RequestId(request.request_id))
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the request is not known, or no longer")
            raise AssertionError("abort raises")
        return admin_codec.encode_explanation(found)

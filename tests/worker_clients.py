"""A scheduler and a gateway written by hand, for tests of a worker over real gRPC."""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
from quire.v1 import worker_pb2, worker_pb2_grpc

from gpu_worker.messages import StepPlan
from tests.worker_builders import plan_message


async def status_of(call: Any) -> grpc.StatusCode:
    """How the stream ends; the status comes after the last message."""
    async with asyncio.timeout(20):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        code = await call.code()
    assert isinstance(code, grpc.StatusCode)
    return code


class Scheduler:
    """A session, written by hand."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.call: Any = None
        self.hello = worker_pb2.Hello()
        self.snapshot: list[worker_pb2.Snapshot] = []
        self.others: list[worker_pb2.SessionResponse] = []

    async def dial(self) -> None:
        self.call = worker_pb2_grpc.WorkerServiceStub(self.channel).Session()

    async def open(self, epoch: int = 1, last_result: int = 0, incarnation: int = 0) -> None:
        await self.dial()
        await self.call.write(
            worker_pb2.SessionRequest(
                open=worker_pb2.Open(
                    epoch=epoch,
                    min_schema_revision=1,
                    max_schema_revision=1,
                    last_result_step=last_result,
                    incarnation=incarnation,
                )
            )
        )
        self.hello = (await self.read()).hello
        self.snapshot = []
        while not (self.snapshot and self.snapshot[-1].last):
            self.snapshot.append((await self.read()).snapshot)

    async def read(self) -> worker_pb2.SessionResponse:
        async with asyncio.timeout(20):
            message = await self.call.read()
        assert message is not grpc.aio.EOF, "the worker ended the session"
        assert isinstance(message, worker_pb2.SessionResponse)
        return message

    async def send(self, plan: StepPlan) -> None:
        await self.call.write(worker_pb2.SessionRequest(plan=plan_message(plan)))

    async def next(self, kind: str) -> Any:
        """The next message of a kind; others are kept."""
        while True:
            message = await self.read()
            if message.WhichOneof("kind") == kind:
                return getattr(message, kind)
            self.others.append(message)

    async def results(self, count: int) -> list[worker_pb2.StepResult]:
        return [await self.next("result") for _ in range(count)]

    async def status(self) -> grpc.StatusCode:
        return await status_of(self.call)


class Gateway:
    """A Tokens stream, written by hand."""

    def __init__(self, channel: grpc.aio.Channel, reply_to: bytes, name: str) -> None:
        self.channel, self.reply_to, self.name = channel, reply_to, name
        self.call: Any = None
        self.last_sequence = 0
        self.outputs: dict[bytes, list[int]] = {}
        self.finishes: dict[bytes, int] = {}
        self.logprobs: dict[bytes, list[worker_pb2.TokenLogprobs]] = {}

    async def subscribe(self, incarnation: int) -> worker_pb2.Subscribed:
        self.call = worker_pb2_grpc.TokensServiceStub(self.channel).Tokens()
        await self.call.write(
            worker_pb2.TokensRequest(
                subscribe=worker_pb2.Subscribe(
                    gateway_id=self.name,
                    reply_to=self.reply_to,
                    incarnation=incarnation,
                    last_sequence=self.last_sequence,
                )
            )
        )
        async with asyncio.timeout(20):
            message = await self.call.read()
        assert isinstance(message, worker_pb2.TokensResponse), await self.call.code()
        return message.subscribed

    async def read(self, count: int = 1) -> None:
        """So many batches; their tokens go to `outputs`, by position."""
        for _ in range(count):
            async with asyncio.timeout(20):
                batch = (await self.call.read()).batch
            assert batch.sequence == self.last_sequence + 1
            self.last_sequence = batch.sequence
            for entry in batch.logprobs:
                request = batch.request_ids[16 * entry.entry : 16 * entry.entry + 16]
                self.logprobs.setdefault(request, []).append(entry)
            at = 0
            for index, size in enumerate(batch.num_tokens):
                request = batch.request_ids[16 * index : 16 * index + 16]
                outputs = self.outputs.setdefault(request, [])
                assert batch.first_positions[index] == len(outputs)
                outputs.extend(batch.token_ids[at : at + size])
                at += size
                if batch.finish_reasons[index]:
                    assert request not in self.finishes
                    self.finishes[request] = batch.finish_reasons[index]

    async def acknowledge(self) -> None:
        acknowledge = worker_pb2.Acknowledge(sequence=self.last_sequence)
        await self.call.write(worker_pb2.TokensRequest(acknowledge=acknowledge))

    async def cancel(self, request: bytes) -> None:
        cancel = worker_pb2.CancelRow(request_id=request)
        await self.call.write(worker_pb2.TokensRequest(cancel=cancel))

"""Many clients that stream for a while: every answer must be whole, to the token.

`python -m benchmarks.soak --clients 64 --seconds 120`. Three quarters of the clients read SSE,
the others gRPC; both count the token ids that come. Ends with status 1 if any answer has an error
or another number of tokens than was asked for.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from benchmarks.client import Client
from benchmarks.stack import Stack
from benchmarks.workload import Job, Shape, jobs
from servicekit import grpc_server


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the clients have seen. Mutable; the clients share one loop.

    `tokens` has the token ids of every answer, by client and the answer's number there.
    """

    num_streams: int = 0
    num_tokens: int = 0
    problems: list[str] = field(default_factory=list)
    tokens: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    took_s: float = 0.0

    def note(self, place: tuple[int, int], token_ids: Sequence[int], problem: str) -> None:
        """One answer; `problem` is empty if it was whole."""
        self.num_streams += 1
        self.num_tokens += len(token_ids)
        self.tokens[place] = tuple(token_ids)
        if problem:
            self.problems.append(problem)

    @property
    def summary(self) -> dict[str, object]:
        """For people and programs."""
        return {
            "streams": self.num_streams,
            "output_tokens": self.num_tokens,
            "seconds": round(self.took_s, 1),
            "output_tokens_per_s": round(self.num_tokens / self.took_s, 1) if self.took_s else 0,
            "problems": self.problems[:20],
            "num_problems": len(self.problems),
        }


async def _rest_client(
    client: Client, model: str, own: tuple[int, Sequence[Job]], end_s: float, t: Tally
) -> None:
    number, work = own
    for i, job in enumerate(work):
        if time.monotonic() > end_s:
            return
        answer = await client.complete(job.body(model, return_token_ids=True))
        problem = answer.problem(job.num_output)
        if not problem and (answer.done != 1 or len(answer.token_ids) != job.num_output):
            problem = f"{answer.done} [DONE], {len(answer.token_ids)} token ids"
        t.note((number, i), answer.token_ids, problem)


async def generate(
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub", request: inference_pb2.GenerateRequest
) -> tuple[list[int], list[inference_pb2.Finished]]:
    """Token ids and terminal messages of one Generate call. Raises grpc.aio.AioRpcError."""
    tokens: list[int] = []
    ends: list[inference_pb2.Finished] = []
    async for message in stub.Generate(request):
        if message.HasField("delta"):
            tokens.extend(message.delta.token_ids)
        elif message.HasField("finished"):
            ends.append(message.finished)
    return tokens, ends


def generate_request(job: Job, seed: int = 0) -> inference_pb2.GenerateRequest:
    """The same request as Job.body."""
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=job.prompt),
        max_tokens=job.num_output,
        temperature=job.temperature,
        ignore_eos=True,
        seed=seed or job.seed,
    )


async def _grpc_client(
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub",
    own: tuple[int, Sequence[Job]],
    end_s: float,
    t: Tally,
) -> None:
    number, work = own
    for i, job in enumerate(work):
        if time.monotonic() > end_s:
            return
        problem, tokens = "", list[int]()
        try:
            tokens, ends = await generate(stub, generate_request(job))
        except grpc.aio.AioRpcError as error:
            problem = f"gRPC {error.code().name}: {error.details()}"
        else:
            reasons = [end.finish_reason for end in ends]
            if reasons != [common_pb2.FINISH_REASON_LENGTH] or len(tokens) != job.num_output:
                problem = f"gRPC: {len(tokens)} tokens of {job.num_output}, ends {reasons}"
        t.note((number, i), tokens, problem)


async def soak(
    client: Client,
    grpc_address: str,
    model: str,
    *,
    num_clients: int,
    seconds: float,
    seed: str = "soak",
    shape: Shape | None = None,
    work: Sequence[Sequence[Job]] = (),
) -> Tally:
    """Runs the clients until `seconds` have passed; streams that run then are read to their end.

    `work` is what each client sends, in order; without it there is more than any gets through.
    """
    tally = Tally()
    began_s = time.monotonic()
    end_s = began_s + seconds
    work = work or [jobs(f"{seed}-{i}", 512, shape or Shape()) for i in range(num_clients)]
    async with contextlib.AsyncExitStack() as opened:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub | None = None
        if grpc_address:
            channel = await opened.enter_async_context(grpc_server.channel(grpc_address))
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async with asyncio.TaskGroup() as group:
            for own in enumerate(work):
                if stub is not None and own[0] % 4 == 3:
                    group.create_task(_grpc_client(stub, own, end_s, tally))
                else:
                    group.create_task(_rest_client(client, model, own, end_s, tally))
    tally.took_s = time.monotonic() - began_s
    return tally


def main(argv: Sequence[str]) -> int:
    """Runs a soak against a stack of its own, or one that runs already."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--model", default="", help="folder; default: the launcher's model cache")
    parser.add_argument("--base-url", default="", help="http://HOST:PORT of a running gateway")
    parser.add_argument(
        "--grpc-address", default="", help="HOST:PORT; empty with --base-url: REST only"
    )
    arguments = parser.parse_args(argv)
    if arguments.base_url:
        from benchmarks.target import running

        client, model = running(arguments.base_url)
        tally = asyncio.run(_soak(client, arguments.grpc_address, model, arguments))
    else:
        from benchmarks.target import model_folder

        with (
            tempfile.TemporaryDirectory(prefix="quire-soak-") as folder,
            Stack(Path(folder), model=model_folder(arguments.model)) as stack,
        ):
            tally = asyncio.run(
                _soak(stack.client, stack.grpc_address, stack.model_name, arguments)
            )
    print(json.dumps(tally.summary, indent=1))
    return 1 if tally.problems or not tally.num_streams else 0


async def _soak(
    client: Client, grpc_address: str, model: str, options: argparse.Namespace
) -> Tally:
    return await soak(
        client, grpc_address, model, num_clients=options.clients, seconds=options.seconds
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Sends what asks makes to a gateway, and reads both protocols' answers into one form."""

import asyncio
import io
import json
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

import grpc
import grpc.aio
from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

from benchmarks.client import Exchange
from tests.fuzz.asks import Ask, Call, Post
from tests.fuzz.world import World, bearer

# One verdict, as each protocol says it.
OF_STATUS = {
    400: "invalid", 401: "no key", 404: "not found", 429: "full",
    500: "failed", 503: "unavailable", 504: "deadline",
}  # fmt: skip
OF_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.UNAUTHENTICATED: "no key",
    grpc.StatusCode.NOT_FOUND: "not found",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "full",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "deadline",
}
ANSWER_S = 60.0
OF_REASON = {
    common_pb2.FINISH_REASON_DEADLINE: "deadline",
    common_pb2.FINISH_REASON_UNAVAILABLE: "unavailable",
    common_pb2.FINISH_REASON_REJECTED: "invalid",
}
OK_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a client was told in the end: outputs by choice, costs of all.

    `raw` is everything that was said, for a look at leaks.
    """

    verdict: str
    message: str = ""
    param: str = ""
    text: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    finish: tuple[str, ...] = ()
    num_prompt: int = 0
    num_output: int = 0
    raw: str = ""

    def said(self, *, exactly: bool) -> tuple[Any, ...]:
        """What must be equal between protocols; output only where the tokens are the same."""
        message = self.message.replace("top_logprobs", "logprobs")
        same: tuple[Any, ...] = (self.verdict, message, self.num_prompt)
        if not exactly:
            return (*same, len(self.finish))
        return (*same, self.text, self.tokens, self.finish, self.num_output)


@dataclass(slots=True)
class Said:
    """One choice as it comes."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An HTTP answer, whole."""

    status: int
    headers: dict[str, str]
    text: str


class _Bytes(socket.socket):
    """What http.client reads an answer from."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    def makefile(self, *args: Any, **options: Any) -> Any:
        """The bytes."""
        return io.BytesIO(self._data)


def read_response(data: bytes, method: str) -> Response:
    """Raises an http.client.HTTPException for what is no whole answer."""
    with _Bytes(data) as given:
        response = HTTPResponse(given, method=method)
        response.begin()
        text = response.read().decode()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Response(status=response.status, headers=headers, text=text)


class Asker:
    """Alice's connections. Its loop runs only while something is asked."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._runner = asyncio.Runner()
        self._runner.run(self._open())

    async def _open(self) -> None:
        self._port = int(self._world.stack.base_url.rsplit(":", 1)[1])
        self.channel = grpc.aio.insecure_channel(self._world.stack.grpc_address)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.metadata = (("authorization", bearer("alice")["authorization"]),)

    def close(self) -> None:
        """Ends the connections."""
        self._runner.run(self.channel.close())
        self._runner.close()

    def together(self, asked: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """All at a time."""

        async def gather() -> list[Any]:
            return list(await asyncio.gather(*asked))

        return self._runner.run(gather())

    async def by_rest(self, ask: Ask) -> Outcome:
        """Over HTTP, streamed or not."""
        path, body = ask.rest()
        headers = {"content-type": "application/json"}
        answer = await self.post(Post(method="POST", path=path, body=body, headers=headers))
        return rest_outcome(answer.status, answer.text, stream=ask.stream)

    async def by_grpc(self, ask: Ask) -> Outcome:
        """Over gRPC."""
        said: list[str] = []
        choices: dict[int, Said] = {}
        echo, end = "", None
        try:
            async for event in self.stub.Generate(
                ask.grpc(), metadata=self.metadata, timeout=ANSWER_S
            ):
                said.append(str(event) if event.HasField("finished") else "")
                echo += event.echo.text
                choice = choices.setdefault(event.sample_index, Said())
                choice.text += event.delta.text
                choice.tokens += event.delta.token_ids
                if event.HasField("finished"):
                    end = event.finished
                    choice.finish = OK_REASONS.get(end.finish_reason, "")
        except grpc.aio.AioRpcError as error:
            message = error.details() or ""
            verdict = OF_CODE.get(error.code(), f"undocumented {error.code().name}")
            return Outcome(verdict=verdict, message=message, param=_param_in(message), raw=message)
        assert end is not None
        for choice in choices.values():
            choice.text = echo + choice.text
        return _grpc_outcome(choices, end, "".join(said))

    async def post(self, post: Post, tenant: str = "alice", *, port: int = 0) -> Response:
        """Anything at all over HTTP, on a connection of its own."""
        port = port or self._port
        own = {"host": f"127.0.0.1:{port}", "connection": "close", **bearer(tenant)}
        if post.body or post.method == "POST":
            own["content-length"] = str(len(post.body))
        lines = [f"{name}: {value}\r\n" for name, value in {**own, **post.headers}.items()]
        head = f"{post.method} {post.path} HTTP/1.1\r\n{''.join(lines)}\r\n"
        exchange = Exchange(head.encode() + post.body)
        try:
            async with asyncio.timeout(ANSWER_S):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: exchange, "127.0.0.1", port)
                await exchange.ended
        finally:
            exchange.hang_up()
        return read_response(b"".join(data for _, data in exchange.pieces), post.method)

    async def call(self, call: Call) -> tuple[grpc.StatusCode, str]:
        """Any bytes over gRPC, whatever the method; how it ended and what was said of it."""
        return await self._call(self.channel, call)

    async def call_at(self, port: int, call: Call) -> tuple[grpc.StatusCode, str]:
        """The same on another port of this machine."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return await self._call(channel, call)

    async def _call(self, channel: grpc.aio.Channel, call: Call) -> tuple[grpc.StatusCode, str]:
        stream: Any = channel.unary_stream(call.method)
        try:
            answers = stream(call.data, metadata=self.metadata, timeout=ANSWER_S)
            said = [data.decode("utf-8", "replace") async for data in answers]
            return grpc.StatusCode.OK, "".join(said)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""


def _param_in(message: str) -> str:
    """gRPC has no field for it: a message begins with its name."""
    name, found, _ = message.partition(":")
    return name if found and " " not in name else ""


def same_param(rest: Outcome, grpc_: Outcome) -> bool:
    """The field that REST names is the one with which the message begins, if it does."""
    return grpc_.param in ("", rest.param.replace("top_logprobs", "logprobs"))


def _ok(choices: dict[int, Said], num_prompt: int, num_output: int, raw: str) -> Outcome:
    found = [choices[index] for index in sorted(choices)]
    return Outcome(
        verdict="ok",
        text=tuple(choice.text for choice in found),
        tokens=tuple(tuple(choice.tokens) for choice in found),
        finish=tuple(choice.finish for choice in found),
        num_prompt=num_prompt,
        num_output=num_output,
        raw=raw,
    )


def _grpc_outcome(choices: dict[int, Said], end: inference_pb2.Finished, raw: str) -> Outcome:
    if end.finish_reason in OK_REASONS:
        return _ok(choices, end.usage.prompt_tokens, end.usage.completion_tokens, raw)
    verdict = OF_REASON.get(end.finish_reason, f"undocumented {end.finish_reason}")
    return Outcome(verdict=verdict, message=end.message, raw=raw)


def rest_outcome(status: int, raw: str, *, stream: bool) -> Outcome:
    """Of a whole answer, a stream of events, or an error."""
    if stream and status == 200:
        lines = raw.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], raw[-200:]
        documents = [json.loads(line[6:]) for line in lines[:-2] if line.startswith("data: ")]
    else:
        documents = [json.loads(raw)]
    errors = [document["error"] for document in documents if "error" in document]
    if errors:
        [error] = errors
        code = {"deadline_exceeded": 504}.get(error["code"], status)
        verdict = OF_STATUS.get(code, f"undocumented {status}")
        return Outcome(
            verdict=verdict, message=error["message"], param=error["param"] or "", raw=raw
        )
    choices: dict[int, Said] = {}
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    for document in documents:
        for shown in document["choices"]:
            choice = choices.setdefault(shown["index"], Said())
            message = shown.get("delta") or shown.get("message") or {}
            choice.text += shown.get("text") or message.get("content") or ""
            choice.tokens += shown.get("token_ids") or ()
            choice.finish = shown.get("finish_reason") or choice.finish
        usage = document.get("usage") or usage
    raw = "" if stream else raw
    return _ok(choices, usage["prompt_tokens"], usage["completion_tokens"], raw)

"""Sends what asks makes to a gateway, and reads both protocols' answers into one form."""

import asyncio
import io
import json
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
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
    """What a client was told in the end. `raw` is everything that was said, for a look at leaks."""

    verdict: str
    message: str = ""
    param: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()
    finish: str = ""
    num_prompt: int = 0
    raw: str = ""

    def said(self, *, exactly: bool) -> tuple[Any, ...]:
        """What must be equal between protocols; output only where the tokens are the same."""
        message = self.message.replace("top_logprobs", "logprobs")
        same: tuple[Any, ...] = (self.verdict, message, self.num_prompt)
        return (*same, self.text, self.tokens, self.finish) if exactly else same


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
        tokens: list[int] = []
        text, end = "", None
        try:
            async for event in self.stub.Generate(
                ask.grpc(), metadata=self.metadata, timeout=ANSWER_S
            ):
                said.append(str(event) if event.HasField("finished") else "")
                text += event.echo.text + event.delta.text
                tokens += event.delta.token_ids
                if event.HasField("finished"):
                    end = event.finished
        except grpc.aio.AioRpcError as error:
            message = error.details() or ""
            verdict = OF_CODE.get(error.code(), f"undocumented {error.code().name}")
            return Outcome(verdict=verdict, message=message, param=_param_in(message), raw=message)
        assert end is not None
        return _grpc_outcome(text, tokens, end, "".join(said))

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


def _grpc_outcome(text: str, tokens: list[int], end: inference_pb2.Finished, raw: str) -> Outcome:
    if end.finish_reason in OK_REASONS:
        return Outcome(
            verdict="ok",
            text=text,
            tokens=tuple(tokens),
            finish=OK_REASONS[end.finish_reason],
            num_prompt=end.usage.prompt_tokens,
            raw=raw,
        )
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
    tokens: list[int] = []
    text, finish, num_prompt = "", "", 0
    for document in documents:
        for choice in document["choices"]:
            shown = choice.get("delta") or choice.get("message") or {}
            text += choice.get("text") or shown.get("content") or ""
            tokens += choice.get("token_ids") or ()
            finish = choice.get("finish_reason") or finish
        num_prompt = (document.get("usage") or {}).get("prompt_tokens", num_prompt)
    return Outcome(
        verdict="ok",
        text=text,
        tokens=tuple(tokens),
        finish=finish,
        num_prompt=num_prompt,
        raw="" if stream else raw,
    )

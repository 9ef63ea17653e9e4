"""`buf curl`: the gateway's gRPC services by reflection alone, without any schema at hand."""

import base64
import json
import subprocess
import sys
import time
from pathlib import Path

from checks import API_KEY, GRPC, HAS_KEYS, MODEL, PROMPTS, QUESTION, cancelled, check, equal, main

BUF = str(Path(sys.executable).parent / "buf")
SERVICE = "quire.v1.InferenceService"
GREEDY = {"temperature": 0, "maxTokens": 8}


def command(path: str, *more: str, key: str = API_KEY) -> list[str]:
    """The command line for one method, or for a listing."""
    headers = []
    if HAS_KEYS:
        # Reflection needs a key too, and is told its own.
        headers = ["-H", f"authorization: Bearer {key}"]
        headers += ["--reflect-header", f"authorization: Bearer {API_KEY}"]
    address = f"http://{GRPC}/{path}".rstrip("/")
    return [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *headers, *more, address]


def run(path: str, *more: str, key: str = API_KEY) -> subprocess.CompletedProcess[str]:
    """Waits for it."""
    argv = command(path, *more, key=key)
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)


def call(method: str, body: object) -> list[dict[str, object]]:
    """The messages of the answer."""
    done = run(method, "-d", json.dumps(body))
    assert done.returncode == 0, done.stderr
    return list(_messages(done.stdout))


def _messages(text: str) -> list[dict[str, object]]:
    found, at, decoder = [], 0, json.JSONDecoder()
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        message, at = decoder.raw_decode(text, at)
        found.append(message)
    return found


def text_of(messages: list[dict[str, object]]) -> str:
    """Of a generated answer."""
    return "".join(message.get("delta", {}).get("text", "") for message in messages)


@check
def listing() -> None:
    """Reflection names the services and their methods."""
    services = run("", "--list-services").stdout.split()
    for name in (SERVICE, "inference.GRPCInferenceService", "grpc.health.v1.Health"):
        assert name in services, services
    methods = run("", "--list-methods").stdout.split()
    assert f"{SERVICE}/Generate" in methods, methods


@check
def health() -> None:
    """Health answers."""
    equal(call("grpc.health.v1.Health/Check", {}), [{"status": "SERVING"}])


@check
def models() -> None:
    """Models are listed."""
    assert MODEL in json.dumps(call(f"{SERVICE}/ListModels", {}))


@check
def generate() -> None:
    """A prompt and a chat stream their answers, which begin with started and end with finished."""
    for asked in (
        {"text": PROMPTS[0]},
        {"messages": {"messages": [{"role": "user", "content": QUESTION}]}},
    ):
        messages = call(f"{SERVICE}/Generate", {**asked, **GREEDY})
        assert "started" in messages[0], messages
        assert "finished" in messages[-1], messages
        assert "Paris" in text_of(messages), messages


@check
def infer() -> None:
    """The Open Inference Protocol's service answers too."""
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    tensor["contents"] = {"bytesContents": [base64.b64encode(PROMPTS[0].encode()).decode()]}
    asked = {"modelName": MODEL, "inputs": [tensor]}
    asked["parameters"] = {"temperature": {"doubleParam": 0}, "max_tokens": {"int64Param": 8}}
    (answer,) = call("inference.GRPCInferenceService/ModelInfer", asked)
    equal(len(answer["rawOutputContents"]), 1)


@check
def errors() -> None:
    """What is refused has its status code and names the field."""
    body = json.dumps({"text": "x", "temperature": -1})
    wrong = json.loads(run(f"{SERVICE}/Generate", "-d", body).stderr)
    equal(wrong["code"], "invalid_argument")
    assert "temperature" in wrong["message"]
    body = json.dumps({"text": "x", "model": "another"})
    equal(json.loads(run(f"{SERVICE}/Generate", "-d", body).stderr)["code"], "not_found")
    if HAS_KEYS:
        stranger = run(f"{SERVICE}/ListModels", "-d", "{}", key="wrong")
        equal(json.loads(stranger.stderr)["code"], "unauthenticated")


@check
def leaving() -> None:
    """A command that is interrupted cancels its request."""
    body = json.dumps({"text": PROMPTS[0], "maxTokens": 2000, "ignoreEos": True})
    with cancelled():
        running = subprocess.Popen(
            command(f"{SERVICE}/Generate", "-d", body), stdout=subprocess.PIPE, text=True
        )
        assert running.stdout is not None
        assert running.stdout.readline()
        time.sleep(0.5)
        running.terminate()
        running.wait(10)


if __name__ == "__main__":
    sys.exit(main())

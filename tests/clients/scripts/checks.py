"""What every script of a client shares: where Quire is, and how a check is said to have gone.

Runs inside the client's own environment: standard library only. A script registers its checks and
ends with `sys.exit(main())`. The runner counts the lines that begin with "ok " and "FAILED ".
"""

import os
import time
import traceback
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

BASE_URL = os.environ["CLIENTS_BASE_URL"].rstrip("/")
GRPC = os.environ["CLIENTS_GRPC"]
MODEL = os.environ["CLIENTS_MODEL"]
# Clients insist on some key; a gateway without keys looks at none.
HAS_KEYS = bool(os.environ.get("CLIENTS_API_KEY"))
API_KEY = os.environ.get("CLIENTS_API_KEY") or "none"
WORK = os.environ["CLIENTS_WORK"]
TOKENIZER = os.environ["CLIENTS_TOKENIZER"]

V1 = f"{BASE_URL}/v1"
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PROMPTS = ["The capital of France is", "One, two, three, four,", "def add(a, b):"]
CANCEL_S = 20.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_checks: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Registers a check; the first line of its docstring is its name."""
    _checks.append(function)
    return function


def main() -> int:
    """Runs all checks, also after one that failed; the exit status."""
    failed = 0
    for function in _checks:
        name = (function.__doc__ or function.__name__).strip().splitlines()[0].rstrip(".")
        started = time.monotonic()
        try:
            function()
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            traceback.print_exc()
        else:
            print(f"ok {name} ({time.monotonic() - started:.1f} s)", flush=True)
    return 1 if failed else 0


def equal(got: object, want: object) -> None:
    """Raises AssertionError showing both."""
    assert got == want, f"got {got!r}, want {want!r}"


def raises(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """The error of that very kind that the call raises."""
    try:
        got = call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}, but {got!r}"[:400])


def metric(name: str, label: str = "") -> float:
    """Sum of the gateway's samples of that name whose labels hold `label`."""
    request = urllib.request.Request(f"{BASE_URL}/metrics")
    request.add_header("Authorization", f"Bearer {API_KEY}")
    with _opener.open(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.split("{")[0].split(" ")[0] == name and label in line]
    assert found, f"no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def cancelled() -> AbstractContextManager[object]:
    """Within it a stream is left early; at its end the gateway must have cancelled the request."""
    return _Cancelled()


class _Cancelled(nullcontext[object]):
    def __enter__(self) -> object:
        self._before = metric("vllm:request_success_total", 'finished_reason="abort"')
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:
            return
        deadline = time.monotonic() + CANCEL_S
        while metric("vllm:request_success_total", 'finished_reason="abort"') <= self._before:
            assert time.monotonic() < deadline, "the request was not cancelled"
            time.sleep(0.1)

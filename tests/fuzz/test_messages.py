"""The gRPC messages that take longest to parse for their size, beside a stream that must go on.

The loop parses a message in one go. The round prints its longest stall: with messages of 1 MiB it
is to stay under 50 ms on a machine that is otherwise idle.
"""

import grpc
import pytest

from gateway.app import MESSAGE_BYTES
from tests.fuzz.asking import Asker
from tests.fuzz.asks import Call
from tests.fuzz.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
GENERATE = "/quire.v1.InferenceService/Generate"
INFER = "/inference.GRPCInferenceService/ModelInfer"
ROUNDS = 3


def number(value: int) -> bytes:
    """A varint."""
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def field(index: int, data: bytes) -> bytes:
    """One of a message, of bytes."""
    return number(index << 3 | 2) + number(len(data)) + data


def filled(piece: bytes) -> bytes:
    """So many of them that a message around them has just the room."""
    return piece * ((MESSAGE_BYTES - 32) // len(piece))


def worst() -> dict[str, tuple[str, bytes]]:
    """By what they hold: method, and bytes up to the bound."""
    keys = b"".join(field(4, field(1, b"%06x" % i)) for i in range((MESSAGE_BYTES - 32) // 10))
    return {
        "messages": (GENERATE, field(4, filled(field(1, b"")))),
        "token ids": (GENERATE, field(3, field(1, filled(b"\1")))),
        "prompts over prompts": (GENERATE, filled(field(4, field(1, b"")))),
        "biases": (GENERATE, filled(field(20, b""))),
        "stops": (GENERATE, filled(field(10, b""))),
        "unknown fields": (GENERATE, filled(number(100 << 3) + b"\1")),
        "tensors": (INFER, filled(field(5, b""))),
        "parameters": (INFER, keys),
        "a tensor's parameters": (INFER, field(5, filled(field(4, b"")))),
        "contents": (INFER, field(5, field(5, filled(field(8, b""))))),
    }


def test_the_worst_messages_are_refused(fuzzed: World, asker: Asker) -> None:
    """One after the other, by what they hold; a byte too many by its length."""
    for what, (method, data) in worst().items():
        assert MESSAGE_BYTES - 64 < len(data) <= MESSAGE_BYTES, what
        with fuzzed.round(f"1 MiB of {what}"):
            for _ in range(ROUNDS):
                [(code, _)] = asker.together([asker.call(Call(method=method, data=data))])
                assert code is grpc.StatusCode.INVALID_ARGUMENT, what
    longer = Call(method=GENERATE, data=field(2, b"x" * MESSAGE_BYTES))
    [(code, said)] = asker.together([asker.call(longer)])
    assert (code, str(MESSAGE_BYTES) in said) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)

"""Batches with logprobs from the wire: columns that fit, or no batch at all."""

import pytest
from quire.v1 import common_pb2, inference_pb2, worker_pb2

from gateway import codec
from gateway.core.output import Chunk
from gateway.core.types import MIN_LOGPROB, TokenLogprob


def message(*logprobs: worker_pb2.TokenLogprobs) -> worker_pb2.TokensResponse:
    """Two entries, of two tokens and of one."""
    batch = worker_pb2.TokenBatch(
        sequence=1,
        request_ids=b"a" * 16 + b"b" * 16,
        attempts=[1, 1],
        first_positions=[0, 4],
        num_tokens=[2, 1],
        token_ids=[5, 6, 7],
        finish_reasons=[common_pb2.FINISH_REASON_UNSPECIFIED] * 2,
        num_cached_tokens=[0, 0],
        logprobs=logprobs,
    )
    return worker_pb2.TokensResponse(batch=batch)


def columns(**changes: object) -> worker_pb2.TokenLogprobs:
    """Rows of entry 0: one of its prompt, two of its tokens, with two tops each."""
    fields: dict[str, object] = {
        "entry": 0,
        "num_prompt_rows": 1,
        "logprobs": [-1.0, -2.0, -3.0],
        "num_top": 2,
        "top_token_ids": [1, 2, 3, 4, 5, 6],
        "top_logprobs": [-0.5] * 6,
    }
    return worker_pb2.TokenLogprobs(**(fields | changes))  # type: ignore[arg-type]


def test_rows_by_entry() -> None:
    """Those of the prompt first, tops of a row together."""
    batch = codec.decode_batch(message(columns()))
    assert batch is not None
    assert list(batch.logprobs) == [0]
    rows = batch.logprobs[0]
    assert rows.num_prompt_rows == 1
    assert rows.row(1, 5) == TokenLogprob(token_id=5, logprob=-2.0, top=((3, -0.5), (4, -0.5)))


def test_most_batches_have_none() -> None:
    """And cost nothing more."""
    batch = codec.decode_batch(message())
    assert batch is not None
    assert batch.logprobs == {}


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -1e30])
def test_json_has_no_infinities(value: float) -> None:
    """What is less than the floor, or no number, is the floor."""
    row = columns(logprobs=[0, value, 0], top_logprobs=[0, 0, value, 0, 0, 0])
    batch = codec.decode_batch(message(row))
    assert batch is not None
    found = batch.logprobs[0].row(1, 5)
    assert (found.logprob, found.top[0][1]) == (MIN_LOGPROB, MIN_LOGPROB)


@pytest.mark.parametrize(
    "rows",
    [
        [columns(entry=2)],
        [columns(), columns()],
        [columns(num_prompt_rows=0)],
        [columns(logprobs=[-1.0] * 4)],
        [columns(num_top=1)],
        [columns(top_token_ids=[1] * 5)],
        [columns(top_logprobs=[-1.0] * 7)],
        [columns(num_prompt_rows=2**32 - 1)],
    ],
)
def test_columns_that_do_not_fit(rows: list[worker_pb2.TokenLogprobs]) -> None:
    """No index outside a table is made of what a worker says."""
    with pytest.raises(codec.DecodeError):
        codec.decode_batch(message(*rows))


def bytes_of(token_id: int) -> bytes:
    """A letter."""
    return bytes([token_id])


def test_what_a_grpc_client_is_told() -> None:
    """Tokens with their bytes and the likeliest in their place; a prompt's first has no logprob."""
    entry = TokenLogprob(token_id=66, logprob=-0.5, top=((66, -0.5), (67, -1.5)))
    shown = inference_pb2.TokenLogprob(
        token_id=66,
        token=b"B",
        logprob=-0.5,
        top=[
            inference_pb2.TopLogprob(token_id=66, token=b"B", logprob=-0.5),
            inference_pb2.TopLogprob(token_id=67, token=b"C", logprob=-1.5),
        ],
    )
    delta = codec.delta(Chunk(text="B", token_ids=[66], logprobs=[entry]), bytes_of, 0).delta
    assert delta == inference_pb2.Delta(text="B", token_ids=[66], logprobs=[shown])
    echo = codec.echo("AB", [65, 66], [entry], bytes_of, first=True).echo
    first = inference_pb2.TokenLogprob(token_id=65, token=b"A")
    assert echo == inference_pb2.Echo(text="AB", token_ids=[65, 66], logprobs=[first, shown])
    assert not first.HasField("logprob")
    assert len(codec.echo("A", [65], [], bytes_of, first=True).echo.logprobs) == 1
    assert len(codec.echo("AB", [65, 66], None, bytes_of, first=True).echo.logprobs) == 0
    later = codec.echo("", [66], [entry], bytes_of, first=False).echo
    assert list(later.logprobs) == [shown]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("first_positions", [0]),
        ("finish_reasons", [0, 0, 0]),
        ("num_tokens", [1, 1]),
        ("request_ids", b"a" * 31),
        ("token_ids", [5, 6]),
    ],
)
def test_batches_that_do_not_fit(column: str, values: list[int] | bytes) -> None:
    """Entries, ids and tokens must count the same."""
    broken = message()
    broken.batch.ClearField(column)  # type: ignore[arg-type]
    broken.batch.MergeFrom(worker_pb2.TokenBatch(**{column: values}))  # type: ignore[arg-type]
    with pytest.raises(codec.DecodeError):
        codec.decode_batch(broken)

"""The native attention against dense float64, in both dtypes; bits; refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kernels import reference
from kernels.native import operators
from tests.kernels.cases import FAULTS, Case, Tensors, build, expected, plant, worst
from tests.kernels.mistakes import ATTENTION, STORE, message_of
from tests.kernels.native import needs_native
from tests.kernels.random_shapes import random_cases
from tests.kernels.shapes import CASES
from tests.kernels.storing import differs

pytestmark = needs_native
DTYPES = (torch.float32, torch.bfloat16)

# Around the span of 256 keys: lengths, windows, chunks that end and begin there.
SPANS = [
    *(Case(rows=((1, n),), num_heads=3, num_kv_heads=1) for n in (255, 256, 257, 511, 513, 1025)),
    *(Case(rows=((1, 700), (40, 700)), window=w) for w in (1, 188, 189, 190, 255, 256, 257, 500)),
    Case(rows=((300, 300), (3, 515), (1, 256), (77, 600)), num_heads=6),
    Case(rows=((40, 290), (1, 530)), num_heads=40, num_kv_heads=1, sinks=True),
    Case(rows=((9, 270), (1, 270)), head_dim=72, block_size=5, softcap=8.0),
    Case(rows=((9, 270), (1, 600)), head_dim=256, block_size=128),
    # Of every number of heads at once, in place and laid side by side; dims that quads don't fill.
    *(Case(rows=((1, 290), (2, 44)), num_heads=n, num_kv_heads=1) for n in range(1, 17)),
    *(Case(rows=((1, 290), (3, 44)), head_dim=d) for d in (65, 70, 91)),
]


def error_of(case: Case, fault: str | None = None) -> float:
    tensors = build(case)
    want = expected(case, tensors)
    if fault is not None:
        case, tensors = plant(fault, case, tensors)
    return worst(tensors.call(operators.paged_attention, case), want, case.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_awkward_shapes(dtype: torch.dtype) -> None:
    errors = {str(case): error_of(case.at(dtype)) for case in [*CASES, *SPANS]}
    assert {case: error for case, error in errors.items() if error > 1} == {}


@settings(max_examples=120, deadline=None)
@given(case=random_cases(max_len=300))
def test_random_mixes(case: Case) -> None:
    assert error_of(case) <= 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault: str, dtype: torch.dtype) -> None:
    case = Case(rows=((1, 37), (3, 21)), window=20, block_size=8, num_heads=2, dtype=dtype)
    assert error_of(case) <= 1
    assert error_of(case, fault) > 1


def alone(case: Case, tensors: Tensors, row: int, first: int, count: int) -> torch.Tensor:
    """Query tokens first .. first + count of a row, in a call of their own."""
    query_len, seq_len = case.rows[row]
    start = int(tensors.query_start_loc[row]) + first
    part = replace(
        tensors,
        q=tensors.q[start : start + count],
        block_tables=tensors.block_tables[row : row + 1],
        seq_lens=torch.tensor([seq_len - query_len + first + count], dtype=torch.int32),
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
    )
    return part.call(operators.paged_attention, replace(case, rows=((count, seq_len),)))


def assert_same_in_any_chunk(case: Case, threads: int) -> None:
    """Decoded alone, in chunks of any size, beside other rows, on so many threads."""
    tensors = build(case)
    torch.set_num_threads(threads)
    together = tensors.call(operators.paged_attention, case)
    torch.set_num_threads(1)
    for row, (query_len, _) in enumerate(case.rows):
        for size in sorted({1, min(7, query_len), min(32, query_len), query_len}):
            for first in range(0, query_len, size):
                count = min(size, query_len - first)
                start = int(tensors.query_start_loc[row]) + first
                part = alone(case, tensors, row, first, count)
                assert torch.equal(part, together[start : start + count]), (row, size, first)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 40, 300])
def test_a_token_has_the_same_bits_in_any_chunk(
    window: int, dtype: torch.dtype, threads: int
) -> None:
    rows = ((70, 590), (1, 90), (33, 33), (1, 700))
    case = Case(rows=rows, num_heads=6, num_kv_heads=2, window=window, softcap=20.0, sinks=True)
    assert_same_in_any_chunk(case.at(dtype), threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "head_dim", "block_size"),
    [(1, 128, 16), (1, 70, 8), (2, 80, 4), (4, 256, 128), (5, 72, 5), (7, 64, 16), (16, 96, 32)],
)
def test_so_it_has_with_any_number_of_heads(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    rows = ((40, 300), (1, 270), (9, 9))
    case = Case(rows=rows, num_heads=group, num_kv_heads=1, head_dim=head_dim)
    assert_same_in_any_chunk(replace(case, block_size=block_size, dtype=dtype), 2)


def test_a_row_with_nan_leaves_the_others_alone() -> None:
    case = Case(rows=((1, 40), (5, 33), (1, 300)))
    tensors = build(case)
    good = tensors.call(operators.paged_attention, case)
    tensors.k_cache[tensors.block_tables[1, 0]] = float("nan")
    bad = tensors.call(operators.paged_attention, case)
    assert torch.equal(bad[0], good[0])
    assert torch.equal(bad[6], good[6])
    assert bad[1:6].isnan().all()


def test_infinite_scores_give_nan_as_the_twin_does() -> None:
    case = Case(rows=((1, 20),))
    tensors = build(case)
    tensors.k_cache[tensors.block_tables[0, 0], :, 3] = float("inf")
    tensors = replace(tensors, q=tensors.q.abs())
    for function in (operators.paged_attention, reference.paged_attention):
        assert tensors.call(function, case).isnan().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_lens": torch.tensor([9, 2], dtype=torch.int32)}, "row 1: seq_lens"),
        ({"seq_lens": torch.tensor([-1, 17], dtype=torch.int32)}, "row 0: seq_lens"),
        ({"query_start_loc": torch.tensor([0, 2, 1], dtype=torch.int32)}, "row 1: seq_lens"),
        ({"query_start_loc": torch.tensor([0, 1, 9], dtype=torch.int32)}, "row 0: seq_lens"),
        ({"seq_lens": torch.tensor([9, 49], dtype=torch.int32)}, "row 1: its block table is too"),
        ({"block_tables": torch.tensor([[0, 0, 0], [1, 9, 0]])}, "row 1: a block is outside"),
        ({"block_tables": torch.tensor([[-1, 0, 0], [1, 2, 0]])}, "row 0: a block is outside"),
    ],
)
def test_values_that_point_outside_are_refused(changes: dict[str, Any], words: str) -> None:
    case = Case(rows=((1, 9), (3, 17)))
    changes = {name: value.to(torch.int32) for name, value in changes.items()}
    tensors = replace(build(case), **changes)
    with pytest.raises(ValueError, match=words):
        tensors.call(operators.paged_attention, case)


@pytest.mark.parametrize("name", ATTENTION | STORE)
def test_mistakes_are_refused(name: str) -> None:
    message = message_of(name, operators.paged_attention, operators.store_kv)
    assert (ATTENTION | STORE)[name] in message


def test_half_precision_is_refused() -> None:
    case = Case(rows=((1, 9),)).at(torch.float16)
    with pytest.raises(ValueError, match=r"native kernels take fp32 and bf16, got torch\.float16"):
        build(case).call(operators.paged_attention, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "block_size"),
    [(0, 64, 16), (1, 64, 4), (37, 80, 16), (19, 256, 5), (700, 64, 16), (9, 3, 4)],
)
def test_store(num_tokens: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    assert not differs(operators.store_kv, num_tokens, head_dim, block_size, 3, dtype)


@pytest.mark.parametrize("slot", [-2, 10_000])
def test_a_slot_outside_is_refused_and_nothing_is_stored(slot: int) -> None:
    tensors = build(Case(rows=((1, 9), (3, 17))))
    before = tensors.k_cache.clone()
    k = torch.ones(3, 2, 64)
    with pytest.raises(ValueError, match="slot of token 2 is outside the cache"):
        operators.store_kv(k, k, tensors.k_cache, tensors.v_cache, torch.tensor([0, -1, slot]))
    assert torch.equal(tensors.k_cache.nan_to_num(7.0), before.nan_to_num(7.0))

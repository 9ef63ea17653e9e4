"""The torch twins against dense float64 attention, in every dtype; plans; refusals."""

import pytest
import torch
from hypothesis import given, settings

from kernels import reference
from kernels.checks import check_runs_triton
from tests.kernels.cases import FAULTS, TOLERANCES, Case, build, expected, plant, worst
from tests.kernels.mistakes import ATTENTION, STORE, message_of
from tests.kernels.random_shapes import random_cases
from tests.kernels.shapes import CASES
from tests.kernels.storing import differs


def error_of(case: Case, fault: str | None = None) -> float:
    tensors = build(case)
    want = expected(case, tensors)
    if fault is not None:
        case, tensors = plant(fault, case, tensors)
    return worst(tensors.call(reference.paged_attention, case), want, case.dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_awkward_shapes(dtype: torch.dtype) -> None:
    errors = {str(case): error_of(case.at(dtype)) for case in CASES}
    assert {case: error for case, error in errors.items() if error > 1} == {}


@settings(max_examples=60, deadline=None)
@given(case=random_cases(max_len=150))
def test_random_mixes(case: Case) -> None:
    assert error_of(case) <= 1


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault: str, dtype: torch.dtype) -> None:
    case = Case(rows=((1, 37), (3, 21)), window=20, block_size=8, num_heads=2, dtype=dtype)
    assert error_of(case) <= 1
    assert error_of(case, fault) > 1


def test_one_plan_serves_all_layers_of_a_step() -> None:
    case = Case(rows=((1, 33), (6, 40), (1, 5)), window=12)
    tensors = build(case)
    plan = reference.make_attention_plan(
        tensors.block_tables, tensors.seq_lens, tensors.query_start_loc, 16, case.window
    )
    for _ in range(2):
        out = tensors.call(reference.paged_attention, case, plan=plan)
        assert worst(out, expected(case, tensors), case.dtype) <= 1


def test_a_plan_of_another_window_is_refused() -> None:
    case = Case(rows=((1, 33),))
    tensors = build(case)
    plan = reference.make_attention_plan(
        tensors.block_tables, tensors.seq_lens, tensors.query_start_loc, 16, 8
    )
    with pytest.raises(AssertionError, match="another window"):
        tensors.call(reference.paged_attention, case, plan=plan)


def test_one_long_row_does_not_pad_the_others() -> None:
    lens = torch.tensor([8_000, *range(1, 64)], dtype=torch.int32)
    tables = torch.zeros((64, 500), dtype=torch.int32)
    starts = torch.arange(65, dtype=torch.int32)
    plan = reference.make_attention_plan(tables, lens, starts, 16)
    gathered = sum(len(group.blocks) for group in plan.groups)
    needed = sum(-(-n // 16) for n in lens.tolist())
    assert gathered <= needed / reference.GROUP_FILL
    assert len(plan.groups) <= 6


def test_a_group_gathers_a_bounded_number_of_tokens() -> None:
    lens = torch.full((20,), 768, dtype=torch.int32)
    tables = torch.zeros((20, 48), dtype=torch.int32)
    plan = reference.make_attention_plan(tables, lens, torch.arange(21, dtype=torch.int32), 16)
    assert [len(group.tokens) for group in plan.groups] == [5, 5, 5, 5]
    assert all(len(g.blocks) * 16 <= reference.MAX_GATHERED_TOKENS for g in plan.groups)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "block_size"), [(0, 64, 16), (1, 64, 4), (37, 80, 16), (19, 256, 5)]
)
def test_store(num_tokens: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    assert not differs(reference.store_kv, num_tokens, head_dim, block_size, 3, dtype)


@pytest.mark.parametrize("name", ATTENTION | STORE)
def test_mistakes_are_refused(name: str) -> None:
    message = message_of(name, reference.paged_attention, reference.store_kv)
    assert (ATTENTION | STORE)[name] in message


def test_compiled_kernels_refuse_cpu_tensors() -> None:
    with pytest.raises(ValueError, match="take CUDA tensors, got cpu"):
        check_runs_triton(torch.device("cpu"), object())

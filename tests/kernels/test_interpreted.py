"""The Triton kernels, run by the interpreter on CPU tensors, against dense float64 attention."""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.kernels import interpreted
from tests.kernels.cases import FAULTS, Case
from tests.kernels.mistakes import ATTENTION, STORE
from tests.kernels.random_shapes import random_cases
from tests.kernels.shapes import CASES, QUICK

# The fixture is one process for all examples, so that sharing it is meant.
SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_quick_shapes(interpreter: ProcessPoolExecutor, case: Case) -> None:
    assert interpreter.submit(interpreted.attention_error, case).result() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(interpreter: ProcessPoolExecutor, dtype: torch.dtype) -> None:
    case = Case(rows=((1, 19), (4, 9)), num_heads=3, num_kv_heads=1, dtype=dtype)
    assert interpreter.submit(interpreted.attention_error, case).result() <= 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_awkward_shapes(interpreter: ProcessPoolExecutor) -> None:
    """All cases, every third one in bf16."""
    cases = [case.at(torch.bfloat16) if i % 3 == 2 else case for i, case in enumerate(CASES)]
    errors = dict(zip(cases, interpreter.map(interpreted.attention_error, cases), strict=True))
    assert {str(case): error for case, error in errors.items() if error > 1} == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=20, deadline=None, suppress_health_check=SHARED)
@given(case=random_cases(max_len=70))
def test_random_mixes(interpreter: ProcessPoolExecutor, case: Case) -> None:
    assert interpreter.submit(interpreted.attention_error, case).result() <= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(interpreter: ProcessPoolExecutor, fault: str) -> None:
    case = Case(rows=((1, 37), (3, 21)), window=20, block_size=8, num_heads=2)
    assert interpreter.submit(interpreted.attention_error, case, fault).result() > 1


@pytest.mark.parametrize("window", [0, 40])
def test_a_row_has_the_same_bits_alone(interpreter: ProcessPoolExecutor, window: int) -> None:
    case = Case(rows=((1, 90), (2, 34), (1, 5)), num_kv_heads=1, num_heads=2, window=window)
    assert interpreter.submit(interpreted.alone_equals_batched, case).result()


def test_small_scratch_means_more_launches(interpreter: ProcessPoolExecutor) -> None:
    """One row a launch: the scratch of a row with 2 heads and 2 splits is 1,056 bytes."""
    case = Case(rows=((1, 70), (1, 9), (1, 33)), num_kv_heads=1, num_heads=2)
    assert interpreter.submit(interpreted.launches_bounded, case, 1100).result() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "block_size"), [(0, 64, 16), (1, 64, 4), (37, 80, 16), (19, 256, 5)]
)
def test_store(
    interpreter: ProcessPoolExecutor,
    num_tokens: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    arguments = (num_tokens, head_dim, block_size, 3, dtype)
    assert not interpreter.submit(interpreted.store_differs, *arguments).result()


def test_mistakes_are_refused(interpreter: ProcessPoolExecutor) -> None:
    for name, words in (ATTENTION | STORE).items():
        assert words in interpreter.submit(interpreted.refusal, name).result(), name


def test_rows_longer_than_their_tables_are_refused(interpreter: ProcessPoolExecutor) -> None:
    for length, words in ((48, ""), (49, "max_seq_len must be at most 48"), (-1, "got -1")):
        said = interpreter.submit(interpreted.refusal_of_length, length).result()
        assert words in said, length
        assert bool(said) == bool(words), length

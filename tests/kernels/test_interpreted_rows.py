"""Norm, rotary embedding with store, and activation in Triton's interpreter, against float64."""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels import interpreted_rows
from tests.kernels.row_cases import (
    DTYPES,
    GATES,
    HEADS,
    NORMS,
    ROTARIES,
    GateCase,
    NormCase,
    RotaryCase,
    planted,
)

SHARED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
ALL: list[NormCase | GateCase | RotaryCase] = [*NORMS, *GATES, *ROTARIES]


def test_every_tenth_awkward_shape(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(interpreted_rows.errors, ALL[::10]).result() == {}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_awkward_shapes(interpreter: ProcessPoolExecutor) -> None:
    """The others."""
    others = [case for index, case in enumerate(ALL) if index % 10]
    for found in interpreter.map(interpreted_rows.errors, (others[::2], others[1::2])):
        assert found == {}


@st.composite
def random_cases(draw: st.DrawFn) -> NormCase | GateCase | RotaryCase:
    num_tokens, dtype = draw(st.integers(0, 4)), draw(st.sampled_from(DTYPES))
    seed, kind = draw(st.integers(0, 999)), draw(st.integers(0, 2))
    flags = draw(st.booleans()), draw(st.booleans())
    if kind == 2:
        head_dim, half = draw(st.sampled_from(HEADS))
        return RotaryCase(
            num_tokens=num_tokens,
            head_dim=head_dim,
            half=draw(st.integers(1, half)),
            num_heads=draw(st.integers(1, 5)),
            num_kv_heads=draw(st.integers(1, 3)),
            dtype=dtype,
            normed=flags[0],
            offset=flags[1],
            seed=seed,
        )
    dim, apart = draw(st.integers(2, 700)), draw(st.integers(0, 2))
    if kind:
        return NormCase(
            num_tokens=num_tokens,
            dim=dim,
            dtype=dtype,
            delta=flags[0],
            offset=flags[1],
            apart=apart,
            seed=seed,
        )
    return GateCase(
        num_tokens=num_tokens, dim=dim, dtype=dtype, gelu=flags[0], apart=apart, seed=seed
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=60, deadline=None, suppress_health_check=SHARED)
@given(case=random_cases())
def test_random_shapes(
    interpreter: ProcessPoolExecutor, case: NormCase | GateCase | RotaryCase
) -> None:
    assert interpreter.submit(interpreted_rows.errors, [case]).result() == {}


@pytest.mark.parametrize("fault", ["positions", "slots"])
def test_planted_fault_is_seen(interpreter: ProcessPoolExecutor, fault: str) -> None:
    case = RotaryCase(num_tokens=4, head_dim=18, half=9)
    assert interpreter.submit(interpreted_rows.errors, [case]).result() == {}
    assert interpreter.submit(interpreted_rows.errors, [planted(case, fault)]).result() != {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_has_the_bits_of_torch(
    interpreter: ProcessPoolExecutor, dtype: torch.dtype
) -> None:
    case = RotaryCase(num_tokens=4, head_dim=80, half=20, dtype=dtype)
    assert interpreter.submit(interpreted_rows.bits_of_torch, case).result()


@pytest.mark.parametrize("gelu", [False, True])
def test_gates_far_out(interpreter: ProcessPoolExecutor, gelu: bool) -> None:
    assert interpreter.submit(interpreted_rows.extremes, gelu).result() < 1e-6


def test_a_row_has_the_same_bits_alone(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(interpreted_rows.rows_alone).result()


def test_mistakes_are_refused(interpreter: ProcessPoolExecutor) -> None:
    for name, words in interpreted_rows.REFUSALS.items():
        assert words in interpreter.submit(interpreted_rows.refusal, name).result(), name

"""Native log probabilities: a float64 softmax's, and the worker's own by torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpu_worker import scoring
from kernels import reference_sampling
from kernels.native import sampling
from kernels.sampling import MAX_TOP
from tests.kernels.native import needs_native
from tests.kernels.sampling_cases import random_logits

pytestmark = needs_native
NAN, INFINITY = float("nan"), float("inf")


def error_of(logits: Tensor, tokens: Tensor, num_top: int) -> float:
    """Greatest difference from the twin, relative where a logprob is large; ids must be equal."""
    own, ids, values = sampling.logprobs(logits, tokens, num_top)
    want, want_ids, want_values = reference_sampling.logprobs(logits, tokens, num_top)
    assert torch.equal(ids, want_ids)
    found = torch.cat((own[:, None], values), 1).double()
    wanted = torch.cat((want[:, None], want_values), 1).double()
    far = wanted.isinf()
    assert torch.equal(found[far], wanted[far])
    assert torch.equal(found.isnan(), wanted.isnan())
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1))[~far].nan_to_num().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["plain", "tied", "peaked", "far"]),
    vocabulary=st.one_of(st.integers(1, 70), st.integers(1000, 3000)),
    num_top=st.integers(0, MAX_TOP),
    seed=st.integers(0, 2**20),
)
def test_a_softmax(dtype: torch.dtype, kind: str, vocabulary: int, num_top: int, seed: int) -> None:
    logits = random_logits(kind, 5, vocabulary, seed).to(dtype)
    tokens = torch.randint(0, vocabulary, (5,), generator=torch.Generator().manual_seed(seed))
    tokens[seed % 5] = vocabulary - 1
    before = logits.clone()
    assert error_of(logits, tokens, num_top) < 1e-5
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", ["plain", "tied", "far"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_real_vocabulary(kind: str, dtype: torch.dtype) -> None:
    logits = random_logits(kind, 8, 49_152, 5).to(dtype)
    assert error_of(logits, torch.arange(8) * 7000, MAX_TOP) < 1e-5


def test_equal_logits_go_by_id() -> None:
    """Also those with which the list of the likeliest is full, and those of no weight."""
    logits = torch.full((3, 90), 1.5)
    logits[1, 40:60] = 2.0
    logits[2, :] = -INFINITY
    logits[2, 33] = 0.0
    assert error_of(logits, torch.tensor([89, 0, 33]), MAX_TOP) < 1e-6
    _, ids, values = sampling.logprobs(logits, torch.tensor([89, 0, 33]), 3)
    assert ids.tolist() == [[0, 1, 2], [40, 41, 42], [33, 0, 1]]
    assert values[2].tolist() == [0.0, -INFINITY, -INFINITY]


@pytest.mark.parametrize("place", [0, 1, 17, 49])
@pytest.mark.parametrize("bad", [NAN, INFINITY])
def test_what_is_not_finite_is_nan_in_its_row_alone(bad: float, place: int) -> None:
    logits = torch.zeros(3, 50)
    logits[1, place] = bad
    own, ids, values = sampling.logprobs(logits, torch.tensor([4, 4, 4]), 2)
    assert own.isnan().tolist() == values[:, 0].isnan().tolist() == [False, True, False]
    assert ids.min() >= 0
    assert ids.max() < 50


def test_nothing_likely_and_no_token() -> None:
    logits = torch.stack((torch.full((9,), -INFINITY), torch.zeros(9)))
    own, _, values = sampling.logprobs(logits, torch.tensor([0, -1]), 1)
    assert own.isnan().all()
    assert values[:, 0].isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    logits = random_logits("plain", 64, 3001, 9).to(dtype)
    tokens = torch.arange(64) * 46
    torch.set_num_threads(2)
    together = sampling.logprobs(logits, tokens, 5)
    for row in range(64):
        torch.set_num_threads(1 + row % 3)
        alone = sampling.logprobs(logits[row : row + 1], tokens[row : row + 1], 5)
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[row : row + 1], part)


def test_rows_of_a_wider_tensor() -> None:
    wide = random_logits("plain", 6, 500, 2)
    assert error_of(wide[::2, :300], torch.tensor([1, 2, 299]), 4) < 1e-5


def test_no_rows() -> None:
    own, ids, _ = sampling.logprobs(torch.empty(0, 7), torch.empty(0, dtype=torch.int64), 9)
    assert (own.shape, ids.shape) == ((0,), (0, 7))


@pytest.mark.parametrize(
    ("logits", "tokens", "num_top", "words"),
    [
        (torch.zeros(2, 9), torch.tensor([0, 9]), 1, "below 9, got 9 for row 1"),
        (torch.zeros(2, 9), torch.tensor([0]), 1, "one entry for each"),
        (torch.zeros(2, 9), torch.tensor([0, 1], dtype=torch.int32), 1, "int64"),
        (torch.zeros(2, 9), torch.tensor([0, 1]), MAX_TOP + 1, "0 to 20, got 21"),
        (torch.zeros(2, 9), torch.tensor([0, 1]), -1, "0 to 20, got -1"),
        (torch.zeros(2, 9, dtype=torch.float16), torch.tensor([0, 1]), 1, "fp32 and bf16"),
        (torch.zeros(9, 2).T, torch.tensor([0, 1]), 1, "logits"),
    ],
)
def test_refused(logits: Tensor, tokens: Tensor, num_top: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sampling.logprobs(logits, tokens, num_top)


def test_the_worker_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives what it gives by torch; more than MAX_TOP are torch's."""
    logits, tokens = random_logits("tied", 4, 700, 1), torch.tensor([0, 5, 699, 5])
    calls = 0

    def counting(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        return sampling.logprobs(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(scoring, "_native_logprobs", lambda: counting)
    native, many = scoring.score(logits, tokens, MAX_TOP), scoring.score(logits, tokens, 30)
    assert calls == 1
    monkeypatch.setattr(scoring, "_native_logprobs", lambda: None)
    plain = scoring.score(logits, tokens, MAX_TOP)
    assert np.array_equal(native.top_token_ids, plain.top_token_ids)
    assert native.top_token_ids.dtype == plain.top_token_ids.dtype
    assert np.allclose(native.logprobs, plain.logprobs, atol=1e-5)
    assert np.allclose(native.top_logprobs, plain.top_logprobs, atol=1e-5)
    assert many.top_token_ids.shape == (4, 30)

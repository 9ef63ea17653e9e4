"""The native sampler chooses the tokens of the worker's own, from the same logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.ports import SamplingSpec
from kernels.native import sampling
from kernels.sampling import RowTokens
from tests.kernels.native import needs_native
from tests.kernels.sampling_cases import Row, on_host, random_logits, random_rows, tensors

pytestmark = needs_native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["plain", "tied", "peaked", "far"]),
    vocabulary=st.one_of(st.integers(1, 70), st.integers(1000, 3000)),
    changed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_chooses_as_the_worker_does(
    dtype: torch.dtype, kind: str, vocabulary: int, changed: bool, seed: int
) -> None:
    logits = random_logits(kind, 5, vocabulary, seed).to(dtype)
    rows = random_rows(5, vocabulary, seed, changed=changed)
    before = logits.clone()
    assert sampling.sample(logits, tensors(rows, vocabulary)).tolist() == on_host(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", ["plain", "tied", "far"])
def test_a_real_vocabulary(kind: str) -> None:
    """Every way to sample over 49,152 logits, flat ones too, on two threads."""
    torch.set_num_threads(2)
    specs = [
        SamplingSpec(max_tokens=1, temperature=t, top_p=p, top_k=k, min_p=m, seed=17 * k + 3)
        for t in (0.2, 1.0, 5.0)
        for p in (1.0, 0.9, 0.2)
        for k in (0, 5, 1000, 30_000)
        for m in (0.0, 0.001)
    ]
    rows = [Row(spec=spec, position=at) for at, spec in enumerate(specs)]
    logits = random_logits(kind, len(rows), 49_152, 5)
    assert sampling.sample(logits, tensors(rows, 49_152)).tolist() == on_host(logits, rows)


def test_all_logits_equal() -> None:
    """Everything stands in one bucket, in the order of ids."""
    logits = torch.full((6, 5000), 2.5)
    rows = [
        Row(spec=SamplingSpec(max_tokens=1, temperature=1.0, top_k=k, top_p=p, seed=k + 1))
        for k, p in ((0, 1.0), (7, 1.0), (0, 0.3), (4999, 1.0), (40, 0.5), (5000, 0.999))
    ]
    assert sampling.sample(logits, tensors(rows, 5000)).tolist() == on_host(logits, rows)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("at", [0, 33, 69])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_choice_fails_alone(bad: float | None, at: int, temperature: float) -> None:
    logits = torch.randn(3, 70)
    if bad is None:
        logits[1] = float("-inf")
    else:
        logits[1, at] = bad
    rows = [Row(spec=SamplingSpec(max_tokens=1, temperature=temperature, seed=4))] * 3
    found = sampling.sample(logits, tensors(rows, 70)).tolist()
    assert found[1] == -1
    assert found == on_host(logits, rows)
    assert min(found[0], found[2]) >= 0


def test_rows_do_not_depend_on_each_other() -> None:
    logits = random_logits("plain", 64, 1000, 3)
    rows = random_rows(64, 1000, 9, changed=True)
    together = sampling.sample(logits, tensors(rows, 1000)).tolist()
    for row in range(64):
        part = slice(row, row + 1)
        assert sampling.sample(logits[part], tensors(rows[part], 1000)).tolist() == together[part]


def test_draws_follow_the_probabilities() -> None:
    """20,000 draws of eight tokens: every share within four standard deviations."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.5, -3.0, 0.5, 2.5]])
    rows = [
        Row(spec=SamplingSpec(max_tokens=1, temperature=0.8, seed=seed)) for seed in range(20_000)
    ]
    drawn = sampling.sample(logits.expand(len(rows), -1), tensors(rows, 8)).numpy()
    shares = np.bincount(drawn, minlength=8) / len(rows)
    expected = torch.softmax(logits[0].double() / 0.8, 0).numpy()
    deviation = np.sqrt(expected * (1 - expected) / len(rows))
    assert (np.abs(shares - expected) < 4 * deviation).all()


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    rows = [Row(spec=SamplingSpec(max_tokens=1))] * 2
    columns = tensors(rows, 50)
    for token in (-1, 50):
        bad = RowTokens(starts=torch.tensor([0, 0, 1]), tokens=torch.tensor([token]))
        with pytest.raises(ValueError, match="a token is outside the vocabulary"):
            sampling.sample(torch.randn(2, 50), replace(columns, forbidden=bad))


def test_half_precision_is_refused() -> None:
    rows = [Row(spec=SamplingSpec(max_tokens=1))]
    with pytest.raises(ValueError, match="native kernels take fp32 and bf16"):
        sampling.sample(torch.randn(1, 50).half(), tensors(rows, 50))

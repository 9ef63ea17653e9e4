"""The torch twin of the sampler chooses the tokens of the worker's own; its noise is Philox's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker import sampler, scoring
from kernels import reference_sampling
from tests.kernels.interpreted_sampling import Case


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["plain", "tied", "peaked", "far"]),
    vocabulary=st.one_of(st.integers(1, 40), st.integers(1000, 3000)),
    changed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_chooses_as_the_worker_does(kind: str, vocabulary: int, changed: bool, seed: int) -> None:
    case = Case(kind=kind, num_rows=3, vocabulary=vocabulary, changed=changed, seed=seed)
    assert case.differences(reference_sampling.sample) == []


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 11, 2**64 - 1])
def test_noise(seed: int) -> None:
    ids = torch.arange(1003)
    signed = seed - 2**64 if seed >= 2**63 else seed
    ours = reference_sampling.uniforms(ids, signed, 2**31 + 5, 3)
    assert np.array_equal(ours.numpy(), sampler.all_uniforms(1003, seed, 2**31 + 5, 3))


def test_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(5, 700).round(decimals=1)
    tokens = torch.tensor([0, 3, 699, 4, 4])
    own, ids, values = reference_sampling.logprobs(logits, tokens, 20)
    monkeypatch.setattr(scoring, "_kernel_for", lambda _logits: None)
    want = scoring.score(logits, tokens, 20)
    assert np.array_equal(ids.numpy(), want.top_token_ids)
    assert np.allclose(values.numpy(), want.top_logprobs, atol=1e-5)
    assert np.allclose(own.numpy(), want.logprobs, atol=1e-5)

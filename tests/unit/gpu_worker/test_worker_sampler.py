"""The choice of a token: same draw whatever the batch, the right distribution, failures alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker import sampler
from gpu_worker.ports import SamplingSpec

Rows = list[tuple[SamplingSpec, int]]


def spec(**changes: object) -> SamplingSpec:
    """Sampling at temperature 1."""
    made = SamplingSpec(max_tokens=100, temperature=1.0, seed=0x1234_5678_9ABC_DEF0)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def logits(num_rows: int, vocabulary: int = 5000, seed: int = 0) -> torch.Tensor:
    """Rows of different spread."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocabulary, generator=generator) * 3


def sample(scores: torch.Tensor, rows: Rows) -> sampler.Sampled:
    """Tokens of rows without penalties."""
    return sampler.sample(scores, [(chosen, position, None) for chosen, position in rows])


def test_noise_is_philox_4x32_10() -> None:
    # Known answers of Random123 for counter and key of zeros and of ones.
    words = sampler.philox(np.zeros(1, dtype=np.uint64), 0, 0, 0)
    assert [f"{int(w):08x}" for w in words[:, 0]] == [
        "6627e8d5",
        "e169c58d",
        "bc57ac4c",
        "9b00dbd8",
    ]
    assert words.dtype == np.uint64


def test_noise_of_some_tokens_is_that_of_all() -> None:
    every = sampler.all_uniforms(1003, 99, 5, 1)
    ids = np.array([0, 1, 2, 3, 4, 500, 1002])
    assert (sampler.uniforms(ids, 99, 5, 1) == every[ids]).all()
    assert len(every) == 1003
    assert every.min() > 0
    assert every.max() < 1


@pytest.mark.parametrize("changed", [{"seed": 1}, {"sample_index": 1}, {"position": 1}, {"ids": 1}])
def test_noise_depends_on_all_of_its_counters(changed: dict[str, int]) -> None:
    base = {"seed": 0, "position": 0, "sample_index": 0, "ids": 0}

    def noise(values: dict[str, int]) -> list[float]:
        ids = np.arange(64) + values["ids"]
        return sampler.uniforms(
            ids, values["seed"], values["position"], values["sample_index"]
        ).tolist()

    assert not set(noise(base)) & set(noise(base | changed)) or "ids" in changed
    assert noise(base) != noise(base | changed)
    assert noise(base) == noise(base)
    high = base | {"seed": 1 << 40}
    assert noise(high) != noise(base)


MIXED = [
    (spec(), 0),
    (spec(temperature=0.0), 1),
    (spec(top_k=5), 2),
    (spec(top_p=0.5, seed=7), 3),
    (spec(top_k=50, top_p=0.9, temperature=0.7), 4),
    (spec(min_tokens=9, stop_token_ids=(3, 4)), 5),
    (spec(temperature=2.5, sample_index=2), 6),
]


def test_a_token_does_not_depend_on_the_batch() -> None:
    rows: Rows = MIXED * 3
    scores = logits(len(rows))
    together = sample(scores, rows)
    assert together.failures == ()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(5)).tolist()
    shuffled = sample(scores[order], [rows[i] for i in order])
    for at, index in enumerate(order):
        assert shuffled.token_ids[at] == together.token_ids[index]
        alone = sample(scores[index : index + 1].clone(), [rows[index]])
        assert alone.token_ids == (together.token_ids[index],)


def test_logits_are_left_as_they_were() -> None:
    rows: Rows = [(spec(min_tokens=5, stop_token_ids=(1, 2), temperature=t), 0) for t in (0.0, 1.0)]
    scores = logits(2)
    before = scores.clone()
    sample(scores, rows)
    assert torch.equal(scores, before)


def expected_share(row: torch.Tensor, chosen: SamplingSpec) -> torch.Tensor:
    """Probabilities, computed plainly."""
    probabilities = torch.softmax(row.double() / chosen.temperature, -1)
    order = probabilities.argsort(descending=True, stable=True)
    if chosen.top_k:
        probabilities[order[chosen.top_k :]] = 0
        probabilities /= probabilities.sum()
    if chosen.top_p < 1:
        before = probabilities[order].cumsum(-1) - probabilities[order]
        probabilities[order[before >= chosen.top_p]] = 0
        probabilities /= probabilities.sum()
    return probabilities


@pytest.mark.parametrize(
    "chosen",
    [
        spec(),
        spec(temperature=0.5),
        spec(top_k=4),
        spec(top_p=0.7),
        spec(top_k=6, top_p=0.8, temperature=1.5),
        spec(sample_index=3, seed=12),
    ],
)
@pytest.mark.parametrize("dense", [False, True])
def test_draws_follow_the_softmax(
    chosen: SamplingSpec, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dense:
        monkeypatch.setattr(sampler, "DENSE_FROM", 0)
    row = torch.linspace(-1.5, 1.5, 12)[
        torch.randperm(12, generator=torch.Generator().manual_seed(1))
    ]
    draws = 1200
    counts = np.zeros(12)
    for position in range(draws):
        counts[sampler.sample_row(row.numpy(), chosen, position)] += 1
    share = expected_share(row, chosen).numpy()
    assert (counts[share == 0] == 0).all()
    kept = share > 0
    chi2 = float((((counts - draws * share) ** 2)[kept] / (draws * share)[kept]).sum())
    degrees = int(kept.sum()) - 1
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5 + 4  # about one in ten thousand


def test_seeds_are_independent_draws() -> None:
    row = torch.tensor([0.0, 1.0, 2.0])
    share = torch.softmax(row, -1).numpy()
    counts = np.zeros(3)
    for seed in range(800):
        counts[sampler.sample_row(row.numpy(), spec(seed=seed), 0)] += 1
    assert float(((counts - 800 * share) ** 2 / (800 * share)).sum()) < 14


def test_dense_and_sparse_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = logits(40, vocabulary=999).numpy()
    chosen = spec(top_k=900)
    sparse = [sampler.sample_row(row, chosen, at) for at, row in enumerate(rows)]
    monkeypatch.setattr(sampler, "DENSE_FROM", 0)
    assert [sampler.sample_row(row, chosen, at) for at, row in enumerate(rows)] == sparse
    # The whole vocabulary with exact logarithms is what both shorten.
    ids = np.arange(999)
    for at, row in enumerate(rows):
        noise = -np.log(-np.log1p(-sampler.all_uniforms(999, chosen.seed, at, 0)))
        kept = np.argsort(-row, kind="stable")[:900]
        scores = np.full(999, -np.inf)
        scores[kept] = row.astype(np.float64)[kept] + noise[kept]
        assert ids[scores.argmax()] == sparse[at]


def test_kept_sets_where_the_likely_tokens_do_not_hold_them() -> None:
    flat = np.zeros(8000, dtype=np.float32)  # no token has a thousandth of the mass
    tokens = {sampler.sample_row(flat, spec(top_p=0.25), at) for at in range(60)}
    assert max(tokens) < 2000  # equal logits rank by token id
    assert len(tokens) > 40
    assert {sampler.sample_row(flat, spec(top_k=3), at) for at in range(60)} == {0, 1, 2}
    assert sampler.sample_row(flat, spec(top_p=1e-9), 0) == 0
    assert sampler.sample_row(flat, spec(top_k=9000, top_p=1.0), 0) < 8000


def test_top_p_is_a_share_of_all_that_top_k_keeps() -> None:
    """Also where the likely tokens hold that share of the whole mass, but are fewer than top_k."""
    row = np.full(8000, -8.0, dtype=np.float32)
    row[:20] = 0.0  # 20 of a mass of 22.3 over the first 7,000
    chosen = spec(top_k=7000, top_p=0.5)
    drawn = {sampler.sample_row(row, chosen, at) for at in range(400)}
    assert drawn == set(range(12))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0])
def test_equal_logits_and_top_k_one_take_the_first(temperature: float) -> None:
    scores = torch.zeros(3, 4000)
    scores[:, [17, 900, 3999]] = 5.0
    chosen = spec(temperature=temperature, top_k=1)
    assert sample(scores, [(chosen, 0)] * 3).token_ids == (17, 17, 17)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_wait_for_min_tokens(temperature: float) -> None:
    scores = torch.zeros(1, 100)
    scores[0, 42] = 50.0
    scores[0, 43] = 40.0
    chosen = spec(temperature=temperature, min_tokens=3, stop_token_ids=(42, 7, 100_000))
    tokens = [sample(scores, [(chosen, at)]).token_ids[0] for at in range(5)]
    assert tokens == [43, 43, 43, 42, 42]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "all forbidden"])
def test_bad_logits_fail_their_row_alone(temperature: float, bad: float | str) -> None:
    scores = logits(3, vocabulary=50)
    if isinstance(bad, str):
        scores[1] = -float("inf")
    else:
        scores[1, 20] = bad
    rows: Rows = [(spec(temperature=temperature), 0)] * 3
    result = sample(scores, rows)
    assert result.failures == ((1, "logits are not finite"),)
    assert result.token_ids[1] is None
    assert None not in (result.token_ids[0], result.token_ids[2])


def test_an_exception_is_its_row_alone() -> None:
    rows: Rows = [(spec(), 0), (spec(seed="x"), 0), (spec(), 0)]
    result = sample(logits(3), rows)
    assert [index for index, _ in result.failures] == [1]
    assert result.token_ids[0] is not None
    assert result.token_ids[2] is not None


def test_a_token_outside_the_vocabulary_is_its_row_alone() -> None:
    rows: Rows = [(spec(), 0), (spec(logit_bias=((10**6, 1.0),)), 0), (spec(), 0)]
    result = sample(logits(3), rows)
    assert [index for index, _ in result.failures] == [1]
    assert None not in (result.token_ids[0], result.token_ids[2])


def test_a_kernel_that_fails_is_no_fault_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not come out as a slower way to the same tokens, which nobody would see."""

    def broken(_logits: torch.Tensor, _columns: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sampler, "_kernel_for", lambda _logits: broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        sample(logits(3), [(spec(), 0)] * 3)


def test_bfloat16_and_no_rows() -> None:
    scores = logits(2).bfloat16()
    result = sample(scores, [(spec(temperature=0.0), 0), (spec(), 0)])
    assert result.token_ids[0] == int(scores[0].float().argmax())
    assert sample(scores[:0], []) == sampler.Sampled(token_ids=(), failures=())

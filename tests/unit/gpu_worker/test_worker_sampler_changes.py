"""Bias, penalties and min_p: tokens as by the formulas in double precision, and nothing shared."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings

from gpu_worker import sampler
from gpu_worker.ports import SamplingSpec

VOCABULARY = 97
Doubles = npt.NDArray[np.float64]


def changed(logits: Doubles, spec: SamplingSpec, prompt: list[int], output: list[int]) -> Doubles:
    """The logits that choose, token by token as the definitions say."""
    x = logits.copy()
    for token, bias in spec.logit_bias:
        x[token] += bias
    if len(output) < spec.min_tokens:
        for token in spec.stop_token_ids:
            x[token] = -np.inf
    for token in {*prompt, *output}:
        x[token] = (
            x[token] * spec.repetition_penalty
            if x[token] < 0
            else (x[token] / spec.repetition_penalty)
        )
    for token in set(output):
        x[token] -= spec.frequency_penalty * output.count(token) + spec.presence_penalty
    return x


def kept(x: Doubles, spec: SamplingSpec) -> tuple[list[int], float]:
    """Tokens that may be chosen, and how near to a bound the nearest probability is."""
    p = np.exp((x - x.max()) / spec.temperature)
    p /= p.sum()
    near = np.abs(p - spec.min_p * p.max()).min() if spec.min_p else 1.0
    ids = [i for i in range(len(p)) if p[i] >= spec.min_p * p.max()]
    ids.sort(key=lambda i: (-x[i], i))
    if spec.top_k:
        ids = ids[: spec.top_k]
    if spec.top_p < 1:
        shares = np.cumsum(p[ids]) / p[ids].sum()
        near = min(near, np.abs(shares - spec.top_p).min())
        ids = ids[: int(np.searchsorted(shares, spec.top_p)) + 1]
    return ids, float(near)


def twin(
    logits: Doubles, spec: SamplingSpec, prompt: list[int], output: list[int]
) -> tuple[int, float]:
    """The token, and by how much less anything may differ without another choice."""
    x = changed(logits, spec, prompt, output)
    near = 1.0
    if spec.temperature < sampler.GREEDY_BELOW:
        scores = x
    else:
        ids, near = kept(x, spec)
        uniform = sampler.all_uniforms(len(x), spec.seed, len(output), spec.sample_index)
        scores = np.full(len(x), -np.inf)
        scores[ids] = x[ids] / spec.temperature - np.log(-np.log1p(-uniform[ids]))
    best = np.sort(scores)[-2:]
    return int(scores.argmax()), min(near, float(best[1] - best[0]))


tokens = st.integers(0, VOCABULARY - 1)
specs = st.builds(
    SamplingSpec,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    top_k=st.sampled_from([0, 0, 1, 5, 40]),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    min_tokens=st.integers(0, 6),
    sample_index=st.integers(0, 2),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.2, 2.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 0.0, 4.0, 100.0]), max_size=4)
    .map(dict.items)
    .map(tuple),
)


@settings(max_examples=400, deadline=None)
@given(
    spec=specs,
    seed=st.integers(0, 2**32 - 1),
    prompt=st.lists(tokens, min_size=1, max_size=8),
    output=st.lists(tokens, max_size=8),
)
def test_tokens_are_those_of_the_formulas(
    spec: SamplingSpec, seed: int, prompt: list[int], output: list[int]
) -> None:
    row = (np.random.default_rng(seed).normal(size=VOCABULARY) * 2).astype(np.float32)
    before = row.copy()
    expected, margin = twin(row.astype(np.float64), spec, prompt, output)
    assume(margin > 1e-4)
    history = [*prompt, *output]
    assert sampler.sample_row(row, spec, len(output), history) == expected
    assert (row == before).all()
    together = sampler.sample(torch.from_numpy(row)[None], [(spec, len(output), history)])
    assert together.token_ids == (expected,)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 1),
        ({"logit_bias": ((1, -9.0),)}, 2),
        ({"logit_bias": ((5, 100.0), (1, 50.0))}, 5),
        ({"repetition_penalty": 2.0}, 3),
        ({"presence_penalty": 1.5}, 2),
        ({"frequency_penalty": 0.6}, 2),
        ({"frequency_penalty": 0.4}, 1),
        ({"min_tokens": 5, "stop_token_ids": (1, 2)}, 3),
        # A bias can't bring back what is forbidden.
        ({"min_tokens": 5, "stop_token_ids": (1,), "logit_bias": ((1, 100.0),)}, 2),
    ],
)
def test_one_change_at_a_time(change: dict[str, object], expected: int) -> None:
    """Logits 4, 3, 2.5 of tokens 1, 2, 3; 1 stands twice in the output, 2 in the prompt."""
    row = np.full(8, -1.0, dtype=np.float32)
    row[[1, 2, 3]] = 4.0, 3.0, 2.5
    spec = dataclasses.replace(SamplingSpec(max_tokens=9), **change)  # type: ignore[arg-type]
    assert sampler.sample_row(row, spec, 2, [2, 7, 1, 1]) == expected


def test_a_penalty_of_a_negative_logit_makes_it_less_likely() -> None:
    row = np.array([-1.0, -1.5], dtype=np.float32)
    spec = SamplingSpec(max_tokens=9, repetition_penalty=2.0)
    assert sampler.sample_row(row, spec, 0, [0]) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_fails_for_its_penalties_fails_alone(temperature: float) -> None:
    scores = 10 * torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    tiny = SamplingSpec(max_tokens=9, temperature=temperature, repetition_penalty=1e-38)
    good = SamplingSpec(max_tokens=9, temperature=temperature)
    rows: list[sampler.Row] = [(good, 0, None), (tiny, 0, list(range(50))), (tiny, 0, None)]
    done = sampler.sample(scores, rows)
    assert [index for index, _ in done.failures] == [1, 2]
    assert done.failures[0][1] == "logits are not finite"
    assert done.token_ids[0] is not None


def test_changes_of_one_row_do_not_reach_another() -> None:
    scores = torch.zeros(2, 10)
    biased = SamplingSpec(max_tokens=9, logit_bias=((7, 5.0),))
    done = sampler.sample(scores, [(biased, 0, None), (SamplingSpec(max_tokens=9), 0, None)])
    assert done.token_ids == (7, 0)


@pytest.mark.parametrize("num_plain", [0, 3])
def test_plain_greedy_rows_never_leave_the_device(
    num_plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[sampler.Row] = [(SamplingSpec(max_tokens=9), 0, None)] * num_plain
    monkeypatch.setattr(sampler, "sample_row", None)
    monkeypatch.setattr(sampler, "_native_sample", lambda: None)
    assert len(sampler.sample(torch.zeros(num_plain, 9), rows).token_ids) == num_plain
    penalized: sampler.Row = (SamplingSpec(max_tokens=9, presence_penalty=1.0), 0, [1])
    done = sampler.sample(torch.zeros(num_plain + 1, 9), [*rows, penalized])
    assert [index for index, _ in done.failures] == [num_plain]

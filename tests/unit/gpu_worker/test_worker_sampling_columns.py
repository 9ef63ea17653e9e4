"""The worker's rows as columns for the sampling kernels: same tokens and failures as by numpy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker import sampler
from gpu_worker.ports import SamplingSpec
from gpu_worker.sampling_columns import columns
from tests.kernels.native import needs_native
from tests.kernels.sampling_cases import random_logits, random_rows


def by_numpy(logits: torch.Tensor, rows: list[sampler.Row]) -> sampler.Sampled:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_native_sample", lambda: None)
        return sampler.sample(logits, rows)


@needs_native
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**20), changed=st.booleans(), bad=st.booleans())
def test_the_native_sampler_says_what_numpy_says(seed: int, changed: bool, bad: bool) -> None:
    given_rows = random_rows(4, 300, seed, changed=changed)
    rows: list[sampler.Row] = [(r.spec, r.position, r.history) for r in given_rows]
    logits = random_logits("plain", 4, 300, seed)
    if bad:
        # Not one that min_tokens bans: nobody looks at that.
        seen = next(token for token in range(300) if token not in rows[2][0].stop_token_ids)
        logits[2, seen] = float("nan")
    found = sampler.sample(logits, rows)
    assert found == by_numpy(logits, rows)
    assert bad == (dict(found.failures) == {2: "logits are not finite"})


@needs_native
def test_a_row_that_names_no_token_fails_alone() -> None:
    good = SamplingSpec(max_tokens=9, temperature=1.0)
    bad = SamplingSpec(max_tokens=9, logit_bias=((50, 1.0),))
    rows: list[sampler.Row] = [(good, 0, None), (bad, 0, None), (good, 0, None)]
    logits = torch.randn(3, 50)
    found = sampler.sample(logits, rows)
    assert [at for at, _ in found.failures] == [1]
    assert found.token_ids[0] is not None
    assert found == by_numpy(logits, rows)


def test_what_nobody_asks_for_is_left_out() -> None:
    plain = (SamplingSpec(max_tokens=9, stop_token_ids=(3,)), 4, None)
    made = columns([plain, plain], 50)
    assert (made.bias, made.forbidden, made.penalties) == (None, None, None)
    assert not made.changes_logits


def test_every_seed_keeps_its_bits() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1]
    made = columns([(SamplingSpec(max_tokens=9, seed=seed), 0, None) for seed in seeds], 50)
    assert [int(seed) % 2**64 for seed in made.seed] == seeds


def test_lists_keep_to_their_rows() -> None:
    rows: list[sampler.Row] = [
        (SamplingSpec(max_tokens=9), 3, [1, 2]),
        (SamplingSpec(max_tokens=9, presence_penalty=1.0), 2, [5, 6, 7]),
        (SamplingSpec(max_tokens=9, min_tokens=2, stop_token_ids=(4, -1, 60)), 0, None),
        (SamplingSpec(max_tokens=9, logit_bias=((8, 0.5), (9, -1.0))), 0, None),
    ]
    made = columns(rows, 50)
    assert made.penalties is not None
    assert made.forbidden is not None
    assert made.bias is not None
    assert made.penalties.history.starts.tolist() == [0, 0, 3, 3, 3]
    assert made.penalties.history.tokens.tolist() == [5, 6, 7]
    assert made.penalties.output_starts.tolist() == [0, 1, 3, 3]
    assert made.forbidden.starts.tolist() == [0, 0, 0, 1, 1]
    assert made.forbidden.tokens.tolist() == [4]
    assert made.bias.where.starts.tolist() == [0, 0, 0, 0, 2]
    assert made.bias.values.tolist() == [0.5, -1.0]

"""Logprobs of logits, and what they cost: bounded when asked for, nothing when not."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker import scoring
from gpu_worker.ports import SamplingSpec, ScheduledRow
from gpu_worker.runner import TorchRunner
from tests.kernels.native import needs_native
from tests.tiny_llama import VOCABULARY, load_llama, write_llama

pytestmark = pytest.mark.timeout(120)  # the first import of transformers takes its time


def score(logits: torch.Tensor, num_top: int = 3, token: int = 0) -> scoring.Scores:
    """Of one token at each position."""
    return scoring.score(logits, torch.full((len(logits),), token), num_top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs_are_the_log_softmax(dtype: torch.dtype, num_top: int) -> None:
    logits = (torch.randn(9, 300, generator=torch.Generator().manual_seed(1)) * 6).to(dtype)
    token_ids = torch.arange(9) * 31
    scores = scoring.score(logits, token_ids, num_top)
    expected = torch.log_softmax(logits.double(), -1)
    assert scores.logprobs == pytest.approx(
        expected.gather(-1, token_ids[:, None])[:, 0].numpy(), abs=1e-5
    )
    assert scores.top_token_ids.shape == scores.top_logprobs.shape == (9, num_top)
    order = (-logits.float()).argsort(dim=-1, stable=True)[:, :num_top]
    assert (scores.top_token_ids == order.numpy()).all()
    assert scores.top_logprobs == pytest.approx(expected.gather(-1, order).numpy(), abs=1e-5)


def test_equal_logits_rank_by_token_id() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [700, 20, 30]] = 5.0
    logits[1, 900] = 5.0
    scores = score(logits, num_top=4)
    assert scores.top_token_ids.tolist() == [[20, 30, 700, 0], [900, 0, 1, 2], [0, 1, 2, 3]]


def test_a_vocabulary_smaller_than_what_is_asked_for() -> None:
    assert score(torch.zeros(1, 5), num_top=20).top_token_ids.tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_marked(bad: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = bad
    assert np.isnan(score(logits).logprobs).tolist() == [False, True, False]
    forbidden = torch.zeros(1, 8)
    forbidden[0, 0] = -float("inf")
    assert score(forbidden).logprobs.tolist() == [-np.inf], "less likely than anything, but known"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    """Computed by transformers' modules."""
    return load_llama(write_llama(tmp_path_factory.mktemp("llama"), num_layers=1), fused="false")


def row(length: int, samples: bool = True, first_block: int = 0, **sampling: Any) -> ScheduledRow:
    """A prompt whose tokens are all scored where logprobs are wanted."""
    spec = SamplingSpec(max_tokens=9, **sampling)
    prompt = [(7 * i + 3) % VOCABULARY for i in range(length + 1)]
    scored = prompt[1:length] if samples else prompt[1:]
    return ScheduledRow(
        slot=0,
        token_ids=prompt[:length],
        start=0,
        block_ids=range(first_block, first_block + -(-length // 4)),
        samples=samples,
        output_position=0,
        sampling=spec,
        scored_token_ids=scored if spec.num_logprobs is not None else (),
    )


class Heads:
    """How many positions each call of the head computed."""

    def __init__(self, runner: TorchRunner) -> None:
        self.sizes: list[int] = []
        self.num_backbone_calls = 0
        module = runner._model.module
        head, layer = module.lm_head, module.model.layers[0]
        self.hooks = [
            head.register_forward_hook(lambda _m, given, _o: self.sizes.append(given[0].shape[1])),
            layer.register_forward_hook(lambda *_: self.count()),
        ]

    def count(self) -> None:
        self.num_backbone_calls += 1

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


@pytest.fixture
def heads(runner: TorchRunner) -> Any:
    made = Heads(runner)
    yield made
    made.remove()


def test_a_step_without_logprobs_scores_nothing(
    runner: TorchRunner, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "score", None)
    monkeypatch.setattr(scoring, "forward", None)
    output = runner.run([row(6), row(5, samples=False, first_block=4)])
    assert output.logprobs == ()
    assert (heads.sizes, heads.num_backbone_calls) == ([1], 1)


@pytest.mark.parametrize("size", [3, 4, 29, 256])
def test_the_backbone_runs_once_and_the_head_in_slices(
    size: int, runner: TorchRunner, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(30, num_logprobs=4), row(9, samples=False, first_block=8), row(6, first_block=12)]
    whole = runner.run(rows)
    heads.sizes.clear()
    heads.num_backbone_calls = 0
    monkeypatch.setattr(scoring, "SLICE", size)
    output = runner.run(rows)
    assert heads.num_backbone_calls == 1
    assert sum(heads.sizes) == 29 + 2
    assert max(heads.sizes) == heads.sizes[0] == min(size, 29) + 2
    assert output.token_ids == whole.token_ids
    ((index, sliced),), ((_, at_once),) = output.logprobs, whole.logprobs
    assert (index, len(sliced.logprobs), len(sliced.top_logprobs)) == (0, 30, 120)
    assert sliced.logprobs.tolist() == pytest.approx(at_once.logprobs.tolist(), abs=1e-5)
    assert sliced.top_token_ids == at_once.top_token_ids
    assert "forward" not in vars(runner._model.module.base_model)


@needs_native
@pytest.mark.parametrize("size", [3, 4, 29, 256])
def test_the_lean_forward_runs_once_and_its_head_in_slices(
    size: int, runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(30, num_logprobs=4), row(9, samples=False, first_block=8), row(6, first_block=12)]
    by_modules = runner.run(rows)
    lean = load_llama(write_llama(tmp_path, num_layers=1))
    fused = lean._model.fused
    assert fused is not None
    sizes: list[int] = []
    num_forwards = 0
    hidden, head = fused.hidden, fused.head

    def counted(*given: Any) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        return hidden(*given)

    def measured(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return head(x)

    monkeypatch.setattr(fused, "hidden", counted)
    monkeypatch.setattr(fused, "head", measured)
    monkeypatch.setattr(scoring, "SLICE", size)
    output = lean.run(rows)
    assert num_forwards == 1
    assert sum(sizes) == 29 + 2
    assert max(sizes) == sizes[0] == min(size, 29) + 2
    assert output.token_ids == by_modules.token_ids
    ((index, sliced),), ((_, expected),) = output.logprobs, by_modules.logprobs
    assert (index, len(sliced.logprobs), len(sliced.top_logprobs)) == (0, 30, 120)
    assert sliced.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=1e-4)
    assert sliced.top_token_ids == expected.top_token_ids


def test_a_forward_past_the_backbone_is_run_for_each_slice(
    runner: TorchRunner, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded in memory, if not in time; what it stores again is the same."""
    rows = [row(30, num_logprobs=4), row(6, first_block=12)]
    whole = runner.run(rows)
    heads.sizes.clear()
    heads.num_backbone_calls = 0
    monkeypatch.setattr(scoring, "SLICE", 10)
    monkeypatch.setattr(scoring, "_kept_output", lambda _backbone: nullcontext([]))
    output = runner.run(rows)
    assert (heads.sizes, heads.num_backbone_calls) == ([12, 10, 9], 3)
    assert output.token_ids == whole.token_ids
    ((_, sliced),), ((_, at_once),) = output.logprobs, whole.logprobs
    assert sliced.logprobs.tolist() == pytest.approx(at_once.logprobs.tolist(), abs=1e-5)


def test_each_row_gets_what_it_asked_for(runner: TorchRunner) -> None:
    rows = [
        row(6, num_logprobs=0),
        row(5, samples=False, first_block=2, num_logprobs=7),
        row(7, first_block=4),
        row(1, first_block=6, num_logprobs=2),
    ]
    output = runner.run(rows)
    found = dict(output.logprobs)
    assert {i: (len(r.logprobs), r.num_top) for i, r in found.items()} == {
        0: (6, 0),
        1: (5, 7),
        3: (1, 2),
    }
    assert len(found[1].top_token_ids) == 35
    # Greedy: the token is the likeliest, and alone it has the same logprob.
    assert found[3].top_token_ids[0] == output.token_ids[2]
    assert found[3].logprobs[0] == pytest.approx(found[3].top_logprobs[0])
    ((_, alone),) = runner.run([rows[1]]).logprobs
    assert alone.logprobs.tolist() == pytest.approx(found[1].logprobs.tolist(), abs=1e-5)


def test_a_row_that_cannot_be_scored_fails_alone(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = scoring.score

    def spoilt(logits: torch.Tensor, *args: Any) -> scoring.Scores:
        logits = logits.clone()
        if len(logits) > 2:
            logits[2] = torch.nan  # a position of the first row
        return real(logits, *args)

    monkeypatch.setattr(scoring, "score", spoilt)
    rows = [row(6, num_logprobs=1), row(4, first_block=2, num_logprobs=1), row(3, first_block=4)]
    output = runner.run(rows)
    assert output.failures == ((0, "logits are not finite"),)
    assert output.token_ids[0] is None
    assert None not in output.token_ids[1:]
    assert [index for index, _ in output.logprobs] == [1]

"""Runs the Triton sampler in the interpreter's process; see interpreted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.sampling_cases import on_host, random_logits, random_rows, tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Random rows over random logits."""

    kind: str
    num_rows: int
    vocabulary: int
    changed: bool
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def logits(self) -> Tensor:
        """Of the rows."""
        logits = random_logits(self.kind, self.num_rows, self.vocabulary, self.seed)
        return logits.to(self.dtype)

    def differences(self, function: Any) -> list[tuple[int, int]]:
        """(the function's, the worker's) choices where they differ."""
        logits = self.logits()
        rows = random_rows(self.num_rows, self.vocabulary, self.seed, changed=self.changed)
        before = logits.clone()
        chosen = function(logits, tensors(rows, self.vocabulary)).tolist()
        assert torch.equal(logits, before), "logits were changed"
        return [(a, b) for a, b in zip(chosen, on_host(logits, rows), strict=True) if a != b]


def sampled_otherwise(cases: Sequence[Case]) -> dict[str, list[tuple[int, int]]]:
    """Cases in which Triton chooses other tokens than the worker's sampler."""
    from kernels.sampler import sample

    found = {str(case): case.differences(sample) for case in cases}
    return {name: differences for name, differences in found.items() if differences}


def logprob_error(case: Case, num_top: int) -> float:
    """Greatest difference from the float64 twin; infinite where other tokens are likeliest."""
    from kernels import reference_sampling
    from kernels.logprobs import logprobs

    logits = case.logits()
    tokens = torch.arange(case.num_rows) * 7 % case.vocabulary
    own, ids, values = logprobs(logits, tokens, num_top)
    own_want, ids_want, values_want = reference_sampling.logprobs(logits, tokens, num_top)
    if not torch.equal(ids, ids_want):
        return float("inf")
    return max([0.0, *(own - own_want).abs(), *(values - values_want).abs().flatten()])


def strange() -> dict[str, list[int]]:
    """Choices of rows that choose nothing, greedy and sampled, and logprobs of a NaN row."""
    from kernels.logprobs import logprobs
    from kernels.sampler import sample

    nan, inf = float("nan"), float("inf")
    logits = torch.zeros(6, 300)
    logits[0, 299] = nan
    logits[1, 5] = inf
    logits[2] = -inf
    logits[3, 7], logits[4, :299], logits[5, 3] = 1.0, -inf, -inf
    rows = random_rows(6, 300, 1, changed=False)
    found = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1e-4)):
        specs = [replace(r, spec=replace(r.spec, temperature=temperature)) for r in rows]
        found[name] = sample(logits, tensors(specs, 300)).tolist()
        assert found[name] == on_host(logits, specs)
    own, _, _ = logprobs(logits, torch.tensor([0, 0, 0, 7, -1, 299]), 0)
    found["unscored"] = own.isnan().nonzero()[:, 0].tolist()
    return found


def outside() -> bool:
    """True when tokens outside the vocabulary change nothing, not even another row."""
    from kernels.sampler import sample

    plain = random_rows(3, 300, 1, changed=False)
    logits = random_logits("plain", 3, 300, 1)
    far = (300, 301, 599, -1, -300)
    rows = [
        replace(
            row,
            history=far,
            position=2,
            spec=replace(
                row.spec,
                repetition_penalty=5.0,
                presence_penalty=9.0,
                logit_bias=tuple((token, 100.0) for token in far),
                stop_token_ids=(5,),
                min_tokens=3,
            ),
        )
        for row in plain
    ]
    given = tensors(rows, 300)
    assert given.forbidden is not None
    moved = replace(given.forbidden, tokens=torch.tensor([300, 599, -1]))
    without = replace(given, bias=None, forbidden=None, penalties=None)
    return torch.equal(sample(logits, replace(given, forbidden=moved)), sample(logits, without))


def worker_differences(seed: int) -> list[tuple[int, Any, Any]]:
    """Rows in which the worker's sampler says another thing through Triton than by numpy.

    One row names a token that is not there, another has a NaN.
    """
    import pytest

    from gpu_worker import sampler

    rows: list[sampler.Row] = [
        (row.spec, row.position, row.history) for row in random_rows(6, 300, seed, changed=True)
    ]
    logits = random_logits("plain", 6, 300, seed)
    logits[1, 5] = float("nan")
    kernel = sampler._device_sample()
    assert kernel is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_kernel_for", lambda _logits: kernel)
        answers = [sampler.sample(logits, rows)]
        rows[4] = (replace(rows[4][0], logit_bias=((300, 1.0),)), *rows[4][1:])
        answers.append(sampler.sample(logits, rows))
    assert [at for at, _ in answers[0].failures] == [1]
    assert [at for at, _ in answers[1].failures] == [1, 4]
    other = sampler.sample_on_host(logits, rows)
    assert other == answers[1]
    return [
        (row, ours, theirs)
        for row, (ours, theirs) in enumerate(
            zip(answers[0].token_ids, other.token_ids, strict=True)
        )
        if ours != theirs and row != 4
    ]


def worker_score_error(num_top: int) -> float:
    """Greatest difference of the worker's logprobs through Triton from those by torch."""
    import numpy as np
    import pytest

    from gpu_worker import scoring

    logits, tokens = random_logits("tied", 3, 300, 2), torch.tensor([4, 299, 0])
    logits[1, 5] = float("nan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_kernel_for", lambda _logits: scoring._device_logprobs())
        ours = scoring.score(logits, tokens, num_top)
        patch.setattr(scoring, "_kernel_for", lambda _logits: None)
        theirs = scoring.score(logits, tokens, num_top)
    rows = [0, 2]  # what stands beside a NaN is of no use
    assert np.array_equal(np.isnan(ours.logprobs), [False, True, False])
    assert np.array_equal(ours.top_token_ids[rows], theirs.top_token_ids[rows])
    assert ours.top_token_ids.dtype == theirs.top_token_ids.dtype
    values = np.concatenate((ours.logprobs[rows], ours.top_logprobs[rows].ravel()))
    wanted = np.concatenate((theirs.logprobs[rows], theirs.top_logprobs[rows].ravel()))
    return float(np.abs(values - wanted).max())


def strided() -> bool:
    """True when rows of a wider tensor, half as far apart in memory as they are long, agree."""
    from kernels.sampler import sample

    wide = random_logits("plain", 4, 900, 3)
    rows = random_rows(2, 600, 5, changed=True)
    part = wide[::2, 100:700]
    return bool(sample(part, tensors(rows, 600)).tolist() == on_host(part, rows))


REFUSALS = {
    "dims": "logits must be",
    "logits_dtype": "logits must be fp32",
    "strided": "dense rows",
    "rows": "temperature must have one entry",
    "real": "top_p must be torch.float64",
    "whole": "seed must be torch.int64",
    "device": "min_p must be on cpu",
    "starts": "bias starts must have",
    "tokens": "tokens must have one entry",
    "num_top": "num_top must be 0 to 20",
}


def refusal(name: str) -> str:
    """With what words a planted mistake is refused; "" where it is not."""
    from kernels.logprobs import logprobs
    from kernels.sampler import sample

    logits = torch.zeros(3, 10)
    good = tensors(random_rows(3, 10, 0, changed=True), 10)
    assert good.bias is not None
    short = replace(good.bias, where=replace(good.bias.where, starts=good.bias.where.starts[1:]))
    changed: dict[str, Any] = {
        "dims": lambda: sample(logits[0], good),
        "logits_dtype": lambda: sample(logits.double(), good),
        "strided": lambda: sample(torch.zeros(3, 20)[:, ::2], good),
        "rows": lambda: sample(logits[:2], good),
        "real": lambda: sample(logits, replace(good, top_p=good.top_p.float())),
        "whole": lambda: sample(logits, replace(good, seed=good.seed.int())),
        "device": lambda: sample(logits, replace(good, min_p=good.min_p.to("meta"))),
        "starts": lambda: sample(logits, replace(good, bias=short)),
        "tokens": lambda: logprobs(logits, torch.zeros(2).long(), 3),
        "num_top": lambda: logprobs(logits, torch.zeros(3).long(), 21),
    }
    try:
        changed[name]()
    except ValueError as error:
        return str(error)
    return ""

"""QUIRE_DETERMINISTIC=1: a request's logits have the same bits however it is batched.

Every request runs alone first. Then all run under a condition (batches up to 64 rows, chunks of any
size, prefix hits, preemption, a move to another runner, other threads), and each logit of each
sampled token is compared bit by bit. Each condition is asserted by its counter.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.ports import ModelRunner
from tests.kernels.native import needs_native
from tests.parity import families
from tests.parity.comparing import Recording, recorded_logits, runner_of
from tests.parity.fake_scheduler import FakeScheduler, Request

NEW_TOKENS = 10
NUM_REQUESTS = 64

slow = pytest.mark.slow
pytestmark = [
    needs_native,
    pytest.mark.timeout(240),
    pytest.mark.parametrize(
        ("family", "dtype"),
        [
            ("llama", "float32"),
            pytest.param("llama", "bfloat16", marks=slow),
            pytest.param("qwen2", "float32", marks=slow),
            pytest.param("qwen3", "bfloat16", marks=slow),
            pytest.param("mistral", "float32", marks=slow),
            pytest.param("phi3", "bfloat16", marks=slow),
            pytest.param("gemma", "bfloat16", marks=slow),
            pytest.param("gemma2", "float32", marks=slow),
            pytest.param("gemma3", "bfloat16", marks=slow),
        ],
    ),
]


def make_requests() -> list[Request]:
    """Prompts of 1 to 100 tokens, half of them with a common beginning; every other is sampled."""
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(0, families.VOCABULARY, (100,), generator=generator).tolist()
    requests = []
    for number in range(NUM_REQUESTS):
        length = 1 + (number * 37) % 100
        own = torch.randint(0, families.VOCABULARY, (length,), generator=generator).tolist()
        shared = 40 if number % 4 < 2 and length > 40 else 0
        request = Request(number, (*common[:shared], *own[shared:]), NEW_TOKENS)
        request.temperature = 0.0 if number % 2 else 0.9
        requests.append(request)
    return requests


Outcome = tuple[list[list[int]], Recording]


def outcome(scheduler: FakeScheduler, requests: list[Request] | None = None) -> Outcome:
    """Tokens by request, and logits by request and position."""
    requests = make_requests() if requests is None else requests
    with recorded_logits() as recording:
        scheduler.run(requests)
    return [request.output for request in requests], recording


class Runners:
    """Of one model and dtype; and what its requests give alone."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._folder, self._dtype = folder, dtype
        self.alone = outcome(FakeScheduler([self.make()], max_rows=1))

    @cache  # noqa: B019  # as long as the session's models
    def make(self, number: int = 0, num_blocks: int = 1200) -> ModelRunner:
        """One that has room for all, or less."""
        return runner_of(
            self._folder,
            dtype=self._dtype,
            deterministic=True,
            num_gpu_blocks_override=num_blocks,
            max_num_seqs=NUM_REQUESTS,
        )


@pytest.fixture(scope="session")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Runners]:
    """Made once per family and dtype."""

    @cache
    def make(family: str, dtype: str) -> Runners:
        folder = families.save(family, tmp_path_factory.mktemp(f"bits-{family}"))
        return Runners(folder, dtype)

    return make


def same_bits(found: Outcome, alone: Outcome) -> None:
    """Of all logits of all sampled tokens."""
    tokens, logits = found
    expected_tokens, expected = alone
    assert logits.keys() == expected.keys()
    assert len(expected) == NUM_REQUESTS * NEW_TOKENS
    differing = [key for key in expected if not torch.equal(logits[key], expected[key])]
    assert differing == []
    assert tokens == expected_tokens


def test_alone_is_lively(family: str, dtype: str, runners: Callable[..., Runners]) -> None:
    """Requests differ, and sampling does not just repeat greedy: otherwise nothing is shown."""
    tokens, _ = runners(family, dtype).alone
    assert len({tuple(output) for output in tokens}) >= NUM_REQUESTS * 3 // 4


@pytest.mark.parametrize("max_rows", [2, 3, 7, 64])
def test_batches(family: str, dtype: str, max_rows: int, runners: Callable[..., Runners]) -> None:
    of = runners(family, dtype)
    scheduler = FakeScheduler([of.make()], max_rows=max_rows, budget=1024, admit_all=True)
    same_bits(outcome(scheduler), of.alone)
    assert scheduler.num_mixed_steps > 0
    assert scheduler.most_rows == scheduler.most_decodes == max_rows


@pytest.mark.parametrize("chunk", [1, 5, 33])
def test_chunks(family: str, dtype: str, chunk: int, runners: Callable[..., Runners]) -> None:
    of = runners(family, dtype)
    scheduler = FakeScheduler([of.make()], chunk=chunk, budget=96, max_rows=16)
    same_bits(outcome(scheduler), of.alone)
    assert scheduler.num_chunks > 60


def test_order_of_rows(family: str, dtype: str, runners: Callable[..., Runners]) -> None:
    of = runners(family, dtype)
    requests = make_requests()
    scheduler = FakeScheduler([of.make()], max_rows=9)
    tokens, logits = outcome(scheduler, list(reversed(requests)))
    same_bits((tokens[::-1], logits), of.alone)


def test_prefix_hits(family: str, dtype: str, runners: Callable[..., Runners]) -> None:
    of = runners(family, dtype)
    scheduler = FakeScheduler([of.make()], share_prefixes=True, max_rows=16)
    same_bits(outcome(scheduler), of.alone)
    assert scheduler.num_cached_tokens > 300


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_preemption(
    family: str, dtype: str, share_prefixes: bool, runners: Callable[..., Runners]
) -> None:
    of = runners(family, dtype)
    scheduler = FakeScheduler([of.make(num_blocks=40)], share_prefixes=share_prefixes, max_rows=16)
    same_bits(outcome(scheduler), of.alone)
    assert scheduler.num_preemptions > 0


def test_two_runners(family: str, dtype: str, runners: Callable[..., Runners]) -> None:
    """Every request moves to the other one midway, which computes its tokens anew."""
    of = runners(family, dtype)
    requests = make_requests()
    for request in requests:
        request.worker = request.number % 2
        request.moves_at = 1 + request.number % (NEW_TOKENS - 1)
    scheduler = FakeScheduler([of.make(), of.make(number=1)], max_rows=12)
    same_bits(outcome(scheduler, requests), of.alone)
    assert scheduler.num_moves == NUM_REQUESTS


def test_threads(family: str, dtype: str, runners: Callable[..., Runners]) -> None:
    of = runners(family, dtype)
    torch.set_num_threads(3)
    same_bits(outcome(FakeScheduler([of.make()], max_rows=16)), of.alone)


def test_the_comparison_can_fail(
    family: str, dtype: str, runners: Callable[..., Runners], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's own linear layers, whose sums the number of rows decides, bits differ."""
    from kernels.native import linear

    def by_torch(self: Any, x: torch.Tensor) -> torch.Tensor:
        columns = self.packed.float().transpose(1, 2).reshape(-1, self.depth)[: self.columns]
        out = x.float() @ columns.T
        return (out if self._bias is None else out + self._bias).to(x.dtype)

    of = runners(family, dtype)
    monkeypatch.setattr(linear.PackedLinear, "__call__", by_torch)
    alone = outcome(FakeScheduler([of.make()], max_rows=1))
    together = outcome(FakeScheduler([of.make()], max_rows=16))
    with pytest.raises(AssertionError, match=r"== \[\]"):
        same_bits(together, alone)

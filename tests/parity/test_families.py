"""fp32 greedy tokens and logits of all families equal transformers', however they are batched.

On the native kernels with the lean forward, on them with the model's own modules, and on torch.

Each condition is asserted by its counter: a test that did not chunk, share or preempt fails.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.native import needs_native
from tests.parity import families
from tests.parity.comparing import Parity, compare, recorded_logits
from tests.parity.conftest import Small
from tests.parity.fake_scheduler import FakeScheduler, Request

NEW_TOKENS = 48
PROMPT_LENS = (1, 5, 30, 64, 100, 150)

pytestmark = pytest.mark.timeout(120)


def pair(family: str, backend: str) -> Any:
    """A parameter; all but Llama's are slow."""
    slow = family != "llama" or backend == "native alone"
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(family, backend, marks=marks + ([needs_native] * (backend != "torch")))


# Families with a lean forward: on native kernels they have another way, their own modules.
LEAN = [family for family in families.FAMILIES if family not in families.EXPERTS]
# Every condition, on the way that the family is served.
SERVED = [pair(family, "native") for family in families.FAMILIES]
SERVED += [pair(family, "torch") for family in ("llama", "mistral")]
# The conditions that reach most, on the other ways too.
EVERY = [
    *SERVED,
    *(pair(family, "torch") for family in families.FAMILIES if family not in ("llama", "mistral")),
    *(pair(family, "native alone") for family in LEAN),
]
served = pytest.mark.parametrize(("family", "backend"), SERVED)
every = pytest.mark.parametrize(("family", "backend"), EVERY)


def make_requests(seed: int = 3, shared: int = 0) -> list[Request]:
    """Prompts of PROMPT_LENS; the first `shared` tokens are the same in all that are longer."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(0, families.VOCABULARY, (200,), generator=generator).tolist()
    requests = []
    for number, length in enumerate(PROMPT_LENS):
        own = torch.randint(0, families.VOCABULARY, (length,), generator=generator).tolist()
        prompt = (*common[:shared], *own[shared:]) if length > shared else tuple(own)
        requests.append(Request(number, prompt, NEW_TOKENS))
    return requests


def run(scheduler: FakeScheduler, model: Small, requests: list[Request]) -> Parity:
    """Runs and compares; near ties must stay rare and the outputs lively."""
    with recorded_logits() as recording:
        scheduler.run(requests)
    parity = compare(model.reference, requests, recording)
    assert parity.num_near_ties <= parity.num_tokens // 100
    assert parity.num_distinct_tokens >= 20
    return parity


@served
def test_alone(family: str, backend: str, small: Callable[..., Small]) -> None:
    model = small(family, backend)
    scheduler = FakeScheduler(model.runners[:1], max_rows=1)
    requests = make_requests()
    run(scheduler, model, requests)
    assert scheduler.num_mixed_steps == 0
    for request in requests:
        assert len(set(request.output)) >= 20


@served
def test_equal_to_generate(family: str, backend: str, small: Callable[..., Small]) -> None:
    model = small(family, backend)
    requests = make_requests(seed=4)
    parity = run(FakeScheduler(model.runners[:1]), model, requests)
    assert parity.num_near_ties == 0, "choose another seed: generate may take the other branch"
    for request in requests:
        generated = model.reference.generate(
            torch.tensor([request.prompt]), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert generated[0, len(request.prompt) :].tolist() == request.output


@every
def test_chunks_in_mixed_batches(family: str, backend: str, small: Callable[..., Small]) -> None:
    check_chunks(7, small(family, backend))


@served
@pytest.mark.parametrize("chunk", [1, 64])
def test_the_shortest_and_longest_chunks(
    family: str, backend: str, chunk: int, small: Callable[..., Small]
) -> None:
    check_chunks(chunk, small(family, backend))


def check_chunks(chunk: int, model: Small) -> None:
    scheduler = FakeScheduler(model.runners[:1], chunk=chunk, budget=64)
    run(scheduler, model, make_requests())
    assert scheduler.num_chunks >= sum(-(-length // chunk) - 1 for length in PROMPT_LENS) > 0
    assert scheduler.num_mixed_steps > 0


@served
def test_prefix_hits(family: str, backend: str, small: Callable[..., Small]) -> None:
    model = small(family, backend)
    scheduler = FakeScheduler(model.runners[:1], share_prefixes=True, budget=64)
    requests = [*make_requests(shared=50), *make_requests(shared=50)]
    for number, request in enumerate(requests):
        request.number = number
    run(scheduler, model, requests)
    assert scheduler.num_cached_tokens >= 300


@served
def test_preemption(family: str, backend: str, small: Callable[..., Small]) -> None:
    scheduler = check_preemption(small(family, backend), share_prefixes=False)
    assert scheduler.num_cached_tokens == 0


@every
def test_preemption_with_prefix_hits(
    family: str, backend: str, small: Callable[..., Small]
) -> None:
    scheduler = check_preemption(small(family, backend), share_prefixes=True)
    assert scheduler.num_cached_tokens > 0


def check_preemption(model: Small, *, share_prefixes: bool) -> FakeScheduler:
    scheduler = FakeScheduler([model.cramped], share_prefixes=share_prefixes)
    run(scheduler, model, make_requests())
    assert scheduler.num_preemptions > 0
    return scheduler


@served
def test_two_workers(family: str, backend: str, small: Callable[..., Small]) -> None:
    """Half of the requests start on each; all move to the other one midway."""
    model = small(family, backend)
    requests = make_requests()
    for request in requests:
        request.worker = request.number % 2
        request.moves_at = 5 + 6 * request.number
    scheduler = FakeScheduler(model.runners)
    run(scheduler, model, requests)
    assert min(scheduler.steps) > 0
    assert scheduler.num_moves == len(requests)

"""The Triton sampler in the interpreter chooses the worker's tokens; logprobs against float64."""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.kernels import interpreted_sampling
from tests.kernels.interpreted_sampling import Case

KINDS = ("plain", "tied", "peaked", "far")
# The interpreter's turns are of 256 logits.
VOCABULARIES = (1, 2, 5, 63, 255, 256, 257, 513, 600)
CASES = [
    Case(
        kind=KINDS[seed % 4],
        num_rows=4,
        vocabulary=VOCABULARIES[seed % 9],
        changed=seed % 3 != 1,
        dtype=(torch.float32, torch.bfloat16, torch.float16)[seed % 5 % 3],
        seed=seed,
    )
    for seed in range(45)
]
QUICK = [Case(kind=kind, num_rows=8, vocabulary=300, changed=True, seed=1) for kind in KINDS]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.kind)
def test_quick_mixes(interpreter: ProcessPoolExecutor, case: Case) -> None:
    assert interpreter.submit(interpreted_sampling.sampled_otherwise, [case]).result() == {}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_awkward_mixes(interpreter: ProcessPoolExecutor) -> None:
    halves = (CASES[::2], CASES[1::2])
    for found in interpreter.map(interpreted_sampling.sampled_otherwise, halves):
        assert found == {}


def test_rows_that_choose_nothing(interpreter: ProcessPoolExecutor) -> None:
    found = interpreter.submit(interpreted_sampling.strange).result()
    assert found["greedy"] == [-1, -1, -1, 7, 299, 0]
    assert found["sampled"][:5] == [-1, -1, -1, 7, 299]
    assert found["unscored"] == [0, 1, 2, 4]


def test_tokens_outside_the_vocabulary_change_nothing(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(interpreted_sampling.outside).result()


def test_the_worker_says_the_same_through_triton(interpreter: ProcessPoolExecutor) -> None:
    for seed in (3, 4):
        assert interpreter.submit(interpreted_sampling.worker_differences, seed).result() == []


@pytest.mark.parametrize("num_top", [0, 5, 21])
def test_the_worker_scores_the_same_through_triton(
    interpreter: ProcessPoolExecutor, num_top: int
) -> None:
    assert interpreter.submit(interpreted_sampling.worker_score_error, num_top).result() < 1e-5


def test_rows_of_a_wider_tensor(interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(interpreted_sampling.strided).result()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocabulary", "num_top"), [(600, 3), (5, 20), (257, 0)])
def test_logprobs(
    interpreter: ProcessPoolExecutor, kind: str, vocabulary: int, num_top: int
) -> None:
    case = Case(kind=kind, num_rows=2, vocabulary=vocabulary, changed=False)
    assert interpreter.submit(interpreted_sampling.logprob_error, case, num_top).result() < 1e-5


@pytest.mark.slow
def test_logprobs_of_the_most_that_can_be_asked_for(interpreter: ProcessPoolExecutor) -> None:
    for kind in KINDS:
        case = Case(kind=kind, num_rows=2, vocabulary=1000, changed=False, dtype=torch.bfloat16)
        assert interpreter.submit(interpreted_sampling.logprob_error, case, 20).result() < 1e-5


def test_mistakes_are_refused(interpreter: ProcessPoolExecutor) -> None:
    for name, words in interpreted_sampling.REFUSALS.items():
        assert words in interpreter.submit(interpreted_sampling.refusal, name).result(), name

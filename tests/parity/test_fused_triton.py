"""The lean forward on Triton's kernels, in the interpreter: what the unmodified modules compute."""

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
import torch

from gpu_worker import models
from gpu_worker.attention import UnsupportedModelError
from tests.kernels.interpreted import start_interpreter
from tests.parity import fused_triton

pytestmark = pytest.mark.timeout(240)

# The operators of Mistral are those of Llama, the ones of Gemma among those of Gemma 2.
FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3")
CASES = [
    *((family, "float32") for family in FAMILIES),
    ("llama", "bfloat16"),
    ("gemma2", "bfloat16"),
]
# Largest difference of a logit over the spread of all, and of a key or value.
TOLERANCE = {"float32": (5e-5, 1e-4), "bfloat16": (0.2, 0.1)}
FAULTS = {"residual": "llama", "activation": "llama", "window": "gemma2"}  # planted in a family
Answers = dict[tuple[str, ...], "Future[dict[str, float]]"]


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    """Of all cases, to come; two interpreters work at a time."""
    pool: ProcessPoolExecutor
    with start_interpreter() as pool:
        keys = [*CASES, *((family, "float32", fault) for fault, family in FAULTS.items())]
        yield {key: pool.submit(fused_triton.compare, *key) for key in keys}


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_the_forward_is_that_of_the_modules(family: str, dtype: str, answers: Answers) -> None:
    found = answers[family, dtype].result()
    logits, cache = TOLERANCE[dtype]
    assert found["logits"] <= logits, found
    assert found["cache"] <= cache, found
    assert found["stored"] > 0
    assert found["modules"] == 0.0, "the modules still compute, over the shared weights"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, answers: Answers) -> None:
    found = answers[FAULTS[fault], "float32", fault].result()
    assert found["logits"] > 100 * TOLERANCE["float32"][0]


def test_the_lean_forward_on_triton_is_not_deterministic_by_promise() -> None:
    """Matrix products are the device library's, which chooses its sums by the batch."""
    module = fused_triton.build("llama", torch.float32)
    model = models.wrap(module, torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match="the triton back end computes attention"):
        models.fuse(model, "triton", wanted=True, deterministic=True, log=fused_triton.QuietLog())

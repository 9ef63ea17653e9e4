"""The worker's runner on the Triton kernels, in Triton's interpreter: tokens as on plain torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.interpreted import start_interpreter
from tests.parity import families
from tests.parity.comparing import compare, recorded_logits, runner_of
from tests.parity.fake_scheduler import FakeScheduler, Request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


FAMILIES = ("mistral", "gemma2", "gpt_oss", "mixtral", "qwen3_moe", "gemma3", "phi3")
# The last prompt is longer than the window of those that have one, and so are its last chunk's
# prefix and the decodes that follow.
LENGTHS = (1, 5, families.WINDOW + 12)
NUM_OUTPUT = 2
CHUNK, BUDGET = 14, 16
assert (LENGTHS[-1] - 1) // CHUNK * CHUNK > families.WINDOW


def serve(folder: Path, backend: str) -> tuple[list[Request], Any, int, int]:
    """A mixed batch; returns requests, recorded logits, mixed steps and calls of Triton."""
    from gpu_worker.attention import TritonBackend

    torch.set_num_threads(1)
    calls = 0
    original = TritonBackend.attend

    def counting(self: TritonBackend, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonBackend, "attend", counting)
        # Few tokens a step: the interpreter takes its time, also for the warm-up.
        runner = runner_of(folder, attention_backend=backend, max_num_batched_tokens=BUDGET)
        calls = 0
        generator = torch.Generator().manual_seed(3)
        requests = [
            Request(
                number,
                tuple(
                    torch.randint(0, families.VOCABULARY, (length,), generator=generator).tolist()
                ),
                NUM_OUTPUT,
            )
            for number, length in enumerate(LENGTHS)
        ]
        scheduler = FakeScheduler([runner], chunk=CHUNK, budget=BUDGET)
        with recorded_logits() as recording:
            scheduler.run(requests)
    return requests, recording, scheduler.num_mixed_steps, calls


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Any]]]:
    """Each family's folder and its answer to come; two interpreters work at a time."""
    folders = {
        family: families.save(family, tmp_path_factory.mktemp(family)) for family in FAMILIES
    }
    with start_interpreter() as pool:
        yield {
            family: (folder, pool.submit(serve, folder, "triton"))
            for family, folder in folders.items()
        }


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches(family: str, served: dict[str, tuple[Path, Any]]) -> None:
    folder, answer = served[family]
    requests, recording, num_mixed_steps, calls = answer.result()
    plain, _, _, no_calls = serve(folder, "torch")
    assert num_mixed_steps > 0
    assert (calls > 0, no_calls) == (True, 0)
    assert [r.output for r in requests] == [r.output for r in plain]
    compare(families.reference(folder), requests, recording)

"""The worker's runner on the Triton kernels, in Triton's interpreter: tokens as on plain torch."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.interpreted import start_interpreter
from tests.parity import families
from tests.parity.comparing import compare, recorded_logits, runner_of
from tests.parity.fake_scheduler import FakeScheduler, Request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


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
        # Chunks of 32 at most: the interpreter takes its time, also for the warm-up.
        runner = runner_of(folder, attention_backend=backend, max_num_batched_tokens=32)
        calls = 0
        generator = torch.Generator().manual_seed(3)
        requests = [
            Request(
                number,
                tuple(
                    torch.randint(0, families.VOCABULARY, (length,), generator=generator).tolist()
                ),
                6,
            )
            for number, length in enumerate((1, 30, 50))
        ]
        scheduler = FakeScheduler([runner], chunk=16)
        with recorded_logits() as recording:
            scheduler.run(requests)
    return requests, recording, scheduler.num_mixed_steps, calls


@pytest.fixture(scope="module")
def interpreter() -> Any:
    """A process whose Triton runs on CPU tensors."""
    with start_interpreter() as pool:
        yield pool


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_mixed_batches(family: str, interpreter: ProcessPoolExecutor, tmp_path: Path) -> None:
    folder = families.save(family, tmp_path)
    requests, recording, num_mixed_steps, calls = interpreter.submit(
        serve, folder, "triton"
    ).result()
    plain, _, _, no_calls = serve(folder, "torch")
    assert num_mixed_steps > 0
    assert (calls > 0, no_calls) == (True, 0)
    assert [r.output for r in requests] == [r.output for r in plain]
    compare(families.reference(folder), requests, recording)

"""The runner: failures stay with their row, errors have the port's types, settings are honoured."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker import runner as runner_module
from gpu_worker.attention import TorchBackend, UnsupportedModelError
from gpu_worker.kv_cache import CacheTooSmallError
from gpu_worker.ports import (
    BrokenDeviceError,
    OutOfDeviceMemoryError,
    SamplingSpec,
    ScheduledRow,
    StepOutput,
)
from gpu_worker.runner import TorchRunner
from servicekit.model_files import model_digest
from tests.tiny_llama import VOCABULARY, load_llama, write_llama

pytestmark = pytest.mark.timeout(120)  # the first import of transformers takes its time

# By plain torch.
load = partial(load_llama, attention_backend="torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers."""
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> TorchRunner:
    """One runner for the tests that only compute."""
    return load(folder)


def row(
    token_ids: list[int], blocks: list[int], start: int = 0, samples: bool = True, **sampling: Any
) -> ScheduledRow:
    """Greedy unless told otherwise."""
    return ScheduledRow(
        slot=0,
        token_ids=token_ids,
        start=start,
        block_ids=blocks,
        samples=samples,
        output_position=0,
        sampling=SamplingSpec(max_tokens=9, **sampling),
    )


def test_info_says_what_was_loaded(folder: Path, loaded: TorchRunner) -> None:
    info = loaded.info
    assert info.model_digest == model_digest(folder)
    assert info.vocab_size == VOCABULARY
    assert info.max_model_len == 128
    assert info.max_num_batched_tokens == 256
    group = info.cache_group
    assert (group.num_blocks, group.block_size, group.window) == (32, 4, 0)
    assert group.block_bytes == 2 * 2 * 2 * 4 * 8 * 4
    assert info.step_us > 0
    assert info.token_us >= 0


def test_tokens_come_in_the_order_of_the_rows_that_sample(loaded: TorchRunner) -> None:
    first, second = row([5, 6, 7], [0]), row([9, 8], [1])
    alone = [loaded.run([r]).token_ids[0] for r in (first, second)]
    chunk = row([1, 2, 3, 4], [2], samples=False)
    result = loaded.run([first, chunk, second])
    assert result.token_ids == tuple(alone)
    assert result.failures == ()
    assert loaded.run([chunk]).token_ids == ()


def test_a_bad_row_fails_alone(loaded: TorchRunner) -> None:
    good, bad = row([5, 6, 7], [0]), row([VOCABULARY], [1])
    broken = row([3], [2], temperature=1.0, seed="not a number")
    expected = loaded.run([good]).token_ids[0]
    result = loaded.run([bad, good, broken])
    assert result.token_ids == (None, expected, None)
    assert [index for index, _ in result.failures] == [0, 2]
    assert loaded.run([bad]) == StepOutput(
        token_ids=(None,),
        failures=((0, f"a token id is outside the vocabulary of {VOCABULARY}"),),
        apply_us=result_time(0),
        forward_us=result_time(0),
        sample_us=result_time(0),
    )


class result_time(int):  # noqa: N801  # stands for any duration
    """Equal to every number."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    __hash__ = int.__hash__


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.cuda.OutOfMemoryError("no memory"), OutOfDeviceMemoryError),
        (MemoryError("no memory"), OutOfDeviceMemoryError),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"),
            OutOfDeviceMemoryError,
        ),
        (torch.AcceleratorError("CUDA error: an illegal access"), BrokenDeviceError),
        (RuntimeError("CUDA error: device-side assert"), BrokenDeviceError),
        (RuntimeError("shapes differ"), RuntimeError),
        (KeyError("layer"), KeyError),
    ],
)
def test_what_a_step_raises(
    raised: Exception,
    expected: type[Exception],
    loaded: TorchRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise raised

    before = loaded.run([row([5], [0])]).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(TorchBackend, "attend", attend)
        with pytest.raises(expected) as caught:
            loaded.run([row([5], [0])])
    assert caught.type is expected
    assert loaded.run([row([5], [0])]).token_ids == before


def test_the_cache_bounds_the_longest_request(folder: Path) -> None:
    with capture_logs() as logs:
        info = load(folder, num_gpu_blocks_override=10).info
    assert info.max_model_len == 40
    [entry] = [log for log in logs if log["event"] == "kv cache"]
    assert entry["max_model_len"] == 40
    assert entry["max_model_len_of_model"] == 128
    with pytest.raises(CacheTooSmallError, match="QUIRE_MAX_MODEL_LEN=41"):
        load(folder, num_gpu_blocks_override=10, max_model_len=41)


def test_a_model_without_weights_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin"):
        load(tmp_path)


def test_cost_comes_from_a_decode_and_the_largest_chunk(loaded: TorchRunner) -> None:
    class Counting:
        def __init__(self) -> None:
            self.lengths: list[int] = []

        info = loaded.info

        def run(self, rows: list[ScheduledRow]) -> StepOutput:
            self.lengths.append(len(rows[0].token_ids))
            return loaded.run(rows)

    counting = Counting()
    cost = runner_module.measure(counting)  # type: ignore[arg-type]
    assert set(counting.lengths) == {1, 128}
    assert cost.step_us >= 0
    assert cost.token_us >= 0

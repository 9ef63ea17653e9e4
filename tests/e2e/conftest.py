"""Stacks that several tests share. A stack is started once and must end by itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.stack import Stack
from tests.e2e.models import write_stub_model
from tests.e2e.stack import assert_idle, await_workers, mend

STUB_DRAIN_S = 3


@pytest.fixture(scope="package")
def _stub_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stub")
    settings = {
        "QUIRE_DRAIN_S": str(STUB_DRAIN_S),
        "QUIRE_MAX_NUM_SEQS": "32",
        "QUIRE_NUM_GPU_BLOCKS_OVERRIDE": "600",
        "STUB_STEP_MS": "10",
    }
    model = write_stub_model(Path(folder) / "stub-model")
    with Stack(
        folder / "stack",
        model=str(model),
        workers=2,
        worker_module="tests.stub_worker",
        settings=settings,
    ) as stack:
        await_workers(stack, 2)
        yield stack


@pytest.fixture
def stub_stack(_stub_stack: Stack) -> Stack:
    """Gateway, scheduler, Redis and two torch-free workers; whole and idle at the test's start."""
    mend(_stub_stack)
    assert_idle(_stub_stack)
    return _stub_stack

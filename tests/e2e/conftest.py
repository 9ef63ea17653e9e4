"""Stacks that several tests share. A stack is started once and must end by itself."""

from collections.abc import Iterator

import pytest

from benchmarks.stack import Stack
from tests.e2e.stack import assert_idle, await_workers, mend, stub_stack_in

STUB_DRAIN_S = 10


@pytest.fixture(scope="package")
def _stub_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {
        "QUIRE_DRAIN_S": str(STUB_DRAIN_S),
        # A process that stands still for a while leads all the same.
        "QUIRE_LEASE_TTL_S": "5",
        "QUIRE_MAX_NUM_SEQS": "32",
        "QUIRE_NUM_GPU_BLOCKS_OVERRIDE": "600",
    }
    with stub_stack_in(tmp_path_factory.mktemp("stub"), settings) as stack:
        await_workers(stack, 2)
        yield stack


@pytest.fixture
def stub_stack(_stub_stack: Stack) -> Stack:
    """Gateway, scheduler, Redis and two torch-free workers; whole and idle at the test's start."""
    mend(_stub_stack)
    assert_idle(_stub_stack)
    return _stub_stack

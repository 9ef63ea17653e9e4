"""One pool of interpreter processes for all tests of this folder."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from tests.kernels.interpreted import start_interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton runs its kernels on CPU tensors."""
    with start_interpreter() as pool:
        yield pool


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""How much is thrown, from which seed, and the stack it is thrown at."""

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.fuzz.asking import Asker
from tests.fuzz.world import World, world

NUM_REQUESTS = int(os.environ.get("FUZZ_N") or 10_000)
SEED = int(os.environ.get("FUZZ_SEED") or secrets.randbits(32))


def pytest_report_header() -> str:
    """Shown where the folder is named on the command line; failures show it as well."""
    return f"fuzz: FUZZ_N={NUM_REQUESTS} FUZZ_SEED={SEED}"


@pytest.fixture(scope="package")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Gateway, scheduler, worker and Redis, all under watch."""
    with world(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.fixture
def asker(fuzzed: World) -> Iterator[Asker]:
    """Clients of the stack."""
    asker = Asker(fuzzed)
    yield asker
    asker.close()

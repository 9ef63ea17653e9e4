"""What all tests share: hypothesis' settings, the option to rewrite files, the order of a run."""

import pytest
from hypothesis import settings

# No example is timed: on a busy machine any of them may take long.
settings.register_profile("quire", settings.default, deadline=None)
settings.load_profile("quire")

SLOW_FOLDERS = frozenset({"fuzz", "integration", "kernels", "parity"})


def pytest_addoption(parser: pytest.Parser) -> None:
    """Golden traces and generated pages are compared unless --rewrite is given."""
    parser.addoption(
        "--rewrite", action="store_true", help="write golden traces and generated pages anew"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks what `make test-fast` leaves out: servers, compilers and whole models."""
    if SLOW_FOLDERS.intersection(item.path.relative_to(item.config.rootpath).parts):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: of several processes none is left with a slow one at the end."""
    slowness: dict[object, int] = {}
    for item in items:
        is_slow = item.get_closest_marker("e2e") or item.get_closest_marker("slow")
        slowness[item.path] = slowness.get(item.path, 0) or int(is_slow is not None)
    items.sort(key=lambda item: -slowness[item.path])


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether recorded files are to be written anew; explain the difference in the commit."""
    return bool(request.config.getoption("--rewrite"))

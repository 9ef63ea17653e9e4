"""What all tests share: the option that rewrites recorded files."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Golden traces and generated pages are compared unless --rewrite is given."""
    parser.addoption(
        "--rewrite", action="store_true", help="write golden traces and generated pages anew"
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether recorded files are to be written anew; explain the difference in the commit."""
    return bool(request.config.getoption("--rewrite"))

"""The lock of gateway and scheduler: the lines of requirements.lock that they need, no others."""

import ast
import importlib.metadata
import sys
from functools import cache

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.local import setup
from deploy.local.options import ROOT
from tests.unit.deploy.test_locks import is_needed

LIGHT = "requirements-light.lock"
SOURCES = ("gateway", "scheduler_svc", "servicekit", "protos/gen/quire")
OURS = {"gateway", "scheduler_svc", "servicekit", "quire"}
# A tool of developers: it takes parts of all three services, and no image carries it.
NOT_IN_IMAGES = ROOT / "scheduler_svc" / "sim"
# What uvicorn and redis use where it is there.
FASTER = {"httptools", "hiredis"}


@cache
def needed() -> frozenset[str]:
    """Packages behind the imports of the sources, with all that those need."""
    providers = importlib.metadata.packages_distributions()
    wanted = set(FASTER)
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            if path.is_relative_to(NOT_IN_IMAGES):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                names: list[str] = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                for name in {name.split(".")[0] for name in names}:
                    if name not in OURS and name not in sys.stdlib_module_names:
                        wanted.update(providers[name])
    found: set[str] = set()
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.distribution(name).requires or []:
            need = Requirement(line)
            if is_needed(need):
                wanted.add(need.name)
    return frozenset(found)


def test_its_lines_are_those_of_the_whole_lock() -> None:
    """Two locks never disagree on a version."""
    whole = (ROOT / setup.RUNTIME).read_text().splitlines()
    lines = [line for line in (ROOT / LIGHT).read_text().splitlines() if not line.startswith("#")]
    assert lines == [line for line in whole if line in lines]


def test_it_holds_what_the_two_services_import() -> None:
    """And what that needs in turn; anything else would be dead weight in their images."""
    light = {canonicalize_name(name) for name in setup.lock_lines(LIGHT)}
    assert light == needed()


def test_it_holds_nothing_of_a_model() -> None:
    """Gigabytes that only workers need."""
    light = {canonicalize_name(name) for name in setup.lock_lines(LIGHT)}
    assert not light & {"torch", "triton", "transformers", "safetensors"}


def test_what_it_leaves_out_is_in_no_image() -> None:
    """The simulator draws with a library that the lock lacks."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert str(NOT_IN_IMAGES.relative_to(ROOT)) in ignored

"""The locks are exact, free of addresses, and closed: whatever a package needs is locked too."""

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.local import setup
from deploy.local.options import ROOT

LOCKS = (setup.RUNTIME, setup.TOOLS, setup.CUDA)
LINE = re.compile(r"^[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*$")


# Markers are asked for the oldest Python that Quire runs on as well as for this one.
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"extra": ""},
    {"extra": "", "python_version": "3.11", "python_full_version": "3.11.0"},
)


def is_needed(need: Requirement) -> bool:
    """By some Python that Quire runs on."""
    return need.marker is None or any(need.marker.evaluate(e) for e in ENVIRONMENTS)


def locked(*names: str) -> dict[str, str]:
    """Canonical package names to versions."""
    lines = [pair for name in names for pair in setup.lock_lines(name).items()]
    return {canonicalize_name(package): version for package, version in lines}


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_is_one_exact_version(name: str) -> None:
    """No addresses, no hashes, no ranges, no options."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not LINE.match(line)] == []
    assert lines == sorted(lines, key=lambda line: canonicalize_name(line.split("==")[0]))


def test_no_package_stands_in_two_locks() -> None:
    """Two locks could come to disagree."""
    names = [canonicalize_name(package) for name in LOCKS for package in setup.lock_lines(name)]
    assert len(names) == len(set(names))


def test_torch_is_locked_without_a_build() -> None:
    """`torch==2.13.0` takes 2.13.0+cpu as well as the CUDA build; triton is its pair."""
    assert locked(setup.RUNTIME)["torch"] == "2.13.0"
    assert locked(setup.RUNTIME)["triton"] == "3.7.1"


@pytest.mark.parametrize("names", [(setup.RUNTIME,), (setup.RUNTIME, setup.TOOLS)])
def test_locks_are_closed(names: tuple[str, ...]) -> None:
    """Installing with --no-deps leaves nothing out: checked against the installed packages."""
    versions = locked(*names)
    for package, version in versions.items():
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.fail(f"{package} is locked and not installed")
        assert found.version.split("+")[0] == version, package
        for line in found.requires or []:
            need = Requirement(line)
            if not is_needed(need):
                continue
            name = canonicalize_name(need.name)
            if name.startswith(("nvidia-", "cuda-")):
                continue  # those of the CUDA build have a lock of their own
            assert name in versions, f"{package} needs {line}"
            assert need.specifier.contains(versions[name], prereleases=True), f"{package}: {line}"


def test_the_cuda_lock_holds_cuda_packages_only() -> None:
    """So that a CPU machine is never made to install any of them."""
    assert all(re.match("^(nvidia|cuda)-", name) for name in locked(setup.CUDA))
    others = locked(setup.RUNTIME, setup.TOOLS)
    assert not [name for name in others if re.match("^(nvidia|cuda)-", name)]


@pytest.mark.parametrize(
    ("requires", "cuda"),
    [
        ([], False),
        (["filelock", 'optree>=0.13.0; extra == "optree"'], False),
        (["triton==3.7.1; platform_system == 'Linux'"], False),
        (["nvidia-cudnn-cu13==9.20.0.48; platform_system == 'Linux'"], True),
        (["cuda-toolkit[cublas]==13.0.3; platform_system == 'Linux'"], True),
        (['nvidia-npp==13.0; extra == "all"'], False),
    ],
)
def test_torch_s_own_needs_tell_its_build(requires: list[str], cuda: bool) -> None:
    """Not the machine, and not the version's suffix."""
    assert setup.is_cuda_build(requires) is cuda


def test_the_cuda_lock_is_of_one_cuda() -> None:
    """Packages named after a release of CUDA are all named after the same, which is the toolkit's,
    and those that the toolkit counts itself are of its release too.
    """
    versions = locked(setup.CUDA)
    release = versions["cuda-toolkit"].split(".")
    named = {match[1] for name in versions if (match := re.search(r"-cu(\d+)$", name))}
    assert named == {release[0]}
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cuda-cupti", "nvidia-nvtx"):
        assert versions[name].split(".")[:2] == release[:2], name

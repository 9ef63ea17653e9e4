"""Each process by itself: its help, and what it does with a wrong setting."""

import os
import subprocess
import sys

import pytest

from deploy.local.options import ROOT
from servicekit.catalogue import ALL, CATALOGUE

pytestmark = pytest.mark.slow

SERVICES = ALL.split()


def run(service: str, *flags: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Starts a service as the launcher does and waits for its end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "protos" / "gen")))
    return subprocess.run(
        [sys.executable, "-m", service, *flags],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


@pytest.mark.parametrize("service", SERVICES)
def test_help_names_every_setting_and_its_variable(service: str) -> None:
    """With default and unit; how each is written is tested with the settings."""
    shown = run(service, "--help")
    assert shown.returncode == 0, shown.stderr
    text = "".join(shown.stdout.split())
    for setting in CATALOGUE:
        assert (f"[QUIRE_{setting.name.upper()}]" in text) is (service in setting.services)


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize(
    ("name", "value"), [("QUIRE_NO_SUCH_THING", "1"), ("QUIRE_LOG_LEVEL", "loud")]
)
def test_a_wrong_variable_stops_the_process_by_name(service: str, name: str, value: str) -> None:
    """One line, status 2."""
    ended = run(service, **{name: value})
    assert ended.returncode == 2
    assert name in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_variable_of_another_service_does_no_harm(service: str) -> None:
    """One set of variables serves all: only the wrong one is complained about."""
    others = {
        "QUIRE_PORT": "8001", "QUIRE_BLOCK_SIZE": "32", "QUIRE_LEASE_TTL_S": "2",
        "QUIRE_WORKERS": "2", "QUIRE_LOG_LEVEL": "loud",
    }  # fmt: skip
    ended = run(service, **others)
    assert ended.returncode == 2
    assert ended.stderr.strip().startswith("QUIRE_LOG_LEVEL")

"""The gateway's settings: the catalogue's names, and who is served without keys."""

from dataclasses import fields
from pathlib import Path

import pytest

from gateway import settings
from servicekit.catalogue import CATALOGUE, GATEWAY
from servicekit.settings import SettingsError


def test_every_setting_of_the_catalogue_is_a_field() -> None:
    """And nothing else is."""
    named = {s.name for s in CATALOGUE if GATEWAY in s.services}
    assert {f.name for f in fields(settings.GatewaySettings)} == named


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.com"])
def test_without_keys_only_this_machine_is_served(host: str) -> None:
    """There is no key by default, and no address that would do without one."""
    with pytest.raises(SettingsError, match=r"QUIRE_HOST.*QUIRE_API_KEYS_FILE"):
        settings.load([], {"QUIRE_HOST": host})
    with pytest.raises(SettingsError, match="QUIRE_HOST"):
        settings.load([], {"QUIRE_HOST": host, "QUIRE_API_KEYS_FILE": " "})
    assert settings.load([], {"QUIRE_HOST": host, "QUIRE_API_KEYS_FILE": "keys"}).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_its_names(host: str) -> None:
    """By variable or flag."""
    assert settings.load([], {"QUIRE_HOST": host}).host == host
    assert settings.load(["--host", host], {}).host == host


def test_the_version_is_the_projects() -> None:
    """Written once more for /version."""
    project = Path(settings.__file__).parents[1] / "pyproject.toml"
    assert f'version = "{settings.VERSION}"' in project.read_text()

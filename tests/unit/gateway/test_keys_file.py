"""The key file: followed while the gateway runs; a broken one changes nothing."""

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.adapters.keys_file import KeysFile
from gateway.core.keys import KeysError, UnauthorizedError
from tests.unit.gateway.test_keys import ALICE, BOB, bearer, digest_of


def write(path: Path, text: str) -> None:
    """A new file in the old one's place, as careful editors and secret mounts do it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with Alice's key."""
    file = tmp_path / "keys"
    file.write_text(f"alice:{digest_of(ALICE)}\n")
    return file


async def test_a_changed_file_is_in_force_at_the_next_look(path: Path) -> None:
    """New keys count, old ones no more."""
    file = KeysFile(str(path))
    assert file.current().owner(bearer(ALICE)).tenant == "alice"
    write(path, f"bob:{digest_of(BOB)}\n")
    await file.refresh()
    assert file.current().owner(bearer(BOB)).tenant == "bob"
    with pytest.raises(UnauthorizedError):
        file.current().owner(bearer(ALICE))


@pytest.mark.parametrize("broken", ["alice:plain-text-key\n", "", "# nobody\n", None])
async def test_a_broken_file_keeps_the_keys_in_force(path: Path, broken: str | None) -> None:
    """Said once, by line, without what stands there; a whole file later is taken."""
    file = KeysFile(str(path))
    if broken is None:
        os.unlink(path)
    else:
        write(path, broken)
    with capture_logs() as said:
        for _ in range(3):
            await file.refresh()
    assert file.current().owner(bearer(ALICE)).tenant == "alice"
    [line] = said
    assert line["event"] == "keys_not_reloaded"
    assert line["why"]
    assert "plain-text-key" not in str(said)
    write(path, f"bob:{digest_of(BOB)}\n")
    await file.refresh()
    assert file.current().owner(bearer(BOB)).tenant == "bob"


async def test_an_unchanged_file_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look costs one stat."""
    file = KeysFile(str(path))
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("read"))
    await file.refresh()


def test_a_gateway_does_not_start_without_its_keys(tmp_path: Path) -> None:
    """The message says why and names no content."""
    with pytest.raises(KeysError, match="can't be read"):
        KeysFile(str(tmp_path / "missing"))
    huge = tmp_path / "huge"
    huge.write_bytes(b"#" * 2**20)
    with pytest.raises(KeysError, match="larger than"):
        KeysFile(str(huge))

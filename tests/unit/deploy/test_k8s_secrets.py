"""deploy/k8s/secrets.sh: Secrets with all keys that pods read, and nothing printed but the API key.

kubectl is a script here that keeps what it is given.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.k8s_check import object_checks
from gateway.core import keys

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "deploy" / "k8s" / "secrets.sh"
# get: whether the folder is there; create: copies the files into it.
KUBECTL = """#!/bin/sh
[ "$1 $2" = "--namespace here" ] || exit 9
shift 2
if [ "$1 $2" = "get secret" ]; then [ -d "$STORE/$3" ]; exit; fi
[ "$1 $2 $3" = "create secret generic" ] || exit 9
mkdir "$STORE/$4"; name=$4; shift 4
for option; do cp "${option#--from-file=}" "$STORE/$name/"; done
"""

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "kubectl").write_text(KUBECTL)
    (tools / "kubectl").chmod(0o755)
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def run(store: Path) -> subprocess.CompletedProcess[str]:
    """The script, for the namespace `here`."""
    path = f"{store.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", str(SCRIPT), "here"],
        env={"PATH": path, "STORE": str(store)},
        capture_output=True,
        text=True,
        check=False,
    )


def sha256(text: str) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def test_all_keys_that_pods_read_are_made(store: Path) -> None:
    done = run(store)
    assert done.returncode == 0, done.stderr
    made = {path.name: {file.name for file in path.iterdir()} for path in store.iterdir()}
    assert made == object_checks.SECRETS


def test_each_role_has_a_password_of_its_own(store: Path) -> None:
    """The address holds it, the server its hash, the output nothing."""
    done = run(store)
    users = (store / "redis-acl" / "users.acl").read_text()
    assert "@" not in users.replace("-@all", "")
    passwords = set()
    for role in ("gateway", "scheduler", "worker"):
        address = (store / "redis-urls" / role).read_text()
        user, _, rest = address.removeprefix("redis://").partition(":")
        password, _, where = rest.partition("@")
        assert (user, where) == (role, "redis:6379/0")
        assert f"user {role} on #{sha256(password)} " in users
        assert password not in done.stdout + done.stderr
        passwords.add(password)
    assert len(passwords) == 3


def test_the_api_key_is_shown_once_and_kept_as_a_hash(store: Path) -> None:
    done = run(store)
    key = done.stdout.strip().rpartition(" ")[2]
    text = (store / "quire-api-keys" / "keys").read_bytes()
    assert keys.parse(text).owner([f"Bearer {key}".encode()]).tenant == "default"
    assert key.encode() not in text


def test_a_second_run_changes_nothing(store: Path) -> None:
    run(store)
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    done = run(store)
    assert done.returncode == 0
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before


def test_half_a_pair_is_refused(store: Path) -> None:
    """An address whose password the server does not know helps nobody."""
    run(store)
    shutil.rmtree(store / "redis-acl")
    done = run(store)
    assert done.returncode == 1
    assert "only one of" in done.stderr

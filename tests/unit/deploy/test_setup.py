"""The set-up: what it accepts as finished, what it refuses to touch, what it says is missing."""

import ast
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local import preflight, setup


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty clone that has the locks."""
    for name in (setup.RUNTIME, setup.TOOLS, setup.CUDA):
        (tmp_path / name).write_text("# a comment\nalpha==1.0\n\nbeta==2.0\n")
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    return tmp_path


def finish(torch_index: str = "") -> None:
    """Leaves what a finished set-up leaves."""
    setup.PYTHON.parent.mkdir(parents=True)
    setup.PYTHON.symlink_to(sys.executable)
    (setup.VENV / setup.MARK).write_text(json.dumps(setup.wanted_stamp(torch_index)))


@pytest.mark.usefixtures("clone")
def test_a_finished_environment_is_recognised() -> None:
    """The second run must be instant."""
    assert not setup.is_finished("")
    finish()
    assert setup.is_finished("")


def test_a_changed_lock_is_another_environment(clone: Path) -> None:
    """Whichever lock it is."""
    finish()
    (clone / setup.TOOLS).write_text("alpha==1.1\n")
    assert not setup.is_finished("")


@pytest.mark.usefixtures("clone")
def test_torch_index_counts_only_where_it_is_given() -> None:
    """Having set up with an index once, one need not name it again."""
    finish("some-folder")
    assert setup.is_finished("")
    assert setup.is_finished("some-folder")
    assert not setup.is_finished("another")


@pytest.mark.usefixtures("clone")
def test_an_environment_of_someone_else_is_left_alone() -> None:
    """It may hold work."""
    setup.VENV.mkdir()
    (setup.VENV / "precious").write_text("")
    with pytest.raises(setup.SetupError, match=r"mv \.venv"):
        setup.make_environment()
    assert (setup.VENV / "precious").exists()


@pytest.mark.usefixtures("clone")
def test_an_unfinished_environment_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed set-up may have left half a package."""
    setup.VENV.mkdir()
    (setup.VENV / setup.MARK).write_text("{}\n")
    (setup.VENV / "half").write_text("")
    commands: list[list[str]] = []
    monkeypatch.setattr(
        "deploy.local.setup.subprocess.run", lambda command, **_: commands.append(command)
    )
    assert not setup.is_finished("")
    setup.make_environment()
    assert not (setup.VENV / "half").exists()
    assert (setup.VENV / setup.MARK).exists()
    assert commands == [[sys.executable, "-m", "venv", str(setup.VENV)]]


def test_what_serving_imports_keeps_its_bytecode(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each start would compile it anew."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    monkeypatch.setattr(setup, "IMPORTED", ("probe",))
    (clone / "probe.py").write_text("VALUE = 1\n")
    setup.check_imports()
    assert list((clone / "__pycache__").glob("probe.*.pyc"))


def test_what_does_not_import_is_no_finished_environment(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "PYTHON", sys.executable)
    monkeypatch.setattr(setup, "IMPORTED", ("probe",))
    (clone / "probe.py").write_text("raise ImportError\n")
    with pytest.raises(setup.SetupError, match="does not import"):
        setup.check_imports()


def test_index_options(tmp_path: Path) -> None:
    """An address or a folder; for torch alone."""
    assert setup.index_options("") == []
    assert setup.index_options("scheme://host/cpu") == ["--index-url", "scheme://host/cpu"]
    assert setup.index_options(str(tmp_path)) == ["--no-index", "--find-links", str(tmp_path)]


def test_a_lock_is_read_as_names_and_versions(clone: Path) -> None:
    """Comments and empty lines are passed over."""
    assert clone
    assert setup.lock_lines(setup.RUNTIME) == {"alpha": "1.0", "beta": "2.0"}


@pytest.fixture
def busy_port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_busy_port_is_named_with_a_command_that_works(busy_port: int) -> None:
    """The command names another port, which is free."""
    missing = preflight.port("127.0.0.1", busy_port, "PORT")
    assert missing is not None
    assert str(busy_port) in missing.what
    other = int(missing.mend.removeprefix("make serve PORT="))
    assert preflight.bindable("127.0.0.1", other)
    assert preflight.port("127.0.0.1", 0, "PORT") is None


def test_each_missing_thing_comes_with_one_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All at once, not one per attempt."""
    monkeypatch.setattr("deploy.local.preflight.shutil.which", lambda _: None)
    monkeypatch.setattr("deploy.local.preflight.importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("deploy.local.preflight.sys.version_info", (3, 9, 2))
    found = [
        preflight.make(),
        preflight.python(),
        preflight.venv(),
        preflight.disk(tmp_path / "not" / "there", 1e9, "the environment"),
    ]
    assert preflight.report(found) == 4
    shown = capsys.readouterr().err
    assert "Python 3.9.2 is too old" in shown
    assert shown.count("mend it with:") == 4


def test_nothing_missing_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The usual case."""
    assert preflight.report([preflight.make(), preflight.python(), None]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["__init__", "setup", "preflight", "procs"])
def test_an_old_python_can_read_far_enough_to_say_that_it_is_too_old(name: str) -> None:
    """Not a syntax error, which would help nobody."""
    path = Path(setup.__file__).with_name(f"{name}.py")
    tree = ast.parse(path.read_text(), feature_version=(3, 8))
    plain = [node for node in tree.body if isinstance(node, ast.Import)]
    imported = {alias.name.split(".")[0] for node in plain for alias in node.names}
    assert imported <= sys.stdlib_module_names

"""Command lines of the image builds, and what the Dockerfiles take along."""

import re
from pathlib import Path

import pytest

from deploy.docker import __main__ as images
from deploy.k8s_check import code_facts, pod_checks

ROOT = Path(__file__).resolve().parents[3]


def options(line: list[str]) -> list[str]:
    """Build arguments of a command line, in order."""
    return [line[i + 1] for i, word in enumerate(line) if word == "--build-arg"]


def test_a_light_image_knows_no_torch() -> None:
    line = images.command("buildah", "gateway", {"TORCH_BUILD": "cuda", "TORCH_INDEX": "x"})
    assert options(line) == []
    assert line[:2] == ["buildah", "build"]
    assert line[-3:] == ["--tag", f"quire/gateway:{code_facts.version()}", "."]


def test_the_workers_tag_says_which_torch_it_holds() -> None:
    cpu = images.command("docker", "worker", {})
    assert options(cpu) == ["TORCH_BUILD=cpu", f"TORCH_INDEX={images.CPU_INDEX}"]
    assert f"quire/worker:{code_facts.version()}-cpu" in cpu
    cuda = images.command("docker", "worker", {"TORCH_BUILD": "cuda"})
    assert options(cuda) == ["TORCH_BUILD=cuda", "TORCH_INDEX="]
    assert f"quire/worker:{code_facts.version()}-cuda" in cuda
    with pytest.raises(ValueError, match="TORCH_BUILD"):
        images.command("docker", "worker", {"TORCH_BUILD": "rocm"})


def test_flags_of_the_user_win() -> None:
    """They stand after what the command chooses."""
    flags = {"IMAGE_FLAGS": "--build-arg 'TORCH_INDEX=' --network host", "PYTHON_IMAGE": "p:1"}
    line = images.command("buildah", "worker", flags)
    assert options(line)[0] == "PYTHON_IMAGE=p:1"
    assert options(line)[-1] == "TORCH_INDEX="
    assert "host" in line


def test_without_a_builder_it_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "BUILDERS", ("no-such-builder",))
    assert images.main([], {}) == 0
    assert "skipped" in capsys.readouterr().out
    assert images.main(["gatway"], {}) == 2


@pytest.mark.parametrize("image", images.SERVICES)
def test_what_is_copied_passes_the_ignore_file(image: str) -> None:
    """The context is a list of what may go in; a name that is missing there breaks the build."""
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    text = pod_checks.dockerfile(image).read_text()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, source


@pytest.mark.parametrize("image", images.SERVICES)
def test_images_run_without_rights(image: str) -> None:
    """As a user that is not root, from a base that a digest can pin, started without a shell."""
    text = pod_checks.dockerfile(image).read_text()
    assert text.count("FROM ${PYTHON_IMAGE}") == text.count("\nFROM ") == 2
    assert "USER 10001:10001" in text
    assert re.search(r'^ENTRYPOINT \["python", "-m", "\w+"\]$', text, re.MULTILINE)
    assert pod_checks.image_variables(image)["PYTHONDONTWRITEBYTECODE"] == "1"


@pytest.mark.parametrize("image", images.SERVICES)
def test_images_say_what_they_are(image: str) -> None:
    """By OCI's labels, in the stage that is kept."""
    last = pod_checks.dockerfile(image).read_text().split("\nFROM ")[-1]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]+)"', last))
    assert labels.pop("description")
    assert labels == {"title": f"quire-{image}", "version": code_facts.version()}


@pytest.mark.parametrize("image", images.SERVICES)
def test_images_hold_what_the_locks_say(image: str) -> None:
    """pip resolves nothing and nothing is fetched by another way; no hour gets into what it
    compiles.
    """
    text = pod_checks.dockerfile(image).read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install ([^;&\n]+)", text)
    assert installs
    for options in installs:
        assert "--no-deps" in options
        assert "--no-cache-dir" in options
        assert re.search(r"-r requirements\S*\.lock|grep '\^torch==' requirements\.lock", options)
    assert not re.search(r"^ADD |\b(curl|wget|git clone)\b", text, re.MULTILINE)
    builder = text.split("\nFROM ")[1]
    assert builder.index("ENV SOURCE_DATE_EPOCH=") < builder.index("RUN ")


def test_the_context_is_small() -> None:
    """What passes the ignore file is source code: no environment, no model, no results."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*", "nothing but what is named"
    allowed = [ROOT / line[1:] for line in lines if line.startswith("!")]
    assert all(path.exists() for path in allowed)
    files = [f for path in allowed for f in (path.rglob("*") if path.is_dir() else [path])]
    kept = [f for f in files if f.is_file() and "__pycache__" not in f.parts]
    assert sum(f.stat().st_size for f in kept) < 8 * 2**20

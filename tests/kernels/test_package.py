"""The package's name is also that of a PyPI package which transformers looks for."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import transformers
from transformers import LlamaForCausalLM
from transformers.integrations import hub_kernels
import kernels
print(kernels.__file__)
"""


def test_the_package_is_empty() -> None:
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_transformers_is_not_confused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(root=str(ROOT))],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(ROOT / "kernels" / "__init__.py")


@pytest.mark.slow
def test_reference_needs_no_triton() -> None:
    """The torch back end must work where Triton is not installed."""
    program = (
        "import sys; sys.modules['triton'] = None; from kernels import reference, cache_layout"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=25)

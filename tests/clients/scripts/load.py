"""What the scripts of load tools share: a small load, and a tool that runs to its end."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from checks import API_KEY, WORK

NUM_REQUESTS, NUM_AT_ONCE = 8, 2
PROMPT_TOKENS, OUTPUT_TOKENS = 24, 8


def run_tool(argv: Sequence[str], timeout_s: float = 600) -> str:
    """Its output. Raises AssertionError with the end of it if the tool fails."""
    folder = Path(WORK)
    environ = {
        **os.environ,
        "OPENAI_API_KEY": API_KEY,
        "MODELSCOPE_CACHE": str(folder / "modelscope"),
    }
    done = subprocess.run(
        argv, cwd=folder, env=environ, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    return output


def tool(name: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).parent / name)

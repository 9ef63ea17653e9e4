"""What loading has freed goes back to the system, in a process whose C library keeps it."""

import platform
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,  # a process of its own, with torch
    pytest.mark.timeout(120),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library"),
]
PROGRAM = """
import os
import torch
from gpu_worker import runner

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

runner.keep_freed_memory()
tensors = [torch.ones(1 << 18) for _ in range(200)]  # a MiB each
kept = tensors[::40]
del tensors
before = resident()
runner.give_back_freed_memory()
print(before - resident())
"""


def test_what_loading_has_freed_goes_back() -> None:
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(ended.stdout) > 150

"""Logs are read by line: a line must never be cut."""

import json
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import logging
from servicekit import logs
logs.configure("gpu_worker", "info")
logs.get_logger("worker").info("ready", worker="worker-0")
logging.getLogger("grpc").error("a library's")
"""


@pytest.mark.parametrize("flags", [(), ("-u",)], ids=["buffered", "unbuffered"])
def test_each_line_is_one_write(flags: tuple[str, ...]) -> None:
    """A socket that keeps writes apart stands in for the container's log."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with reader, writer:
        subprocess.run([sys.executable, *flags, "-c", PROGRAM], stderr=writer.fileno(), check=True)
        writer.close()
        writes = []
        while write := reader.recv(65536):
            writes.append(write.decode())
    assert [write.endswith("\n") for write in writes] == [True, True]
    said = [json.loads(write) for write in writes]
    assert [(line["event"], line["service"]) for line in said] == [
        ("ready", "gpu_worker"),
        ("a library's", "gpu_worker"),
    ]

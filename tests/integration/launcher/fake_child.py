"""A child for the launcher's tests: says that it is ready, notes its end, obeys its instructions.

Instructions (JSON in argv[2]): `end_s` how long it takes to end, `ends_after` a line of the notes
without which it does not end, `deaf` ignores SIGTERM, `die_s` dies by itself after so long,
`status` with this exit status, `grandchild` starts a process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAME, ORDERS, NOTES = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])


def note(word: str) -> None:
    """Appends one line; O_APPEND keeps lines of several processes whole."""
    with NOTES.open("a") as file:
        file.write(f"{NAME} {word}\n")


def on_term(_number: int, _frame: object) -> None:
    """Ends as told."""
    note("told")
    if ORDERS.get("deaf"):
        return
    time.sleep(ORDERS.get("end_s", 0.05))
    while ORDERS.get("ends_after", "") not in NOTES.read_text():
        time.sleep(0.01)
    note("ended")
    os._exit(0)


def main() -> None:
    """Lives until told otherwise, at most two minutes."""
    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, lambda *_: note("interrupted"))
    if ORDERS.get("grandchild"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        note(f"grandchild {child.pid}")
    note("started")
    print(json.dumps({"event": "ready", "level": "info"}), file=sys.stderr, flush=True)
    warning = {"event": "odd", "level": "warning", "who": NAME}
    print(json.dumps(warning), file=sys.stderr, flush=True)
    if "die_s" in ORDERS:
        time.sleep(ORDERS["die_s"])
        print("the last words", file=sys.stderr, flush=True)
        os._exit(ORDERS.get("status", 1))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(1)


main()

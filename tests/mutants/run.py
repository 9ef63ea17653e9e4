"""Plants each bug in a copy of the tree and runs the cheap finders: `python -m tests.mutants.run`.

A mutant is a file `NAME.patch`: a header, then a unified diff against shipped code.

    What: what is broken, in a sentence
    Rule: the rule that it breaks
    Find: finders to try in turn, separated by commas; left out, DEFAULT_FINDERS
    Only: histories - that no other test finds it has been seen; `only_by` sees it again

Finders, each a process of its own in the copy, which ends at the first failure:

    machine       the stateful machine over the core, see tests/mutants/machine.py
    sim           the simulator's fault mix, see tests/mutants/seeds.py
    PATH[::TEST]  pytest on that file or folder without its slow tests, or on that test

The histories begin with seed 1, or with N where the finder is `machine@N` or `sim@N`.

A mutant counts when tests/mutants/smoke.py passes with it: else it would fall to an import or to
the first assertion. What finds it, and after how many seconds from the start of that finder's
process, is printed as a table; --json writes it to a file. Exit status 1: one was not found, did
not apply or does not count, or the median is above MAX_MEDIAN_S. Seconds are of CPU time, the start
of the finder's process included.

With --only-by the unit tests are run as well where the machine or the simulator was the finder, so
that the table says which mutants nothing else finds. That takes about a minute for each; without
it those count of which the header says so.
"""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent
COPIED = (
    "benchmarks", "deploy", "docs", "gateway", "gpu_worker", "kernels", "protos", "scheduler_svc",
    "servicekit", "tests", "pyproject.toml",
)  # fmt: skip
HISTORIES = {"machine": "tests.mutants.machine", "sim": "tests.mutants.seeds"}
DEFAULT_FINDERS = ("machine", "sim")
UNIT_TESTS = ("tests/unit/scheduler_core", "tests/unit/scheduler_svc", "tests/unit/gateway",
              "tests/traces", "tests/unit/gpu_worker")  # fmt: skip
MAX_MEDIAN_S = 5.0
MIN_MUTANTS, MIN_ONLY = 40, 15
LIMIT_S, UNIT_LIMIT_S = 60.0, 300.0
_WALL_FACTOR = 10
_HEADER = re.compile(r"^(?:(What|Rule|Find): (.+)|(Only): (histories))$")
_HISTORY = re.compile(r"^((?:machine, depth \d+|simulator), seed \d+): ", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


_Outcome = TypeVar("_Outcome")


class MutantError(Exception):
    """A patch that is not one, or does not apply; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A planted bug."""

    name: str
    what: str
    rule: str
    finders: tuple[str, ...]
    diff: str
    # It has been seen that histories find it and no other test.
    only: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        """What it changes."""
        return tuple(re.findall(r"^\+\+\+ b/(\S+)$", self.diff, re.MULTILINE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of a mutant. `by` is a test or a seed; empty if nothing found it."""

    name: str
    what: str
    by: str
    seconds: float
    problem: str = ""
    # None where nobody has looked, and the header does not say it.
    also_by_unit_tests: bool | None = None


def parse(path: Path) -> Mutant:
    """A patch file. Raises MutantError."""
    head, separator, diff = path.read_text(encoding="utf-8").partition("\n--- a/")
    fields: dict[str, str] = {}
    for line in head.splitlines():
        if match := _HEADER.match(line):
            fields[match[1] or match[3]] = (match[2] or match[4]).strip()
        elif line.strip():
            raise MutantError(f"{path.name}: {line!r} is no line of a header")
    if not separator or not {"What", "Rule"} <= fields.keys():
        raise MutantError(f"{path.name}: needs What, Rule and a unified diff")
    finders = tuple(part.strip() for part in fields.get("Find", "").split(",") if part.strip())
    return Mutant(
        name=path.stem,
        what=fields["What"],
        rule=fields["Rule"],
        finders=finders or DEFAULT_FINDERS,
        diff=f"--- a/{diff}",
        only="Only" in fields,
    )


def history(finder: str) -> list[str]:
    """What runs the finder if it plays histories; empty if it is a test."""
    name, _, seed = finder.partition("@")
    module = HISTORIES.get(name)
    return ["-m", module, *(["--seed", seed] if seed else [])] if module else []


def mutants(names: Sequence[str] = ()) -> list[Mutant]:
    """All of them by name, or those named."""
    found = [parse(path) for path in sorted(FOLDER.glob("*.patch"))]
    unknown = set(names) - {mutant.name for mutant in found}
    if unknown:
        raise MutantError(f"no such mutants: {', '.join(sorted(unknown))}")
    return [mutant for mutant in found if not names or mutant.name in names]


class Copy:
    """A copy of the tree, in which one mutant at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        ignore = shutil.ignore_patterns("__pycache__", "*.patch", "results", "run")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignore)
            else:
                shutil.copy(source, folder / name)
        # Bytecode of a file that is changed twice within a second would be taken for fresh.
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((".", "protos/gen")),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_CEILING_DIRECTORIES": str(folder.parent),
        }
        self._compile()

    def _compile(self) -> None:
        """So that finders do not spend their seconds on it."""
        command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode",
                   "checked-hash", "."]  # fmt: skip
        subprocess.run(command, cwd=self._root, check=False, capture_output=True)

    def plant(self, mutant: Mutant, *, reverse: bool = False) -> None:
        """Applies its patch, or takes it back. Raises MutantError."""
        command = ["git", "apply", "--whitespace=nowarn", *(["-R"] if reverse else []), "-"]
        done = subprocess.run(
            command,
            cwd=self._root,
            env=self._environment,
            input=mutant.diff,
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise MutantError(f"does not apply: {done.stderr.strip()[:300]}")

    def run(self, command: Sequence[str], limit_s: float) -> tuple[int | None, str, float]:
        """Exit status (None: out of time), output and CPU seconds of a command in the copy.

        What else runs on the machine does not count. A process that computes for longer than the
        limit is killed by the kernel, one that waits for many times as long by us.
        """
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=self._root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            bound = int(limit_s) + 1
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (bound, bound))
            timer = threading.Timer(_WALL_FACTOR * limit_s, process.kill)
            timer.start()
            _, status, used = os.wait4(process.pid, 0)
            timer.cancel()
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            text = output.read()
        seconds = used.ru_utime + used.ru_stime
        killed = process.returncode in (-signal.SIGKILL, -signal.SIGXCPU)
        return (None if killed else process.returncode), text, seconds

    def survives_smoke(self) -> str:
        """Empty if a plain life goes well; else the last line of what went wrong."""
        status, output, _ = self.run(["-m", "tests.mutants.smoke"], LIMIT_S)
        return "" if status == 0 else (output.strip().splitlines() or ["out of time"])[-1]

    def find(self, finder: str) -> tuple[str, float]:
        """What the finder says first, empty if nothing, and after how long."""
        if command := history(finder):
            status, output, seconds = self.run(command, LIMIT_S)
            told = _HISTORY.search(output)
        else:
            status, output, seconds = self.run(_pytest(finder), LIMIT_S)
            told = _FAILED.search(output)
        if status == 1 and told:
            return told[1], seconds
        if status:
            raise MutantError(f"{finder} could not be run: {output.strip()[-300:]}")
        # Nothing, or out of time: a test that hangs names nothing.
        return "", seconds

    def found_by_unit_tests(self) -> bool:
        """Whether any of them fails."""
        status, _, _ = self.run([*_pytest(*UNIT_TESTS), "--timeout=60"], UNIT_LIMIT_S)
        return status != 0


def _pytest(*paths: str) -> list[str]:
    command = ["-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *paths]
    # What is named singly is run although it is slow; a file without its slow tests.
    return [*command, "-m", "not gpu"] if any("::" in path for path in paths) else command


def examine(copy: Copy, mutant: Mutant, *, only_by: bool) -> Found:
    """Plants the mutant, looks for it and takes it away."""
    found = Found(name=mutant.name, what=mutant.what, by="", seconds=0.0)
    try:
        copy.plant(mutant)
    except MutantError as error:
        return replace(found, problem=str(error))
    try:
        if problem := copy.survives_smoke():
            return replace(found, problem=f"does not count, a plain life breaks: {problem}")
        spent_s = 0.0
        for finder in mutant.finders:
            by, seconds = copy.find(finder)
            spent_s += seconds
            if by:
                # The finder's own seconds: what was tried before is a question of order.
                found = replace(found, by=by, seconds=round(seconds, 1))
                break
        else:
            return replace(found, seconds=round(spent_s, 1), problem="not found")
        if history(finder) and (only_by or mutant.only):
            also = copy.found_by_unit_tests() if only_by else False
            found = replace(found, also_by_unit_tests=also)
        return found
    except MutantError as error:
        return replace(found, problem=str(error))
    finally:
        copy.plant(mutant, reverse=True)


def in_copies(
    wanted: Sequence[Mutant], num_jobs: int, work: Callable[[Copy, Mutant], _Outcome]
) -> Iterator[_Outcome]:
    """In their order, each as soon as it is there; num_jobs copies side by side.

    What is not begun when its reader has enough is left.
    """
    with tempfile.TemporaryDirectory(prefix="quire-mutants-") as temporary:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(num_jobs):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            copies.put(Copy(folder))

        def one(mutant: Mutant) -> _Outcome:
            copy = copies.get()
            try:
                return work(copy, mutant)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(num_jobs) as pool:
            left = iter(wanted)
            # Twice as many, so that nobody waits for the first of them.
            begun = deque(pool.submit(one, mutant) for mutant in islice(left, 2 * num_jobs))
            try:
                while begun:
                    yield begun.popleft().result()
                    begun.extend(pool.submit(one, mutant) for mutant in islice(left, 1))
            finally:
                pool.shutdown(cancel_futures=True)


def line(found: Found) -> str:
    """Of the table."""
    also = {None: "", True: "yes", False: "no"}[found.also_by_unit_tests]
    by = found.by or f"**{found.problem}**"
    return f"| {found.name} | {found.what} | {by} | {found.seconds:.1f} | {also} |\n"


def verdict(results: Sequence[Found], *, whole: bool) -> tuple[str, bool]:
    """The sum of it, and whether all is well. Numbers are asked of a run over all mutants only."""
    bad = [found for found in results if found.problem]
    times = [found.seconds for found in results if found.by]
    median_s = statistics.median(times) if times else 0.0
    by_histories = [f for f in results if f.by.startswith(("simulator", "machine"))]
    only = [found for found in by_histories if found.also_by_unit_tests is False]
    good = not bad and median_s <= MAX_MEDIAN_S
    if whole:
        good &= len(results) >= MIN_MUTANTS and len(only) >= MIN_ONLY
    return (
        f"{len(results)} mutants, {len(results) - len(bad)} found, median {median_s:.1f} s, "
        f"slowest {max(times, default=0.0):.1f} s; {len(by_histories)} by the machine or the "
        f"simulator, {len(only)} of them by nothing else",
        good,
    )


def main(argv: Sequence[str]) -> int:
    """Prints the table while it grows."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants; all if none is named")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only-by", action="store_true", help="see what unit tests find as well")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(argv)
    try:
        wanted = mutants(options.names)
    except MutantError as error:
        parser.error(str(error))
    sys.stdout.write("| mutant | what | found by | s | unit tests too |\n|---|---|---|---|---|\n")
    results = []
    work = partial(examine, only_by=options.only_by)
    for found in in_copies(wanted, options.jobs, work):
        results.append(found)
        sys.stdout.write(line(found))
        sys.stdout.flush()
    text, good = verdict(results, whole=not options.names)
    sys.stdout.write(f"\n{text}\n")
    if options.json is not None:
        document = {"summary": text, "mutants": [asdict(found) for found in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

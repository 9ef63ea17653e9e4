"""`make clients`: installs clients of others, runs each against a served Quire, prints a table.

Without --base-url it serves a model itself, as `make serve` does, in float32 and with an API key.
Exit status 0 if every client met what its script asks, 1 if one did not, 2 for wrong arguments.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stack import StackError
from deploy.local import model, options, procs
from tests.clients import environments
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.environments import InstallError, say
from tests.e2e.stack import LauncherStack

KEY = "a-key-of-the-clients"
FLOAT32_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where Quire answers, and what it serves."""

    base_url: str
    grpc: str
    model: str
    api_key: str
    tokenizer: Path
    tolerance: float
    examples: int

    def environ(self, work: Path) -> dict[str, str]:
        """What a script reads. Nothing of it may ask a hub, or go through a proxy."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("QUIRE_", "PYTHON"))}
        return {
            **kept,
            "CLIENTS_BASE_URL": self.base_url,
            "CLIENTS_GRPC": self.grpc,
            "CLIENTS_MODEL": self.model,
            "CLIENTS_API_KEY": self.api_key,
            "CLIENTS_TOKENIZER": str(self.tokenizer),
            "CLIENTS_TOLERANCE": str(self.tolerance),
            "CLIENTS_EXAMPLES": str(self.examples),
            "CLIENTS_PYTHON": sys.executable,
            "CLIENTS_WORK": str(work),
            "HF_HOME": str(work / "hf"),
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a client fared. `problem` is empty if it met everything."""

    client: Client
    num_met: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    problem: str = ""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Arguments. Ends the process with 2 if they are wrong."""
    parser = argparse.ArgumentParser(prog="make clients", description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=names, help=", ".join(names))
    parser.add_argument("--all", action="store_true", help="the large load tools as well")
    parser.add_argument("--base-url", help="of a Quire that runs, without /v1")
    parser.add_argument("--grpc", default="127.0.0.1:9000", help="its gRPC address")
    parser.add_argument("--api-key", default="", help="for it, if it has keys")
    parser.add_argument("--model-dir", type=Path, help="the folder of the model that it serves")
    parser.add_argument(
        "--tolerance", type=float, default=FLOAT32_TOLERANCE,
        help="of log likelihoods against float32; a model served in bfloat16 needs about 0.5",
    )  # fmt: skip
    parser.add_argument("--examples", type=int, default=200, help="of schemathesis, a route")
    return parser.parse_args(argv)


def chosen(only: Sequence[str] | None, everything: bool) -> list[Client]:
    """The clients to run, in the catalogue's order."""
    if only:
        return [client for client in CLIENTS if client.name in only]
    return [client for client in CLIENTS if everything or not client.extra]


@contextlib.contextmanager
def served(arguments: argparse.Namespace, folder: Path) -> Iterator[Target]:
    """The Quire that was named, or one of its own that ends with this block."""
    settings = options.read(os.environ)
    folder_of_model = arguments.model_dir or model.ensure(settings.model, settings.cache_dir)
    if arguments.base_url:
        base_url, grpc, key = arguments.base_url.rstrip("/"), arguments.grpc, arguments.api_key
        yield _target(arguments, base_url, grpc, key, folder_of_model)
        return
    keys = folder / "keys"
    keys.write_text(f"clients:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    say("serving a model on free ports")
    stack = LauncherStack(
        folder / "stack",
        {
            "MODEL": str(folder_of_model),
            "QUIRE_DTYPE": "float32",
            "QUIRE_API_KEYS_FILE": str(keys),
        },
    )
    try:
        stack.start()
        yield _target(arguments, stack.base_url, stack.grpc_address, KEY, folder_of_model)
        stack.stop()
    finally:
        stack.destroy()


def _target(
    arguments: argparse.Namespace, base_url: str, grpc: str, key: str, folder: Path
) -> Target:
    return Target(
        base_url=base_url,
        grpc=grpc,
        model=_served_name(base_url, key),
        api_key=key,
        tokenizer=folder.resolve(),
        tolerance=arguments.tolerance,
        examples=arguments.examples,
    )


def _served_name(base_url: str, key: str) -> str:
    import urllib.request

    request = urllib.request.Request(f"{base_url}/v1/models")
    request.add_header("Authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def try_client(client: Client, target: Target, cache: Path, work: Path) -> Outcome:
    """Installs it if needed, runs its script and counts what it met."""
    try:
        folder = environments.ensure(client, cache)
    except InstallError as error:
        return Outcome(client=client, problem=f"not installed: {error}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    say(f"{client.name}: running")
    started = time.monotonic()
    met, failed, status = _run_script(client, folder, target.environ(work), work)
    problem = ""
    if status != 0 or failed or not met:
        problem = "too slow" if status is None else f"exit status {status}"
    return Outcome(
        client=client,
        num_met=met,
        num_failed=failed,
        seconds=time.monotonic() - started,
        problem=problem,
    )


def _run_script(
    client: Client, folder: Path, environ: Mapping[str, str], work: Path
) -> tuple[int, int, int | None]:
    """Checks met and failed, and the exit status, None for one that had to be ended."""
    output = work / "output.log"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            environments.command(client, folder), cwd=work, env=dict(environ),
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=procs.death_with_parent(),  # noqa: PLW1509
        )  # fmt: skip
        try:
            status: int | None = process.wait(client.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            procs.kill_group(process)
            process.wait()
    text = output.read_text(errors="replace")
    print(text, end="" if text.endswith("\n") else "\n", flush=True)
    lines = text.splitlines()
    met = sum(line.startswith("ok ") for line in lines)
    return met, sum(line.startswith("FAILED ") for line in lines), status


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a client."""
    rows = [("client", "versions", "met", "failed", "seconds", "verdict")]
    rows += [
        (
            outcome.client.name,
            environments.versions(outcome.client),
            str(outcome.num_met),
            str(outcome.num_failed),
            f"{outcome.seconds:.0f}",
            outcome.problem.splitlines()[0] if outcome.problem else "met",
        )
        for outcome in outcomes
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main(argv: Sequence[str]) -> int:
    """Runs the clients one after the other."""
    arguments = parse(argv)
    cache = options.read(os.environ).cache_dir / "clients"
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="quire-clients-") as scratch:
        folder = Path(scratch)
        try:
            with served(arguments, folder) as target:
                for client in chosen(arguments.only, arguments.all):
                    outcome = try_client(client, target, cache, folder / "work" / client.name)
                    if outcome.problem:
                        say(f"{client.name}: {outcome.problem}")
                    outcomes.append(outcome)
        except StackError as error:
            say(f"Quire itself: {error}")
            return 1
    print(table(outcomes))
    return 1 if any(outcome.problem for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`make serve`: a whole Quire on this machine. Runs inside .venv.

Imports nothing heavy: the children load, this process watches.
"""

import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from deploy.local import examples, model, options, preflight, runs, services, valkey
from deploy.local.children import Child
from deploy.local.options import ROOT, Options
from deploy.local.ports import FreePorts
from deploy.local.supervisor import FAILED, Supervisor, say
from servicekit.settings import SettingsError

RUNS = ROOT / "run"
PROBE_TIMEOUT_S = 1.0
# Straight to the gateway: a proxy of the environment must not stand between.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def gateway_is_ready(url: str) -> bool:
    """Whether the gateway says that a worker can serve."""
    try:
        with _opener.open(f"{url}/ready", timeout=PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def run(chosen: Options) -> int:
    """Makes the model ready, starts the stack and keeps it; the exit status."""
    busy = [
        preflight.port(chosen.host, chosen.port, "PORT"),
        preflight.port(chosen.host, chosen.grpc_port, "GRPC_PORT"),
    ]
    if preflight.report(busy):
        return FAILED
    model_dir = model.ensure(chosen.model, chosen.cache_dir)
    name = chosen.served_model_name or model.short_name(chosen.model)
    run_dir = runs.create(RUNS)
    data_dir = chosen.data_dir or run_dir / "redis"
    lock = runs.hold(data_dir)
    if lock is None:
        say(f"another launcher uses QUIRE_DATA_DIR={data_dir}")
        return FAILED
    try:
        return _serve(chosen, model_dir, name, run_dir, data_dir)
    finally:
        _leave(lock, run_dir, keep_data=chosen.data_dir is not None)


def _serve(chosen: Options, model_dir: Path, name: str, run_dir: Path, data_dir: Path) -> int:
    stack = services.plan(
        chosen, model_dir=model_dir, served_name=name, data_dir=data_dir, ports=FreePorts()
    )
    say(f"model {name} from {model_dir}")
    say(f"logs in {run_dir}")
    if chosen.redis_url:
        say("Redis as named by QUIRE_REDIS_URL")

    def on_change(children: Sequence[Child]) -> None:
        runs.write_state(
            run_dir,
            {
                "url": stack.url,
                "grpc_port": stack.grpc_port,
                "redis_url": stack.redis_url,
                "model": name,
                "children": {
                    c.spec.name: {"pid": c.process.pid, "ports": dict(c.launch.ports)}
                    for c in children
                    if c.process is not None and c.launch is not None
                },
            },
        )

    def on_ready() -> None:
        chat = examples.has_chat_template(model_dir)
        say(f"\nREST {stack.url}/v1   gRPC {chosen.reach}:{stack.grpc_port}   model {name}\n")
        say(examples.text(stack.url, name, chat, keyed=bool(chosen.api_keys_file)))
        say("\nCtrl-C ends it.")

    redis_port = stack.redis_port
    return Supervisor(
        stack.specs,
        run_dir=run_dir,
        cwd=ROOT,
        drain_s=chosen.drain_s,
        redis_answers=lambda: redis_port is None or valkey.answers(redis_port),
        is_ready=lambda: gateway_is_ready(stack.url),
        on_ready=on_ready,
        on_change=on_change,
    ).run()


def _leave(lock: IO[str], run_dir: Path, *, keep_data: bool) -> None:
    lock.close()
    if not keep_data:
        shutil.rmtree(run_dir / "redis", ignore_errors=True)


def main() -> int:
    """Reads the environment; wrong settings end it with status 2 and one line."""
    if not __debug__:
        sys.exit("Quire does not run under -O: its assertions guard shared state")
    try:
        return run(options.read(os.environ))
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except (model.ModelError, OSError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

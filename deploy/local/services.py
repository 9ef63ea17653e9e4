"""The children of a real stack: command lines, variables, ports.

Command lines stay exactly `python -m gateway`, `python -m scheduler_svc` and `python -m gpu_worker`
(one process per worker); everything else goes through QUIRE_* variables.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.local import valkey
from deploy.local.children import Launch, Role, Spec
from deploy.local.options import Options
from deploy.local.ports import FreePorts

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What the launcher needs to know about the children it is about to start."""

    specs: tuple[Spec, ...]
    url: str
    rest_port: int
    grpc_port: int
    redis_url: str
    redis_port: int | None
    served_name: str


def plan(
    chosen: Options, *, model_dir: Path, served_name: str, data_dir: Path, ports: FreePorts
) -> Stack:
    """The stack for these options. Ports named by the user are kept; all others are free ones."""
    rest = chosen.port or ports.take()
    grpc = chosen.grpc_port or ports.take()
    redis_port = None if chosen.redis_url else ports.take()
    redis_url = chosen.redis_url or f"redis://127.0.0.1:{redis_port}/0"
    common = {
        **chosen.environ,
        # What only this machine's own processes speak to has no keys: it stays here.
        "QUIRE_HOST": chosen.host if chosen.host in LOOPBACK else LOOPBACK[0],
        "QUIRE_PORT": str(rest),
        "QUIRE_GRPC_PORT": str(grpc),
        "QUIRE_REDIS_URL": redis_url,
        "QUIRE_MODEL": str(model_dir),
        "QUIRE_SERVED_MODEL_NAME": served_name,
        "QUIRE_DRAIN_S": f"{chosen.drain_s:g}",
    }
    specs: list[Spec] = []
    if redis_port is not None:
        specs.append(_redis(redis_port, data_dir))
    specs.append(_scheduler(common, ports))
    specs += [_worker(common, chosen, index, ports) for index in range(chosen.workers)]
    specs.append(_gateway({**common, "QUIRE_HOST": chosen.host}, rest, grpc, ports))
    reach = f"[{chosen.reach}]" if ":" in chosen.reach else chosen.reach
    return Stack(
        specs=tuple(specs),
        url=f"http://{reach}:{rest}",
        rest_port=rest,
        grpc_port=grpc,
        redis_url=redis_url,
        redis_port=redis_port,
        served_name=served_name,
    )


def _redis(port: int, data_dir: Path) -> Spec:
    argv = valkey.command(valkey.binary(), port, data_dir)
    launch = Launch(argv=argv, environ={}, ports={"redis": port})
    return Spec(name="redis", role=Role.REDIS, prepare=lambda: launch)


def _service(
    module: str, common: dict[str, str], more: Callable[[], tuple[dict[str, str], dict[str, int]]]
) -> Callable[[], Launch]:
    def prepare() -> Launch:
        variables, ports = more()
        return Launch(
            argv=[sys.executable, "-m", module], environ={**common, **variables}, ports=ports
        )

    return prepare


def _scheduler(common: dict[str, str], ports: FreePorts) -> Spec:
    def more() -> tuple[dict[str, str], dict[str, int]]:
        admin, ops = ports.take(), ports.take()
        variables = {"QUIRE_SCHEDULER_PORT": str(admin), "QUIRE_OPS_PORT": str(ops)}
        return variables, {"grpc": admin, "ops": ops}

    return Spec(
        name="scheduler_svc",
        role=Role.SCHEDULER,
        prepare=_service("scheduler_svc", common, more),
    )


def _worker(common: dict[str, str], chosen: Options, index: int, ports: FreePorts) -> Spec:
    name = f"worker-{index}"
    threads = str(chosen.num_threads)
    variables = {
        "QUIRE_WORKER_ID": name,
        "QUIRE_NUM_THREADS": threads,
        "OMP_NUM_THREADS": chosen.environ.get("OMP_NUM_THREADS") or threads,
        # Threads that spin at barriers starve whatever else runs here: other workers, the gateway.
        "OMP_WAIT_POLICY": chosen.environ.get("OMP_WAIT_POLICY") or "PASSIVE",
    }

    def more() -> tuple[dict[str, str], dict[str, int]]:
        own, ops = ports.take(), ports.take()
        taken = {"QUIRE_WORKER_PORT": str(own), "QUIRE_OPS_PORT": str(ops)}
        return {**variables, **taken}, {"grpc": own, "ops": ops}

    return Spec(name=name, role=Role.WORKER, prepare=_service("gpu_worker", common, more))


def _gateway(common: dict[str, str], rest: int, grpc: int, ports: FreePorts) -> Spec:
    def more() -> tuple[dict[str, str], dict[str, int]]:
        ops = ports.take()
        return {"QUIRE_OPS_PORT": str(ops)}, {"rest": rest, "grpc": grpc, "ops": ops}

    return Spec(name="gateway", role=Role.GATEWAY, prepare=_service("gateway", common, more))

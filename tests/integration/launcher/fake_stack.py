"""The launcher's supervisor over fake children and a real embedded Valkey, as a process of its own.

argv[1] is a folder; `orders.json` in it tells each child what to do and sets `drain_s` and
`worker_stage_s`.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.local import runs, supervisor, valkey
from deploy.local.children import Child, Launch, Role, Spec
from deploy.local.ports import FreePorts

FAKE = Path(__file__).with_name("fake_child.py")
ROLES = {"gateway": Role.GATEWAY, "scheduler_svc": Role.SCHEDULER}


def main() -> int:
    """Runs until it is told to end."""
    folder = Path(sys.argv[1])
    orders = json.loads((folder / "orders.json").read_text())
    worker_stage_s = orders.get("worker_stage_s", supervisor.STAGE_S[Role.WORKER])
    supervisor.STAGE_S[Role.WORKER] = worker_stage_s
    notes = folder / "notes"
    redis_port = FreePorts().take()
    data_dir = folder / "redis"
    data_dir.mkdir(exist_ok=True)
    redis = Launch(
        argv=valkey.command(valkey.binary(), redis_port, data_dir),
        environ={},
        ports={"redis": redis_port},
    )

    def spec(name: str) -> Spec:
        argv = [sys.executable, str(FAKE), name, json.dumps(orders.get(name, {})), str(notes)]
        launch = Launch(argv=argv, environ=dict(os.environ), ports={})
        role = ROLES.get(name, Role.WORKER)
        return Spec(name=name, role=role, prepare=lambda: launch)

    def on_change(children: Sequence[Child]) -> None:
        pids = {c.spec.name: c.process.pid for c in children if c.process is not None}
        runs.write_state(folder, {"pids": pids, "redis_port": redis_port})

    names = ["scheduler_svc", "worker-0", "worker-1", "gateway"]
    return supervisor.Supervisor(
        [Spec(name="redis", role=Role.REDIS, prepare=lambda: redis), *map(spec, names)],
        run_dir=folder,
        cwd=folder,
        drain_s=orders.get("drain_s", 30.0),
        redis_answers=lambda: valkey.answers(redis_port),
        is_ready=lambda: notes.exists() and notes.read_text().count("started") >= len(names),
        on_ready=lambda: supervisor.say("THE EXAMPLES"),
        on_change=on_change,
    ).run()


if __name__ == "__main__":
    sys.exit(main())

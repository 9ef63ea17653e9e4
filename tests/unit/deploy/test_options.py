"""What the launcher reads from the environment and hands to the children."""

import sys
from pathlib import Path

import pytest

from deploy.local import options, services, valkey
from deploy.local.children import Role
from deploy.local.ports import FreePorts
from servicekit.settings import SettingsError


def stack(environ: dict[str, str]) -> services.Stack:
    """The stack of these variables on four cores."""
    chosen = options.read(environ, cores=4)
    return services.plan(
        chosen,
        model_dir=Path("/models/some"),
        served_name="some",
        data_dir=Path("/data"),
        ports=FreePorts(),
    )


def environments(environ: dict[str, str]) -> dict[str, dict[str, str]]:
    """Variables of each child by name."""
    return {spec.name: dict(spec.prepare().environ) for spec in stack(environ).specs}


def test_defaults() -> None:
    """As documented."""
    chosen = options.read({}, cores=2)
    assert (chosen.port, chosen.grpc_port, chosen.workers) == (8000, 9000, 1)
    assert chosen.model == "smollm2-135m"
    assert chosen.drain_s == 5
    assert chosen.num_threads == 2
    assert chosen.data_dir is None


def test_make_variables_stand_for_settings_and_win() -> None:
    """An empty one is one that is not given: make exports them all."""
    environ = {"PORT": "8123", "GRPC_PORT": "", "WORKERS": "2", "MODEL": " a/b "}
    environ |= {"QUIRE_PORT": "1", "QUIRE_GRPC_PORT": "9123", "QUIRE_DRAIN_S": "7"}
    chosen = options.read(environ, cores=4)
    assert (chosen.port, chosen.grpc_port, chosen.workers) == (8123, 9123, 2)
    assert chosen.model == "a/b"
    assert chosen.drain_s == 7


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORKERS": "0"}, "^WORKERS='0': must be from 1"),
        ({"PORT": "http"}, "^PORT='http': must be a whole number"),
        ({"QUIRE_PORT": "http"}, "^QUIRE_PORT='http'"),
        ({"QUIRE_PROT": "8000"}, "QUIRE_PROT: no Quire service knows this setting"),
        ({"QUIRE_DTYPE": "fp16"}, "QUIRE_DTYPE"),
    ],
)
def test_a_wrong_variable_stops_the_launcher_by_name(environ: dict[str, str], message: str) -> None:
    """Before any child is started, whichever child would have read it."""
    with pytest.raises(SettingsError, match=message):
        options.read(environ)


def test_command_lines_are_exact() -> None:
    """Others find the processes by them."""
    commands = {
        spec.name: list(spec.prepare().argv)
        for spec in stack({"WORKERS": "2"}).specs
        if spec.role is not Role.REDIS
    }
    assert commands == {
        "scheduler_svc": [sys.executable, "-m", "scheduler_svc"],
        "worker-0": [sys.executable, "-m", "gpu_worker"],
        "worker-1": [sys.executable, "-m", "gpu_worker"],
        "gateway": [sys.executable, "-m", "gateway"],
    }


def test_every_setting_reaches_every_service() -> None:
    """Known names are accepted by all, so all get them."""
    found = environments({"QUIRE_MAX_INFLIGHT_STEPS": "4", "QUIRE_HOST": "127.0.0.1"})
    for name in ("gateway", "scheduler_svc", "worker-0"):
        assert found[name]["QUIRE_MAX_INFLIGHT_STEPS"] == "4"
        assert found[name]["QUIRE_MODEL"] == "/models/some"
        assert found[name]["QUIRE_SERVED_MODEL_NAME"] == "some"
        assert found[name]["QUIRE_DRAIN_S"] == "5"
    assert len({found[name]["QUIRE_REDIS_URL"] for name in found if name != "redis"}) == 1


def test_threads_are_shared_out_among_workers() -> None:
    """Spinning threads of a worker would starve another, and the gateway."""
    one, two = environments({}), environments({"WORKERS": "2"})
    assert one["worker-0"]["QUIRE_NUM_THREADS"] == one["worker-0"]["OMP_NUM_THREADS"] == "4"
    assert one["worker-0"]["OMP_WAIT_POLICY"] == "PASSIVE"
    for name in ("worker-0", "worker-1"):
        assert two[name]["QUIRE_NUM_THREADS"] == two[name]["OMP_NUM_THREADS"] == "2"
        assert two[name]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environments({"WORKERS": "9"})["worker-8"]["QUIRE_NUM_THREADS"] == "1"
    assert environments({"QUIRE_NUM_THREADS": "3"})["worker-0"]["QUIRE_NUM_THREADS"] == "3"


def test_all_other_ports_are_free_ones_and_differ_at_a_restart() -> None:
    """A port of a process that has just died may not be free yet."""
    spec = next(s for s in stack({}).specs if s.role is Role.WORKER)
    first, second = spec.prepare(), spec.prepare()
    assert first.environ["QUIRE_WORKER_PORT"] == str(first.ports["grpc"])
    assert first.environ["QUIRE_OPS_PORT"] == str(first.ports["ops"])
    assert not set(first.ports.values()) & set(second.ports.values())


def test_a_redis_of_one_s_own_is_not_started() -> None:
    """QUIRE_REDIS_URL goes to all children as it is."""
    mine = stack({"QUIRE_REDIS_URL": "redis://10.0.0.1/3"})
    assert all(spec.role is not Role.REDIS for spec in mine.specs)
    assert mine.specs[0].prepare().environ["QUIRE_REDIS_URL"] == "redis://10.0.0.1/3"
    assert mine.redis_port is None


def test_valkey_keeps_everything_and_is_reached_from_here_only() -> None:
    """Loopback, append-only file, no eviction."""
    command = " ".join(valkey.command(Path("/bin/server"), 1234, Path("/data")))
    assert "--bind 127.0.0.1 " in command
    assert "--port 1234 " in command
    assert "--dir /data --appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert valkey.binary().is_file()


def test_the_address_to_ask_is_one_that_can_be_reached() -> None:
    """0.0.0.0 is for listening."""
    assert options.read({"QUIRE_HOST": "0.0.0.0"}).reach == "127.0.0.1"
    assert options.read({"QUIRE_HOST": "::1"}).reach == "::1"


def test_only_the_gateway_listens_where_others_reach() -> None:
    """The other services have no keys."""
    environ = {"QUIRE_HOST": "0.0.0.0", "QUIRE_API_KEYS_FILE": "keys", "WORKERS": "2"}
    hosts = {name: child.get("QUIRE_HOST") for name, child in environments(environ).items()}
    assert hosts.pop("gateway") == "0.0.0.0"
    hosts.pop("redis")
    assert set(hosts.values()) == {"127.0.0.1"}
    assert len(hosts) == 3
    assert environments({"QUIRE_HOST": "::1"})["worker-0"]["QUIRE_HOST"] == "::1"

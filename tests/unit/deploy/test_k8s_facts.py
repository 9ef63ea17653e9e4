"""What the checks read from the sources is what the objects say."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from prometheus_client import CollectorRegistry

from deploy.k8s_check import code_facts
from gateway.metrics import GatewayMetrics
from gpu_worker.metrics import WorkerMetrics
from scheduler_svc.metrics import Sample, SchedulerMetrics
from servicekit import ops

EMPTY = Sample(
    stats=None, view=None, num_finishes_pending=0, num_events_queued=0, time_to_drain_s=0.0
)


def exported() -> Iterator[str]:
    """Series of all services' registries that have one without any request."""
    registries = [CollectorRegistry() for _ in range(3)]
    GatewayMetrics(registries[0], "m")
    SchedulerMetrics(registries[1], "m", lambda: EMPTY)
    WorkerMetrics(registries[2], "m")
    for registry in registries:
        for family in registry.collect():
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    yield sample.name


def test_every_series_that_is_exported_is_known() -> None:
    known = code_facts.metrics().series
    found = set(exported())
    assert len(found) > 60
    assert found <= known


def family(series: str) -> str:
    """Without what Prometheus' client adds to a metric's name."""
    return re.sub(r"_(total|bucket|sum|count)$", "", series)


def test_no_series_is_known_that_its_family_lacks() -> None:
    """A gauge that was read as a counter, say. Families that come with the first request are not
    asked: nothing exports them yet.
    """
    found = set(exported())
    families = {family(series) for series in found}
    known = {series for series in code_facts.metrics().series if family(series) in families}
    assert known - found == set()


def test_labels_are_known() -> None:
    assert {
        "model_name",
        "finished_reason",
        "part",
        "reason",
        "stop",
    } <= code_facts.metrics().labels


def test_a_metric_of_no_kind_is_told() -> None:
    """So that a new way to make one is taught to the reader first."""
    tree = ast.parse('observe("quire:something", "Text")')
    with pytest.raises(ValueError, match="quire:something"):
        list(code_facts._families(tree))


async def test_routes_of_the_ops_port_answer() -> None:
    """Each of those that probes and monitors may ask."""
    assert code_facts.ops_routes() == {"/health", "/health/ready", "/metrics"}
    server = ops.OpsServer(CollectorRegistry(), lambda: True)
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for path in code_facts.ops_routes():
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/healthz")).status_code == 404
    await server.stop()


def test_the_version_is_the_packages() -> None:
    from gateway.settings import VERSION

    assert code_facts.version() == VERSION
    assert Path(code_facts.ROOT / "pyproject.toml").is_file()

"""What the run under memory pressure sends and how it judges; no stack runs here."""

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily

from benchmarks import pressure
from benchmarks.soak import Tally
from benchmarks.stack import Metrics
from benchmarks.workload import Job


def test_half_of_the_requests_are_sampled_with_seeds_of_their_own() -> None:
    work = pressure.make_work(4)
    assert work == pressure.make_work(4)
    every = [job for own in work for job in own]
    sampled = [job for job in every if job.temperature]
    assert len(sampled) == len(every) // 2
    assert len({job.seed for job in sampled}) == len(sampled)
    body = sampled[0].body("m")
    assert (body["temperature"], body["seed"]) == (0.8, sampled[0].seed)


def test_clients_need_the_blocks_of_a_whole_request_each() -> None:
    work = [[Job(prompt=(1,) * 17, num_output=16)], [Job(prompt=(1,) * 8, num_output=8)]]
    assert pressure.needed_blocks(work) == 4


def test_host_pools_are_small_and_large(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    gib = pressure.block_gib(str(tmp_path))
    # Keys and values of 30 layers, 3 heads of 64, 16 tokens, two bytes.
    assert gib * 2**30 == 2 * 30 * 3 * 64 * 16 * 2
    small, *others = pressure.parts(300, gib)
    assert 30 <= float(small.settings["QUIRE_SWAP_SPACE_GIB"]) / gib < 31
    assert all(float(o.settings["QUIRE_SWAP_SPACE_GIB"]) / gib >= 899 for o in others)
    assert sum(part.share for part in others) == 1
    assert tuple(part.name for part in (small, *others)) == pressure.PARTS
    assert {mode for part in others for mode in part.must} == {"swap", "recompute"}


def test_tokens_that_differ_are_told_with_their_place() -> None:
    found, expected = Tally(), Tally()
    found.note((0, 0), [1, 2, 3], "")
    found.note((0, 1), [1, 2, 9], "")
    found.note((3, 0), [4], "")
    expected.note((0, 0), [1, 2, 3], "")
    expected.note((0, 1), [1, 2, 3], "")
    assert pressure.differing(found, expected) == [
        "client 0, request 1: tokens differ from 2 on",
        "client 3, request 0: tokens differ from 0 on",
    ]
    assert pressure.differing(expected, expected) == []


def test_a_counter_that_is_not_there_is_an_error() -> None:
    """Else a renamed counter would count nothing, and be found too few only after minutes."""
    registry = CollectorRegistry()
    family = CounterMetricFamily("quire:preemptions", "x", labels=["model_name", "mode"])
    family.add_metric(["m", "swap"], 5)

    class _Fixed:
        def collect(self) -> list[CounterMetricFamily]:
            return [family]

    registry.register(_Fixed())  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        pressure.counted(Metrics(generate_latest(registry).decode()))
    family.add_metric(["m", "recompute"], 2)
    counts = pressure.counted(Metrics(generate_latest(registry).decode()))
    assert counts == {"swap": 5, "recompute": 2}

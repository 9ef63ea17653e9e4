"""What must not matter to the tokens a request gets: order, chunks, blocks, depth, workers, policy.

Each case is held against the token function itself, and must have exercised what it varies.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from scheduler_svc.core.events import RequestArrived
from tests.builders import expected_output, make_core, make_request
from tests.cluster import Cluster


def requests(seed: int = 0, count: int = 24) -> list[RequestArrived]:
    """Some with shared prefixes, some that stop early."""
    pick = random.Random(seed)
    return [
        make_request(
            f"r{i}",
            prompt=pick.randint(1, 60),
            family=pick.randint(0, 3),
            max_tokens=pick.randint(1, 24),
            stop_after=pick.choice([None, None, 5]),
            tenant=f"t{i % 3}",
        )
        for i in range(count)
    ]


def serve(
    arrivals: Sequence[RequestArrived],
    *,
    workers: Sequence[dict[str, Any]] = ({},),
    gap: int = 2,
    **config: Any,
) -> Cluster:
    """Serves all, `gap` steps apart."""
    cluster = Cluster(make_core(**config))
    for number, options in enumerate(workers):
        cluster.begin(f"w{number}", **{"num_blocks": 40, **options})
    for arrival in arrivals:
        cluster.arrive(arrival)
        for _ in range(gap):
            busy = [w for w in cluster.workers.values() if w.plans]
            if busy:
                cluster.step(busy[0].worker_id)
    cluster.run()
    for arrival in arrivals:
        name = arrival.request_id.decode()
        assert (cluster.output(name), cluster.end(name)) == expected_output(arrival)
    cluster.assert_idle()
    return cluster


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_arrival_does_not_matter(seed: int) -> None:
    arrivals = requests()
    random.Random(seed).shuffle(arrivals)
    assert serve(arrivals).core.stats.prefix_hits > 0


@pytest.mark.parametrize("chunk", [1, 3, 7, 40])
def test_the_size_of_chunks_does_not_matter(chunk: int) -> None:
    assert serve(requests(), prefill_chunk_tokens=chunk).core.stats.num_chunked_prefills > 0


@pytest.mark.parametrize("budget", [5, 17, 300])
def test_the_token_budget_does_not_matter(budget: int) -> None:
    serve(requests(), workers=[{"max_num_batched_tokens": budget}])


@pytest.mark.parametrize("block_size", [1, 2, 16, 64])
def test_the_size_of_blocks_does_not_matter(block_size: int) -> None:
    serve(requests(), workers=[{"block_size": block_size, "num_blocks": 256 // block_size}])


@pytest.mark.parametrize("depth", range(9))
def test_the_number_of_steps_in_flight_does_not_matter(depth: int) -> None:
    stats = serve(requests(), max_inflight_steps=depth).core.stats
    assert (stats.num_wasted_rows > 0) == (depth != 1)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_number_of_workers_does_not_matter(count: int) -> None:
    cluster = serve(requests(), workers=[{}] * count, gap=0)
    assert all(worker.steps for worker in cluster.workers.values())


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 0])
@pytest.mark.parametrize("num_blocks", [22, 26, 40])
def test_preemption_does_not_matter(depth: int, num_blocks: int) -> None:
    workers = [{"num_blocks": num_blocks}]
    cluster = serve(requests(), workers=workers, gap=0, watermark=0.0, max_inflight_steps=depth)
    assert cluster.core.stats.num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize(("mode", "token_us"), [("swap", 0.0), ("recompute", 0.0), ("auto", 1.0)])
def test_the_way_of_preemption_does_not_matter(depth: int, mode: str, token_us: float) -> None:
    host = {"num_host_blocks": 40, "token_us": token_us, "swap_gb_per_s": 8.0 * token_us}
    stats = serve(
        requests(),
        workers=[{"num_blocks": 22, **host}],
        gap=0,
        watermark=0.0,
        max_inflight_steps=depth,
        preemption_mode=mode,
    ).core.stats
    assert stats.num_preemptions > 0
    assert (stats.num_blocks_swapped_in > 0) == (mode != "recompute")


@pytest.mark.parametrize(
    "config",
    [
        {"scheduling_policy": "static"},
        {"scheduling_policy": "fair"},
        {"enable_prefix_caching": 0},
        {"max_prefill_gap_ns": 1},
    ],
)
def test_policy_and_cache_do_not_matter(config: dict[str, Any]) -> None:
    serve(requests(), **config)

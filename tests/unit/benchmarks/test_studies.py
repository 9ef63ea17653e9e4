"""What the studies send and what they read out of a scrape; no stack runs here."""

import itertools
from pathlib import Path

import pytest

from benchmarks.studies.batching import exponential_jobs
from benchmarks.studies.block_size import pairs, wasted_share
from benchmarks.studies.prefixes import SYSTEM_TOKENS, num_blocks, shared_prompts
from benchmarks.studies.study import Gauges, read_gauges
from benchmarks.studies.tenants import write_keys
from benchmarks.workload import Job
from gateway.core import keys

SCRAPE = """
# HELP quire:blocks_used KV blocks owned by requests.
quire:blocks_used{model_name="m"} 12.0
quire:preemptions_total{mode="swap",model_name="m"} 3.0
quire:preemptions_total{mode="recompute",model_name="m"} 4.0
quire:plan_bytes_bucket{le="16.0",model_name="m"} 5.0
quire:plan_bytes_sum{model_name="m"} 1.5e+03
"""


def test_outputs_are_exponential_and_cut() -> None:
    work = exponential_jobs(256, mean=128, most=512, seed=7)
    lengths = [job.num_output for job in work]
    assert work == exponential_jobs(256, mean=128, most=512, seed=7)
    assert (min(lengths), max(lengths)) == (1, 512)
    # Without the cut the mean is 128; these 256 have 122.
    assert sum(lengths) / 256 == pytest.approx(122, abs=0.1)
    assert all(64 <= len(job.prompt) <= 192 for job in work)


def test_no_two_prompts_share_a_first_block() -> None:
    work = exponential_jobs(256, mean=128, most=512, seed=7)
    assert len({job.prompt[:4] for job in work}) == len(work)


def test_pairs_share_what_they_say_and_no_more() -> None:
    found = pairs("seed", 50)
    for first, second, shared in found:
        same = itertools.takewhile(
            lambda both: both[0] == both[1], zip(first.prompt, second.prompt, strict=False)
        )
        assert sum(1 for _ in same) == shared
    assert len({shared for _, _, shared in found}) > 10


def test_requests_of_a_load_share_the_system_prompt_alone() -> None:
    work, other = shared_prompts("a", 30), shared_prompts("b", 30)
    assert len({job.prompt[:SYSTEM_TOKENS] for job in work}) == 1
    assert len({job.prompt[: SYSTEM_TOKENS + 4] for job in work}) == 30
    assert work[0].prompt[:4] != other[0].prompt[:4]


def test_blocks_are_counted_whole() -> None:
    assert num_blocks([Job(prompt=(1,) * 16, num_output=16)]) == 2
    assert num_blocks([Job(prompt=(1,) * 16, num_output=17)] * 3) == 9


def test_a_scrape_is_read_with_and_without_labels() -> None:
    gauges = read_gauges(SCRAPE, 1.0)
    assert gauges.get("quire:blocks_used") == 12
    assert gauges.get("quire:preemptions_total") == 7
    assert gauges.get('quire:preemptions_total{mode="swap"}') == 3
    assert gauges.get("quire:plan_bytes_sum") == 1500
    assert gauges.get("quire:plan_bytes_bucket") == 0
    assert gauges.get("quire:not_there") == 0


def test_waste_counts_the_moments_when_all_run() -> None:
    work = [Job(prompt=(1,) * 10, num_output=10)] * 2

    def moment(running: float, blocks: float, backlog: float) -> Gauges:
        values = {
            "vllm:num_requests_running": running,
            "quire:blocks_used": blocks,
            "quire:backlog_tokens": backlog,
        }
        return Gauges(at_s=0.0, values=values)

    # 24 of 40 tokens computed in 2 blocks of 16 tokens: 8 of 32 places are empty.
    assert wasted_share([moment(2, 2, 16), moment(1, 1, 10)], work, 16) == pytest.approx(0.25)
    assert wasted_share([moment(1, 1, 10)], work, 16) is None


def test_the_gateway_knows_the_tenants_keys(tmp_path: Path) -> None:
    path, shown = write_keys(tmp_path)
    ring = keys.parse(path.read_bytes())
    owners = {ring.owner([f"Bearer {key}".encode()]).tenant for key in shown.values()}
    assert owners == {"greedy", "modest"}
    assert ring.weight("greedy") == ring.weight("modest") == 1

"""Tenants: what is charged, who is next, what an idle time earns."""

from collections import Counter

import pytest

from scheduler_svc.core.tenants import Tenant, Tenants
from scheduler_svc.core.waiting import MAX_LEFT, WaitingQueue
from tests.builders import expected_output, make_core, make_request
from tests.cluster import Cluster
from tests.unit.scheduler_core.test_waiting import make


def test_the_tenant_served_least_is_next_after_each_admission() -> None:
    tenants = Tenants()
    queue = WaitingQueue(tenants)
    a, b = tenants.arrived("a", 1.0), tenants.arrived("b", 2.0)
    for sequence, tenant in enumerate((a, a, a, b, b, b)):
        queue.add(make(sequence, tenant=tenant))
    order = []
    for request in queue.in_turn({}):
        order.append(request.tenant.name)
        request.tenant.charge(10)
    # a counts 10 tokens as 10, b as 5.
    assert order == ["a", "b", "b", "a", "b", "a"]


def test_inside_a_tenant_the_rank_decides() -> None:
    tenants = Tenants()
    queue, tenant = WaitingQueue(tenants), tenants.arrived("a", 1.0)
    for sequence, priority in enumerate((1, 0, -1)):
        queue.add(make(sequence, priority=priority, tenant=tenant))
    assert [request.rank[1] for request in queue.in_turn({})] == [2, 1, 0]


def test_one_tenant_with_nothing_that_fits_does_not_hide_the_others() -> None:
    tenants = Tenants()
    queue = WaitingQueue(tenants)
    flood, other = tenants.arrived("flood", 1.0), tenants.arrived("other", 1.0)
    other.charge(1)
    for sequence in range(100):
        queue.add(make(sequence, tenant=flood))
    queue.add(make(100, tenant=other))
    left: Counter[Tenant] = Counter()
    names = []
    for request in queue.in_turn(left):
        names.append(request.tenant.name)
        left[request.tenant] += 1
    assert names == ["flood"] * MAX_LEFT + ["other"]


def test_an_idle_time_earns_nothing() -> None:
    tenants = Tenants()
    queue = WaitingQueue(tenants)
    busy, idle = tenants.arrived("busy", 1.0), tenants.arrived("idle", 1.0)
    queue.add(make(0, tenant=busy))
    busy.charge(500)
    tenants.raise_floor(busy.counter)
    queue.add(make(1, tenant=idle))
    assert idle.counter == 500.0


def test_what_was_had_beyond_the_others_is_remembered() -> None:
    tenants = Tenants()
    for name, tokens in (("ahead", 300), ("behind", 50)):
        tenant = tenants.arrived(name, 1.0)
        tenant.charge(tokens)
        tenants.raise_floor(100.0)
        tenants.ended(tenant)
    assert len(tenants) == 1
    assert tenants.arrived("ahead", 1.0).counter == 300.0
    assert tenants.arrived("behind", 1.0).counter == 0.0


def test_at_the_bound_the_one_idle_longest_is_forgotten() -> None:
    tenants = Tenants(max_idle=2)
    for name in "abc":
        tenant = tenants.arrived(name, 1.0)
        tenant.charge(10)
        tenants.ended(tenant)
    assert len(tenants) == 2
    assert [tenants.arrived(name, 1.0).counter for name in "abc"] == [0.0, 10.0, 10.0]


def service(cluster: Cluster, tenant: str) -> float:
    """What the core has charged."""
    return cluster.core._tenants.arrived(tenant, 1.0).counter


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tokens_are_charged_once_whatever_happens_to_their_request(depth: int) -> None:
    """Preempted, its step failed, its worker lost, asked for anew: still prompt and output."""
    c = Cluster(make_core(scheduling_policy="fair", max_inflight_steps=depth, watermark=0.0))
    c.begin(num_blocks=6, block_size=4)
    arrivals = [make_request(name, prompt=10, max_tokens=8, tenant=name) for name in "ab"]
    c.arrive_together(*arrivals)
    c.steps(2)
    c.step(fail=True)
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    c.lose("w")
    c.supersede("a")
    c.begin(num_blocks=6, block_size=4)
    c.run()
    for arrival in arrivals:
        name = arrival.request_id.decode()
        assert (c.output(name), c.end(name)) == expected_output(arrival)
    assert c.core.stats.num_preemptions > 0
    # A worker that is lost takes tokens with it that the core has not seen and samples again.
    assert service(c, "a") == service(c, "b") == 18.0


def test_a_prefix_hit_costs_its_tenant_nothing() -> None:
    c = Cluster(make_core(scheduling_policy="fair", max_inflight_steps=1))
    c.begin(block_size=4)
    for name in "ab":
        c.arrive(make_request(name, prompt=12, family=1, max_tokens=1, tenant=name))
        c.run()
    assert (service(c, "a"), service(c, "b")) == (13.0, 5.0)


def test_a_greedy_tenant_does_not_keep_another_waiting() -> None:
    for policy, first in (("fcfs", False), ("fair", True)):
        c = Cluster(make_core(scheduling_policy=policy, max_inflight_steps=1))
        c.begin(num_slots=2)
        greedy = [make_request(f"g{i}", max_tokens=6, tenant="greedy") for i in range(8)]
        c.arrive_together(*greedy, make_request("late", max_tokens=2, tenant="modest"))
        c.run(until=lambda c=c: c.end("late") is not None)  # type: ignore[misc]
        assert (sum(c.end(f"g{i}") is not None for i in range(8)) <= 2) is first


def test_small_ones_of_a_tenant_in_front_do_not_pass_a_large_one_for_ever() -> None:
    """A lead of one context ends the passing, though max_skips would allow it."""
    c = Cluster(make_core(scheduling_policy="fair", max_inflight_steps=1, max_skips=1000))
    c.begin(num_blocks=10, block_size=4, num_slots=3, max_model_len=40)
    c.arrive(make_request("runs", prompt=6, max_tokens=34, tenant="small"))
    c.step()
    c.arrive(make_request("large", prompt=36, max_tokens=2, tenant="large"))
    for i in range(60):
        c.arrive(make_request(f"s{i}", prompt=3, max_tokens=1, tenant="small"))
    c.run(until=lambda: c.row("large") > 0)
    passed = sum(c.end(f"s{i}") is not None for i in range(60))
    assert 0 < passed <= 40 // 4
    c.run()
    assert len(c.finishes) == 62


def test_with_fair_the_most_served_tenant_gives_its_blocks() -> None:
    c = Cluster(make_core(scheduling_policy="fair", max_inflight_steps=1, watermark=0.0))
    c.begin(num_blocks=6, block_size=4)
    c.arrive(make_request("first", prompt=10, max_tokens=8, tenant="greedy"))
    c.arrive(make_request("second", prompt=6, max_tokens=14, tenant="modest"))
    c.run(until=lambda: c.core.stats.num_preemptions > 0)
    c.run()
    assert c.finish("first").num_preemptions >= 1
    assert c.finish("second").num_preemptions == 0

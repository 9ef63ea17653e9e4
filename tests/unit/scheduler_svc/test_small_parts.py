"""Settings, Redis time, the gateways' grace, metrics."""

import asyncio

import pytest
from prometheus_client import generate_latest

from scheduler_svc import settings
from scheduler_svc.adapters import gateway_watch
from scheduler_svc.adapters.clock import MonotonicClock
from scheduler_svc.adapters.gateway_watch import GRACE_NS, GatewayWatch
from scheduler_svc.adapters.inbox_redis import RedisTime
from scheduler_svc.adapters.redis_access import RedisHealth
from scheduler_svc.core.account import Account, Wait
from scheduler_svc.core.events import GatewayLost
from scheduler_svc.core.ready import CoreStats, CoreView, Finish, Ready, WorkerView
from scheduler_svc.core.types import (
    FinishReason,
    PreemptionMode,
    PrefixStop,
    RequestId,
    WorkerId,
)
from scheduler_svc.metrics import Sample, SchedulerMetrics
from servicekit import redis_client
from servicekit.metrics import new_registry
from servicekit.settings import SettingsError
from tests.integration.scheduler.harness import Recorder

S = 1_000_000_000


def test_settings_become_the_cores_configuration() -> None:
    loaded = settings.load(
        ["--max-inflight-steps", "4"],
        {
            "QUIRE_MODEL": "/models/tiny",
            "QUIRE_SCHEDULING_POLICY": "static",
            "QUIRE_WORKER_WAIT_S": "1.5",
            "QUIRE_MAX_NUM_BATCHED_TOKENS": "512",
            "QUIRE_ENABLE_PREFIX_CACHING": "off",
            "QUIRE_MAX_PREFILL_GAP_MS": "2.5",
            "QUIRE_PRIORITY_AGEING_S": "0.5",
            "QUIRE_PORT": "8000",
        },
    )
    core = loaded.core_config()
    assert loaded.model_name == "tiny"
    assert (core.scheduling_policy, core.max_inflight_steps) == ("static", 4)
    assert (core.worker_wait_ns, core.max_num_batched_tokens) == (1_500_000_000, 512)
    assert not core.enable_prefix_caching
    assert (core.max_prefill_gap_ns, core.priority_ageing_ns) == (2_500_000, 500_000_000)


def test_running_streams_are_spared_unless_it_is_set_otherwise() -> None:
    """A step with decodes takes 200 ms at most, as far as its cost is known."""
    assert settings.load([], {}).core_config().max_prefill_gap_ns == 200_000_000
    unbound = settings.load([], {"QUIRE_MAX_PREFILL_GAP_MS": "0"})
    assert unbound.core_config().max_prefill_gap_ns == 0


def test_equal_models_hash_equally_and_others_do_not() -> None:
    def key(name: str) -> bytes:
        return settings.load([], {"QUIRE_SERVED_MODEL_NAME": name}).core_config().hash_key

    assert key("a") == key("a") != key("b")


def test_the_depth_is_adapted_unless_it_is_set() -> None:
    assert settings.load([], {}).core_config().max_inflight_steps == 0
    assert (
        settings.load([], {"QUIRE_MAX_INFLIGHT_STEPS": "8"}).core_config().max_inflight_steps == 8
    )


@pytest.mark.parametrize(
    ("name", "value"), [("QUIRE_LEASE_TTL_S", "0"), ("QUIRE_NO_SUCH_THING", "1")]
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        settings.load([], {name: value})


def test_redis_time_becomes_the_own_clock() -> None:
    time = RedisTime()
    time.sample(before_ns=10 * S, after_ns=10 * S + 200, redis_ns=1000 * S)
    assert time.to_clock_ns(1_000_000) == 10 * S + 100
    # A slower round trip says less and does not count, until the first is old.
    time.sample(before_ns=11 * S, after_ns=12 * S, redis_ns=1002 * S)
    assert time.to_clock_ns(1_000_000) == 10 * S + 100
    time.sample(before_ns=30 * S, after_ns=31 * S, redis_ns=1020 * S)
    assert time.to_clock_ns(1_000_000) == 10 * S + S // 2


async def test_a_gateway_has_a_grace_after_it_was_last_seen() -> None:
    redis = redis_client.connect("redis://127.0.0.1:1/0")
    clock = MonotonicClock()
    watch = GatewayWatch(
        redis,
        model="m",
        clock=clock,
        sink=None,  # type: ignore[arg-type]
        subscribed=frozenset,
        health=RedisHealth(clock),
    )
    watch.saw_request("from a request")
    now_ns = clock.now_ns()
    assert watch.lost({"a", "b"}, now_ns) == []
    assert watch.lost({"b"}, now_ns + GRACE_NS - S) == []
    assert sorted(watch.lost({"b"}, now_ns + GRACE_NS + S)) == ["a", "from a request"]
    assert watch.lost({"b"}, now_ns + GRACE_NS + 2 * S) == [], "said once"
    await redis.aclose()


class TurnedClock:
    """ports.Clock that the test turns."""

    now = 0

    def now_ns(self) -> int:
        """Nanoseconds."""
        return self.now


async def test_all_gateways_have_their_grace_anew_once_redis_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They could not register meanwhile, and their records have run out."""
    clock, sink = TurnedClock(), Recorder()
    answers: list[set[str] | Exception] = [{"g"}]
    read = asyncio.Event()

    async def members(*_: object) -> set[str]:
        while not answers:
            read.set()
            await asyncio.sleep(0)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def answer(*given: set[str] | Exception) -> None:
        read.clear()
        answers.extend(given)
        await read.wait()

    monkeypatch.setattr(redis_client, "members", members)
    monkeypatch.setattr(gateway_watch, "PERIOD_S", 0)
    redis = redis_client.connect("redis://127.0.0.1:1/0")
    watch = GatewayWatch(
        redis, model="m", clock=clock, sink=sink, subscribed=frozenset, health=RedisHealth(clock)
    )
    watching = asyncio.create_task(watch.run())
    await read.wait()
    clock.now += 2 * GRACE_NS
    await answer(ConnectionError("away"), set())
    assert sink.events == []
    clock.now += GRACE_NS
    await answer(set())
    assert sink.events == []
    clock.now += S
    await answer(set(), set())
    assert sink.events == [GatewayLost(now_ns=clock.now, gateway_id="g")]
    watching.cancel()
    await asyncio.wait([watching])
    await redis.aclose()


def test_metrics_show_the_core_and_its_histograms() -> None:
    worker = WorkerView(
        worker_id=WorkerId("w"),
        num_running=3,
        num_blocks_used=16,
        num_blocks=64,
        num_steps_in_flight=2,
        last_step=9,
        draining=False,
        max_steps_in_flight=3,
        round_trip_us=2500,
        num_swapped=2,
        num_host_blocks_used=4,
        num_host_blocks=8,
    )
    view = CoreView(
        epoch=7,
        num_waiting=5,
        num_running=3,
        num_swapped=2,
        backlog_tokens=99,
        workers=(worker,),
    )
    sample = Sample(
        stats=CoreStats(
            preemptions={
                PreemptionMode.SWAP: 1,
                PreemptionMode.RECOMPUTE: 3,
                PreemptionMode.MOVE: 0,
            },
            num_swaps_void=1,
            num_blocks_swapped_out=12,
            num_blocks_swapped_in=11,
            prefix_queries=10,
            prefix_hits=6,
            num_recovered=2,
            prefix_stops={PrefixStop.COLD: 3, PrefixStop.END: 0},
            num_held_back=6,
            num_forks=7,
            num_copied_blocks=5,
        ),
        view=view,
        num_finishes_pending=8,
        num_events_queued=1,
        time_to_drain_s=12.5,
    )
    registry = new_registry()
    metrics = SchedulerMetrics(registry, "tiny", lambda: sample)
    finish = Finish(
        request_id=RequestId(b"r"),
        entry_id="1-0",
        attempt=1,
        gateway_id="g",
        reason=FinishReason.STOP,
        notify=False,
        message="",
        num_prompt_tokens=1,
        num_output_tokens=1,
        num_cached_tokens=0,
        num_preemptions=1,
        arrived_ns=0,
        first_scheduled_ns=2 * S,
        first_token_ns=5 * S,
        finished_ns=9 * S,
        account=Account(
            waited=((Wait.TURN, S), (Wait.BLOCKS, S // 2)), preempted_ns=3 * S, set_back_ns=4 * S
        ),
    )
    metrics.round_done(Ready(finishes=(finish,)), 0.001)
    metrics.plan_sent(77)
    metrics.step_returned(0.5, 300)
    metrics.worker_lost()
    text = generate_latest(registry).decode()
    for line in (
        'vllm:num_requests_running{model_name="tiny"} 3.0',
        'vllm:num_requests_waiting{model_name="tiny"} 5.0',
        'vllm:num_requests_swapped{model_name="tiny"} 2.0',
        'vllm:cpu_cache_usage_perc{model_name="tiny"} 0.5',
        'quire:host_blocks_used{model_name="tiny"} 4.0',
        'quire:preemptions_total{mode="swap",model_name="tiny"} 1.0',
        'quire:preemptions_total{mode="recompute",model_name="tiny"} 3.0',
        'quire:swaps_void_total{model_name="tiny"} 1.0',
        'quire:swap_blocks_total{direction="out",model_name="tiny"} 12.0',
        'quire:swap_blocks_total{direction="in",model_name="tiny"} 11.0',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.25',
        'vllm:num_preemptions_total{model_name="tiny"} 4.0',
        'vllm:prefix_cache_queries_total{model_name="tiny"} 10.0',
        'vllm:prefix_cache_hits_total{model_name="tiny"} 6.0',
        'vllm:request_queue_time_seconds_sum{model_name="tiny"} 2.0',
        'vllm:request_prefill_time_seconds_sum{model_name="tiny"} 3.0',
        'vllm:request_decode_time_seconds_sum{model_name="tiny"} 4.0',
        'quire:prefix_looks_total{model_name="tiny",stop="cold"} 3.0',
        'quire:prefix_looks_total{model_name="tiny",stop="end"} 0.0',
        'quire:requests_held_back_total{model_name="tiny"} 6.0',
        'quire:forks_total{model_name="tiny"} 7.0',
        'quire:copied_blocks_total{model_name="tiny"} 5.0',
        'quire:request_wait_seconds_total{model_name="tiny",reason="turn"} 1.0',
        'quire:request_wait_seconds_total{model_name="tiny",reason="blocks"} 0.5',
        'quire:preempted_seconds_total{model_name="tiny"} 3.0',
        'quire:set_back_seconds_total{model_name="tiny"} 4.0',
        'quire:requests_recovered_total{model_name="tiny"} 2.0',
        'quire:worker_lost_total{model_name="tiny"} 1.0',
        'quire:plan_bytes_sum{model_name="tiny"} 77.0',
        'quire:plan_to_result_seconds_sum{model_name="tiny"} 0.5',
        'quire:finishes_pending{model_name="tiny"} 8.0',
        'quire:blocks_used{model_name="tiny"} 16.0',
        'quire:slots_used{model_name="tiny"} 3.0',
        'quire:backlog_tokens{model_name="tiny"} 99.0',
        'quire:time_to_drain_seconds{model_name="tiny"} 12.5',
        'quire:epoch{model_name="tiny"} 7.0',
        'quire:inflight_steps{model_name="tiny",worker_id="w"} 3.0',
        'quire:round_trip_seconds{model_name="tiny",worker_id="w"} 0.0025',
    ):
        assert line in text, line


def test_a_standby_shows_zeros() -> None:
    registry = new_registry()
    sample = Sample(stats=None, view=None, num_finishes_pending=0, num_events_queued=0)
    SchedulerMetrics(registry, "tiny", lambda: sample)
    text = generate_latest(registry).decode()
    assert 'quire:epoch{model_name="tiny"} 0.0' in text
    assert "quire:time_to_drain_seconds" not in text, "it would say that there is no work"

"""The stand-ins of the control-plane benchmark: workers that sleep, a line that is longer."""

import asyncio
import time

from benchmarks.hop.delay import delaying
from benchmarks.hop.sleepers import Sleeper
from gpu_worker.messages import Admit, Open, StepPlan, StepResult
from gpu_worker.ports import CacheGroupSpec, RunnerInfo
from tests.worker_builders import make_admit


def make_sleeper(step_us: float = 1000.0) -> Sleeper:
    group = CacheGroupSpec(window=0, block_size=16, block_bytes=1, num_blocks=8)
    return Sleeper(
        RunnerInfo(
            model_digest="0" * 64,
            vocab_size=100,
            max_model_len=100,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            cache_group=group,
            step_us=step_us,
            token_us=0.0,
        )
    )


async def results(sleeper: Sleeper, *plans: StepPlan) -> list[StepResult]:
    """Those of all steps of the plans, sent in one session."""
    link = sleeper.sessions.open(
        Open(
            epoch=1,
            min_schema_revision=1,
            max_schema_revision=1,
            last_result_step=0,
            incarnation=0,
        )
    )
    for plan in plans:
        sleeper.sessions.receive(link, plan)
    found: list[StepResult] = []
    async with asyncio.timeout(20):
        while len(found) < plans[-1].last_step:
            link.wake.clear()
            messages = sleeper.sessions.next_messages(link)
            found += [message for message in messages if isinstance(message, StepResult)]
            if not messages:
                await link.wake.wait()
    return found


def admit(slot: int) -> Admit:
    """Five tokens."""
    return make_admit(slot)


async def test_a_sleeper_samples_for_rows_whose_prompt_is_done() -> None:
    first = StepPlan(
        epoch=1, step=1, reset=True, admits=[admit(0), admit(1)],
        changed_slots=(0, 1), changed_num_tokens=(5, 3),
    )  # fmt: skip
    second = StepPlan(epoch=1, step=2, changed_slots=(0, 1), changed_num_tokens=(1, 2))
    third = StepPlan(epoch=1, step=3, num_steps=2, changed_slots=(1,), changed_num_tokens=(1,))
    last = StepPlan(epoch=1, step=5, release_slots=(0,))
    found = await results(make_sleeper(), first, second, third, last)
    assert [result.step for result in found] == [1, 2, 3, 4, 5]
    assert [sorted(result.slots) for result in found] == [[0], [0, 1], [0, 1], [0, 1], [1]]


async def test_steps_of_a_sleeper_follow_each_other_without_a_gap() -> None:
    plan = StepPlan(
        epoch=1, step=1, reset=True, num_steps=4, admits=[admit(0)],
        changed_slots=(0,), changed_num_tokens=(5,),
    )  # fmt: skip
    found = await results(make_sleeper(), plan)
    assert [result.times.idle_us for result in found[1:]] == [0, 0, 0]
    assert [result.times.total_us for result in found] == [1000, 2000, 3000, 4000]


async def test_a_delayed_line_keeps_the_order_and_takes_its_time_both_ways() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(100):
            writer.write(chunk)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with delaying(server.sockets[0].getsockname()[1], 0.05) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begin = time.monotonic()
        for number in range(20):
            writer.write(b"%02d" % number)
            await asyncio.sleep(0.001)
        async with asyncio.timeout(20):
            answer = await reader.readexactly(40)
        assert answer == b"".join(b"%02d" % number for number in range(20))
        assert time.monotonic() - begin >= 0.1
        writer.close()
    server.close()

"""Operations over real gRPC: host blocks in Hello, copies in plans, what is done in results."""

import grpc

from gpu_worker.ports import OperationKind
from tests.integration.worker.bench import OPTIONS, MakeBench
from tests.stub_worker.fake_runner import token_from_history
from tests.worker_builders import PlanScript, make_admit, make_operation, request_id

COPY, SWAP_OUT, SWAP_IN = OperationKind.COPY, OperationKind.SWAP_OUT, OperationKind.SWAP_IN
PROMPT = (11, 12, 13, 14, 15, 16, 17)


async def test_hello_says_what_the_host_holds(make_bench: MakeBench) -> None:
    bench = await make_bench(num_host_blocks=32, swap_gb_per_s=7.5)
    scheduler = bench.scheduler()
    await scheduler.open()
    (group,) = scheduler.hello.cache_groups
    assert (group.num_host_blocks, group.block_bytes) == (32, 1024)
    cost = scheduler.hello.cost
    assert (cost.swap_out_gb_per_s, cost.swap_in_gb_per_s) == (7.5, 7.5)


async def test_two_samples_share_a_prompt_until_one_writes(make_bench: MakeBench) -> None:
    """The second takes the first's blocks, but for the last one, which it gets a copy of."""
    bench = await make_bench()
    scheduler, script = bench.scheduler(), PlanScript()
    gateway = await bench.subscribed()
    await scheduler.open()
    first = make_admit(token_ids=PROMPT, prompt_len=7, block_ids=(0, 1))
    await scheduler.send(script.plan(admits=[first], schedule=[(0, 7)]))
    second = make_admit(
        1,
        request_id=request_id(1),
        token_ids=PROMPT,
        prompt_len=7,
        block_ids=(0, 9),
        num_computed_tokens=6,
    )
    copy = make_operation(1, COPY, [(1, 9)])
    plan = script.plan(admits=[second], schedule=[(0, 1), (1, 1)], operations=[copy])
    await scheduler.send(plan)
    await scheduler.send(script.plan(schedule=[(0, 0)]))
    results = await scheduler.results(3)
    assert [list(result.operations_done) for result in results] == [[], [1], []]
    await gateway.read(3)
    tokens = list(PROMPT)
    for _ in range(2):
        tokens.append(token_from_history(tokens, OPTIONS))
    assert gateway.outputs == {request_id(0): tokens[7:], request_id(1): tokens[7:]}


async def test_a_resync_repeats_what_was_done_as_it_was(make_bench: MakeBench) -> None:
    bench = await make_bench(swap_steps=1)
    scheduler, script = bench.scheduler(), PlanScript()
    await scheduler.open()
    incarnation = scheduler.hello.incarnation
    swap = make_operation(5, SWAP_OUT, [(20, 0)])
    await scheduler.send(script.plan(operations=[swap, make_operation(6, COPY, [(20, 21)])]))
    await scheduler.send(script.plan(admits=[make_admit()], schedule=[(0, 5)]))
    seen = await scheduler.results(2)
    assert sorted(seen[0].operations_done) == [5, 6]
    scheduler.call.cancel()
    again = bench.scheduler()
    await again.open(last_result=0, incarnation=incarnation)
    assert await again.results(2) == seen
    more = script.plan(schedule=[(0, 1)], operations=[make_operation(7, SWAP_IN, [(0, 22)])])
    await again.send(more)
    (last,) = await again.results(1)
    assert (list(last.operations_done), list(last.faults)) == ([7], [])


async def test_a_new_leader_numbers_operations_anew(make_bench: MakeBench) -> None:
    bench = await make_bench()
    old, new = bench.scheduler(), bench.scheduler()
    await old.open(epoch=1)
    await old.send(PlanScript(epoch=1).plan(operations=[make_operation(9, COPY, [(20, 21)])]))
    assert list((await old.results(1))[0].operations_done) == [9]
    await new.open(epoch=2)
    await new.send(PlanScript(epoch=2).plan(operations=[make_operation(1, COPY, [(20, 21)])]))
    (result,) = await new.results(1)
    assert (list(result.operations_done), list(result.faults)) == ([1], [])
    assert await old.status() is grpc.StatusCode.ABORTED

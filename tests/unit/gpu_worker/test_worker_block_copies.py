"""Copies of whole blocks: at once, and in a lane beside the one that computes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from gpu_worker import block_copies, kv_cache
from gpu_worker.block_copies import AtOnce, BlockCopies, SwapBandwidth
from gpu_worker.models import KvShape
from gpu_worker.operations import InFlight
from gpu_worker.ports import OperationKind
from gpu_worker.slot_table import InvalidPlanError, ReplicaLimits
from kernels.cache_layout import layer_views
from tests.worker_builders import make_operation

COPY, SWAP_OUT, SWAP_IN = OperationKind.COPY, OperationKind.SWAP_OUT, OperationKind.SWAP_IN
SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=4, windows=(0,) * 3)


class Later:
    """Made when the lane gets to it."""

    def __init__(self, lane: "SlowLane", copy: Callable[[], None]) -> None:
        self.lane, self.copy = lane, copy
        self.is_made = False

    def query(self) -> bool:
        return self.is_made

    def synchronize(self) -> None:
        while not self.is_made:
            self.lane.make_one()


class SlowLane:
    """Copies wait until they are let through, one after the other: a side stream by hand."""

    def __init__(self) -> None:
        self.waiting: list[Later] = []

    def run(self, copy: Callable[[], None]) -> Later:
        self.waiting.append(Later(self, copy))
        return self.waiting[-1]

    def make_one(self) -> None:
        later = self.waiting.pop(0)
        later.copy()
        later.is_made = True


def numbered(num_blocks: int, first: int) -> Tensor:
    """Blocks of three elements that hold a number of their own."""
    numbers = torch.arange(first, first + num_blocks, dtype=torch.float32)
    return numbers[:, None].repeat(1, 3)


def numbers(blocks: Tensor) -> list[int]:
    """What `numbered` wrote, where all elements of each block agree."""
    assert bool((blocks == blocks[:, :1]).all())
    return [int(value) for value in blocks[:, 0]]


def test_all_layers_of_a_block_are_copied_and_nothing_else() -> None:
    layout = kv_cache.layout(SHAPE, 4, 6)
    cache = kv_cache.allocate(layout, torch.bfloat16, torch.device("cpu"))
    cache.copy_(torch.rand(cache.shape))
    before = cache.clone()
    copies = block_copies.make(cache, 2)
    assert copies.host.shape == (2, layout.block_elements)
    copies.begin([make_operation(1, SWAP_OUT, [(4, 1)]), make_operation(2, COPY, [(0, 4)])])
    copies.begin([make_operation(3, SWAP_IN, [(1, 5)])])
    assert copies.finished(wait=False) == [1, 2, 3]
    assert copies.finished(wait=True) == []
    for layer in range(3):
        for side, old in zip(layer_views(cache, layer), layer_views(before, layer), strict=True):
            assert torch.equal(side[:4], old[:4])
            assert torch.equal(side[4], old[0])
            assert torch.equal(side[5], old[4])
    assert not copies.host[0].any()


def test_pairs_of_a_copy_are_copied_in_order() -> None:
    copies = BlockCopies(numbered(4, 10), numbered(0, 0), main=AtOnce(), side=AtOnce())
    copies.begin([make_operation(1, COPY, [(0, 1), (1, 2), (1, 3)])])
    assert numbers(copies.device) == [10, 10, 10, 10]


def test_a_swap_is_done_when_its_lane_says_so_and_a_copy_does_not_wait_for_it() -> None:
    side = SlowLane()
    copies = BlockCopies(numbered(4, 10), numbered(2, 20), main=AtOnce(), side=side)
    copies.begin(
        [
            make_operation(1, SWAP_OUT, [(0, 0)]),
            make_operation(2, COPY, [(1, 2)]),
            make_operation(3, SWAP_IN, [(1, 3)]),
        ]
    )
    assert copies.finished(wait=False) == [2]
    side.make_one()
    assert copies.finished(wait=False) == [1]
    assert copies.finished(wait=False) == []
    assert numbers(copies.device) == [10, 11, 11, 13]
    assert copies.finished(wait=True) == [3]
    assert numbers(copies.device) == [10, 11, 11, 21]
    assert numbers(copies.host) == [10, 21]


LIMITS = ReplicaLimits(
    num_slots=1,
    num_blocks=5,
    block_size=4,
    vocab_size=10,
    max_model_len=20,
    max_num_batched_tokens=20,
    num_host_blocks=3,
)
blocks = st.integers(0, 4)
events = st.one_of(
    st.tuples(st.sampled_from([COPY, SWAP_OUT, SWAP_IN]), st.tuples(blocks, blocks)),
    st.tuples(st.sampled_from(["write", "read"]), blocks),
    st.tuples(st.sampled_from(["let through", "ask"]), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(script=st.lists(events, min_size=1, max_size=25))
def test_what_the_rules_allow_is_as_if_every_copy_were_made_at_once(
    script: list[tuple[Any, Any]],
) -> None:
    """Copies, and what steps read and write meanwhile, against lists that hold numbers."""
    side, rules = SlowLane(), InFlight()
    copies = BlockCopies(numbered(5, 10), numbered(3, 20), main=AtOnce(), side=side)
    device, host = numbers(copies.device), numbers(copies.host)
    new_number = 100
    for at, (what, argument) in enumerate(script, 1):
        if isinstance(what, OperationKind):
            operation = make_operation(at, what, [argument])
            try:
                rules.stage([operation], LIMITS, new_epoch=False)
            except InvalidPlanError:
                continue
            rules.commit([operation], new_epoch=False)
            copies.begin([operation])
            source, target = argument
            into = host if what is SWAP_OUT else device
            into[target] = (host if what is SWAP_IN else device)[source]
        elif what == "let through" and side.waiting:
            side.make_one()
        elif what == "ask":
            rules.done(copies.finished(wait=False))
        elif what in ("read", "write"):
            busy = rules.stage([], LIMITS, new_epoch=False)
            forbidden = set[int]() if busy is None else set(busy.filling)
            if busy is not None and what == "write":
                forbidden |= busy.leaving
            if argument in forbidden:
                continue
            if what == "read":
                assert numbers(copies.device)[argument] == device[argument]
            else:
                new_number += 1
                copies.device[argument] = new_number
                device[argument] = new_number
    rules.done(copies.finished(wait=True))
    assert len(rules) == 0
    assert (numbers(copies.device), numbers(copies.host)) == (device, host)


class FakeStream:
    """Notes what is asked of it; stands for a CUDA stream, which is not here to be used."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: "FakeStream") -> None:
        self.calls.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.calls.append(f"event of {self.name}")
        return self.name

    def __enter__(self) -> None:
        self.calls.append(f"on {self.name}")

    def __exit__(self, *error: object) -> None:
        self.calls.append(f"off {self.name}")


def test_a_side_stream_copies_after_what_the_main_one_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    cuda = SimpleNamespace(
        Stream=lambda device: FakeStream("side", calls),
        current_stream=lambda device: FakeStream("main", calls),
        stream=lambda stream: stream,
    )
    monkeypatch.setattr("gpu_worker.block_copies.torch.cuda", cuda)
    device = torch.device("cuda:0")
    made = block_copies.SideStream(device).run(lambda: calls.append("copy"))
    assert str(made) == "side"
    assert calls == ["side waits for main", "on side", "copy", "off side", "event of side"]
    calls.clear()
    made = block_copies.MainStream(device).run(lambda: calls.append("copy"))
    assert str(made) == "main"
    assert calls == ["copy", "event of main"]


def test_bandwidth_is_that_of_real_copies() -> None:
    layout = kv_cache.layout(SHAPE, 16, 300)
    cache = kv_cache.allocate(layout, torch.float32, torch.device("cpu"))
    measured = block_copies.measure(block_copies.make(cache, 20))
    assert measured.out_gb_per_s > 0
    assert measured.in_gb_per_s > 0


def test_bandwidth_is_bytes_over_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes a block, eight blocks: 96 bytes a copy. Rounds take 3, 2 and 4 ns, in and out."""
    side = SlowLane()
    copies = BlockCopies(numbered(8, 0), numbered(9, 0), main=AtOnce(), side=side)
    monkeypatch.setattr(block_copies, "MEASURED_RUNS", 3)
    durations = [3, 2, 4] * 2 + [6, 4, 8] + [12, 9, 8]
    ticks = [tick for duration in durations for tick in (1000, 1000 + duration)]
    clock = SimpleNamespace(perf_counter_ns=lambda: ticks.pop(0))
    monkeypatch.setattr("gpu_worker.block_copies.time", clock)
    assert block_copies.measure(copies) == SwapBandwidth(out_gb_per_s=24.0, in_gb_per_s=12.0)
    assert not ticks


def test_without_host_blocks_there_is_no_bandwidth() -> None:
    cache = kv_cache.allocate(kv_cache.layout(SHAPE, 4, 6), torch.float32, torch.device("cpu"))
    copies = block_copies.make(cache, 0)
    assert copies.host.shape[0] == 0
    assert block_copies.measure(copies) == SwapBandwidth()

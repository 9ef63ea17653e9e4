"""The parity tests can fail: each planted fault is found by the comparison they use."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from gpu_worker import runner as runner_module
from gpu_worker.attention import Backend, StepTables, UnsupportedModelError, make_backend
from gpu_worker.batch import BatchBuilder, FlatBatch, Row
from tests.parity.comparing import BLOCK_SIZE, ParityError, compare, recorded_logits, runner_of
from tests.parity.conftest import Small
from tests.parity.fake_scheduler import FakeScheduler, Request
from tests.parity.test_families import make_requests


class Faulty:
    """A back end with one fault, once it is armed."""

    name = "faulty"

    def __init__(self, real: Backend, fault: str) -> None:
        self.real = real
        self.fault = fault
        self.armed = False

    def store(self, k: Tensor, v: Tensor, caches: Any, step: StepTables) -> None:
        """Wrong KV head: each head's keys and values go to its neighbour's place."""
        if self.armed and self.fault == "wrong KV head":
            k, v = k.roll(1, dims=1), v.roll(1, dims=1)
        self.real.store(k, v, caches, step)

    def attend(
        self, q: Tensor, caches: Any, step: StepTables, *, window: int, **kwargs: Any
    ) -> Tensor:
        """Window off by one, either way; what few families ask for, left out."""
        if self.armed and window:
            window += {"window too long": 1, "window too short": -1}.get(self.fault, 0)
        if self.armed and self.fault in ("softcap", "sinks"):
            assert kwargs[self.fault] is not None
            kwargs[self.fault] = {"softcap": 0.0, "sinks": None}[self.fault]
        return self.real.attend(q, caches, step, window=window, **kwargs)


def break_batch(fault: str, batch: FlatBatch, rows: Sequence[Row]) -> FlatBatch:
    """The same batch with a fault in its arrays."""
    if fault == "two blocks swapped":
        # The first and the last one: attention does not see the order of blocks that are attended
        # whole, since their keys carry their positions.
        tables = batch.block_tables.copy()
        for table, seq_len in zip(tables, batch.seq_lens, strict=True):
            last = (seq_len - 1) // BLOCK_SIZE
            table[[0, last]] = table[[last, 0]]
        return replace(batch, block_tables=tables)
    assert fault == "positions off by one"
    # In later chunks and decodes only: shifting all positions alike changes nothing, since
    # rotary embeddings see differences.
    positions = batch.positions.copy()
    for at, index in enumerate(batch.rows):
        if rows[index].start:
            positions[batch.query_start_loc[at] : batch.query_start_loc[at + 1]] += 1
    return replace(batch, positions=positions)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Faulty]]:
    """Plants a fault in runners loaded afterwards; the back ends are armed by hand."""

    def planted(fault: str) -> list[Faulty]:
        backends: list[Faulty] = []

        def make(name: str, device: Any) -> Faulty:
            backends.append(Faulty(make_backend(name, device), fault))
            return backends[-1]

        monkeypatch.setattr(runner_module, "make_backend", make)
        return backends

    return planted


BATCH_FAULTS = ("two blocks swapped", "positions off by one")
BACKEND_FAULTS = ("wrong KV head", "window too long", "window too short")


SEEN_BY = [
    *(("llama", fault) for fault in (*BATCH_FAULTS, "wrong KV head")),
    *(("mistral", fault) for fault in (*BATCH_FAULTS, *BACKEND_FAULTS)),
    ("gemma2", "softcap"),
    ("gpt_oss", "sinks"),
]


@pytest.mark.parametrize(("family", "fault"), SEEN_BY)
@pytest.mark.parametrize(
    "condition",
    [
        "whole prompts",
        pytest.param("chunks of 7", marks=pytest.mark.slow),
        pytest.param("prefix hits", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(120)
def test_a_planted_fault_is_found(
    family: str,
    fault: str,
    condition: str,
    small: Callable[[str], Small],
    plant: Callable[[str], list[Faulty]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small(family)
    backends = plant(fault)
    broken = runner_of(model.folder)
    scheduler = FakeScheduler(
        [broken],
        chunk=7 if condition == "chunks of 7" else 64,
        share_prefixes=condition == "prefix hits",
    )
    requests: list[Request] = make_requests(shared=50)
    with recorded_logits() as recording:
        scheduler.run(requests)
    compare(model.reference, requests, recording)  # unarmed: equal

    backends[0].armed = True
    if fault in BATCH_FAULTS:
        build = BatchBuilder.build
        monkeypatch.setattr(
            BatchBuilder,
            "build",
            lambda builder, rows: break_batch(fault, build(builder, rows), rows),
        )
    requests = make_requests(shared=50)
    with recorded_logits() as recording:
        scheduler.run(requests)
    with pytest.raises(ParityError, match=r"logits|behind"):
        compare(model.reference, requests, recording)


def test_a_broken_back_end_is_refused_at_load(
    small: Callable[[str], Small], plant: Callable[[str], list[Faulty]]
) -> None:
    backends = plant("wrong KV head")
    original = Faulty.__init__

    def armed(self: Faulty, real: Backend, fault: str) -> None:
        original(self, real, fault)
        self.armed = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Faulty, "__init__", armed)
        with pytest.raises(UnsupportedModelError, match="llama: its paged logits"):
            runner_of(small("llama").folder)
    assert backends[0].armed

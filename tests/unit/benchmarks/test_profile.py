"""Where a step's time goes: what counts as a step, what the parts add up to, and their floors."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gateway.streams import StreamError
from benchmarks.profile import __main__ as bench
from benchmarks.profile import floors
from benchmarks.profile.floors import Rates, Sizes, Work
from benchmarks.profile.record import ATTENTION, GATE_UP, HEAD, PARTS, Record, Step

SIZES = Sizes(
    num_layers=2, width=8, num_heads=2, num_kv_heads=1, head_dim=4, inner=16, vocab_size=100,
    itemsize=4,
)  # fmt: skip


def step(began_ms: int, ended_ms: int, rows: int = 2, tokens: int = 2) -> Step:
    return Step(
        began_ns=began_ms * 10**6,
        ended_ns=ended_ms * 10**6,
        num_rows=rows,
        num_tokens=tokens,
        contexts=50,
        apply_us=100,
        forward_us=2000,
        sample_us=300,
        parts_ns={**dict.fromkeys(PARTS, 0), ATTENTION: 500_000, HEAD: 700_000},
    )


def window(begin_ms: int, end_ms: int) -> bench.Window:
    span = range(begin_ms * 10**6, end_ms * 10**6)
    return bench.Window(ns=span, cpu_s={"gateway": 0.004}, plan_wait_us=40.0)


STEPS = [
    step(0, 3),
    step(3, 7),
    step(8, 11),
    step(11, 14, rows=1, tokens=1),
    step(14, 18, tokens=9),
    step(18, 30),
]


def test_steps_of_another_shape_and_at_the_windows_edges_do_not_count() -> None:
    pairs = bench.full_steps(STEPS, range(1, 19 * 10**6), num_streams=2)
    assert [(before.began_ns, of.began_ns) for before, of in pairs] == [(3 * 10**6, 8 * 10**6)]


def test_the_lines_add_up_to_the_time_from_step_to_step() -> None:
    found = bench.profile(Record(steps=STEPS), window(1, 19), SIZES, num_streams=2)
    assert found.num_steps == 1
    assert found.period_us == pytest.approx(4000.0)
    assert sum(line.us for line in found.lines) == pytest.approx(4000.0)
    by_name = {line.name: line.us for line in found.lines}
    assert by_name["attention over the blocks"] == pytest.approx(500.0)
    assert by_name["tables, choosing rows, Python between"] == pytest.approx(800.0)
    assert by_name["the plan into rows; the step's books"] == pytest.approx(1560.0)
    # 4 ms of CPU in a window of 18, in which there was room for 4.5 such steps.
    assert dict(found.beside)["gateway"] == pytest.approx(4000 / 4.5)


def test_a_window_without_a_full_step_is_an_error() -> None:
    with pytest.raises(StreamError):
        bench.profile(Record(steps=STEPS), window(1, 19), SIZES, num_streams=3)


def chunk(began_ms: int, context: int, tokens: int = 256) -> Step:
    of = step(began_ms, began_ms + 3, rows=1, tokens=tokens)
    return dataclasses.replace(of, contexts=context)


def test_chunks_of_a_prompt_count_behind_their_like_and_before_the_last() -> None:
    steps = [
        chunk(0, 256),
        chunk(3, 512),
        chunk(6, 768),
        chunk(9, 769, tokens=1),
        chunk(12, 256),  # of another prompt
        chunk(15, 640, tokens=128),
        chunk(18, 768, tokens=128),
        chunk(21, bench.CHUNKED_TOKENS - 256),
        chunk(24, bench.CHUNKED_TOKENS),
    ]
    pairs = bench.chunk_steps(steps, range(0, 30 * 10**6))
    assert [of.began_ns // 10**6 for _, of in pairs] == [3, 6]
    assert bench.chunk_steps(steps, range(2 * 10**6, 8 * 10**6)) == []
    found = bench.profile(Record(steps=steps), window(0, 30), SIZES, num_streams=0)
    assert (found.chunk_tokens, found.num_steps, found.mean_context) == (256, 2, 640)
    text = bench.text(found, Rates(read_gb_per_s=1.0, gflop_per_s=1.0))
    assert "chunks of 256 tokens of one prompt, 2 steps" in text
    # 2 layers x 4 operations x 8 of each head and pair: 384 tokens before it, then its own.
    flops = 2 * 4 * 8 * (256 * 384 + 256 * 257 / 2)
    assert cells(text, "attention over")[4] == f"{flops / 1e6:,.0f}"
    # Nothing is sampled: the last layer ends with its attention, and there is no head.
    assert cells(text, "gate and up")[4] == f"{2 * 256 * 8 * 32 / 1e6:,.0f}"
    assert cells(text, "| head")[3:] == ["", "", "", ""]
    assert sum(line.us for line in found.lines) == pytest.approx(found.period_us)


def test_a_parts_work_is_its_weights_its_rows_and_the_contexts() -> None:
    works = floors.work(SIZES, {GATE_UP: 1000}, rows=3, contexts=40)
    # Packed weights, 3 rows of 8 in and 2 x 16 out, 2 layers.
    assert works[GATE_UP].num_bytes == 1000 + 2 * 3 * (8 + 32) * 4
    assert works[GATE_UP].flops == 2 * 2 * 3 * 8 * 32
    # What is not packed has the numbers' own size.
    assert works[HEAD].num_bytes == 100 * 8 * 4 + 3 * (8 + 100) * 4
    # Keys and values of 40 tokens; queries in and out of 3 rows; two products a pair.
    assert works[ATTENTION].num_bytes == 2 * (2 * 40 * 4 + 2 * 3 * 8) * 4
    assert works[ATTENTION].flops == 2 * 4 * 40 * 8
    assert set(works) == {*PARTS, "sample"}


def test_the_longer_of_bytes_and_arithmetic_is_the_floor() -> None:
    rates = Rates(read_gb_per_s=2.0, gflop_per_s=100.0)
    assert Work(num_bytes=4000.0, flops=1000.0).floor_us(rates) == pytest.approx(2.0)
    assert Work(num_bytes=4.0, flops=500_000.0).floor_us(rates) == pytest.approx(5.0)


def test_sizes_come_from_the_models_configuration(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Sizes.of(tmp_path, 4) == SIZES


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = Record(steps=STEPS, weight_bytes={HEAD: 5})
    path = tmp_path / "record"
    path.write_text(json.dumps(asdict(record)))
    assert Record.read(path) == record


def cells(table: str, name: str) -> Sequence[str]:
    line = next(line for line in table.splitlines() if name in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_floors_where_they_are_known() -> None:
    found = bench.profile(Record(steps=STEPS), window(1, 19), SIZES, num_streams=2)
    table = bench.table(found, Rates(read_gb_per_s=1.0, gflop_per_s=1.0))
    assert cells(table, "wait for the plan")[1:] == ["40", "1.0%", "", "", "", ""]
    # 2 layers x (2 x 50 x 4 + 2 x 2 x 8) numbers of 4 bytes; 2 x 4 x 50 x 8 operations.
    assert cells(table, "attention")[1:] == ["500", "12.5%", "0.00", "0", "3", "144.68"]
    assert cells(table, "| a step")[1] == "4,000"

"""The gateway's benchmark: tokens counted in the bytes, delays, steps at a pace, goals."""

import asyncio
import dataclasses
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gateway import __main__ as bench
from benchmarks.gateway import worker
from benchmarks.gateway.streams import Arrivals, Reader, StreamError, arrivals, read
from benchmarks.stack import StackError
from gpu_worker.messages import Subscribe, TokenBatch
from gpu_worker.ports import CacheGroupSpec, RunnerInfo, SamplingSpec, ScheduledRow
from servicekit import logs

REQUEST_ID = bytes(range(16))
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
TEXT = b" the"


def frame(text: bytes) -> bytes:
    choice = b'"choices":[{"index":0,"text":"' + text + b'"}]'
    return b'data: {"id":"cmpl-' + REQUEST_ID.hex().encode() + b'",' + choice + b"}\n\n"


def test_tokens_are_counted_where_their_text_ends() -> None:
    whole = frame(TEXT * 2)
    # The text of the second token is whole only with the second piece.
    cut = whole.index(TEXT) + len(TEXT) + 2
    pieces = [(10, HEAD + whole[:cut]), (20, whole[cut:] + frame(TEXT))]
    found = arrivals(pieces, TEXT)
    assert found.request_id == REQUEST_ID
    assert found.token_ns == [10, 20, 20]
    assert found.frame_ns == [10, 20]


def test_an_answer_that_is_no_stream_is_refused() -> None:
    refusal = HEAD.replace(b"200 OK", b"503 Service Unavailable") + frame(TEXT)
    for raw in (refusal, HEAD + b'{"error":{}}'):
        with pytest.raises(StreamError):
            arrivals([(1, raw)], TEXT)


def stream(*token_ns: int) -> Arrivals:
    return Arrivals(request_id=REQUEST_ID, token_ns=token_ns, frame_ns=token_ns[:2])


def window(came: Arrivals, time_ns: range, cpu_s: float = 0.0) -> bench.Window:
    return bench.Window(streams=[came], time_ns=time_ns, cpu_s=cpu_s)


def test_windows_count_the_tokens_that_came_in_them() -> None:
    published = {REQUEST_ID: {0: 0, 1: 1_000_000, 2: 2_000_000, 3: 4_000_000}}
    came = stream(1_500_000, 3_000_000, 4_000_000, 9_000_000)
    windows = [
        window(came, range(2_000_000, 6_000_000), cpu_s=0.0004),
        window(stream(), range(7_000_000, 9_000_000), cpu_s=0.0006),
    ]
    found = bench.reading(bench.PACED, windows, published)
    assert found.seconds == pytest.approx(0.006)
    assert found.tokens_per_s == pytest.approx(2 / 0.006)
    assert found.tokens_per_cpu_s == pytest.approx(2 / 0.001)
    assert found.cores == pytest.approx(1 / 6)
    assert found.tokens_per_frame == pytest.approx(2.0)
    assert found.added_worst_ms == pytest.approx(2.0)
    assert found.added_p50_ms == pytest.approx(2.0)


def test_a_token_that_no_worker_gave_is_an_error() -> None:
    with pytest.raises(StreamError):
        bench.delays_ms(window(stream(5), range(10)), {REQUEST_ID: {}})


def test_no_window_is_longer_than_its_streams() -> None:
    """Each has streams of its own, which end after MAX_TOKENS."""
    assert bench.split(3.0, bench.FAST) == [3.0]
    parts = bench.split(30.0, bench.FAST)
    assert sum(parts) == pytest.approx(30.0)
    assert len(set(parts)) == 1
    streams_s = bench.MAX_TOKENS * bench.FAST.step_ms / 1000
    assert all(bench.WARM_UP_S + part < 0.6 * streams_s for part in parts)
    assert bench.split(30.0, bench.PACED) == [30.0]


def ahead_of_monotonic_ns() -> int:
    """How far the clock that stamps is ahead; too little where a pause lay between the looks."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME) - time.monotonic_ns()


def test_a_reader_keeps_what_has_come_and_when_the_kernel_had_it() -> None:
    """Not when it was looked for; the end of a stream is seen."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = Reader(listener.getsockname()[1], b"ask")
        peer, _ = listener.accept()
        assert peer.recv(10) == b"ask"
        # The kernel does not stamp from the first moment on.
        deadline = time.monotonic() + 30
        while reader.num_unstamped == len(reader.pieces) and time.monotonic() < deadline:
            before_ns = time.monotonic_ns()
            peer.sendall(frame(TEXT))
            sent_ns = time.monotonic_ns()
            time.sleep(0.01)
            reader.take(max(ahead_of_monotonic_ns() for _ in range(10)))
        at_ns, data = reader.pieces[-1]
        assert (data, reader.began, reader.ended) == (frame(TEXT), True, False)
        assert before_ns - 100_000 <= at_ns <= sent_ns + 1_000_000
        peer.close()
        with pytest.raises(StreamError):
            read([reader], lambda: False)
        assert reader.ended
        reader.hang_up()


@pytest.mark.slow
async def test_the_libraries_alone_give_every_stream_a_token_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each frame tells when it was given, which is before it came."""
    monkeypatch.setattr(bench, "WARM_UP_S", 0.2)
    of = bench.Load(name="paced", num_streams=3, step_ms=10.0)
    found = await asyncio.to_thread(bench.bare, of, 4.0)
    assert found.num_streams == 3
    assert 0 < found.tokens_per_s <= 3 * 100 + 10
    assert found.added_p50_ms > 0


def test_a_hub_writes_down_what_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as file:
        hub = worker.LoggingHub(
            file,
            max_batches=4,
            clock_s=lambda: 0.0,
            on_subscriptions=lambda _: None,
            log=logs.get_logger("test"),
        )
        reply_to = b"r" * 16
        subscribe = Subscribe(gateway_id="g", reply_to=reply_to, incarnation=1, last_sequence=0)
        to_send = hub.subscribe(subscribe)
        batch = TokenBatch(
            step=1,
            request_ids=[REQUEST_ID, bytes(16)],
            attempts=[1, 1],
            first_positions=[7, 0],
            num_tokens=[2, 1],
            token_ids=[1, 2, 3],
            finish_reasons=[0, 0],
            num_cached_tokens=[0, 0],
        )
        hub.publish([(reply_to, batch)])
    assert [of for _, of in to_send.next_batches()] == [batch]
    first, second = worker.read_log(path)
    assert (first.request_id, first.first, first.count) == (REQUEST_ID, 7, 2)
    assert (second.request_id, second.first, second.count) == (bytes(16), 0, 1)
    assert first.at_ns == second.at_ns > 0
    given = {REQUEST_ID: {7: first.at_ns, 8: first.at_ns}, bytes(16): {0: first.at_ns}}
    assert bench.published_by(path) == given
    whole = path.read_bytes()
    for kept in (len(whole) - 1, 3):
        path.write_bytes(whole + whole[:kept])
        assert list(worker.read_log(path)) == [first, second]


def make_runner(step_s: float, times: list[float], slept: list[float]) -> worker.PacedRunner:
    info = RunnerInfo(
        model_digest="0" * 64,
        vocab_size=100,
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        cache_group=CacheGroupSpec(window=0, block_size=16, block_bytes=1, num_blocks=8),
        step_us=0.0,
        token_us=0.0,
    )
    return worker.PacedRunner(info, 5, step_s, clock_s=lambda: times.pop(0), sleep=slept.append)


def row(*, samples: bool) -> ScheduledRow:
    return ScheduledRow(
        slot=0,
        token_ids=[1],
        start=0,
        block_ids=[0],
        samples=samples,
        output_position=0,
        sampling=SamplingSpec(max_tokens=1),
    )


def test_steps_begin_at_their_pace_and_do_not_make_up_for_a_late_one() -> None:
    slept: list[float] = []
    runner = make_runner(0.5, [10.0, 10.125, 11.5, 11.625], slept)
    for _ in range(4):
        runner.run([row(samples=True)])
    # Begun at 10, 10.5, 11.5 (it came late) and 12.
    assert slept == pytest.approx([0.375, 0.375])


def test_rows_that_sample_get_the_token() -> None:
    output = make_runner(0.0, [1.0], []).run([row(samples=True), row(samples=False)])
    assert output.token_ids == (5,)


def test_goals_are_scaled_by_what_a_chunk_takes_today() -> None:
    reading = bench.Reading(
        load="fast", num_streams=64, seconds=1.0, tokens_per_s=1.0, cores=1.0,
        tokens_per_cpu_s=10_500.0, tokens_per_frame=1.0, added_p50_ms=9.0, added_p99_ms=9.0,
        added_worst_ms=9.0,
    )  # fmt: skip
    core, p50, p99 = bench.verdicts([reading], floor_us=2 * bench.REFERENCE_US)
    assert core.scaled == pytest.approx(10_000.0)
    assert (core.text, p50.text, p99.text) == ("met", "not measured", "not measured")
    assert (p50.scaled, p99.scaled) == (2.0, 10.0)
    paced = dataclasses.replace(reading, load="paced", added_p50_ms=0.9, added_p99_ms=5.1)
    texts = [of.text for of in bench.verdicts([paced], floor_us=bench.REFERENCE_US)]
    assert texts == ["not measured", "met", "missed"]


def test_every_heading_has_its_cell() -> None:
    nothing = bench.reading(bench.FAST, [window(stream(), range(10))], {})
    assert len(bench.row(nothing)) == len(bench.HEADINGS)


def test_a_part_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    mute = [sys.executable, "-c", "import time; time.sleep(3600)"]
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(mute, **options))
    monkeypatch.setattr(bench, "START_S", 0.2)
    with pytest.raises(StackError, match="source did not start within"), bench._part("source"):
        pass

"""A random Llama of two layers through the stack: back ends and preemption change no token."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.client import Answer
from benchmarks.stack import Stack
from benchmarks.workload import Job, Shape, jobs
from tests.e2e.models import VOCAB_SIZE, write_tiny_llama
from tests.e2e.stack import (
    assert_equal_streams,
    assert_exact,
    assert_idle,
    await_workers,
    bodies,
    start_streams,
)
from tests.kernels.native import needs_native

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NUM_SAMPLED = 2
SETTINGS = {"QUIRE_DTYPE": "float32", "QUIRE_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def in_vocabulary(seed: str, count: int, shape: Shape) -> list[Job]:
    """Jobs whose prompts lie in the tiny model's vocabulary."""
    return [
        Job(prompt=tuple(3 + t % (VOCAB_SIZE - 3) for t in job.prompt), num_output=job.num_output)
        for job in jobs(seed, count, shape)
    ]


# The interpreter runs a kernel's programs one by one: short prompts, cut into chunks all the same.
MIXED = in_vocabulary("mixed", 6, Shape(prompt=(8, 40), output=(12, 24)))
LONG = in_vocabulary("long", 12, Shape(prompt=(32, 64), output=(64, 96)))


async def ask(stack: Stack, work: list[Job]) -> list[Answer]:
    """Whole answers; the last two are sampled with seeds of their own."""
    streams = start_streams(stack.client, bodies(stack.model_name, work, NUM_SAMPLED))
    answers = await streams.finish()
    assert_exact(work, answers)
    return answers


@contextlib.contextmanager
def serving(folder: Path, model: Path, **settings: str) -> Iterator[Stack]:
    """One worker on the CPU with these settings."""
    names = {f"QUIRE_{name.upper()}": value for name, value in settings.items()}
    names["TRITON_INTERPRET"] = "1"
    with Stack(folder, model=str(model), settings=SETTINGS | names) as stack:
        await_workers(stack, 1)
        yield stack


def backend_of(stack: Stack) -> str:
    """The attention back end that the worker says it uses."""
    said = [e["attention_backend"] for e in stack.workers[0].events() if "attention_backend" in e]
    assert len(said) == 1
    return str(said[0])


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """Answers of the torch back end with room for everything."""
    folder = tmp_path_factory.mktemp("torch")
    with serving(folder, tiny_model, attention_backend="torch") as stack:
        answers = {"mixed": asyncio.run(ask(stack, MIXED)), "long": asyncio.run(ask(stack, LONG))}
        assert backend_of(stack) == "torch"
        assert stack.scheduler.metrics().total("vllm:num_preemptions_total") == 0
    for answer in (*answers["mixed"], *answers["long"]):
        # Outputs that repeat themselves would hide a wrong context.
        assert len(set(answer.token_ids)) >= min(20, len(answer.token_ids) // 2)
    return answers


@pytest.mark.soak
async def test_triton_serves_the_same_tokens_as_torch(
    tiny_model: Path, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """Through the whole stack, in Triton's interpreter, with prompt chunks beside decodes."""
    with serving(
        tmp_path, tiny_model, attention_backend="triton", max_num_batched_tokens="24"
    ) as stack:
        answers = await ask(stack, MIXED)
        metrics = stack.scheduler.metrics()
        assert backend_of(stack) == "triton"
        # A chunk shares its step with decodes: they alone need fewer tokens than a step has.
        assert metrics.total("quire:chunked_prefills_total") > 0
        await asyncio.to_thread(assert_idle, stack)
    assert_equal_streams(answers, expected["mixed"])


@needs_native
async def test_native_serves_the_same_tokens_as_torch(
    tiny_model: Path, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """Through the whole stack: lean forward, paged attention and sampler in native kernels."""
    with serving(
        tmp_path, tiny_model, attention_backend="native", max_num_batched_tokens="24"
    ) as stack:
        answers = await ask(stack, MIXED)
        assert backend_of(stack) == "native"
        assert [e for e in stack.workers[0].events() if e.get("linear") == ["native"]]
        assert stack.scheduler.metrics().total("quire:chunked_prefills_total") > 0
        await asyncio.to_thread(assert_idle, stack)
    assert_equal_streams(answers, expected["mixed"])


async def test_preemption_changes_no_token(
    tiny_model: Path, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """Room for a third of the requests: the others are thrown out and computed again."""
    with serving(tmp_path, tiny_model, num_gpu_blocks_override="40") as stack:
        answers = await ask(stack, LONG)
        assert stack.scheduler.metrics().total("vllm:num_preemptions_total") > 0
        await asyncio.to_thread(assert_idle, stack)
    assert_equal_streams(answers, expected["long"])

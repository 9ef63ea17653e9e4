"""The scheduler's core, its codec, the worker's codec, replica and runner, without processes.

Plans, results and token batches travel as the bytes that the services would send. A step of each
worker is computed in turn, so that up to `max_inflight_steps` plans wait. Streams joins the tokens
and logprobs of a request as its gateway would.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import worker_pb2

from gpu_worker import codec as worker_codec
from gpu_worker.messages import StepPlan, StepResult
from gpu_worker.ports import ModelRunner, StepOutput
from gpu_worker.replica import AppliedPlan, Replica
from gpu_worker.slot_table import ReplicaLimits
from scheduler_svc import codec as scheduler_codec
from scheduler_svc.core import CoreConfig, SchedulerCore
from scheduler_svc.core.events import (
    BecameLeader,
    RequestArrived,
    StepCompleted,
    WorkerJoined,
    WorkerLost,
)
from scheduler_svc.core.types import RequestId, SamplingSpec, WorkerCapacity, WorkerId
from scheduler_svc.ports import StepReport

GATEWAY, REPLY_TO = "gateway", b"r" * 16
MOST_STEPS = 5000

Likely = list[tuple[int, float]]


@dataclass(slots=True)
class Stream:
    """What a client has been given: tokens, and for each its logprob and the likeliest beside it.

    The prompt's logprobs are those of its tokens from the second one on.
    """

    prompt: tuple[int, ...]
    sampling: SamplingSpec
    attempt: int = 1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, Likely]] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, Likely]] = field(default_factory=list)
    num_cached: int = 0
    num_repeats: int = 0
    ended: bool = False


class Worker:
    """A runner and the replica in front of it. Takes and gives bytes."""

    def __init__(self, runner: ModelRunner) -> None:
        info = runner.info
        self._runner = runner
        self._replica = Replica(
            ReplicaLimits(
                num_slots=info.max_num_seqs,
                num_blocks=info.cache_group.num_blocks,
                block_size=info.cache_group.block_size,
                vocab_size=info.vocab_size,
                max_model_len=info.max_model_len,
                max_num_batched_tokens=info.max_num_batched_tokens,
                num_host_blocks=info.cache_group.num_host_blocks,
            )
        )
        self.plans: deque[StepPlan] = deque()

    def take(self, raw: bytes) -> None:
        """A plan as it comes on the wire; one of several steps is taken apart."""
        plan = worker_codec.session_request(worker_pb2.SessionRequest.FromString(raw))
        assert isinstance(plan, StepPlan)
        self.plans.extend(plan.single_steps())

    def step(self) -> tuple[bytes, list[bytes]]:
        """The oldest plan: its result, and the token batches."""
        plan = self.plans.popleft()
        applied = self._replica.apply(plan)
        assert isinstance(applied, AppliedPlan), applied
        operations_done: Sequence[int] = ()
        self._replica.check_invariants()
        if applied.operations:
            self._runner.begin_operations(applied.operations)
            operations_done = self._runner.finished_operations(wait=True)
            self._replica.operations_done(operations_done)
        output = self._runner.run(applied.rows) if applied.rows else StepOutput(token_ids=())
        assert not output.failures, output.failures
        done = self._replica.complete(output)
        result = StepResult(
            epoch=plan.epoch,
            step=plan.step,
            digest=applied.digest,
            slots=done.slots,
            token_ids=done.token_ids,
            finished_slots=done.finished_slots,
            finish_reasons=done.finish_reasons,
            num_wasted_rows=applied.num_wasted_rows,
            operations_done=operations_done,
        )
        batches = [worker_codec.token_batch(1, batch) for _, batch in done.batches]
        return (
            worker_codec.session_response(result).SerializeToString(),
            [batch.SerializeToString() for batch in batches],
        )


class Whole:
    """Runs requests over one or more runners."""

    def __init__(self, runners: Sequence[ModelRunner], *, chunk: int = 0, **config: Any) -> None:
        self.core = SchedulerCore(CoreConfig(prefill_chunk_tokens=chunk, **config))
        self.core.feed(BecameLeader(now_ns=0, epoch=1))
        self.workers: dict[WorkerId, Worker] = {}
        self.streams: list[Stream] = []
        self.num_mixed_steps = 0
        for number, runner in enumerate(runners):
            self.join(f"w{number}", runner)

    def join(self, name: str, runner: ModelRunner) -> None:
        """A worker with an empty replica."""
        info = runner.info
        self.workers[WorkerId(name)] = Worker(runner)
        self.core.feed(
            WorkerJoined(
                now_ns=0,
                worker_id=WorkerId(name),
                capacity=WorkerCapacity(
                    num_slots=info.max_num_seqs,
                    num_blocks=info.cache_group.num_blocks,
                    block_size=info.cache_group.block_size,
                    max_num_batched_tokens=info.max_num_batched_tokens,
                    max_model_len=info.max_model_len,
                    num_host_blocks=info.cache_group.num_host_blocks,
                    block_bytes=info.cache_group.block_bytes,
                ),
                gateway_ids=frozenset((GATEWAY,)),
                snapshot_attempts={},
            )
        )

    def lose(self, name: str) -> None:
        """A worker dies with what it has not answered."""
        del self.workers[WorkerId(name)]
        self.core.feed(WorkerLost(now_ns=0, worker_id=WorkerId(name)))

    def add(
        self,
        prompt: Sequence[int],
        *,
        sample_group: bytes = b"",
        sample_index: int = 0,
        **sampling: Any,
    ) -> Stream:
        """A request; its number is its id."""
        stream = Stream(tuple(prompt), SamplingSpec(**sampling))
        number = len(self.streams)
        self.streams.append(stream)
        self.core.feed(
            RequestArrived(
                now_ns=0,
                request_id=RequestId(number.to_bytes(16, "big")),
                entry_id=f"{number}-0",
                gateway_id=GATEWAY,
                reply_to=REPLY_TO,
                prompt_token_ids=stream.prompt,
                sampling=stream.sampling,
                sample_group=sample_group,
                sample_index=sample_index,
            )
        )
        return stream

    def run(self, most_steps: int = MOST_STEPS) -> None:
        """To the end of all requests, or for so many steps."""
        for _ in range(most_steps):
            for plan in self.core.take_ready().plans:
                self.num_mixed_steps += plan.num_rows < plan.num_scheduled_tokens and (
                    plan.num_rows > 1
                )
                self.workers[plan.worker_id].take(scheduler_codec.encode_plan(plan))
            busy = [(name, worker) for name, worker in self.workers.items() if worker.plans]
            if not busy:
                return
            for name, worker in busy:
                result, batches = worker.step()
                for batch in batches:
                    self._receive(worker_pb2.TokensResponse.FromString(batch).batch)
                self._feed(name, result)
        assert most_steps < MOST_STEPS, "not done"

    def _feed(self, name: WorkerId, result: bytes) -> None:
        report = scheduler_codec.decode_worker_message(result)
        assert isinstance(report, StepReport)
        self.core.feed(
            StepCompleted(
                now_ns=0,
                worker_id=name,
                step=report.step,
                slots=report.slots,
                token_ids=report.token_ids,
                finished=report.finished,
                num_wasted_rows=report.num_wasted_rows,
                operations_done=report.operations_done,
            )
        )

    def _receive(self, batch: worker_pb2.TokenBatch) -> None:
        scored = {entry.entry: entry for entry in batch.logprobs}
        at = 0
        for index, count in enumerate(batch.num_tokens):
            number = int.from_bytes(batch.request_ids[16 * index : 16 * index + 16], "big")
            stream = self.streams[number]
            tokens = list(batch.token_ids[at : at + count])
            at += count
            stream.num_cached = batch.num_cached_tokens[index]
            entry = scored.get(index)
            assert (entry is None) == (stream.sampling.num_logprobs is None or not tokens)
            rows = [] if entry is None else _rows(entry)
            num_prompt = 0 if entry is None else entry.num_prompt_rows
            first = batch.first_positions[index]
            wants_prompt = stream.sampling.prompt_logprobs and first == 0 and bool(tokens)
            assert num_prompt == (len(stream.prompt) - 1 if wants_prompt else 0)
            assert entry is None or len(rows) == num_prompt + len(tokens)
            self._append(stream, batch.attempts[index], first, tokens, rows[num_prompt:])
            if num_prompt and not stream.prompt_logprobs:
                stream.prompt_logprobs = rows[:num_prompt]
            stream.ended |= bool(batch.finish_reasons[index])

    @staticmethod
    def _append(
        stream: Stream,
        attempt: int,
        first: int,
        tokens: list[int],
        rows: list[tuple[float, Likely]],
    ) -> None:
        assert attempt >= stream.attempt
        stream.attempt = attempt
        assert first <= len(stream.tokens), "tokens are missing"
        known = len(stream.tokens) - first
        # A repeat may come in pieces: known output is scored chunk by chunk.
        assert stream.tokens[first : first + len(tokens)] == tokens[:known]
        stream.num_repeats += min(known, len(tokens))
        stream.tokens += tokens[known:]
        stream.logprobs += rows[known:]


def _rows(entry: worker_pb2.TokenLogprobs) -> list[tuple[float, Likely]]:
    k = entry.num_top
    assert len(entry.top_token_ids) == len(entry.top_logprobs) == k * len(entry.logprobs)
    likely = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
    return [(own, likely[i * k : (i + 1) * k]) for i, own in enumerate(entry.logprobs)]

"""Plans for worker tests: a script of admissions, growth and schedules with the right digests."""

import dataclasses
from collections.abc import Sequence

from quire.v1 import common_pb2, operations_pb2, worker_pb2

from gpu_worker import digest
from gpu_worker.messages import Admit, StepPlan
from gpu_worker.ports import Operation, SamplingSpec
from gpu_worker.slot_table import ReplicaLimits

LIMITS = ReplicaLimits(
    num_slots=8,
    num_blocks=64,
    block_size=4,
    vocab_size=100,
    max_model_len=40,
    max_num_batched_tokens=64,
    num_host_blocks=16,
)
GATEWAY_A, GATEWAY_B = b"a" * 16, b"b" * 16


def request_id(number: int) -> bytes:
    """A readable 16-byte id."""
    return f"request-{number:08d}".encode()


def make_admit(slot: int = 0, **changes: object) -> Admit:
    """A prompt of five tokens in two blocks of its own."""
    admit = Admit(
        slot=slot,
        generation=1,
        request_id=request_id(slot),
        attempt=1,
        reply_to=GATEWAY_A,
        token_ids=(11, 12, 13, 14, 15),
        prompt_len=5,
        emit_from=0,
        num_computed_tokens=0,
        num_cached_tokens=0,
        block_ids=(2 * slot, 2 * slot + 1),
        sampling=SamplingSpec(max_tokens=8),
    )
    return dataclasses.replace(admit, **changes)  # type: ignore[arg-type]


def make_operation(
    op_id: int, kind: int, pairs: Sequence[tuple[int, int]], **changes: object
) -> Operation:
    """Source and target blocks as pairs."""
    operation = Operation(
        op_id=op_id,
        kind=kind,
        source_blocks=tuple(source for source, _ in pairs),
        target_blocks=tuple(target for _, target in pairs),
    )
    return dataclasses.replace(operation, **changes)  # type: ignore[arg-type]


class PlanScript:
    """Writes plans one after the other, as a scheduler would. The first one resets.

    Keeps tables only, and sums the digest anew each time: slow and plain on purpose.
    """

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.step = 0
        self.tables: dict[int, tuple[int, list[int]]] = {}

    def plan(
        self,
        *,
        reset: bool | None = None,
        admits: Sequence[Admit] = (),
        releases: Sequence[int] = (),
        schedule: Sequence[tuple[int, int]] = (),
        growth: Sequence[tuple[int, int]] = (),
        operations: Sequence[Operation] = (),
        num_steps: int = 1,
    ) -> StepPlan:
        """The next plan; `schedule` holds the rows whose number changes."""
        first_step = self.step + 1
        self.step += num_steps
        reset = first_step == 1 if reset is None else reset
        if reset:
            self.tables.clear()
        for slot in releases:
            self.tables.pop(slot, None)
        for admit in admits:
            self.tables[admit.slot] = (admit.generation, list(admit.block_ids))
        for slot, block in growth:
            if slot in self.tables:
                self.tables[slot][1].append(block)
        return StepPlan(
            epoch=self.epoch,
            step=first_step,
            num_steps=num_steps,
            reset=reset,
            release_slots=tuple(releases),
            admits=tuple(admits),
            changed_slots=tuple(slot for slot, _ in schedule),
            changed_num_tokens=tuple(count for _, count in schedule),
            grow_slots=tuple(slot for slot, _ in growth),
            grow_block_ids=tuple(block for _, block in growth),
            digest=self.digest(),
            operations=tuple(operations),
        )

    def digest(self) -> int:
        """Over all tables as of the last plan."""
        total = 0
        for slot, (generation, blocks) in self.tables.items():
            total = digest.add(total, digest.table_sum(slot, generation, 0, blocks))
        return total


def plan_message(plan: StepPlan) -> worker_pb2.StepPlan:
    """The plan as a scheduler sends it."""
    return worker_pb2.StepPlan(
        epoch=plan.epoch,
        step=plan.step,
        num_steps=plan.num_steps,
        reset=plan.reset,
        release_slots=plan.release_slots,
        admits=[_admit_message(admit) for admit in plan.admits],
        changed_slots=plan.changed_slots,
        changed_num_tokens=plan.changed_num_tokens,
        grow_slots=plan.grow_slots,
        grow_block_ids=plan.grow_block_ids,
        digest=plan.digest,
        operations=[_operation_message(operation) for operation in plan.operations],
    )


def _operation_message(operation: Operation) -> operations_pb2.Operation:
    return operations_pb2.Operation(
        op_id=operation.op_id,
        kind=operations_pb2.Operation.Kind.ValueType(operation.kind),
        group=operation.group,
        source_blocks=operation.source_blocks,
        target_blocks=operation.target_blocks,
    )


def _admit_message(admit: Admit) -> worker_pb2.Admit:
    sampling = admit.sampling
    return worker_pb2.Admit(
        slot=admit.slot,
        generation=admit.generation,
        request_id=admit.request_id,
        attempt=admit.attempt,
        reply_to=admit.reply_to,
        token_ids=admit.token_ids,
        prompt_len=admit.prompt_len,
        emit_from=admit.emit_from,
        num_computed_tokens=admit.num_computed_tokens,
        num_cached_tokens=admit.num_cached_tokens,
        block_ids=admit.block_ids,
        sampling=_sampling_message(sampling),
        sample_index=sampling.sample_index,
        kind=worker_pb2.Admit.KIND_GENERATE,
    )


def _sampling_message(spec: SamplingSpec) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=spec.max_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        seed=spec.seed,
        stop_token_ids=spec.stop_token_ids,
        min_tokens=spec.min_tokens,
        min_p=spec.min_p,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty,
        logit_bias_token_ids=[token for token, _ in spec.logit_bias],
        logit_biases=[bias for _, bias in spec.logit_bias],
        num_logprobs=spec.num_logprobs,
        prompt_logprobs=spec.prompt_logprobs,
    )

"""The worker's runner on the device against transformers: a Llama of 1B shape, random weights.

In fp32 tokens and logits must be transformers' own but for rounding; in bf16, as served, logits
must point the same way. A row whose blocks go to host memory and back must go on as if they had
stayed. Then steps of many decoding requests are timed.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.common import Place, emit, place
from gpu_worker import sampler, settings
from gpu_worker.ports import Operation, OperationKind, SamplingSpec, ScheduledRow
from gpu_worker.runner import TorchRunner, load_runner
from tests.parity.fake_scheduler import FakeScheduler, Request

SHAPE = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
DRY_SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
PROMPTS, NEW_TOKENS = (1, 7, 64, 300, 1000), 16
DRY_PROMPTS, DRY_NEW_TOKENS = (1, 13), 2
# What rounding may do, by dtype: a token's logit behind the best one, and the least mean cosine.
BEHIND = {"float32": 2e-3, "bfloat16": 0.25}
COSINE = {"float32": 0.999999, "bfloat16": 0.999}
DECODES = ((1, 512), (32, 512), (128, 512))  # rows, tokens that each has


class QuietLog:
    """Takes the worker's log messages."""

    def info(self, _message: str, **_values: Any) -> None:
        """Says nothing."""

    warning = info


def save_model(folder: Path, where: Place) -> None:
    """Random weights, spread so that the model says different tokens."""
    import transformers

    config = transformers.LlamaConfig(
        **(DRY_SHAPE if where.dry else SHAPE),
        initializer_range=0.25 if where.dry else 0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(1)
    with torch.device(where.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def load(folder: Path, dtype: str, where: Place) -> TorchRunner:
    """The runner, as the worker's process loads it."""
    changes = {"model": folder, "dtype": dtype, "attention_backend": "triton"}
    if where.dry:
        changes |= {"num_gpu_blocks_override": "40", "max_num_batched_tokens": "4"}
    else:
        changes |= {"kv_cache_gib": "8", "max_num_batched_tokens": "2048"}
    argv = [
        part
        for name, value in changes.items()
        for part in (f"--{name}".replace("_", "-"), str(value))
    ]
    return load_runner(settings.load(argv, {}), QuietLog())


def recorded(runner: TorchRunner, requests: list[Request], chunk: int) -> dict[Any, torch.Tensor]:
    """Serves the requests; returns the logits of (request, output position)."""
    kept: dict[Any, torch.Tensor] = {}
    original = sampler.sample

    def recording(logits: torch.Tensor, rows: Any) -> sampler.Sampled:
        for row, (spec, position, *_) in zip(logits, rows, strict=True):
            kept[spec.seed, position] = row.float().clone()
        return original(logits, rows)

    sampler.sample = recording
    try:
        FakeScheduler([runner], chunk=chunk, budget=4 * chunk, share_prefixes=True).run(requests)
    finally:
        sampler.sample = original
    return kept


@torch.inference_mode()
def parity(folder: Path, dtype: str, where: Place, requests: list[Request], kept: Any) -> bool:
    """Emits the comparison with transformers' own forward."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    model = model.eval().to(where.device)
    worst, behind, equal, total, cosines = 0.0, 0.0, 0, 0, []
    for request in requests:
        tokens = torch.tensor([request.known], device=where.device)
        count = len(request.output)
        logits = model(tokens, use_cache=False, logits_to_keep=count + 1).logits[0, :-1].float()
        ours = torch.stack([kept[request.number, i] for i in range(count)])
        given = torch.tensor(request.output, device=where.device)
        worst = max(worst, float((ours - logits).abs().max()))
        gap = logits.amax(-1) - logits.gather(-1, given[:, None])[:, 0]
        behind = max(behind, float(gap.max()))
        equal += int((logits.argmax(-1) == given).sum())
        total += count
        cosines.append(torch.cosine_similarity(ours, logits, dim=-1))
    cosine = float(torch.cat(cosines).mean())
    passed = behind <= BEHIND[dtype] and cosine >= COSINE[dtype]
    emit(
        check="parity",
        dtype=dtype,
        tokens=total,
        equal_tokens=equal,
        largest_logit_difference=worst,
        largest_behind=behind,
        mean_cosine=cosine,
        passed=passed,
    )
    return passed


def make_requests(where: Place) -> list[Request]:
    """Random prompts; the longest ones begin alike."""
    shape = DRY_SHAPE if where.dry else SHAPE
    lengths, new = (DRY_PROMPTS, DRY_NEW_TOKENS) if where.dry else (PROMPTS, NEW_TOKENS)
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(0, shape["vocab_size"], (max(lengths),), generator=generator).tolist()
    requests = []
    for number, length in enumerate(lengths):
        own = torch.randint(0, shape["vocab_size"], (length,), generator=generator).tolist()
        requests.append(Request(number, tuple((*common[: length // 2], *own[length // 2 :])), new))
    return requests


def swap(runner: TorchRunner, where: Place) -> bool:
    """A decode step over blocks that stayed, and over copies that went by way of the host.

    While they go out another row computes, and then writes where they were.
    """
    info = runner.info
    size, num_blocks = info.cache_group.block_size, 2 if where.dry else 32
    tokens = [(7 * i + 3) % info.vocab_size for i in range(2 + (num_blocks - 1) * size)]
    last = len(tokens) - 1
    num_spoiled = 1 if where.dry else last  # tokens of other rows; the interpreter is slow
    old, new = range(num_blocks), range(num_blocks, 2 * num_blocks)
    host = range(num_blocks - 1, -1, -1)

    def step(start: int, end: int, blocks: Any) -> tuple[tuple[int | None, ...], Any]:
        samples = start == last
        row = ScheduledRow(
            slot=0,
            token_ids=tokens[start:end],
            start=start,
            block_ids=blocks,
            samples=samples,
            output_position=0,
            sampling=SamplingSpec(max_tokens=1, num_logprobs=5 if samples else None),
        )
        output = runner.run([row])
        return output.token_ids, output.logprobs

    def copy(op_id: int, kind: OperationKind, source: Any, target: Any) -> None:
        operation = Operation(op_id=op_id, kind=kind, source_blocks=source, target_blocks=target)
        runner.begin_operations([operation])

    step(0, last, old)
    expected = step(last, last + 1, old)
    copy(1, OperationKind.SWAP_OUT, old, host)
    at_once = list(runner.finished_operations(wait=False))
    step(0, num_spoiled, new)
    done = [*at_once, *runner.finished_operations(wait=True)]
    step(0, num_spoiled, old)
    copy(2, OperationKind.SWAP_IN, host, new)
    done += runner.finished_operations(wait=True)
    copy(3, OperationKind.COPY, new[:1], old[-1:])
    done += runner.finished_operations(wait=True)
    passed = done == [1, 2, 3] and step(last, last + 1, (old[-1], *new[1:])) == expected
    emit(
        check="swap",
        blocks=num_blocks,
        done_at_once=bool(at_once),
        out_gb_per_s=round(info.swap_out_gb_per_s, 2),
        in_gb_per_s=round(info.swap_in_gb_per_s, 2),
        passed=passed,
    )
    return passed


def time_decodes(runner: TorchRunner, where: Place, deadline: float) -> None:
    """A step of rows that decode, wall time; the best of some."""
    size = runner.info.cache_group.block_size
    for num_rows, length in ((2, 20),) if where.dry else DECODES:
        each = length // size + 1
        if num_rows * each > runner.info.cache_group.num_blocks or time.monotonic() > deadline:
            return
        rows = [
            ScheduledRow(
                slot=row,
                token_ids=[row + 1],
                start=length - 1,
                block_ids=range(row * each, (row + 1) * each),
                samples=True,
                output_position=0,
                sampling=SamplingSpec(max_tokens=1),
            )
            for row in range(num_rows)
        ]
        times = []
        for _ in range(2 if where.dry else 12):
            began = time.perf_counter()
            runner.run(rows)
            times.append(time.perf_counter() - began)
        best = sorted(times)[len(times) // 4]
        emit(
            check="decode step",
            rows=num_rows,
            tokens_each=length,
            step_ms=round(best * 1e3, 3),
            tokens_per_s=round(num_rows / best, 1),
        )


def main(argv: list[str]) -> None:
    """Both dtypes; fails when a comparison does."""
    where = place(argv, __doc__ or "")
    deadline = time.monotonic() + where.seconds
    passed = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder, where)
        for dtype in ("float32", "bfloat16"):
            runner = load(folder, dtype, where)
            emit(
                check="loaded",
                dtype=dtype,
                blocks=runner.info.cache_group.num_blocks,
                step_us=round(runner.info.step_us),
                token_us=round(runner.info.token_us, 2),
            )
            requests = make_requests(where)
            kept = recorded(runner, requests, 8 if where.dry else 256)
            passed &= parity(folder, dtype, where, requests, kept)
            if dtype == "bfloat16":
                passed &= swap(runner, where)
                time_decodes(runner, where, deadline)
            del runner, kept
            if not where.dry:
                torch.cuda.empty_cache()
    if not passed:
        raise SystemExit("the worker's logits are not transformers', or change with a swap")


if __name__ == "__main__":
    main(sys.argv[1:])

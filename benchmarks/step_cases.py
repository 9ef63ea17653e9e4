"""Whole forwards for benchmarks.kernels: transformers' modules beside the lean forward, on a CPU.

The model is a Llama of SmolLM2-135M's shape with random weights that bf16 holds, as those of a
saved model are. `torch` is its own modules over torch's attention, `native` the lean forward with
the linear layers that a worker takes by default, `deterministic` with those of
QUIRE_DETERMINISTIC=1. Sampling is not in it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_cases import (
    BLOCK_SIZE,
    INNER,
    NUM_HEADS,
    NUM_KV_HEADS,
    VOCABULARY,
    WIDTH,
    Case,
    Rows,
)

NUM_LAYERS, QUICK_LAYERS = 30, 2
CPU = torch.device("cpu")
STEPS = (
    Rows(name="decode 1 x 256", rows=((1, 256),)),
    Rows(name="decode 8 x 256", rows=((1, 256),) * 8),
    Rows(name="decode 32 x 256", rows=((1, 256),) * 32),
    Rows(name="prefill 256 of 256", rows=((256, 256),)),
)


class QuietLog:
    """Takes what loading says."""

    def info(self, _message: str, **_values: Any) -> None:
        """Says nothing."""

    warning = info


def cases(dtype: torch.dtype, name: str, *, quick: bool) -> Iterator[Case]:
    """A case for each step; `quick` takes the first one and a shallow model."""
    from gpu_worker import attention, kv_cache, models
    from kernels.native import library

    module = _module(dtype, QUICK_LAYERS if quick else NUM_LAYERS)
    plain = models.wrap(module, CPU)
    kinds: dict[str, tuple[models.LoadedModel, str]] = {"torch": (plain, "torch")}
    if library.reason_unavailable() is None:
        for kind, deterministic in (("native", False), ("deterministic", True)):
            fused = models.fuse(
                plain, "native", wanted=True, deterministic=deterministic, log=QuietLog()
            )
            models.fix_rotary(fused, max(length for of in STEPS for _, length in of.rows))
            kinds[kind] = (fused, "native")
    steps = STEPS[:1] if quick else STEPS
    blocks = max(len(of.rows) for of in steps) * -(-256 // BLOCK_SIZE)
    cache = kv_cache.allocate(kv_cache.layout(plain.kv_shape, BLOCK_SIZE, blocks), dtype, CPU)
    contexts = {
        kind: attention.PagedContext(cache, attention.make_backend(backend, CPU))
        for kind, (_, backend) in kinds.items()
    }
    num_weights = sum(p.numel() for p in module.parameters())
    for of in steps:
        calls = {kind: step_call(kinds[kind][0], contexts[kind], of) for kind in kinds}
        tokens = sum(query for query, _ in of.rows)
        yield Case("step", of.name, name, 2 * num_weights, calls, flops=2 * num_weights * tokens)


def _module(dtype: torch.dtype, num_layers: int) -> Any:
    import transformers

    from gpu_worker import attention

    attention.register()
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    module = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=attention.IMPLEMENTATION
    )
    return module.to(dtype).eval().requires_grad_(False)


def step_call(model: Any, context: Any, of: Rows) -> Callable[[], Tensor]:
    """One forward of such rows; `context` has a block for each 16 of 256 tokens of each row."""
    from gpu_worker import models
    from gpu_worker.attention import StepTables

    each = -(-256 // BLOCK_SIZE)
    tables = torch.arange(len(of.rows) * each, dtype=torch.int32).view(-1, each)
    positions = torch.cat([torch.arange(seq - query, seq) for query, seq in of.rows])
    owners = torch.repeat_interleave(
        torch.arange(len(of.rows)), torch.tensor([query for query, _ in of.rows])
    )
    slots = tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.tensor([0, *(query for query, _ in of.rows)]).cumsum(0).to(torch.int32)
    lens = torch.tensor([seq for _, seq in of.rows], dtype=torch.int32)
    token_ids = (torch.arange(len(positions)) * 7919 + 11) % VOCABULARY
    last = (starts[1:] - 1).long()

    def call() -> Tensor:
        step = StepTables(  # afresh: what is prepared once a step is part of it
            slot_mapping=slots,
            block_tables=tables,
            seq_lens=lens,
            query_start_loc=starts,
            max_query_len=max(query for query, _ in of.rows),
            max_seq_len=max(seq for _, seq in of.rows),
        )
        return models.forward(model, context, step, token_ids, positions, last)

    return call

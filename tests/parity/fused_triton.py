"""Steps of the lean forward on Triton's kernels beside the modules; runs in the interpreter."""

from dataclasses import replace
from typing import Any

BLOCK_SIZE = 8
# Tokens of each row in two steps; the interpreter takes its time. The first step starts rows, the
# second decodes two and continues one, all past the window of the families that have one.
FIRST, SECOND = (2, 1, 9), (1, 1, 5)
PREFIXES = (30, 26, 27)  # of the second step; torch computes what is missing of them


class QuietLog:
    """Takes what loading says."""

    def info(self, _message: str, **_values: Any) -> None:
        """Says nothing."""

    warning = info


def build(family: str, dtype: Any) -> Any:
    """Random weights; norms and biases that would be seen if they were left out."""
    import torch
    import transformers

    from gpu_worker import attention
    from tests.parity import families

    attention.register()
    torch.manual_seed(1)
    module = transformers.AutoModelForCausalLM.from_config(
        families.config(family), dtype=dtype, attn_implementation=attention.IMPLEMENTATION
    )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(0.3, 0.3)
    return module.eval().requires_grad_(False)


def compare(family: str, dtype_name: str, fault: str = "") -> dict[str, float]:
    """Differences of logits (over their spread), keys and values, and what was called.

    `fault` names what an operator is planted to forget.
    """
    import torch

    from gpu_worker import attention, models
    from kernels.cache_layout import CacheLayout

    dtype, cpu = getattr(torch, dtype_name), torch.device("cpu")
    module = build(family, dtype)
    plain = models.wrap(module, cpu)
    shape = plain.kv_shape
    layout = CacheLayout(
        num_blocks=16,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=shape.head_dim,
    )
    tables = torch.arange(15, dtype=torch.int32).view(3, 5).flip(0).contiguous()

    @torch.inference_mode()
    def forward(
        model: Any, cache: Any, backend: str, starts: tuple[int, ...], lens: tuple[int, ...]
    ) -> torch.Tensor:
        step = step_of(tables, starts, lens)
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens, strict=True)])
        token_ids = (torch.arange(sum(lens)) * 7919 + 11 + sum(starts)) % model.vocab_size
        context = attention.PagedContext(cache, attention.make_backend(backend, cpu))
        wanted = torch.arange(sum(lens))
        logits: torch.Tensor = models.forward(model, context, step, token_ids, positions, wanted)
        return logits.float()

    def run(model: Any, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.zeros(layout.shape, dtype=dtype)
        missing = tuple(p - n for p, n in zip(PREFIXES, FIRST, strict=True))
        first = forward(model, cache, backend, (0, 0, 0), FIRST)
        forward(plain, cache, "torch", FIRST, missing)
        second = forward(model, cache, backend, PREFIXES, SECOND)
        return torch.cat([first, second]), cache.float()

    want, want_cache = run(plain, "torch")
    fused = models.fuse(plain, "triton", wanted=True, deterministic=False, log=QuietLog())
    models.fix_rotary(fused, 64)
    assert fused.fused is not None, family
    if fault:
        plant(fused.fused, fault)
    got, got_cache = run(fused, "triton")
    again, _ = run(plain, "torch")  # over weights that are views of the lean forward's now
    return {
        "logits": float((got - want).abs().max() / want.std()),
        "cache": float((got_cache - want_cache).abs().max()),
        "modules": float((again - want).abs().max()),
        "stored": float(want_cache.count_nonzero()),
    }


def step_of(tables: Any, starts: tuple[int, ...], lens: tuple[int, ...]) -> Any:
    """Tables of a step whose row r computes lens[r] tokens from position starts[r] on."""
    import torch

    from gpu_worker import attention

    slots = [
        int(tables[row, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE
        for row, (start, length) in enumerate(zip(starts, lens, strict=True))
        for at in range(start, start + length)
    ]
    ends = [start + length for start, length in zip(starts, lens, strict=True)]
    return attention.StepTables(
        slot_mapping=torch.tensor(slots),
        block_tables=tables,
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
        max_query_len=max(lens),
        max_seq_len=max(ends),
    )


def plant(fused: Any, fault: str) -> None:
    """Makes one operator of the first layer forget something."""
    layer = fused._layers[0]
    if fault == "residual":
        norm = layer.before_mlp
        object.__setattr__(layer, "before_mlp", lambda x, delta=None: norm(x, None))
        return
    if fault == "window":
        assert layer.call.window
        object.__setattr__(layer, "call", replace(layer.call, window=0))
        return
    assert fault == "activation"
    object.__setattr__(layer, "activation", lambda both: both[:, : both.shape[1] // 2])

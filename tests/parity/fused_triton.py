"""A step of the lean forward on Triton's kernels beside the modules; runs in the interpreter."""

from typing import Any

BLOCK_SIZE = 8
LENS = (2, 1, 9)  # of the step's rows; the interpreter takes its time


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

    `fault` names a kernel that is planted to forget its last argument.
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
    positions = torch.cat([torch.arange(length) for length in LENS])
    owners = torch.repeat_interleave(torch.arange(3), torch.tensor(LENS))
    slots = tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    token_ids = (torch.arange(sum(LENS)) * 7919 + 11) % plain.vocab_size

    def run(model: Any, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.zeros(layout.shape, dtype=dtype)
        context = attention.PagedContext(cache, attention.make_backend(backend, cpu))
        step = attention.StepTables(
            slot_mapping=slots,
            block_tables=tables,
            seq_lens=torch.tensor(LENS, dtype=torch.int32),
            query_start_loc=torch.tensor([0, *LENS]).cumsum(0).to(torch.int32),
            max_query_len=max(LENS),
            max_seq_len=max(LENS),
        )
        wanted = torch.tensor([1, 2, 7, 11])
        with torch.inference_mode():
            logits = models.forward(model, context, step, token_ids, positions, wanted)
        return logits.float(), cache.float()

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


def plant(fused: Any, fault: str) -> None:
    """Makes one operator of the first layer forget something."""
    layer = fused._layers[0]
    if fault == "residual":
        norm = layer.before_mlp
        object.__setattr__(layer, "before_mlp", lambda x, delta=None: norm(x, None))
        return
    assert fault == "activation"
    object.__setattr__(layer, "activation", lambda both: both[:, : both.shape[1] // 2])

"""The lean forward of known families: what the unmodified modules compute, or not used at all."""

from collections.abc import Callable
from typing import Any

import pytest
import structlog
import torch
import transformers

from gpu_worker import attention, models
from gpu_worker.attention import StepTables, UnsupportedModelError
from gpu_worker.fused_operators import NativeOperators
from kernels.cache_layout import CacheLayout
from tests.kernels.native import needs_native
from tests.parity import families

pytestmark = [needs_native, pytest.mark.slow]

CPU = torch.device("cpu")
LOG = structlog.get_logger()
LENS = (5, 1, 40)  # of the step's rows; the last one is longer than the windows
BLOCK_SIZE = 8

# Those with a lean forward.
FUSED = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3")

# Largest difference of a logit over the spread of all: rounding in fp32, one bf16 unit or so.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def build(family: str, dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> Any:
    torch.manual_seed(seed)
    config = families.config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    module = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION
    )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(0.3, 0.3)
    return module.eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


def fuse(module: Any, **options: Any) -> models.LoadedModel:
    wanted = {"wanted": True, "deterministic": False, **options}
    fused = models.fuse(models.wrap(module, CPU), "native", log=LOG, **wanted)
    models.fix_rotary(fused, 128)
    return fused


def step_of(model: models.LoadedModel) -> tuple[Callable[[], attention.PagedContext], StepTables]:
    """Fresh caches for a step of LENS."""
    shape = model.kv_shape
    layout = CacheLayout(
        num_blocks=16,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=shape.head_dim,
    )
    tables = torch.arange(3 * 5, dtype=torch.int32).view(3, 5).flip(0).contiguous()
    slots = [
        int(tables[row, at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE
        for row, length in enumerate(LENS)
        for at in range(length)
    ]
    starts = torch.tensor([0, *LENS]).cumsum(0).to(torch.int32)
    step = StepTables(
        slot_mapping=torch.tensor(slots),
        block_tables=tables,
        seq_lens=torch.tensor(LENS, dtype=torch.int32),
        query_start_loc=starts,
        max_query_len=max(LENS),
        max_seq_len=max(LENS),
    )

    def context() -> attention.PagedContext:
        cache = torch.zeros(layout.shape, dtype=model.dtype)
        return attention.PagedContext(cache, attention.make_backend("native", CPU))

    return context, step


@torch.inference_mode()
def logits_of(
    model: models.LoadedModel, context: attention.PagedContext, step: StepTables
) -> torch.Tensor:
    tokens = (torch.arange(sum(LENS)) * 7919 + 11) % model.vocab_size
    positions = torch.cat([torch.arange(length) for length in LENS])
    wanted = torch.tensor([4, 5, 20, 45])
    step.prepared.clear()
    return models.forward(model, context, step, tokens, positions, wanted).float()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FUSED)
def test_the_forward_is_that_of_the_modules(family: str, dtype: torch.dtype) -> None:
    module = build(family, dtype)
    plain, fused = models.wrap(module, CPU), fuse(module)
    assert fused.fused is not None
    context, step = step_of(plain)
    want, got = logits_of(plain, context(), step), logits_of(fused, context(), step)
    assert got.shape == want.shape == (4, families.VOCABULARY)
    assert float((got - want).abs().max()) <= TOLERANCE[dtype] * float(want.std()) * 5


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_program_has_the_bits_of_operators_one_by_one(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build(family)
    together = fuse(module)
    monkeypatch.setattr(NativeOperators, "program", lambda _self, _layers: None)
    apart = fuse(module)
    context, step = step_of(together)
    want, got = (logits_of(model, context(), step) for model in (apart, together))
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", FUSED)
def test_keys_and_values_are_those_of_the_modules(family: str) -> None:
    module = build(family)
    plain, fused = models.wrap(module, CPU), fuse(module)
    context, step = step_of(plain)
    caches = []
    for model in (plain, fused):
        used = context()
        logits_of(model, used, step)
        caches.append(torch.stack([torch.stack(used.caches(layer)) for layer in range(2)]))
    assert caches[0].count_nonzero() > 0
    assert torch.allclose(caches[0], caches[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_modules_own_weights_can_go(tied: bool) -> None:
    module = build("llama", tie_word_embeddings=tied)
    fused = fuse(module)
    assert fused.fused is not None
    context, step = step_of(fused)
    before = logits_of(fused, context(), step)
    fused.fused.release(module)
    assert torch.equal(logits_of(fused, context(), step), before)
    held = sum(p.numel() for name, p in module.named_parameters() if "proj" in name)
    assert held == 0
    assert module.model.embed_tokens.weight.numel() == families.VOCABULARY * 64


def test_a_fault_in_a_packed_weight_is_refused_at_load() -> None:
    """check_parity holds the lean forward against the untouched module."""
    module = build("llama")
    fused = fuse(module)
    context, _ = step_of(fused)
    assert models.check_parity(fused, context(), BLOCK_SIZE) > 0.9999
    module.model.layers[1].mlp.down_proj.weight.data *= -1
    with pytest.raises(UnsupportedModelError, match="llama: its paged logits are not those of"):
        models.check_parity(fused, context(), BLOCK_SIZE)


class Twisted(torch.nn.Module):
    """An activation that no kernel has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_what_is_not_recognised_keeps_its_modules() -> None:
    bent = build("llama")
    bent.model.layers[1].mlp.act_fn = Twisted()
    half = build("qwen2")
    half.model.layers[0].self_attn.k_proj.bias = None
    other = build("llama")
    other.model.layers[0].self_attn.o_proj = torch.nn.Sequential(torch.nn.Linear(64, 64))
    for module, reason in (
        (bent, "its activation is Twisted"),
        (half, "some of its projections have a bias"),
        (other, "a projection is no plain linear layer"),
    ):
        assert fuse(module).fused is None
        with pytest.raises(UnsupportedModelError, match=f"QUIRE_DETERMINISTIC=1: {reason}"):
            fuse(module, deterministic=True)


def test_deterministic_needs_the_lean_forward() -> None:
    model = models.wrap(build("llama"), CPU)
    for backend, wanted, reason in (
        ("torch", True, "the torch back end computes attention"),
        ("native", False, "QUIRE_FUSED=0"),
    ):
        assert (
            models.fuse(model, backend, wanted=wanted, deterministic=False, log=LOG).fused is None
        )
        with pytest.raises(UnsupportedModelError, match=f"QUIRE_DETERMINISTIC=1: {reason}"):
            models.fuse(model, backend, wanted=wanted, deterministic=True, log=LOG)


def test_what_is_packed_is_not_kept_twice() -> None:
    model = fuse(build("llama"))
    assert model.fused is not None
    embedding = model.module.model.embed_tokens.weight
    linear_bytes = sum(
        part.weight.nbytes
        for part in model.module.modules()
        if type(part) is torch.nn.Linear and part.weight is not embedding
    )
    before = models.weight_bytes(model.module)
    model.fused.release(model.module)
    assert models.weight_bytes(model.module) == before - linear_bytes
    assert model.fused.packed_bytes >= linear_bytes > 0

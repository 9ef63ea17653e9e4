"""Owns the model: what is served and what is refused, loading, and the flat forward.

The model is transformers' own, unmodified, from a local folder with safetensors weights. Its
attention layers come to gpu_worker.attention through transformers' AttentionInterface.

A model is refused by name, before its weights are read where its configuration tells, otherwise by
a probing forward that sees every attention layer's call: each layer must come through the
interface once, with one shape of keys and values. `check_parity` then holds the paged forward
against transformers' eager attention on a few tokens: what goes around the interface (state
of other kinds, position biases) shows there.
"""

import inspect
import itertools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpu_worker.attention import (
    IMPLEMENTATION,
    LayerCall,
    PagedContext,
    StepTables,
    UnsupportedModelError,
    no_native,
    register,
)
from gpu_worker.quantization import NONE, round_weights
from kernels.checks import MAX_HEAD_DIM

if TYPE_CHECKING:
    from gpu_worker.fused import FusedModel

SERVED_LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))

# Families whose state is not keys and values per token; others are told by their configuration.
_STATE_SPACE = "keeps a recurrent state instead of keys and values"
REFUSED_TYPES = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _STATE_SPACE),
    **dict.fromkeys(
        ("jamba", "bamba", "zamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid"),
        _STATE_SPACE + " in some layers",
    ),
    **dict.fromkeys(("recurrent_gemma", "kimi_linear", "qwen3_next", "minimax"), _STATE_SPACE),
    **dict.fromkeys(("bloom", "mpt"), "adds a position bias (ALiBi) to attention"),
    "llama4": "has chunked attention layers that do not pass their chunk",
    "llama4_text": "has chunked attention layers that do not pass their chunk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Keys and values of one token, the same in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]  # of each layer; 0 is full attention


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on its device."""

    module: Any
    name: str
    device: torch.device
    dtype: torch.dtype
    kv_shape: KvShape
    vocab_size: int
    max_position_embeddings: int
    weight_bytes: int
    keeps_logits: bool  # its forward takes logits_to_keep
    calls: tuple[LayerCall, ...]  # what its attention layers asked for, by layer
    fused: "FusedModel | None" = None  # computes the forward in the module's place
    quantization: str = NONE  # of its linear layers there


def refusal(config: Any) -> str | None:
    """Why a model of this configuration can't be served paged; None when nothing speaks against."""
    text = config.get_text_config(decoder=True)
    for part in (config, text):
        if part.model_type in REFUSED_TYPES:
            return f"{part.model_type}: it {REFUSED_TYPES[part.model_type]}"
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        return f"{name}: it is an encoder-decoder model"
    if getattr(text, "kv_lora_rank", None):
        return f"{name}: its latent attention (MLA) is expanded before the attention interface"
    if getattr(text, "attention_chunk_size", None):
        return f"{name}: its chunked attention layers do not pass their chunk"
    if getattr(text, "num_kv_shared_layers", 0):
        return f"{name}: some of its layers read other layers' keys and values"
    if getattr(text, "alibi", False):
        return f"{name}: it adds a position bias (ALiBi) to attention"
    others = set(getattr(text, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if others:
        return f"{name}: it has layers of kind {', '.join(sorted(others))}"
    if getattr(config, "quantization_config", None):
        return f"{name}: its weights are quantized"
    return None


def refuse_unsupported(config: Any) -> None:
    """Raises UnsupportedModelError for what `refusal` names and for classes off the interface."""
    from transformers import AutoModelForCausalLM

    reason = refusal(config)
    if reason is not None:
        raise UnsupportedModelError(f"can't serve {reason}")
    try:
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UnsupportedModelError(
            f"can't serve {config.model_type}: transformers has no causal language model of it"
        ) from None
    if not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"can't serve {config.model_type}: {model_class.__name__} does not go through "
            "transformers' attention interface"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model; raises UnsupportedModelError when there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(
            p.name for ending in ("*.bin", "*.pt", "*.pth") for p in folder.glob(ending)
        )
        found = f"; {', '.join(pickled)} would be unpickled, which can run code" if pickled else ""
        raise UnsupportedModelError(f"no *.safetensors in {folder}{found}")
    return files


def native_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware; without, torch is slower than fp32.

    On an AVX2 machine a step of a 135M model took 5 to 10 times as long in bf16 as in fp32.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    checks = [
        getattr(torch.cpu, name, None)
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return not x86 or any(check is not None and check() for check in checks)


def choose_dtype(
    configured: str, of_model: torch.dtype | None, device: torch.device
) -> torch.dtype:
    """QUIRE_DTYPE to a dtype: auto is the model's, and float32 on a CPU without bf16 hardware."""
    if configured != "auto":
        return torch.bfloat16 if configured == "bfloat16" else torch.float32
    if device.type == "cpu":
        wants = of_model in (torch.bfloat16, torch.float16)
        return torch.bfloat16 if wants and native_bfloat16() else torch.float32
    return of_model or torch.bfloat16


def load(folder: Path, *, dtype: str, device: torch.device, log: Any) -> LoadedModel:
    """Reads the model. Raises UnsupportedModelError for what can't be served."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    register()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        raise UnsupportedModelError(f"can't serve {folder.name}: {error}") from error
    refuse_unsupported(config)
    files = weight_files(folder)
    chosen = choose_dtype(dtype, config.dtype, device)
    log.info(
        "loading weights",
        model_type=config.model_type,
        files=len(files),
        mib=round(sum(file.stat().st_size for file in files) / 2**20),
        dtype=str(chosen).removeprefix("torch."),
        device=str(device),
    )
    module, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=chosen,
        attn_implementation=IMPLEMENTATION,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = sorted(str(key) for key in report["missing_keys"])
    if missing:
        raise UnsupportedModelError(
            f"{folder} lacks {len(missing)} weights of {type(module).__name__}: {missing[:3]}"
        )
    module.eval().requires_grad_(False)
    return wrap(module.to(device), device)


def wrap(module: Any, device: torch.device) -> LoadedModel:
    """Probes a module whose attention implementation is IMPLEMENTATION."""
    text = module.config.get_text_config(decoder=True)
    calls = _probe(module, device)
    return LoadedModel(
        module=module,
        name=module.config.model_type,
        device=device,
        dtype=module.dtype,
        kv_shape=_kv_shape(module.config.model_type, calls, text),
        vocab_size=text.vocab_size,
        max_position_embeddings=int(getattr(text, "max_position_embeddings", None) or 2048),
        weight_bytes=weight_bytes(module),
        keeps_logits="logits_to_keep" in inspect.signature(module.forward).parameters,
        calls=tuple(calls),
    )


def weight_bytes(module: Any) -> int:
    """Of its parameters and buffers; what several share counts once."""
    seen: dict[int, Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        seen[tensor.data_ptr()] = tensor
    return sum(tensor.nbytes for tensor in seen.values())


def _needs_native(deterministic: bool, quantization: str) -> list[str]:
    """The settings that only the lean forward on native kernels can give."""
    needs = ["QUIRE_DETERMINISTIC=1"] if deterministic else []
    if quantization != NONE:
        needs.append(f"QUIRE_QUANTIZATION={quantization}")
    return needs


def _no_lean(backend: str, device: torch.device, *, wanted: bool, needs: list[str]) -> str | None:
    """Why there is no lean forward whatever the model is; None when the model decides."""
    if needs and backend != "native":
        missing = no_native(device)
        if missing is not None:
            return f"it takes the native kernels: {missing}"
    if backend not in ("native", "triton") or (needs and backend != "native"):
        return f"the {backend} back end computes attention"
    return None if wanted else "QUIRE_FUSED=0"


def refuse_without_native(
    name: str,
    backend: str,
    device: torch.device,
    *,
    wanted: bool,
    deterministic: bool,
    quantization: str,
) -> None:
    """Raises UnsupportedModelError, as `fuse` would, for what no model can have here.

    To be asked before weights are fetched and read, which takes minutes.
    """
    needs = _needs_native(deterministic, quantization)
    reason = _no_lean(backend, device, wanted=wanted, needs=needs)
    if needs and reason is not None:
        raise UnsupportedModelError(f"can't serve {name} with {' and '.join(needs)}: {reason}")


def fuse(
    model: LoadedModel,
    backend: str,
    *,
    wanted: bool,
    deterministic: bool,
    quantization: str = NONE,
    log: Any,
) -> LoadedModel:
    """With the lean forward of gpu_worker.fused, where it is wanted and knows the model.

    Only that forward, on native kernels, computes a row by arithmetic which the batch does not
    change, and only it has linear layers of 8 or 4 bits: with `deterministic` or a `quantization`,
    raises UnsupportedModelError where the model has to do without.
    """
    missing = no_native(model.device) if model.device.type == "cpu" else None
    if missing is not None:
        log.warning("no native kernels: torch computes, many times slower", reason=missing)
    needs = _needs_native(deterministic, quantization)
    reason = _no_lean(backend, model.device, wanted=wanted, needs=needs)
    if reason is None:
        from gpu_worker.fused import FusedModel, NotRecognisedError
        from gpu_worker.fused_operators import NativeOperators, Operators, TritonOperators

        try:
            began = time.monotonic()
            operators: Operators = (
                NativeOperators(deterministic=deterministic, quantization=quantization)
                if backend == "native"
                else TritonOperators()
            )
            fused = FusedModel(model.module, model.calls, operators)
            log.info(
                "the lean forward computes it",
                kernels=backend,
                linear=fused.kinds_of_linear,
                seconds=round(time.monotonic() - began, 1),
            )
            return replace(model, fused=fused, quantization=quantization)
        except NotRecognisedError as error:
            reason = str(error)
    if needs:
        asked = " and ".join(needs)
        raise UnsupportedModelError(f"can't serve {model.name} with {asked}: {reason}")
    log.info("the model's own modules compute it", model_type=model.name, reason=reason)
    return model


def forward(
    model: LoadedModel,
    context: PagedContext,
    step: StepTables,
    token_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
) -> Tensor:
    """Logits [len(logits_indices), vocabulary] of the flat batch; KV goes into the cache."""
    if model.fused is not None:
        return model.fused.forward(context, step, token_ids, positions, logits_indices)
    keep = {"logits_to_keep": logits_indices} if model.keeps_logits else {}
    with context.active(step):
        output = model.module(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **keep
        )
    logits: Tensor = output.logits[0]
    return logits if model.keeps_logits else logits[logits_indices]


def fix_rotary(model: LoadedModel, max_model_len: int) -> None:
    """Settles scalings that transformers chooses by the longest position of a batch.

    A batch must not decide what a request gets, so the choice is made once, for max_model_len.
    """
    last = torch.full((1, 1), max_model_len - 1, dtype=torch.long, device=model.device)
    x = torch.zeros((1, 1, 1), dtype=model.dtype, device=model.device)
    for module in model.module.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and ("dynamic" in kinds or kinds == "longrope"):
            module(x, last)
            module.rope_type = "fixed"
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if "dynamic" in kind or kind == "longrope":
                    module(x, last, layer_type)
            module.rope_type = dict.fromkeys(kinds, "fixed")
    if model.fused is not None:
        model.fused.set_positions(max_model_len)


class _NoAttention:
    """Answers zeros, so that a forward runs before there is a cache."""

    name = "probe"

    def store(self, k: Tensor, v: Tensor, caches: Any, step: StepTables) -> None:
        """Keeps nothing."""

    def attend(self, q: Tensor, caches: Any, step: StepTables, **kwargs: Any) -> Tensor:
        """Zeros."""
        return torch.zeros_like(q)


class _NoCache(PagedContext):
    """A context without a cache."""

    def __init__(self) -> None:
        super().__init__(torch.empty((1, 0, 2, 1, 1, 1)), _NoAttention())
        self.calls = []

    def caches(self, layer: int) -> Any:
        """None is ever read."""
        return None


def one_row(start: int, length: int, table: Tensor, block_size: int) -> StepTables:
    """Tables of a step of one row: `length` tokens from position `start` on."""
    device = table.device
    at = torch.arange(start, start + length, device=device)
    return StepTables(
        slot_mapping=table.long()[at // block_size] * block_size + at % block_size,
        block_tables=table[None],
        seq_lens=torch.tensor([start + length], dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=device),
        max_query_len=length,
        max_seq_len=start + length,
    )


@torch.inference_mode()
def _probe(module: Any, device: torch.device) -> list[LayerCall]:
    """Sees each attention layer's call in a forward of two tokens."""
    name = module.config.model_type
    context = _NoCache()
    step = one_row(0, 2, torch.zeros(1, dtype=torch.int32, device=device), 4)
    tokens = torch.zeros((1, 2), dtype=torch.long, device=device)
    try:
        with context.active(step):
            module(
                input_ids=tokens,
                position_ids=torch.arange(2, device=device)[None],
                use_cache=False,
            )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"can't serve {name}: {error}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"can't serve {name}: {type(module).__name__} does not compute a flat batch of tokens "
            f"and positions ({type(error).__name__}: {error})"
        ) from error
    assert context.calls is not None
    return sorted(context.calls, key=lambda call: call.layer)


def _kv_shape(name: str, calls: list[LayerCall], text: Any) -> KvShape:
    """The layers' common shape; raises UnsupportedModelError where they do not have one."""
    num_layers = int(text.num_hidden_layers)
    layers = [call.layer for call in calls]
    if sorted(layers) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"can't serve {name}: {len(set(layers))} of {num_layers} layers came through the "
            f"attention interface, in {len(layers)} calls"
        )
    shapes = {(call.num_kv_heads, call.head_dim) for call in calls}
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"can't serve {name}: its layers differ in (KV heads, head dim): {sorted(shapes)}"
        )
    if calls[0].head_dim > MAX_HEAD_DIM:
        raise UnsupportedModelError(
            f"can't serve {name}: its head dim {calls[0].head_dim} is over the {MAX_HEAD_DIM} that "
            "attention takes"
        )
    by_layer = {call.layer: call for call in calls}
    windows = tuple(by_layer[layer].window for layer in range(num_layers))
    kinds = list(getattr(text, "layer_types", None) or ())
    for layer, kind in enumerate(kinds[:num_layers]):
        if (kind == "sliding_attention") != (windows[layer] > 0):
            raise UnsupportedModelError(
                f"can't serve {name}: layer {layer} is {kind} but passes window {windows[layer]}"
            )
    num_kv_heads, head_dim = next(iter(shapes))
    return KvShape(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, windows=windows
    )


CHECK_TOKENS = 24
CHECK_CHUNKS = (0, 13, 23, 24)  # a prefill, a chunk after it, a decode


@torch.inference_mode()
def check_parity(model: LoadedModel, context: PagedContext, block_size: int) -> float:
    """Least cosine of paged and eager logits over CHECK_TOKENS; writes into the first blocks.

    Where the lean forward has quantized layers, the module gets their weights for it, for good.
    Raises UnsupportedModelError where they are not the same function. In bf16 experts may be chosen
    differently on single tokens, so the mean decides.
    """
    num_blocks = math.ceil(CHECK_TOKENS / block_size)
    table = torch.arange(num_blocks, dtype=torch.int32, device=model.device)
    tokens = (torch.arange(CHECK_TOKENS, device=model.device) * 7919 + 11) % model.vocab_size
    positions = torch.arange(CHECK_TOKENS, device=model.device)
    paged = []
    for begin, end in itertools.pairwise(CHECK_CHUNKS):
        step = one_row(begin, end - begin, table, block_size)
        part = slice(begin, end)
        every = torch.arange(end - begin, device=model.device)
        paged.append(forward(model, context, step, tokens[part], positions[part], every))
    if model.quantization != NONE:
        with torch.inference_mode(mode=False):  # weights that can be freed outside of it
            round_weights(model.module, model.quantization)
    model.module.set_attn_implementation("eager")
    try:
        whole = model.module(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False
        ).logits[0]
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)
    cosine = torch.cosine_similarity(torch.cat(paged).float(), whole.float(), dim=-1)
    if not float(cosine.mean()) > 0.99:
        raise UnsupportedModelError(
            f"can't serve {model.name}: its paged logits are not those of eager attention "
            f"(mean cosine {float(cosine.mean()):.4f} over {CHECK_TOKENS} tokens)"
        )
    return float(cosine.min())

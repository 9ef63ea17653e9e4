"""Owns the lean forward of recognised models on the native kernels.

transformers' modules cost as much in small operators and Python as their linear layers do. For the
families of RECOGNISED this module computes the same function with nine operators a layer: norm with
residual, one projection for queries, keys and values, rotary embedding with the store, paged
attention, output projection, norm with residual, one projection for gate and up, activation, down.
The operators round where the modules round.

What a layer asks of attention (scale, window, soft cap) is what the probing forward saw it ask.
The unmodified module stays the reference: models.check_parity holds this forward against its eager
one at every load.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.attention import LayerCall, PagedContext, StepTables
from kernels.native.linear import Linear, choose_linear
from kernels.native.operators import Attention, GatedActivation, RmsNorm, RotaryStore

# Decoder layer class -> whether its norms scale by 1 + weight.
RECOGNISED = {
    "LlamaDecoderLayer": False,
    "MistralDecoderLayer": False,
    "Qwen2DecoderLayer": False,
    "Qwen3DecoderLayer": False,
    "Phi3DecoderLayer": False,
    "GemmaDecoderLayer": True,
    "Gemma2DecoderLayer": True,
    "Gemma3DecoderLayer": True,
}
LINEAR = ("qkv", "out", "gate_up", "down")
POSITIONS_AT_ONCE = 4096  # of the rotary tables, while they are made


class NotRecognisedError(Exception):
    """Why a model is computed by its own modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Norms over the heads of queries and keys."""

    queries: Tensor
    keys: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A decoder layer's parts; norms that a family lacks are None."""

    before_attention: RmsNorm
    after_attention: RmsNorm | None
    before_mlp: RmsNorm
    after_mlp: RmsNorm | None
    heads: HeadNorms | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    activation: GatedActivation
    rotary: str  # the layer type whose rotary embedding it uses, "" where all share one
    call: LayerCall


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTables:
    """[positions, half] fp32, rounded to the model's dtype."""

    cosine: Tensor
    sine: Tensor


class FusedModel:
    """One model's forward, over packed weights of its own.

    `deterministic` keeps to linear layers in which a row's bits do not depend on the batch.
    """

    def __init__(self, module: Any, calls: Sequence[LayerCall], *, deterministic: bool) -> None:
        body = module.model
        names = {type(layer).__name__ for layer in body.layers}
        if len(names) != 1 or not names <= RECOGNISED.keys():
            raise NotRecognisedError(f"its layers are {', '.join(sorted(names))}")
        self._offset = offset = RECOGNISED[names.pop()]
        self._dtype = module.dtype
        self._embed: Callable[[Tensor], Tensor] = body.embed_tokens
        self._embedding = body.embed_tokens.weight
        self._rotary_module = body.rotary_emb
        self._tables: dict[str, RotaryTables] = {}
        by_layer = {call.layer: call for call in calls}
        types = getattr(body.rotary_emb, "layer_types", None)
        self._layers = [
            _layer(layer, by_layer[index], offset, types is not None, deterministic)
            for index, layer in enumerate(body.layers)
        ]
        self._norm = _norm(body.norm, self._offset)
        self._head = _linear(deterministic, module.lm_head)
        self._cap = float(getattr(module.config, "final_logit_softcapping", None) or 0.0)

    @property
    def kinds_of_linear(self) -> list[str]:
        """What multiplies, for the log."""
        layers = [getattr(layer, name) for layer in self._layers for name in LINEAR]
        return sorted({linear.kind for linear in (*layers, self._head)})

    def release(self, module: Any) -> None:
        """Frees the module's own linear weights: it can't compute a forward any more."""
        for part in module.modules():
            if type(part) is torch.nn.Linear and part.weight is not self._embedding:
                part.weight.data = part.weight.new_empty(0)

    def set_positions(self, num_positions: int) -> None:
        """Makes the rotary tables for so many positions; a model's scaling is settled by then."""
        self._tables = {
            kind: _tables(self._rotary_module, kind, num_positions, self._dtype)
            for kind in {layer.rotary for layer in self._layers}
        }

    def forward(
        self,
        context: PagedContext,
        step: StepTables,
        token_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
    ) -> Tensor:
        """Logits [len(logits_indices), vocabulary] of the flat batch; KV goes into the cache."""
        x = self._embed(token_ids)
        delta: Tensor | None = None
        attends: dict[tuple[float, int, float], Attention] = {}
        stores: dict[str, RotaryStore] = {}
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            caches, call = context.caches(index), layer.call
            key = (call.scale, call.window, call.softcap)
            if key not in attends:
                attends[key] = _attention(caches[0], step, call)
            if layer.rotary not in stores:
                stores[layer.rotary] = self._store(caches[0], step, positions, layer)
            qkv = layer.qkv(layer.before_attention(x, delta))
            norms = (None, None) if layer.heads is None else (layer.heads.queries, layer.heads.keys)
            queries = stores[layer.rotary](qkv, *caches, *norms)
            attended = attends[key](queries, *caches).flatten(1)
            if index == last:  # only the rows whose logits are wanted go on
                x, attended = x[logits_indices], attended[logits_indices]
            delta = layer.out(attended)
            if layer.after_attention is not None:
                delta = layer.after_attention(delta)
            delta = layer.down(layer.activation(layer.gate_up(layer.before_mlp(x, delta))))
            if layer.after_mlp is not None:
                delta = layer.after_mlp(delta)
        logits = self._head(self._norm(x, delta))
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    def _store(
        self, k_cache: Tensor, step: StepTables, positions: Tensor, layer: Layer
    ) -> RotaryStore:
        tables = self._tables[layer.rotary]
        return RotaryStore(
            k_cache,
            step.slot_mapping,
            positions,
            tables.cosine,
            tables.sine,
            epsilon=0.0 if layer.heads is None else layer.heads.epsilon,
            offset=self._offset,
        )


def _attention(k_cache: Tensor, step: StepTables, call: LayerCall) -> Attention:
    return Attention(
        k_cache,
        step.block_tables,
        step.seq_lens,
        step.query_start_loc,
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
    )


def _tables(module: Any, kind: str, num_positions: int, dtype: torch.dtype) -> RotaryTables:
    """Of one rotary embedding, from the module itself."""
    like = torch.zeros((1, 1, 1), dtype=dtype)
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for begin in range(0, num_positions, POSITIONS_AT_ONCE):
        positions = torch.arange(begin, min(begin + POSITIONS_AT_ONCE, num_positions))[None]
        made = module(like, positions, kind) if kind else module(like, positions)
        for part, values in zip(parts, made, strict=True):
            half = values.shape[-1] // 2
            if not torch.equal(values[..., :half], values[..., half:]):
                raise NotRecognisedError("its rotary embedding turns the halves by other angles")
            part.append(values[0, :, :half].float())
    return RotaryTables(cosine=torch.cat(parts[0]), sine=torch.cat(parts[1]))


def _layer(
    layer: Any, call: LayerCall, offset: bool, rotary_by_type: bool, deterministic: bool
) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    if call.sinks:
        raise NotRecognisedError("its attention has sinks")

    def linear(*modules: Any) -> Linear:
        return _linear(deterministic, *modules)

    if hasattr(attention, "qkv_proj"):
        qkv, gate_up = linear(attention.qkv_proj), linear(mlp.gate_up_proj)
    else:
        qkv = linear(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up = linear(mlp.gate_proj, mlp.up_proj)
    four = hasattr(layer, "pre_feedforward_layernorm")
    behind = _norm(layer.post_attention_layernorm, offset)
    activation = getattr(mlp, "act_fn", None) or mlp.activation_fn
    return Layer(
        before_attention=_norm(layer.input_layernorm, offset),
        after_attention=behind if four else None,
        before_mlp=_norm(layer.pre_feedforward_layernorm, offset) if four else behind,
        after_mlp=_norm(layer.post_feedforward_layernorm, offset) if four else None,
        heads=_head_norms(attention),
        qkv=qkv,
        out=linear(attention.o_proj),
        gate_up=gate_up,
        down=linear(mlp.down_proj),
        activation=GatedActivation(gelu=_is_gelu(activation)),
        rotary=attention.layer_type if rotary_by_type else "",
        call=call,
    )


def _epsilon(norm: Any) -> float:
    epsilon = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if epsilon is None else epsilon)


def _norm(module: Any, offset: bool) -> RmsNorm:
    return RmsNorm(module.weight.detach(), _epsilon(module), offset=offset)


def _head_norms(attention: Any) -> HeadNorms | None:
    if not hasattr(attention, "q_norm"):
        return None
    queries, keys = attention.q_norm, attention.k_norm
    if _epsilon(queries) != _epsilon(keys):
        raise NotRecognisedError("its head norms have two epsilons")
    return HeadNorms(
        queries=queries.weight.detach(), keys=keys.weight.detach(), epsilon=_epsilon(queries)
    )


def _linear(deterministic: bool, *modules: Any) -> Linear:
    """Layers of one input side by side."""
    if any(type(module) is not torch.nn.Linear for module in modules):
        raise NotRecognisedError("a projection is no plain linear layer")
    biases = [module.bias for module in modules]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        raise NotRecognisedError("some of its projections have a bias")
    weight = torch.cat([module.weight.detach() for module in modules])
    bias = None if biases[0] is None else torch.cat(biases).detach()
    return choose_linear(weight, bias, deterministic=deterministic)


def _is_gelu(activation: Any) -> bool:
    """Told by what it does: there are several classes for either."""
    at = torch.linspace(-6.0, 6.0, 97)
    found = activation(at)
    if torch.allclose(found, F.silu(at), atol=1e-6):
        return False
    if torch.allclose(found, F.gelu(at, approximate="tanh"), atol=1e-6):
        return True
    raise NotRecognisedError(f"its activation is {type(activation).__name__}")

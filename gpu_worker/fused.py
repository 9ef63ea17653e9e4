"""Owns the lean forward of recognised models, on native kernels or Triton's.

transformers' modules cost as much in small operators and Python as their linear layers do. For the
families of RECOGNISED this module computes the same function with nine operators a layer: norm with
residual, one projection for queries, keys and values, rotary embedding with the store, paged
attention, output projection, norm with residual, one projection for gate and up, activation, down.
The operators round where the modules round; gpu_worker.fused_operators has them. Native ones run as
a program: one call for all layers up to the last attention.

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
from gpu_worker.fused_operators import (
    LINEAR,
    Activation,
    Attend,
    Linear,
    Norm,
    Operators,
    Store,
)

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

    before_attention: Norm
    after_attention: Norm | None
    before_mlp: Norm
    after_mlp: Norm | None
    heads: HeadNorms | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    activation: Activation
    rotary: str  # the layer type whose rotary embedding it uses, "" where all share one
    call: LayerCall


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTables:
    """[positions, half] fp32, rounded to the model's dtype."""

    cosine: Tensor
    sine: Tensor


class FusedModel:
    """One model's forward, by `operators`."""

    def __init__(self, module: Any, calls: Sequence[LayerCall], operators: Operators) -> None:
        self._operators = operators
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
            _layer(layer, by_layer[index], offset, types is not None, operators)
            for index, layer in enumerate(body.layers)
        ]
        self._program = operators.program(self._layers)
        self._norm = _norm(operators, body.norm, self._offset)
        self._head = _linear(operators, module.lm_head, head=True)
        self._cap = float(getattr(module.config, "final_logit_softcapping", None) or 0.0)

    @property
    def linears(self) -> list[Linear]:
        """All linear layers, the head last."""
        return [*(getattr(layer, name) for layer in self._layers for name in LINEAR), self._head]

    @property
    def kinds_of_linear(self) -> list[str]:
        """What multiplies, for the log."""
        return sorted({linear.kind for linear in self.linears})

    @property
    def packed_bytes(self) -> int:
        """Of linear weights that the native kernels hold beside the module's own."""
        packed = (getattr(linear, "packed", None) for linear in self.linears)
        return sum(weights.nbytes for weights in packed if weights is not None)

    def release(self, module: Any) -> None:
        """Frees the module's own linear weights where they are held twice.

        It can't compute a forward any more then.
        """
        if not self._operators.frees_modules:
            return
        for part in module.modules():
            if type(part) is torch.nn.Linear and part.weight is not self._embedding:
                part.weight.data = part.weight.new_empty(0)

    def set_positions(self, num_positions: int) -> None:
        """Makes the rotary tables for so many positions; a model's scaling is settled by then."""
        like = torch.zeros((1, 1, 1), dtype=self._dtype, device=self._embedding.device)
        self._tables = {
            kind: _tables(self._rotary_module, kind, num_positions, like)
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
        return self.head(self.hidden(context, step, token_ids, positions, logits_indices))

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocabulary] of n rows of what `hidden` gives."""
        logits = self._head(hidden)
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    def hidden(
        self,
        context: PagedContext,
        step: StepTables,
        token_ids: Tensor,
        positions: Tensor,
        indices: Tensor,
    ) -> Tensor:
        """What the head takes, normed, at `indices` of the flat batch; KV goes into the cache."""
        x = self._embed(token_ids)
        attends: dict[tuple[float, int, float], Attend] = {}
        stores: dict[str, Store] = {}
        steps: list[tuple[Store, Attend, Tensor, Tensor]] = []
        for index, layer in enumerate(self._layers):
            caches, call = context.caches(index), layer.call
            key = (call.scale, call.window, call.softcap)
            if key not in attends:
                attends[key] = self._operators.attend(context, step, call)
            if layer.rotary not in stores:
                stores[layer.rotary] = self._store(caches[0], step, positions, layer)
            steps.append((stores[layer.rotary], attends[key], *caches))
        if self._program is None:
            x, attended = self._one_by_one(x, steps)
        else:
            x, attended = self._program.run(x, steps)
        # Only the rows whose logits are wanted go on.
        x = x[indices]
        return self._norm(x, self._behind(self._layers[-1], x, attended[indices]))

    def _one_by_one(
        self, x: Tensor, steps: Sequence[tuple[Store, Attend, Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """As Program.run does it."""
        delta: Tensor | None = None
        attended = x
        for index, (layer, step) in enumerate(zip(self._layers, steps, strict=True)):
            if index:
                delta = self._behind(self._layers[index - 1], x, attended)
            store, attend, keys, values = step
            qkv = layer.qkv(layer.before_attention(x, delta))
            norms = (None, None) if layer.heads is None else (layer.heads.queries, layer.heads.keys)
            attended = attend(store(qkv, keys, values, *norms), keys, values).flatten(1)
        return x, attended

    @staticmethod
    def _behind(layer: Layer, x: Tensor, attended: Tensor) -> Tensor:
        """What a layer adds behind its attention; x gets that of the attention."""
        delta = layer.out(attended)
        if layer.after_attention is not None:
            delta = layer.after_attention(delta)
        delta = layer.down(layer.activation(layer.gate_up(layer.before_mlp(x, delta))))
        return delta if layer.after_mlp is None else layer.after_mlp(delta)

    def _store(self, k_cache: Tensor, step: StepTables, positions: Tensor, layer: Layer) -> Store:
        tables = self._tables[layer.rotary]
        return self._operators.store(
            k_cache,
            step,
            positions,
            (tables.cosine, tables.sine),
            epsilon=0.0 if layer.heads is None else layer.heads.epsilon,
            offset=self._offset,
        )


def _tables(module: Any, kind: str, num_positions: int, like: Tensor) -> RotaryTables:
    """Of one rotary embedding, from the module itself, in the dtype and on the device of `like`."""
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for begin in range(0, num_positions, POSITIONS_AT_ONCE):
        end = min(begin + POSITIONS_AT_ONCE, num_positions)
        positions = torch.arange(begin, end, device=like.device)[None]
        made = module(like, positions, kind) if kind else module(like, positions)
        for part, values in zip(parts, made, strict=True):
            half = values.shape[-1] // 2
            if not torch.equal(values[..., :half], values[..., half:]):
                raise NotRecognisedError("its rotary embedding turns the halves by other angles")
            part.append(values[0, :, :half].float())
    return RotaryTables(cosine=torch.cat(parts[0]), sine=torch.cat(parts[1]))


def _layer(
    layer: Any, call: LayerCall, offset: bool, rotary_by_type: bool, operators: Operators
) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    if call.sinks:
        raise NotRecognisedError("its attention has sinks")

    def linear(*modules: Any) -> Linear:
        return _linear(operators, *modules)

    def norm(module: Any) -> Norm:
        return _norm(operators, module, offset)

    if hasattr(attention, "qkv_proj"):
        qkv, gate_up = linear(attention.qkv_proj), linear(mlp.gate_up_proj)
    else:
        qkv = linear(attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up = linear(mlp.gate_proj, mlp.up_proj)
    four = hasattr(layer, "pre_feedforward_layernorm")
    behind = norm(layer.post_attention_layernorm)
    activation = getattr(mlp, "act_fn", None) or mlp.activation_fn
    return Layer(
        before_attention=norm(layer.input_layernorm),
        after_attention=behind if four else None,
        before_mlp=norm(layer.pre_feedforward_layernorm) if four else behind,
        after_mlp=norm(layer.post_feedforward_layernorm) if four else None,
        heads=_head_norms(attention),
        qkv=qkv,
        out=linear(attention.o_proj),
        gate_up=gate_up,
        down=linear(mlp.down_proj),
        activation=operators.activation(gelu=_is_gelu(activation)),
        rotary=attention.layer_type if rotary_by_type else "",
        call=call,
    )


def _epsilon(norm: Any) -> float:
    epsilon = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if epsilon is None else epsilon)


def _norm(operators: Operators, module: Any, offset: bool) -> Norm:
    return operators.norm(module.weight.detach(), _epsilon(module), offset=offset)


def _head_norms(attention: Any) -> HeadNorms | None:
    if not hasattr(attention, "q_norm"):
        return None
    queries, keys = attention.q_norm, attention.k_norm
    if _epsilon(queries) != _epsilon(keys):
        raise NotRecognisedError("its head norms have two epsilons")
    return HeadNorms(
        queries=queries.weight.detach(), keys=keys.weight.detach(), epsilon=_epsilon(queries)
    )


def _linear(operators: Operators, *modules: Any, head: bool = False) -> Linear:
    """Layers of one input side by side."""
    if any(type(module) is not torch.nn.Linear for module in modules):
        raise NotRecognisedError("a projection is no plain linear layer")
    biases = [module.bias for module in modules]
    if any(bias is None for bias in biases) != all(bias is None for bias in biases):
        raise NotRecognisedError("some of its projections have a bias")
    return operators.linear(modules, head=head)


def _is_gelu(activation: Any) -> bool:
    """Told by what it does: there are several classes for either."""
    at = torch.linspace(-6.0, 6.0, 97)
    found = activation(at)
    if torch.allclose(found, F.silu(at), atol=1e-6):
        return False
    if torch.allclose(found, F.gelu(at, approximate="tanh"), atol=1e-6):
        return True
    raise NotRecognisedError(f"its activation is {type(activation).__name__}")

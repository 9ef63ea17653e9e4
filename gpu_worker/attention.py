"""Owns the way from a transformers attention layer to the paged kernels.

`IMPLEMENTATION` is registered in transformers' AttentionInterface, without a mask function:
transformers then builds no mask. A layer calls `attend` with q [1, heads, T, dim] and k, v
[1, kv heads, T, dim] of the flat batch after rotary embedding; its keys and values are stored in
the blocks of the rows and attention reads them from there.

The cache and the step's tables reach `attend` through `PagedContext.active`, one per thread, since
the interface has no argument for them that every family passes on. What depends on the tables
alone is made once a step: for the torch back end one index plan for each window in use.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import cache_layout, reference

IMPLEMENTATION = "quire_paged"

# Arguments that layers pass to an attention function and that change nothing here: dropout is off
# in inference, positions are in the rotary embedding, the cache is ours.
HARMLESS_ARGUMENTS = frozenset(
    (
        "dropout",
        "is_causal",
        "position_ids",
        "position_embeddings",
        "cache",
        "cache_position",
        "past_key_values",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    )
)

_thread = threading.local()


class UnsupportedModelError(Exception):
    """The model can't be served paged; the message names it and says why."""


@dataclass(slots=True, kw_only=True)
class StepTables:
    """A step's tables on the device, shared by all layers."""

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    max_seq_len: int
    plans: dict[int, reference.AttentionPlan] = field(default_factory=dict)
    prepared: dict[Any, Any] = field(default_factory=dict)  # native calls, by their kind


class Backend(Protocol):
    """Stores keys and values, and attends over the cache; see kernels/reference.py."""

    name: str

    def store(self, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], step: StepTables) -> None:
        """Writes k and v [T, kv heads, dim] into their slots."""

    def attend(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        step: StepTables,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of q [T, heads, dim]; same shape."""


class TorchBackend:
    """Plain torch: gathered blocks; indices made once per step and window."""

    name = "torch"

    def store(self, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], step: StepTables) -> None:
        """See Backend."""
        reference.store_kv(k, v, *caches, step.slot_mapping)

    def attend(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        step: StepTables,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """See Backend."""
        plan = step.plans.get(window)
        if plan is None:
            plan = reference.make_attention_plan(
                step.block_tables,
                step.seq_lens,
                step.query_start_loc,
                caches[0].shape[2],
                window,
            )
            step.plans[window] = plan
        return reference.paged_attention(
            q,
            *caches,
            step.block_tables,
            step.seq_lens,
            step.query_start_loc,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            plan=plan,
        )


class TritonBackend:
    """The Triton kernels: CUDA, or CPU tensors in Triton's interpreter."""

    name = "triton"

    def __init__(self) -> None:
        from kernels import kv_store, paged_attention

        self._store: Any = kv_store.store_kv
        self._attend: Any = paged_attention.paged_attention

    def store(self, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], step: StepTables) -> None:
        """See Backend."""
        self._store(k, v, *caches, step.slot_mapping)

    def attend(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        step: StepTables,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """See Backend."""
        out: Tensor = self._attend(
            q,
            *caches,
            step.block_tables,
            step.seq_lens,
            step.query_start_loc,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
        )
        return out


class NativeBackend:
    """The C++ kernels, on a CPU; what depends on the tables alone is prepared once a step."""

    name = "native"

    def __init__(self) -> None:
        from kernels.native import operators

        self._operators: Any = operators

    def store(self, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], step: StepTables) -> None:
        """See Backend."""
        self._operators.store_kv(k, v, *caches, step.slot_mapping)

    def attend(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        step: StepTables,
        *,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """See Backend."""
        key = (scale, window, softcap, None if sinks is None else sinks.data_ptr())
        operator = step.prepared.get(key)
        if operator is None:
            operator = self._operators.Attention(
                caches[0],
                step.block_tables,
                step.seq_lens,
                step.query_start_loc,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )
            step.prepared[key] = operator
        out: Tensor = operator(q, *caches)
        return out


def no_native(device: torch.device) -> str | None:
    """Why the native kernels can't serve this device; None when they can."""
    from kernels.native import library

    return "they are for CPUs" if device.type != "cpu" else library.reason_unavailable()


def make_backend(name: str, device: torch.device) -> Backend:
    """Of QUIRE_ATTENTION_BACKEND. Raises ValueError for one that can't run here."""
    if name == "auto":
        on_cpu = "torch" if no_native(device) else "native"
        name = "triton" if device.type == "cuda" else on_cpu
    if name == "native":
        reason = no_native(device)
        if reason is not None:
            raise ValueError(f"QUIRE_ATTENTION_BACKEND=native can't run here: {reason}")
        return NativeBackend()
    if name == "torch":
        return TorchBackend()
    if name != "triton":
        raise ValueError(f"QUIRE_ATTENTION_BACKEND={name!r} is not a back end")
    if device.type == "cpu" and not interpreted():
        raise ValueError(
            "QUIRE_ATTENTION_BACKEND=triton on a CPU works in Triton's interpreter only: "
            "set TRITON_INTERPRET=1, or use torch"
        )
    return TritonBackend()


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@dataclass(slots=True, kw_only=True)
class LayerCall:
    """What one attention layer asked for; recorded in the check at load."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int
    softcap: float
    sinks: bool
    unknown: tuple[str, ...]
    problem: str


class PagedContext:
    """The KV cache and the back end of one model, and the step that runs."""

    def __init__(self, cache: Tensor, backend: Backend) -> None:
        self.cache = cache
        self.backend = backend
        self.step: StepTables | None = None
        self.calls: list[LayerCall] | None = None  # recorded when a list
        self._views = [cache_layout.layer_views(cache, layer) for layer in range(cache.shape[1])]

    @contextmanager
    def active(self, step: StepTables) -> Iterator[None]:
        """Layers that run on this thread meanwhile attend over this cache."""
        assert getattr(_thread, "context", None) is None, "one step at a time on a thread"
        self.step = step
        _thread.context = self
        try:
            yield
        finally:
            _thread.context = None
            self.step = None

    def caches(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer."""
        if layer >= len(self._views):
            raise UnsupportedModelError(f"attention layer {layer} has no place in the cache")
        return self._views[layer]


def attend(  # noqa: PLR0913  # transformers' signature
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function behind IMPLEMENTATION. Returns [1, T, heads, dim]."""
    context: PagedContext | None = getattr(_thread, "context", None)
    assert context is not None, "a layer ran outside a step"
    assert context.step is not None
    layer = int(getattr(module, "layer_idx", -1))
    scale = float(query.shape[-1]) ** -0.5 if scaling is None else float(scaling)
    if context.calls is not None:
        call = _describe(module, layer, query, key, value, attention_mask, kwargs)
        call.scale, call.window = scale, sliding_window or 0
        call.softcap, call.sinks = softcap or 0.0, s_aux is not None
        context.calls.append(call)
        if call.problem:
            raise UnsupportedModelError(call.problem)
    # [1, heads, T, dim] -> [T, heads, dim]: a view where the layer made it by a transpose.
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    caches = context.caches(layer)
    context.backend.store(k, v, caches, context.step)
    out = context.backend.attend(
        q,
        caches,
        context.step,
        scale=scale,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out[None], None


def _describe(
    module: torch.nn.Module,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    kwargs: dict[str, Any],
) -> LayerCall:
    """A record of the call; `problem` says what paged attention can't honour."""
    unknown = tuple(
        sorted(
            name
            for name, argument in kwargs.items()
            if name not in HARMLESS_ARGUMENTS and argument is not None and argument is not False
        )
    )
    name = type(module).__name__
    problem = ""
    if layer < 0:
        problem = f"{name} has no layer_idx"
    elif attention_mask is not None:
        problem = f"{name} passes a mask of its own"
    elif kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        problem = f"{name} is not causal"
    elif unknown:
        problem = f"{name} passes {', '.join(unknown)} to attention"
    elif key.shape[2] != query.shape[2]:
        problem = f"{name} attends to other tokens than the batch's (cross attention)"
    elif key.shape[-1] != query.shape[-1] or value.shape[-1] != key.shape[-1]:
        problem = (
            f"{name} has head dims {query.shape[-1]}, {key.shape[-1]}, {value.shape[-1]} for "
            "query, key and value, which must be equal"
        )
    return LayerCall(
        layer=layer,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[-1],
        value_dim=value.shape[-1],
        scale=0.0,
        window=0,
        softcap=0.0,
        sinks=False,
        unknown=unknown,
        problem=problem,
    )


def register() -> None:
    """Makes IMPLEMENTATION known to transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)

"""The operators of the lean forward: native on a CPU, Triton on a CUDA device.

Each set makes the operators of one model once, and those of one step once a step. Linear layers are
packed for the native kernels, in 8 or 4 bits where the worker is told so; on a device torch
multiplies, over weights that layers of one input share: the modules keep views of them, so that
nothing is held twice.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.attention import LayerCall, PagedContext, StepTables
from gpu_worker.quantization import NONE, layer_bits

LINEAR = ("qkv", "out", "gate_up", "down")  # of a layer
Caches = tuple[Tensor, Tensor]
Norm = Callable[..., Tensor]  # x, delta
Activation = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, k_cache, v_cache
# qkv, k_cache, v_cache, weights of the heads' norms or None -> queries, rotated
Store = Callable[..., Tensor]


class Program(Protocol):
    """What one layer after the other does, without coming back in between."""

    def run(
        self, x: Tensor, steps: Sequence[tuple[Store, Attend, Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """x with residuals and the last attention [T, D]; a layer's caches stand in `steps`."""


class Linear(Protocol):
    """x -> x weight^T + bias for x [T, K] of the weights' dtype."""

    kind: str  # what multiplies, for people

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""


class Operators(Protocol):
    """What a lean forward is made of. Linear modules given together have one input."""

    frees_modules: bool  # whether the modules' own weights are of no more use

    def linear(self, modules: Sequence[Any], *, head: bool = False) -> Linear:
        """Layers of one input side by side: plain ones, all with a bias or none.

        `head` says that this one makes the logits.
        """

    def norm(self, weight: Tensor, epsilon: float, *, offset: bool) -> Norm:
        """Of rows, adding a residual in place first where there is one."""

    def activation(self, *, gelu: bool) -> Activation:
        """Of gate and up side by side."""

    def attend(self, context: PagedContext, step: StepTables, call: LayerCall) -> Attend:
        """Of all layers of one step that ask for the same."""

    def store(
        self,
        k_cache: Tensor,
        step: StepTables,
        positions: Tensor,
        tables: Caches,
        *,
        epsilon: float,
        offset: bool,
    ) -> Store:
        """Of all layers of one step with one rotary embedding; tables are cosine and sine."""

    def program(self, layers: Sequence[Any]) -> Program | None:
        """All layers up to the last one's attention as one call, where that can be had."""


def joined(modules: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases one after the other."""
    biases = [module.bias for module in modules]
    weight = torch.cat([module.weight.detach() for module in modules])
    return weight, None if biases[0] is None else torch.cat(biases).detach()


class NativeOperators:
    """On the kernels of kernels.native. `quantization` is a value of QUIRE_QUANTIZATION."""

    frees_modules = True

    def __init__(self, *, deterministic: bool, quantization: str = NONE) -> None:
        from kernels.native import linear, operators, quantized

        self._operators: Any = operators
        self._choose: Any = linear.choose_linear
        self._quantized: Any = quantized.QuantizedLinear
        self._deterministic = deterministic
        self._quantization = quantization

    def linear(self, modules: Sequence[Any], *, head: bool = False) -> Linear:
        """See Operators."""
        weight, bias = joined(modules)
        made: Linear
        if self._quantization == NONE:
            made = self._choose(weight, bias, deterministic=self._deterministic)
        else:
            bits = layer_bits(self._quantization, weight.shape[1], head=head)
            made = self._quantized(weight, bias, bits=bits)
        return made

    def norm(self, weight: Tensor, epsilon: float, *, offset: bool) -> Norm:
        """See Operators."""
        made: Norm = self._operators.RmsNorm(weight, epsilon, offset=offset)
        return made

    def activation(self, *, gelu: bool) -> Activation:
        """See Operators."""
        made: Activation = self._operators.GatedActivation(gelu=gelu)
        return made

    def attend(self, context: PagedContext, step: StepTables, call: LayerCall) -> Attend:
        """See Operators."""
        made: Attend = self._operators.Attention(
            context.caches(call.layer)[0],
            step.block_tables,
            step.seq_lens,
            step.query_start_loc,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
        )
        return made

    def store(
        self,
        k_cache: Tensor,
        step: StepTables,
        positions: Tensor,
        tables: Caches,
        *,
        epsilon: float,
        offset: bool,
    ) -> Store:
        """See Operators."""
        made: Store = self._operators.RotaryStore(
            k_cache, step.slot_mapping, positions, *tables, epsilon=epsilon, offset=offset
        )
        return made

    def program(self, layers: Sequence[Any]) -> Program | None:
        """See Operators. None where oneDNN multiplies."""
        from kernels.native import program

        linears = [getattr(layer, name) for layer in layers for name in LINEAR]
        if not all(isinstance(linear, program.NATIVE_LINEAR) for linear in linears):
            return None
        made: Any = program.Program(
            [
                program.LayerOperators(
                    before_attention=layer.before_attention,
                    after_attention=layer.after_attention,
                    before_mlp=layer.before_mlp,
                    after_mlp=layer.after_mlp,
                    q_weight=None if layer.heads is None else layer.heads.queries,
                    k_weight=None if layer.heads is None else layer.heads.keys,
                    qkv=layer.qkv,
                    out=layer.out,
                    gate_up=layer.gate_up,
                    down=layer.down,
                    activation=layer.activation,
                )
                for layer in layers
            ]
        )
        out: Program = made
        return out


class SharedLinear:
    """By torch, over weights side by side; the modules' own become views of them."""

    kind = "torch"

    def __init__(self, modules: Sequence[Any]) -> None:
        if len(modules) == 1:
            self._weight, self._bias = modules[0].weight.detach(), modules[0].bias
            return
        self._weight, self._bias = joined(modules)
        begin = 0
        for module in modules:
            part = slice(begin, begin + len(module.weight))
            begin = part.stop
            module.weight.data = self._weight[part]
            if self._bias is not None:
                module.bias.data = self._bias[part]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]."""
        return F.linear(x, self._weight, self._bias)


class TritonOperators:
    """On the Triton kernels, on a CUDA device or in the interpreter."""

    frees_modules = False

    def __init__(self) -> None:
        from kernels import gated_activation, rms_norm, rotary_store

        self._norm: Any = rms_norm.rms_norm
        self._gate: Any = gated_activation.gated_activation
        self._rotary_store: Any = rotary_store.rotary_store

    def linear(self, modules: Sequence[Any], *, head: bool = False) -> Linear:
        """See Operators."""
        return SharedLinear(modules)

    def norm(self, weight: Tensor, epsilon: float, *, offset: bool) -> Norm:
        """See Operators."""
        by_kernel = self._norm

        def made(x: Tensor, delta: Tensor | None = None) -> Tensor:
            out: Tensor = by_kernel(x, weight, epsilon, delta=delta, offset=offset)
            return out

        return made

    def activation(self, *, gelu: bool) -> Activation:
        """See Operators."""
        by_kernel = self._gate

        def made(both: Tensor) -> Tensor:
            out: Tensor = by_kernel(both, gelu=gelu)
            return out

        return made

    def attend(self, context: PagedContext, step: StepTables, call: LayerCall) -> Attend:
        """See Operators."""
        backend = context.backend

        def made(queries: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            return backend.attend(
                queries,
                (k_cache, v_cache),
                step,
                scale=call.scale,
                window=call.window,
                softcap=call.softcap,
                sinks=None,
            )

        return made

    def store(
        self,
        k_cache: Tensor,
        step: StepTables,
        positions: Tensor,
        tables: Caches,
        *,
        epsilon: float,
        offset: bool,
    ) -> Store:
        """See Operators. `k_cache` is not looked at: each call has its layer's own."""
        by_kernel = self._rotary_store

        def made(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, *norms: Tensor | None) -> Tensor:
            q_weight, k_weight = norms or (None, None)
            out: Tensor = by_kernel(
                qkv,
                k_cache,
                v_cache,
                step.slot_mapping,
                positions,
                *tables,
                q_weight=q_weight,
                k_weight=k_weight,
                epsilon=epsilon,
                offset=offset,
            )
            return out

        return made

    def program(self, layers: Sequence[Any]) -> Program | None:
        """See Operators. None: kernels are launched one by one."""
        return None

"""Programs of native operators: the bits of the operators one by one, and their refusals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.native import operators
from kernels.native.linear import PackedLinear
from kernels.native.program import LayerOperators, LayerStep, Program
from kernels.native.quantized import QuantizedLinear
from tests.kernels.native import needs_native
from tests.kernels.row_cases import randn

pytestmark = needs_native
WIDTH, INNER, HEADS, KV_HEADS, DIM, BLOCK, POSITIONS = 96, 160, 4, 2, 32, 8, 128
NUM_LAYERS, NUM_BLOCKS = 3, 40
# (query_len, seq_len) of one step after the other: memory grows, is kept, grows again.
BATCHES = [((1, 5), (2, 9)), ((30, 60), (1, 20), (9, 9)), ((1, 1),), ((70, 90), (1, 30))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a family's layers have."""

    dtype: torch.dtype = torch.float32
    four_norms: bool = False
    head_norms: bool = False
    window_of_odd: int = 0
    bits: int = 0

    def layers(self) -> list[LayerOperators]:
        return [self._layer(100 * (1 + index)) for index in range(NUM_LAYERS)]

    def _layer(self, seed: int) -> LayerOperators:
        def weight(columns: int, depth: int, of: int) -> Tensor:
            return (randn(columns, depth, seed=seed + of, dtype=torch.float32) / 8).to(self.dtype)

        def linear(columns: int, depth: int, of: int) -> Any:
            if self.bits:
                return QuantizedLinear(weight(columns, depth, of), bits=self.bits)
            return PackedLinear(weight(columns, depth, of))

        def norm(of: int) -> operators.RmsNorm:
            return operators.RmsNorm(1 + weight(1, WIDTH, of)[0], 1e-5)

        return LayerOperators(
            before_attention=norm(1),
            after_attention=norm(2) if self.four_norms else None,
            before_mlp=norm(3),
            after_mlp=norm(4) if self.four_norms else None,
            q_weight=weight(1, DIM, 5)[0] if self.head_norms else None,
            k_weight=weight(1, DIM, 6)[0] if self.head_norms else None,
            qkv=linear((HEADS + 2 * KV_HEADS) * DIM, WIDTH, 7),
            out=linear(WIDTH, HEADS * DIM, 8),
            gate_up=linear(2 * INNER, WIDTH, 9),
            down=linear(WIDTH, INNER, 10),
            activation=operators.GatedActivation(gelu=self.four_norms),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A batch over a cache of its own."""

    x: Tensor
    cache: Tensor  # [layers, K and V, ...]
    tables: tuple[Tensor, Tensor, Tensor]
    slots: Tensor
    positions: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int]], dtype: torch.dtype) -> "Step":
        shape = (NUM_LAYERS, 2, NUM_BLOCKS, KV_HEADS, BLOCK, DIM)
        width = -(-max(length for _, length in rows) // BLOCK)
        tables = torch.arange(len(rows) * width, dtype=torch.int32).view(len(rows), width)
        starts = torch.tensor([0, *(query for query, _ in rows)]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(seq - query, seq) for query, seq in rows])
        owners = torch.repeat_interleave(
            torch.arange(len(rows)), torch.tensor([query for query, _ in rows])
        )
        slots = tables[owners, positions // BLOCK].long() * BLOCK + positions % BLOCK
        return cls(
            x=randn(len(positions), WIDTH, seed=len(positions), dtype=dtype),
            cache=randn(*shape, seed=1, dtype=dtype),
            tables=(tables, torch.tensor([s for _, s in rows], dtype=torch.int32), starts),
            slots=slots,
            positions=positions,
        )

    def steps(self, model: Model) -> list[LayerStep]:
        """Layers share a rotary store; the odd ones attend in another way where they are to."""
        k_cache = self.cache[0, 0]
        angles = torch.arange(POSITIONS)[:, None] / (1 + torch.arange(DIM // 2))
        epsilon = 1e-6 if model.head_norms else 0.0
        store = operators.RotaryStore(
            k_cache, self.slots, self.positions, angles.cos(), angles.sin(), epsilon=epsilon
        )
        attends = [
            operators.Attention(k_cache, *self.tables, scale=DIM**-0.5, window=window)
            for window in (0, model.window_of_odd)
        ]
        return [
            (store, attends[index % 2 if model.window_of_odd else 0], keys, values)
            for index, (keys, values) in enumerate(self.cache)
        ]

    def copy(self) -> "Step":
        return replace(self, x=self.x.clone(), cache=self.cache.clone())


def one_by_one(
    layers: Sequence[LayerOperators], x: Tensor, steps: Sequence[LayerStep]
) -> tuple[Tensor, Tensor]:
    delta: Tensor | None = None
    for layer, (store, attend, keys, values) in zip(layers, steps, strict=True):
        qkv = layer.qkv(layer.before_attention(x, delta))
        queries = store(qkv, keys, values, layer.q_weight, layer.k_weight)
        attended = attend(queries, keys, values).flatten(1)
        if layer is layers[-1]:
            return x, attended
        delta = layer.out(attended)
        if layer.after_attention is not None:
            delta = layer.after_attention(delta)
        delta = layer.down(layer.activation(layer.gate_up(layer.before_mlp(x, delta))))
        if layer.after_mlp is not None:
            delta = layer.after_mlp(delta)
    raise AssertionError("a model has layers")


MODELS = {
    "plain": Model(),
    "bf16": Model(dtype=torch.bfloat16),
    "four norms": Model(four_norms=True),
    "head norms": Model(head_norms=True),
    "windows": Model(window_of_odd=7),
    "all in bf16": Model(dtype=torch.bfloat16, four_norms=True, head_norms=True, window_of_odd=7),
    "int8": Model(bits=8),
    "int4": Model(bits=4),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_program_has_the_bits_of_its_operators(name: str) -> None:
    model = MODELS[name]
    layers = model.layers()
    program = Program(layers)
    for rows in BATCHES:
        step = Step.of(rows, model.dtype)
        other = step.copy()
        x, attended = program.run(step.x, step.steps(model))
        want = one_by_one(layers, other.x, other.steps(model))
        assert torch.equal(x, want[0])
        assert torch.equal(attended, want[1])
        assert torch.equal(step.cache, other.cache)


def test_no_row_is_computed_that_the_step_has_not() -> None:
    """Their memory is there, after a larger step or from the beginning; their time is a step's."""
    model = Model()
    program = Program(model.layers())
    for batch in BATCHES:
        step = Step.of(batch, model.dtype)
        program.run(step.x, step.steps(model))
        assert {call.rows for call in program._calls} == {len(step.x)}


def test_operators_may_be_used_alone_in_between() -> None:
    model = Model()
    layers = model.layers()
    program = Program(layers)
    step = Step.of(BATCHES[0], model.dtype)
    first = [part.clone() for part in program.run(step.x, step.steps(model))]
    layers[0].qkv(randn(9, WIDTH, seed=3, dtype=model.dtype))
    layers[0].before_attention(randn(9, WIDTH, seed=3, dtype=model.dtype))
    layers[0].activation(randn(9, 2 * INNER, seed=3, dtype=model.dtype))
    assert all(map(torch.equal, program.run(step.x, step.steps(model)), first))


def test_what_points_outside_is_refused_and_the_next_step_is_right() -> None:
    model = Model()
    program = Program(model.layers())
    step = Step.of(BATCHES[0], model.dtype)
    good = [part.clone() for part in program.run(step.x, step.steps(model))]
    slots = step.slots.clone()
    slots[1] = NUM_BLOCKS * BLOCK
    with pytest.raises(ValueError, match="token 1: its slot or its position is outside"):
        program.run(step.x, replace(step, slots=slots).steps(model))
    tables = (step.tables[0].clone(), *step.tables[1:])
    tables[0][1, 0] = NUM_BLOCKS
    with pytest.raises(ValueError, match="row 1: a block is outside the cache"):
        program.run(step.x, replace(step, tables=tables).steps(model))
    assert all(map(torch.equal, program.run(step.x, step.steps(model)), good))


def test_rows_of_another_width_or_dtype_are_refused() -> None:
    model = Model()
    program = Program(model.layers())
    step = Step.of(BATCHES[0], model.dtype)
    for x in (step.x[:, 1:], step.x.bfloat16()):
        with pytest.raises(ValueError, match="x must be"):
            program.run(x, step.steps(model))


@pytest.mark.parametrize("which", [2, 3])
def test_caches_of_layers_that_share_an_operator_are_of_one_shape(which: int) -> None:
    """They are bound once; and a step that is refused leaves nothing that the next one trusts."""
    model = Model()
    program = Program(model.layers())
    step = Step.of(BATCHES[0], model.dtype)
    steps = step.steps(model)
    good = [part.clone() for part in program.run(step.x, steps)]
    layer: list[Any] = list(steps[1])
    cache = layer[which]
    for wrong in (cache[:-1], cache.transpose(1, 2), cache.double()):
        layer[which] = wrong
        bad: list[Any] = [steps[0], tuple(layer), *steps[2:]]
        for _ in range(2):
            with pytest.raises(ValueError, match="must have caches of one shape"):
                program.run(step.x, bad)
    assert all(map(torch.equal, program.run(step.x, steps), good))

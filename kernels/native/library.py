"""Loads the compiled kernels for this machine's instruction set and declares their functions.

Calls that compute for long release the interpreter's lock; the small ones keep it, since giving it
away costs more than they take. The structures stand in the C++ sources once more.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels.native import build
from kernels.native.build import CantBuildError

# Flags of /proc/cpuinfo that a library needs; the last one that fits is taken.
_WIDE = frozenset(("avx2", "fma", "avx512f", "avx512vl", "avx512bw", "avx512dq"))
NEEDS: dict[str, frozenset[str]] = {
    "avx2": frozenset(("avx2", "fma")),
    "avx512": _WIDE,
    "avx512bf16": _WIDE | {"avx512_bf16"},
}

_ADDRESS, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class AttentionCall(ctypes.Structure):
    """attention.h: AttentionCall."""

    _fields_ = _fields(
        (_ADDRESS, "out q k_cache v_cache tables lens starts sinks"),
        (_INT, "num_rows num_tokens num_heads num_kv_heads dim"),
        (_INT, "num_blocks block_size table_stride table_width"),
        (_INT, "q_token q_head out_token out_head cache_block cache_head cache_slot"),
        (_INT, "window is_bf16"),
        (_FLOAT, "scale softcap"),
    )


class RotaryCall(ctypes.Structure):
    """rows.h: RotaryCall."""

    _fields_ = _fields(
        (_ADDRESS, "qkv k_cache v_cache slots positions cosine sine q_weight k_weight"),
        (_INT, "num_tokens num_heads num_kv_heads dim half num_positions num_slots block_size"),
        (_INT, "token cache_block cache_head cache_slot is_bf16 offset"),
        (_FLOAT, "epsilon"),
    )


class NormCall(ctypes.Structure):
    """rows.h: NormCall."""

    _fields_ = _fields(
        (_ADDRESS, "out x delta weight"),
        (_INT, "rows dim out_row x_row delta_row offset is_bf16"),
        (_FLOAT, "epsilon"),
    )


class GateCall(ctypes.Structure):
    """rows.h: GateCall."""

    _fields_ = _fields(
        (_ADDRESS, "out both"),
        (_INT, "rows dim out_row both_row gelu is_bf16"),
    )


class Part(ctypes.Structure):
    """program.cpp: Part."""

    _fields_ = _fields(
        (_INT, "kind"),
        (_ADDRESS, "call k_cache v_cache q_weight k_weight"),
    )


class LinearCall(ctypes.Structure):
    """linear.cpp: LinearCall."""

    _fields_ = _fields(
        (_ADDRESS, "out x packed bias"),
        (_INT, "rows columns depth out_row x_row x_is_bf16 packed_kind"),
    )


class QuantizedCall(ctypes.Structure):
    """quantized.cpp: QuantizedCall."""

    _fields_ = _fields(
        (_ADDRESS, "out x packed bias"),
        (_INT, "rows columns depth out_row x_row x_is_bf16 bits"),
    )


class SampleCall(ctypes.Structure):
    """sample.cpp: SampleCall."""

    _fields_ = _fields(
        (_ADDRESS, "tokens logits"),
        (_INT, "rows vocabulary logits_row is_bf16"),
        (_ADDRESS, "temperature top_p min_p top_k seed position sample_index"),
        (_ADDRESS, "bias_starts bias_tokens bias_values forbidden_starts forbidden_tokens"),
        (_ADDRESS, "history_starts history_tokens output_starts repetition frequency presence"),
    )


class LogprobsCall(ctypes.Structure):
    """logprobs.cpp: LogprobsCall."""

    _fields_ = _fields(
        (_ADDRESS, "own top_ids top_logprobs logits tokens"),
        (_INT, "rows vocabulary logits_row num_top is_bf16"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The functions of one library."""

    instruction_set: str
    attention: Any
    linear: Any
    quantized: Any
    sample: Any
    logprobs: Any
    rotary_store: Any
    store_kv: Any
    norm: Any
    gate: Any
    program: Any
    bf16_kind: int  # of packed weights held in bf16, see linear.cpp
    takes_pairs: bool  # of bf16 weights with bf16 inputs


def flags_of_this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Of its first core."""
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def usable(flags: Iterable[str]) -> list[str]:
    """Instruction sets that run with these flags, the best one last."""
    has = frozenset(flags)
    return [name for name, needs in NEEDS.items() if needs <= has]


@cache
def load(instruction_set: str = "") -> Library:
    """The best library of this machine, or a named one. Raises CantBuildError with the reason."""
    folder = build.built()
    names = usable(flags_of_this_machine())
    if not names:
        raise CantBuildError("native kernels need a processor with AVX2 and FMA")
    name = instruction_set or names[-1]
    if name not in names:
        raise CantBuildError(f"this processor has no {name}")
    assert torch.get_num_threads() >= 1  # torch, and with it its OpenMP runtime, is loaded
    path = build.library_file(folder, name)
    try:
        long, short = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    except OSError as error:
        raise CantBuildError(f"{path} does not load: {error}") from error
    store = [_ADDRESS] * 5 + [_INT] * 13
    program = [ctypes.POINTER(Part), _INT, ctypes.POINTER(_INT)]
    return Library(
        instruction_set=name,
        attention=_function(long.quire_attention, [ctypes.POINTER(AttentionCall)]),
        linear=_function(long.quire_linear, [ctypes.POINTER(LinearCall)]),
        quantized=_function(long.quire_quantized, [ctypes.POINTER(QuantizedCall)]),
        sample=_function(long.quire_sample, [ctypes.POINTER(SampleCall)]),
        logprobs=_function(long.quire_logprobs, [ctypes.POINTER(LogprobsCall)]),
        rotary_store=_function(short.quire_rotary_store, [ctypes.POINTER(RotaryCall)]),
        store_kv=_function(short.quire_store_kv, store),
        norm=_function(short.quire_norm, [ctypes.POINTER(NormCall)], None),
        gate=_function(short.quire_gate, [ctypes.POINTER(GateCall)], None),
        program=_function(long.quire_program, program),
        bf16_kind=int(_function(short.quire_bf16_kind, [])()),
        takes_pairs=bool(_function(short.quire_takes_pairs, [])()),
    )


def _function(function: Any, arguments: list[Any], result: Any = _INT) -> Any:
    function.argtypes, function.restype = arguments, result
    return function


def reason_unavailable() -> str | None:
    """Why there are no native kernels here; None when there are."""
    try:
        load()
    except CantBuildError as error:
        return str(error)
    return None

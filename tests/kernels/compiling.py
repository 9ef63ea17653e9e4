"""Compiles the kernels for GPUs that need not be here; `python -m tests.kernels.compiling 90:all`.

Prints one JSON line per kernel: shared memory from the compiler's metadata; for a CUDA architecture
registers, stack and accesses of local memory (spills) from the cubin, or it fails. Runs in a
process of its own, without TRITON_INTERPRET. ARCH is a CUDA architecture, or gfx942.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import sampler_kernels, tiles
from kernels.attention_kernels import decode_kernel, prefill_kernel, reduce_kernel
from kernels.gated_activation import gated_activation_kernel
from kernels.kv_store import kv_store_kernel
from kernels.logprobs import logprobs_kernel
from kernels.rms_norm import rms_norm_kernel
from kernels.rotary_store import rotary_store_kernel
from kernels.sampler import LIST_BLOCK

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
VOCABULARY = 128_256
TABLES = ("block_tables", "seq_lens", "query_start_loc", "counts")
WHOLE = [
    "slot_mapping",
    "positions",
    "tokens",
    "top_ids",
    "top_ks",
    "seeds",
    "sample_indices",
    "starts",
    "output_starts",
    "bias_starts",
    "bias_tokens",
    "forbidden_starts",
    "forbidden_tokens",
]
REAL = [
    "temperatures",
    "top_ps",
    "min_ps",
    "bias_values",
    "repetitions",
    "frequencies",
    "presences",
]
SINGLE = ["part_acc", "part_top", "part_total", "cosine", "sine", "own", "top_logprobs"]
OF_TYPE = [
    "out",
    "q",
    "k",
    "v",
    "k_cache",
    "v_cache",
    "sinks",
    "x",
    "delta",
    "weight",
    "both",
    "qkv",
    "q_weight",
    "k_weight",
    "logits",
]
POINTERS = {
    **dict.fromkeys(TABLES, "i32"),
    **dict.fromkeys(WHOLE, "i64"),
    **dict.fromkeys(REAL, "fp64"),
    **dict.fromkeys(SINGLE, "fp32"),
    **dict.fromkeys(OF_TYPE, "T"),
}
FLOATS = ("scale", "softcap", "epsilon")
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
LOCAL_ACCESS = re.compile(r"\b(?:LDL|STL)\b")
UNALIGNED = ("num_rows", "num_splits", "first_row", "table_stride", "window")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kernel as one launch would compile it."""

    name: str
    kernel: Any
    dtype: torch.dtype
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    head_dim: int = 0
    group: int = 0
    feature: str = "plain"
    wide_places: bool | None = None  # whether block offsets must be seen in 64 bits


def target_of(arch: str) -> GPUTarget:
    """gfx942 or a number."""
    return (
        GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch), 32)
    )


def compile_kernel(variant: Variant, arch: str) -> Any:
    """As the launcher would for aligned pointers and strides that are multiples of 16."""
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    attrs: dict[tuple[int], list[Any]] = {}
    for index, name in enumerate(variant.kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = variant.constants[name]
        elif name in POINTERS:
            signature[name] = "*" + POINTERS[name].replace("T", TYPES[variant.dtype])
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name not in UNALIGNED:
                attrs[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(variant.kernel, signature, constexprs, attrs),
        target=target_of(arch),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )


def of_cubin(name: str, cubin: bytes, *options: str) -> str:
    """What a tool of Triton's wheel says of a cubin; RuntimeError where the wheel has no such."""
    tool = TOOLS / name
    if not tool.exists():
        raise RuntimeError(f"spills can't be read: {tool} is missing")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout


def resources(compiled: Any, arch: str) -> dict[str, int]:
    """Registers and stack bytes a thread, and instructions that read or write local memory.

    {} for what has no cubin. For a CUDA architecture all three are there, or it raises.
    """
    if target_of(arch).backend != "cuda":
        return {}
    cubin = compiled.asm["cubin"]
    usage = of_cubin("cuobjdump", cubin, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    code = of_cubin("nvdisasm", cubin, "--print-code")
    if found is None or "EXIT" not in code:
        raise RuntimeError(f"the tools did not say what a kernel takes on {arch}")
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "local_accesses": len(LOCAL_ACCESS.findall(code)),
    }


def attention(
    arch: int, dtype: torch.dtype, head_dim: int, features: bool, group: int = 4
) -> Iterator[Variant]:
    """Prefill, decode and reduce of a model shape with so many query heads a KV head."""
    chosen = tiles.tiles_for(head_dim, dtype, arch, group)
    block_m = max(chosen.block_m, triton.next_power_of_2(group))
    shape = {"HEAD_DIM": head_dim, "D_PAD": triton.next_power_of_2(head_dim)}
    walk = {
        **shape,
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "DOT_FP32": False,
        "HAS_WINDOW": features,
        "HAS_SOFTCAP": features,
    }
    sinks: dict[str, Any] = {"HAS_SINKS": True} if features else {"HAS_SINKS": False, "sinks": None}
    common: dict[str, Any] = {
        "dtype": dtype,
        "head_dim": head_dim,
        "group": group,
        "feature": "features" if features else "plain",
    }
    yield Variant(
        name="prefill",
        kernel=prefill_kernel,
        constants={**walk, **sinks, "BLOCK_M": block_m, "BLOCK_N": chosen.block_n},
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
        wide_places=True,
        **common,
    )
    yield Variant(
        name="decode",
        kernel=decode_kernel,
        constants={
            **walk,
            "BLOCK_M": max(16, triton.next_power_of_2(group)),
            "BLOCK_N": chosen.decode_block_n,
            "SPLIT": chosen.split,
        },
        num_warps=chosen.decode_num_warps,
        num_stages=chosen.decode_num_stages,
        wide_places=True,
        **common,
    )
    if head_dim == 128 and dtype == torch.bfloat16 and group == 4:
        yield Variant(
            name="reduce",
            kernel=reduce_kernel,
            constants={
                **shape,
                **sinks,
                "SPLIT": chosen.split,
                "BLOCK_S": 16,
                "HAS_WINDOW": features,
            },
            num_warps=4,
            **common,
        )


def rows(dtype: torch.dtype) -> Iterator[Variant]:
    """What is done to rows and heads: store, norm, rotary embedding, activation."""
    cache = {"NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
    yield Variant(
        name="kv_store",
        kernel=kv_store_kernel,
        dtype=dtype,
        constants={**cache, "BLOCK_E": 1024},
        num_warps=4,
        wide_places=True,
    )
    block_h = tiles.rotary_heads(128)
    rotary = {**cache, "NUM_HEADS": 32, "D_PAD": 128, "BLOCK_H": block_h, "BY_HAND": False}
    yield Variant(
        name="rotary_store",
        kernel=rotary_store_kernel,
        dtype=dtype,
        constants={
            **rotary,
            "HALF": 48,
            "HALF_PAD": 64,
            "REST_PAD": 32,
            "NORM_Q": True,
            "NORM_K": True,
            "OFFSET": True,
        },
        num_warps=4,
        feature="features",
        wide_places=True,
    )
    for dim in (4096, 16_384):
        block = triton.next_power_of_2(dim)
        yield Variant(
            name="rms_norm",
            kernel=rms_norm_kernel,
            dtype=dtype,
            constants={
                "DIM": dim,
                "BLOCK_D": block,
                "HAS_DELTA": True,
                "OFFSET": False,
                "BY_HAND": False,
            },
            num_warps=tiles.row_warps(block),
        )
    yield Variant(
        name="gated_activation",
        kernel=gated_activation_kernel,
        dtype=dtype,
        constants={
            "DIM": 14_336,
            "BLOCK_D": tiles.ELEMENTWISE_BLOCK,
            "GELU": True,
            "BY_HAND": False,
        },
        num_warps=4,
    )


def sampling(dtype: torch.dtype) -> Iterator[Variant]:
    """Of the sampler; logits that were changed are fp32."""
    over = {"VOCAB": VOCABULARY, "BLOCK": tiles.VOCABULARY_BLOCK}
    warps = tiles.VOCABULARY_WARPS
    lists = {"VOCAB": VOCABULARY, "BLOCK": LIST_BLOCK}
    for name, kernel, constants, num_warps in (
        ("sample", sampler_kernels.sample_kernel, over, warps),
        ("logprobs", logprobs_kernel, {**over, "NUM_TOP": 20}, warps),
        (
            "change_tokens",
            sampler_kernels.change_tokens_kernel,
            {**lists, "HAS_BIAS": True, "HAS_FORBIDDEN": True},
            4,
        ),
        ("count", sampler_kernels.count_kernel, lists, 4),
        (
            "penalize",
            sampler_kernels.penalize_kernel,
            {**over, "BLOCK": tiles.ELEMENTWISE_BLOCK},
            4,
        ),
    ):
        if name in ("sample", "logprobs") or dtype == torch.float32:
            yield Variant(
                name=name, kernel=kernel, dtype=dtype, constants=constants, num_warps=num_warps
            )


def wide_groups(arch: int) -> Iterator[Variant]:
    """Of models with so many query heads a KV head that the table's own tiles would spill."""
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in sorted({bound for _, _, bound in tiles.TABLE}):
            for group in (32, tiles.MAX_GROUP):
                yield from attention(arch, dtype, head_dim, False, group)


def spilling(arch: int) -> Iterator[Variant]:
    """What must be found: a tile of 64 query heads left to the warps of a tile of 16."""
    _, decode = attention(arch, torch.float32, 256, False, tiles.MAX_GROUP)
    yield replace(decode, num_warps=tiles.tiles_for(256, torch.float32, arch, 1).decode_num_warps)


def variants(arch: int, extent: str) -> Iterator[Variant]:
    """all: attention of every tile choice, its features where registers are scarcest.

    fp16 has bf16's tiles and sizes. each: every kernel once, and the widest tile of decode; quick:
    the three that take most of a step; spilling: one that must not pass.
    """
    if extent == "spilling":
        yield from spilling(arch)
        return
    if extent == "each":
        yield from attention(arch, torch.bfloat16, 128, False)
        yield from itertools.islice(attention(arch, torch.float32, 256, False, 32), 1, None)
        yield from rows(torch.bfloat16)
        yield from sampling(torch.float32)
        return
    if extent == "quick":
        yield from itertools.islice(attention(arch, torch.bfloat16, 128, False), 2)
        yield from itertools.islice(sampling(torch.bfloat16), 1)
        return
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim in sorted({bound for _, _, bound in tiles.TABLE}):
            scarce = dtype == torch.bfloat16 and head_dim > 64
            yield from attention(arch, dtype, head_dim, scarce)
    yield from itertools.islice(attention(arch, torch.float16, 128, False), 1, None)
    yield from wide_groups(arch)
    yield from rows(torch.bfloat16)
    yield from sampling(torch.float32)


def has_wide_places(ttir: str) -> bool:
    """True when block numbers are multiplied with their stride in 64 bits."""
    return re.search(r"%place\w* = arith\.muli %block\w*, .*i64", ttir) is not None


def main(argv: list[str]) -> None:
    """ARCH:EXTENT ..., an extent being quick, each, all or spilling."""
    for arch, extent in (argument.split(":") for argument in argv):
        table = tiles.architecture((int(arch) // 10, int(arch) % 10)) if arch.isdigit() else 80
        for variant in variants(table, extent):
            compiled = compile_kernel(variant, arch)
            line = {
                "kernel": variant.name,
                "arch": arch,
                "dtype": TYPES[variant.dtype],
                "head_dim": variant.head_dim,
                "group": variant.group,
                "feature": variant.feature,
                "shared_bytes": compiled.metadata.shared,
                "wide_places": variant.wide_places is None or has_wide_places(compiled.asm["ttir"]),
                **resources(compiled, arch),
            }
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

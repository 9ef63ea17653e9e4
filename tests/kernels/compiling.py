"""Compiles the kernels for GPUs that need not be here; `python -m tests.kernels.compiling ARCH`.

Prints one JSON line per kernel: shared memory from the compiler's metadata, registers and stack
(spills) from the cubin. Runs in a process of its own, without TRITON_INTERPRET.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.attention_kernels import decode_kernel, prefill_kernel, reduce_kernel
from kernels.kv_store import kv_store_kernel
from kernels.tiles import TABLE, tiles_for

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
POINTERS = {
    "out": "T",
    "q": "T",
    "k": "T",
    "v": "T",
    "k_cache": "T",
    "v_cache": "T",
    "sinks": "T",
    "part_acc": "fp32",
    "part_top": "fp32",
    "part_total": "fp32",
    "block_tables": "i32",
    "seq_lens": "i32",
    "query_start_loc": "i32",
    "slot_mapping": "i64",
}
FLOATS = ("scale", "softcap")
UNALIGNED = ("num_rows", "num_splits", "first_row", "table_stride", "window")


def compile_kernel(
    kernel: Any,
    arch: int,
    dtype: torch.dtype,
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int,
) -> Any:
    """As the launcher would for aligned pointers and strides that are multiples of 16."""
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int], Any] = {}
    attrs: dict[tuple[int], list[Any]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants[name]
        elif name in POINTERS:
            signature[name] = "*" + POINTERS[name].replace("T", TYPES[dtype])
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name not in UNALIGNED:
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attrs)
    return triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes a thread; {} where the tool is not in Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    return {"registers": int(found[1]), "stack_bytes": int(found[2])} if found else {}


def variants(
    arch: int, dtype: torch.dtype, head_dim: int, group: int, features: bool
) -> Iterator[tuple[str, Any, dict[str, Any], int, int]]:
    """(name, kernel, constants, warps, stages) of one model shape."""
    tiles = tiles_for(head_dim, dtype, arch)
    d_pad = triton.next_power_of_2(head_dim)
    shape = {"HEAD_DIM": head_dim, "D_PAD": d_pad}
    walk = {
        **shape,
        "GROUP": group,
        "BLOCK_SIZE": 16,
        "DOT_FP32": False,
        "HAS_WINDOW": features,
        "HAS_SOFTCAP": features,
    }
    sinks: dict[str, Any] = (
        {"HAS_SINKS": features} if features else {"HAS_SINKS": False, "sinks": None}
    )
    yield (
        "prefill",
        prefill_kernel,
        {**walk, **sinks, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n},
        tiles.num_warps,
        tiles.num_stages,
    )
    yield (
        "decode",
        decode_kernel,
        {
            **walk,
            "BLOCK_M": max(16, triton.next_power_of_2(group)),
            "BLOCK_N": tiles.decode_block_n,
            "SPLIT": tiles.split,
        },
        tiles.decode_num_warps,
        tiles.decode_num_stages,
    )
    yield (
        "reduce",
        reduce_kernel,
        {**shape, **sinks, "SPLIT": tiles.split, "BLOCK_S": 16, "HAS_WINDOW": features},
        4,
        3,
    )
    yield (
        "kv_store",
        kv_store_kernel,
        {"NUM_KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK_SIZE": 16, "BLOCK_E": 1024},
        4,
        3,
    )


def has_wide_places(ttir: str) -> bool:
    """True when block numbers are multiplied with their stride in 64 bits."""
    return re.search(r"%place\w* = arith\.muli %block\w*, .*i64", ttir) is not None


def selected(type_name: str, head_dim: int, feature: str, chosen: list[str]) -> bool:
    """Without a choice: plain kernels of all, features where registers are scarcest."""
    if chosen:
        return [type_name, str(head_dim), feature] == chosen
    if type_name == "fp16" and head_dim != 128:
        return False  # the same tiles and sizes as bf16
    return feature == "plain" or (type_name == "bf16" and head_dim > 64)


def main(argv: list[str]) -> None:
    """ARCH [DTYPE HEAD_DIM plain|features]"""
    arch, chosen = int(argv[0]), argv[1:]
    for dtype, type_name in TYPES.items():
        for head_dim in sorted({bound for _, _, bound in TABLE}):
            for feature in ("plain", "features"):
                if not selected(type_name, head_dim, feature, chosen):
                    continue
                for variant in variants(arch, dtype, head_dim, 4, feature == "features"):
                    name, kernel, constants, warps, stages = variant
                    if not chosen and name in ("reduce", "kv_store") and head_dim != 128:
                        continue
                    compiled = compile_kernel(kernel, arch, dtype, constants, warps, stages)
                    line = {
                        "kernel": name,
                        "arch": arch,
                        "dtype": type_name,
                        "head_dim": head_dim,
                        "feature": feature,
                        "shared_bytes": compiled.metadata.shared,
                        "wide_places": has_wide_places(compiled.asm["ttir"]),
                        **resources(compiled.asm["cubin"]),
                    }
                    sys.stdout.write(json.dumps(line) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])

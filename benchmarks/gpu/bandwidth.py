"""The floor: bytes a second of a copy on the device, and operations a second of a product."""

import sys

import torch

from benchmarks.gpu.common import Place, emit, place, seconds_of


def copy_bytes_per_s(where: Place) -> float:
    """Read and written."""
    count = (1 << 20) if where.dry else (2 << 30)
    source = torch.ones(count, dtype=torch.uint8, device=where.device)
    target = torch.empty_like(source)
    return 2 * count / seconds_of(lambda: target.copy_(source), where)


def product_per_s(where: Place) -> float:
    """bf16 floating-point operations of a large matrix product."""
    size = 128 if where.dry else 8192
    left = torch.randn(size, size, device=where.device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=where.device, dtype=torch.bfloat16)
    return 2 * size**3 / seconds_of(lambda: torch.mm(left, right), where)


def main(argv: list[str]) -> None:
    """One line."""
    where = place(argv, __doc__ or "")
    emit(
        copy_gb_per_s=round(copy_bytes_per_s(where) / 1e9, 1),
        product_tflop_per_s=round(product_per_s(where) / 1e12, 2),
    )


if __name__ == "__main__":
    main(sys.argv[1:])

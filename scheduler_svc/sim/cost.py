"""What a step costs on a simulated worker, and how that is fitted to what benchmarks measured.

    seconds = fixed + weights & arithmetic + KV read + bytes copied
    weights & arithmetic = weights_s + tokens' arithmetic      (a CPU: one after the other)
                         = max(weights_s, tokens' arithmetic)  (a device that does both at once)

weights_s is the bytes of all weights over the memory's bandwidth, a token's arithmetic its floating
point operations over the peak, a KV token's time its bytes over the bandwidth. A row that decodes
has the output head and the sampler on top, which a row of a prompt in the middle has not.

Attention of a chunk is counted as reading, too: its keys and values once for each QUERY_TILE of
queries. With 4 query heads a KV head, that many queries are about as much arithmetic for the bytes
they need as a large GPU does while it reads them, so that reading bounds either.
"""

from dataclasses import dataclass

# Queries that share one reading of a context.
QUERY_TILE = 64
# A single step's worth of anything is refused above this: the caller has lost its units.
MAX_COUNT = 1 << 48


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step's parts. Nothing is negative, so more work is never faster."""

    fixed_s: float
    weights_s: float = 0.0
    decode_token_s: float
    prefill_token_s: float
    kv_token_s: float = 0.0
    copied_byte_s: float = 0.0
    overlapped: bool = False

    def __post_init__(self) -> None:
        parts = (
            self.fixed_s, self.weights_s, self.decode_token_s, self.prefill_token_s,
            self.kv_token_s, self.copied_byte_s,
        )  # fmt: skip
        if not all(0.0 <= part < 3600.0 for part in parts):
            raise ValueError(f"parts of a step's cost are 0 or more and under an hour: {self}")

    def seconds(
        self,
        num_decode_tokens: int,
        num_prefill_tokens: int,
        kv_tokens_read: int,
        copied_bytes: int,
    ) -> float:
        """Of a step with so many rows that decode, so many tokens of prompts, and so on.

        kv_tokens_read is summed over rows, see `kv_tokens`. copied_bytes are those of operations
        that the step waits for. A step of nothing costs what its copies do.
        """
        assert min(num_decode_tokens, num_prefill_tokens, kv_tokens_read, copied_bytes) >= 0
        assert max(num_decode_tokens, num_prefill_tokens, kv_tokens_read, copied_bytes) < MAX_COUNT
        copies_s = copied_bytes * self.copied_byte_s
        if not num_decode_tokens + num_prefill_tokens:
            return copies_s
        arithmetic_s = (
            num_decode_tokens * self.decode_token_s + num_prefill_tokens * self.prefill_token_s
        )
        if self.overlapped:
            linear_s = max(self.weights_s, arithmetic_s)
        else:
            linear_s = self.weights_s + arithmetic_s
        return self.fixed_s + linear_s + kv_tokens_read * self.kv_token_s + copies_s


def kv_tokens(start: int, num_tokens: int) -> int:
    """KV tokens that a row reads which computes tokens start to start + num_tokens."""
    return -(-num_tokens // QUERY_TILE) * (start + num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a model's shape says of its steps. Bytes of keys and values count all layers."""

    num_weights: int
    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a device can do at best, per second, and the shares of it that kernels reach."""

    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    fixed_s: float
    memory_share: float = 1.0
    flops_share: float = 1.0
    overlapped: bool = True


def from_specification(model: ModelSize, device: Device) -> StepCost:
    """The cost that the figures of a data sheet promise, times the shares reached."""
    bytes_per_s = device.memory_bytes_per_s * device.memory_share
    token_s = 2 * model.num_weights / (device.flops_per_s * device.flops_share)
    return StepCost(
        fixed_s=device.fixed_s,
        weights_s=model.weight_bytes / bytes_per_s,
        decode_token_s=token_s,
        prefill_token_s=token_s,
        kv_token_s=model.kv_bytes_per_token / bytes_per_s,
        copied_byte_s=1.0 / device.link_bytes_per_s,
        overlapped=device.overlapped,
    )


# SmolLM2-135M in bf16: 30 layers of 3 KV heads of 64 (its config.json), 269 MB as saved.
SMOLLM2_135M = ModelSize(
    num_weights=134_515_008, weight_bytes=269_030_016, kv_bytes_per_token=30 * 2 * 3 * 64 * 2
)
# Llama 3.1 8B in bf16: 32 layers of 8 KV heads of 128 (its config.json).
LLAMA_8B = ModelSize(
    num_weights=8_030_261_248, weight_bytes=16_060_522_496, kv_bytes_per_token=32 * 2 * 8 * 128 * 2
)

# NVIDIA H100 SXM5 (data sheet, 2023): 3.35 TB/s of HBM3, 989 TFLOP/s of dense bf16; PCIe 5.0 x16
# is 64 GB/s a direction. The shares are what large copies and matrix products usually reach, and
# fixed_s is a guess at launches and sampling; a fit replaces all three.
H100 = Device(
    memory_bytes_per_s=3.35e12,
    flops_per_s=989e12,
    link_bytes_per_s=55e9,
    fixed_s=0.002,
    memory_share=0.85,
    flops_share=0.6,
)
# Two cores of an AMD EPYC with AVX-512 and bf16: 29.6 GB/s read; all linear layers and the head of
# SmolLM2-135M take 19.7 ms at one row and 180 ms at 256, so 0.63 ms a token: 430 GFLOP/s, beside
# the reading, not under it. Copies are of memory to memory, read and written.
TWO_CORES = Device(
    memory_bytes_per_s=29.6e9,
    flops_per_s=430e9,
    link_bytes_per_s=13.7e9,
    fixed_s=0.0105,
    memory_share=1.0,
    flops_share=1.0,
    overlapped=False,
)

PRESETS = {
    "cpu": from_specification(SMOLLM2_135M, TWO_CORES),
    "h100": from_specification(LLAMA_8B, H100),
}

"""Settings of a worker; names and defaults stand in servicekit.catalogue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from servicekit import settings
from servicekit.catalogue import CATALOGUE, WORKER


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """All of them, read once at start."""

    host: str
    redis_url: str
    model: str
    served_model_name: str
    ops_port: int
    log_level: str
    drain_s: float
    max_num_batched_tokens: int
    max_num_seqs: int
    worker_port: int
    worker_id: str
    worker_address: str
    block_size: int
    max_model_len: int
    dtype: str
    kv_cache_gib: float
    num_gpu_blocks_override: int
    gpu_memory_utilization: float
    swap_space_gib: float
    kv_cache_dtype: str
    tensor_parallel_size: int
    attention_backend: str
    fused: bool
    deterministic: bool
    quantization: str
    num_threads: int
    outbox_batches: int


def load(argv: Sequence[str], environ: Mapping[str, str]) -> WorkerSettings:
    """Reads flags and variables. Raises SettingsError."""
    return WorkerSettings(**settings.load(WORKER, CATALOGUE, argv, environ))

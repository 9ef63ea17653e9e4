"""Every setting of every service, with default, unit and reader.

One table, so that one ConfigMap can be handed to all services.
"""

from typing import Any

from servicekit.settings import Setting, boolean, choice, integer, number, text

_BIG = 2**31 - 1
GATEWAY, SCHEDULER, WORKER, LOCAL = "gateway", "scheduler_svc", "gpu_worker", "local"
ALL = f"{GATEWAY} {SCHEDULER} {WORKER}"
BATCHING, MODEL = f"{SCHEDULER} {WORKER}", f"{GATEWAY} {WORKER}"
_POLICIES = choice("fcfs", "fair", "static")
_DEPTHS = choice("auto", *"12345678")
_PREEMPTION = choice("auto", "swap", "recompute")
_BACKENDS = choice("auto", "native", "torch", "triton")
_DTYPES = choice("auto", "bfloat16", "float32", aliases={"bf16": "bfloat16", "fp32": "float32"})
_BUDGET = "tokens, 0: by device (CPU 256, GPU 2048 or 8192)"
_SWAP = "GiB, 0: none, -1: by memory (GPU up to 4, CPU up to 1)"
_MESSAGE = "bytes, 0: 1 MiB, or what the context needs"
_GBPS, _US_TOKEN = "10^9 bytes/s, 0: measured", "us, 0: measured"


def _s(services: str, name: str, parse: Any, default: Any, unit: str, help_: str) -> Setting:
    return Setting(
        name=name,
        parse=parse,
        default=default,
        unit=unit,
        help=help_,
        services=frozenset(services.split()),
    )


CATALOGUE: tuple[Setting, ...] = (
    # all
    _s(ALL, "host", text, "127.0.0.1", "", "address the servers listen on"),
    _s(ALL, "redis_url", text, "redis://127.0.0.1:6379/0", "", "Redis or Valkey server"),
    _s(ALL, "model", text, "smollm2-135m", "", "local folder or hub id"),
    _s(ALL, "served_model_name", text, "", "", "name in the API; empty: the model folder's name"),
    _s(ALL, "ops_port", integer(0, 65535), 0, "port, 0 is a free one", "health and metrics"),
    _s(ALL, "log_level", choice("debug", "info", "warning", "error"), "info", "", "least level"),
    _s(ALL, "drain_s", number(0, 3600), 30.0, "s", "time running requests get at SIGTERM"),
    # gateway
    _s(GATEWAY, "port", integer(0, 65535), 8000, "port, 0 is a free one", "REST"),
    _s(GATEWAY, "grpc_port", integer(0, 65535), 9000, "port, 0 is a free one", "public gRPC"),
    _s(GATEWAY, "api_keys_file", text, "", "", "lines tenant:sha256[:weight]; empty: loopback"),
    _s(GATEWAY, "max_queued_requests", integer(1, _BIG), 1024, "requests", "bound of the queue"),
    _s(GATEWAY, "max_queued_tokens", integer(1, _BIG), 4_000_000, "tokens", "bound of the queue"),
    _s(GATEWAY, "default_deadline_s", number(0.1, 86400), 600.0, "s", "life of a request"),
    _s(GATEWAY, "stall_s", number(1, 3600), 60.0, "s", "silence before a stream is superseded"),
    _s(GATEWAY, "stream_buffer_tokens", integer(1, 65536), 256, "tokens", "unread, per stream"),
    _s(GATEWAY, "max_body_bytes", integer(1024, _BIG), 4_194_304, "bytes", "largest request body"),
    _s(GATEWAY, "max_grpc_message_bytes", integer(0, _BIG), 0, _MESSAGE, "largest gRPC request"),
    _s(GATEWAY, "tokenizer_threads", integer(1, 64), 2, "threads", "tokenizing off the loop"),
    # scheduler
    _s(SCHEDULER, "scheduler_port", integer(0, 65535), 0, "port, 0 is a free one", "admin gRPC"),
    _s(SCHEDULER, "scheduling_policy", _POLICIES, "fcfs", "", "order: fcfs, fair or static"),
    _s(SCHEDULER, "static_batch_size", integer(1, 65536), 8, "requests", "batch of `static`"),
    _s(SCHEDULER, "preemption_mode", _PREEMPTION, "auto", "", "auto: the cheaper, by cost"),
    _s(SCHEDULER, "swap_gbps_override", number(0, 1e6), 0.0, _GBPS, "swap, either way"),
    _s(SCHEDULER, "prefill_us_per_token_override", number(0, 1e6), 0.0, _US_TOKEN, "recompute"),
    _s(SCHEDULER, "enable_prefix_caching", boolean, True, "", "share KV blocks of equal prefixes"),
    _s(SCHEDULER, "max_inflight_steps", _DEPTHS, "auto", "plans", "in flight per worker, 1 to 8"),
    _s(SCHEDULER, "lease_ttl_s", number(0.5, 60), 1.5, "s", "leader lease"),
    _s(SCHEDULER, "worker_grace_s", number(0.1, 60), 1.0, "s", "broken session before loss"),
    _s(SCHEDULER, "worker_wait_s", number(0, 3600), 30.0, "s", "no worker before 503"),
    _s(SCHEDULER, "prefill_chunk_tokens", integer(0, _BIG), 0, "tokens, 0: none", "chunk limit"),
    _s(SCHEDULER, "max_prefill_gap_ms", number(0, 60_000), 200.0, "ms, 0: any", "of decodes"),
    _s(SCHEDULER, "trace_dir", text, "", "", "traces for replay, with prompts; empty: none"),
    _s(SCHEDULER, "trace_max_mib", integer(1, 65536), 256, "MiB", "a trace ends there"),
    _s(SCHEDULER, "priority_ageing_s", number(0, 86400), 30.0, "s, 0: strict", "worth of a class"),
    _s(BATCHING, "max_num_batched_tokens", integer(0, _BIG), 0, _BUDGET, "token budget of a step"),
    _s(BATCHING, "max_num_seqs", integer(1, 4096), 256, "requests", "slots"),
    # worker
    _s(WORKER, "worker_port", integer(0, 65535), 0, "port, 0 is a free one", "Session and Tokens"),
    _s(WORKER, "worker_id", text, "", "", "stable name; empty: host name and port"),
    _s(WORKER, "worker_address", text, "", "", "host:port to announce; empty: its own"),
    _s(WORKER, "block_size", integer(4, 128), 16, "tokens", "tokens in a KV block"),
    _s(MODEL, "max_model_len", integer(0, _BIG), 0, "tokens, 0: the model's", "prompt + output"),
    _s(WORKER, "dtype", _DTYPES, "auto", "", "weights and KV"),
    _s(WORKER, "kv_cache_gib", number(0, 4096), 0.0, "GiB, 0: by memory", "KV cache"),
    _s(WORKER, "num_gpu_blocks_override", integer(0, _BIG), 0, "blocks, 0: none", "KV cache"),
    _s(WORKER, "gpu_memory_utilization", number(0.05, 0.99), 0.9, "share", "of device memory"),
    _s(WORKER, "swap_space_gib", number(-1, 4096), -1.0, _SWAP, "host KV blocks, for swap"),
    _s(WORKER, "kv_cache_dtype", choice("auto"), "auto", "", "dtype of the KV cache"),
    _s(WORKER, "tensor_parallel_size", integer(1, 1), 1, "devices", "1 until it is built"),
    _s(WORKER, "attention_backend", _BACKENDS, "auto", "", "paged attention"),
    _s(WORKER, "fused", boolean, True, "", "lean forward of known models"),
    _s(WORKER, "deterministic", boolean, False, "", "same bits whatever the batch"),
    _s(WORKER, "quantization", choice("none", "int8", "int4"), "none", "", "CPU: linear weights"),
    _s(WORKER, "num_threads", integer(0, 1024), 0, "threads, 0: cores / workers", "of torch"),
    _s(WORKER, "outbox_batches", integer(16, 65536), 4096, "batches", "kept per gateway"),
    # the local launcher
    _s(LOCAL, "workers", integer(1, 64), 1, "processes", "workers to start"),
    _s(LOCAL, "cache_dir", text, "~/.cache/quire", "", "converted models"),
    _s(LOCAL, "data_dir", text, "", "", "keeps Redis data; empty: a fresh folder per run"),
)

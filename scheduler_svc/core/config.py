"""Configuration of the core, validated once."""

from dataclasses import dataclass

from scheduler_svc.core.depth import MAX_STEPS
from scheduler_svc.core.policy import POLICIES, PREEMPTION_MODES
from scheduler_svc.core.prefix import HASH_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Knobs of the scheduler core.

    max_inflight_steps bounds the plans in flight on a worker; 0 adapts it to the worker, see depth.
    max_num_seqs and max_num_batched_tokens cap what workers offer; 0 leaves the worker's number.
    prefill_chunk_tokens caps one request's share of a step; 0 leaves only the budget.
    max_prefill_gap_ns is how long a step with decodes may become by prefill, at the measured cost;
    0 is no limit. priority_ageing_ns is what one priority class is worth in waiting time; 0 makes
    classes strict.
    watermark is the share of blocks an admission must leave free. max_skips bounds how often a
    waiting request that does not fit may be passed over by later ones. max_step_failures is how
    many steps in a row may fail before their worker is given up. A request is held back, in at most
    max_holds plans, while a running one fills at least hold_back_tokens that both begin with; 0
    turns that off. hash_bytes is the length of block names.
    preemption_mode is how a request loses its blocks; `auto` goes by cost. The overrides, if not 0,
    stand for what workers have measured: 10^9 bytes/s either way, microseconds per token. A request
    is preempted max_preemptions times unless nothing else can run.
    """

    scheduling_policy: str = "fcfs"
    static_batch_size: int = 8
    enable_prefix_caching: bool = True
    max_inflight_steps: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    prefill_chunk_tokens: int = 0
    max_prefill_gap_ns: int = 0
    priority_ageing_ns: int = 30_000_000_000
    watermark: float = 0.01
    max_skips: int = 16
    worker_wait_ns: int = 30_000_000_000
    max_step_failures: int = 3
    max_attempts: int = 32
    hold_back_tokens: int = 32
    max_holds: int = 64
    preemption_mode: str = "auto"
    max_preemptions: int = 3
    swap_gbps_override: float = 0.0
    prefill_us_per_token_override: float = 0.0
    hash_key: bytes = b"quire"
    hash_bytes: int = HASH_BYTES

    def validate(self) -> None:
        """Raises ValueError naming the first bad field."""
        if self.scheduling_policy not in POLICIES:
            raise ValueError(f"scheduling_policy must be one of {POLICIES}")
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ValueError(f"preemption_mode must be one of {PREEMPTION_MODES}")
        if not 0 <= self.max_inflight_steps <= MAX_STEPS:
            raise ValueError(f"max_inflight_steps must be from 0 to {MAX_STEPS}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError("watermark must be in [0, 1)")
        if not 1 <= self.hash_bytes <= 64:
            raise ValueError("hash_bytes must be from 1 to 64")
        for name in (
            "static_batch_size",
            "max_skips",
            "max_step_failures",
            "max_attempts",
            "max_preemptions",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in (
            "max_prefill_gap_ns",
            "priority_ageing_ns",
            "worker_wait_ns",
            "hold_back_tokens",
            "max_holds",
            "swap_gbps_override",
            "prefill_us_per_token_override",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")

"""Settings of the scheduler, and the core's configuration made from them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler_svc.core.config import CoreConfig
from servicekit import model_files, settings
from servicekit.catalogue import CATALOGUE, SCHEDULER


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Values by their catalogue names."""

    host: str
    redis_url: str
    model: str
    served_model_name: str
    ops_port: int
    log_level: str
    drain_s: float
    scheduler_port: int
    scheduling_policy: str
    static_batch_size: int
    preemption_mode: str
    swap_gbps_override: float
    prefill_us_per_token_override: float
    enable_prefix_caching: bool
    max_inflight_steps: str
    lease_ttl_s: float
    worker_grace_s: float
    worker_wait_s: float
    prefill_chunk_tokens: int
    max_prefill_gap_ms: float
    priority_ageing_s: float
    trace_dir: str
    trace_max_mib: int
    max_num_batched_tokens: int
    max_num_seqs: int

    @property
    def model_name(self) -> str:
        """The served model's name: API name, metric label and Redis hash tag."""
        return model_files.served_name(self.served_model_name, self.model)

    def core_config(self) -> CoreConfig:
        """The core's configuration. Equal for every scheduler of the model, block hashes too."""
        config = CoreConfig(
            scheduling_policy=self.scheduling_policy,
            static_batch_size=self.static_batch_size,
            preemption_mode=self.preemption_mode,
            swap_gbps_override=self.swap_gbps_override,
            prefill_us_per_token_override=self.prefill_us_per_token_override,
            enable_prefix_caching=self.enable_prefix_caching,
            max_inflight_steps=int(self.max_inflight_steps.replace("auto", "0")),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            max_prefill_gap_ns=round(self.max_prefill_gap_ms * 1e6),
            priority_ageing_ns=round(self.priority_ageing_s * 1e9),
            worker_wait_ns=round(self.worker_wait_s * 1e9),
            hash_key=hashlib.sha256(b"quire\0" + self.model_name.encode()).digest(),
        )
        config.validate()
        return config


def load(argv: Sequence[str], environ: Mapping[str, str]) -> SchedulerSettings:
    """Reads flags and variables. Raises SettingsError."""
    return SchedulerSettings(**settings.load(SCHEDULER, CATALOGUE, argv, environ))

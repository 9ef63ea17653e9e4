"""What the simulated studies share: the traces, the clusters, and a run's figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stack import StackError
from scheduler_svc.sim import report
from scheduler_svc.sim.arrivals import ArrivalError, Source, first, open_source
from scheduler_svc.sim.load import Cluster, run_load

AZURE_CHAT = "azure_2023_conv.csv"
AZURE_CODE = "azure_2023_code.csv"
MOONCAKE = "mooncake_conversation.jsonl"

# Llama 3.1 8B in bf16 on an H100 of 80 GB: 0.9 of it, less 16 GB of weights and 2 GB for what is
# computed, holds 25,700 blocks of 16 tokens (2 MiB each). The context is the model's own.
H100_BLOCKS = 25_600
H100_MODEL_LEN = 131_072
H100_BATCHED_TOKENS = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """`requests` bounds the longest runs over a trace; a quick run takes a tenth of it."""

    quick: bool
    traces: Path
    requests: int
    settings: Mapping[str, str] = field(default_factory=dict)

    def trace(self, name: str, count: int | None = None) -> Source:
        """A recorded trace, or its beginning. Raises StackError if it is not there."""
        try:
            source = open_source(self.traces / name)
        except ArrivalError as error:
            raise StackError(f"{error}; --traces names the folder of the traces") from error
        return source if count is None else first(source, count)

    @property
    def most(self) -> int:
        """Requests of a run that would be too long with all of them."""
        return max(1, self.requests // 10) if self.quick else self.requests

    def say(self, text: str) -> None:
        """Progress, at once."""
        print(f"[simulation] {text}", flush=True)


def h100(num_workers: int) -> Cluster:
    """Workers with an H100 each, as above."""
    return Cluster(
        num_workers=num_workers,
        num_blocks=H100_BLOCKS,
        max_model_len=H100_MODEL_LEN,
        max_num_batched_tokens=H100_BATCHED_TOKENS,
    )


def simulate(cluster: Cluster, source: Source) -> dict[str, Any]:
    """A run's figures by the names that the studies' columns have."""
    of = report.summarize(run_load(cluster, source))
    preempted = sum(of.preemptions.values())
    return {
        "workers": of.num_workers,
        "requests": of.num_requests,
        "duration_s": of.duration_s,
        "prompt_tokens": of.prompt_tokens,
        "tokens_per_s": of.output_tokens_per_s,
        "ttft_p50_ms": of.ttft_s.p50 * 1e3,
        "ttft_p99_ms": of.ttft_s.p99 * 1e3,
        "gap_p50_ms": of.token_gap_s.p50 * 1e3,
        "gap_p99_ms": of.token_gap_s.p99 * 1e3,
        "e2e_p50_s": of.e2e_s.p50,
        "e2e_p99_s": of.e2e_s.p99,
        "preempted": preempted,
        "hit_rate": of.hit_rate,
        "blocks_used": of.blocks_used,
        "steps": of.num_steps,
        "rows_per_step": of.rows_per_step,
        "core_us": of.core_cpu_s / max(1, of.num_steps) * 1e6,
        "problems": [f"{of.num_unfinished} requests without an end"] if of.num_unfinished else [],
    }

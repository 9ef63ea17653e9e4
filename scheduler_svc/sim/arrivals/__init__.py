"""What arrives at a simulated cluster: from recorded traffic or from generators by seed."""

from scheduler_svc.sim.arrivals.arrival import (
    Arrival,
    ArrivalError,
    Source,
    faster,
    first,
    mean_rate_per_s,
)
from scheduler_svc.sim.arrivals.files import open_source, read_azure, read_mooncake, read_own, write
from scheduler_svc.sim.arrivals.generators import GENERATORS, Traffic, generate
from scheduler_svc.sim.arrivals.prompts import prompt_token_ids

__all__ = [
    "GENERATORS",
    "Arrival",
    "ArrivalError",
    "Source",
    "Traffic",
    "faster",
    "first",
    "generate",
    "mean_rate_per_s",
    "open_source",
    "prompt_token_ids",
    "read_azure",
    "read_mooncake",
    "read_own",
    "write",
]

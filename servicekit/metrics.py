"""Prometheus registry and bucket bounds. Names follow vLLM's where the meaning is the same."""

from prometheus_client import CollectorRegistry

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BUCKETS_S = (
    0.001, 0.002, 0.004, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
STEP_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512,
    1.0, 2.0, 4.0, 8.0, 16.0,
)  # fmt: skip
SIZE_BUCKETS = tuple(float(2**i) for i in range(0, 21))


def new_registry() -> CollectorRegistry:
    """A registry of its own for each service, so that tests can hold several in one process."""
    return CollectorRegistry(auto_describe=True)

"""The gateway's metrics. Names follow vLLM's where the meaning is the same."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from gateway.core.types import FinishReason
from gateway.gap_histogram import GapHistogram
from servicekit.metrics import (
    LATENCY_BUCKETS_S,
    SIZE_BUCKETS,
    TOKEN_GAP_BUCKETS_S,
    TTFT_BUCKETS_S,
)

_ENDED = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


class GatewayMetrics:
    """Children are bound once, so that a token costs one call."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, text: str) -> Counter:
            family = Counter(name, text, ["model_name"], registry=registry)
            return family.labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ["model_name"], registry=registry, buckets=buckets)
            return family.labels(model_name)

        self.first_token_s = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS_S
        )
        self.token_gap_s = GapHistogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens",
            labels={"model_name": model_name},
            bounds=TOKEN_GAP_BUCKETS_S,
            registry=registry,
        )
        self._request_s = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end", LATENCY_BUCKETS_S
        )
        self._request_prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request", SIZE_BUCKETS
        )
        self._request_output_tokens = histogram(
            "vllm:request_generation_tokens", "Output tokens of a request", SIZE_BUCKETS
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens")
        self.output_tokens = counter("vllm:generation_tokens", "Output tokens")
        self.divergences = counter(
            "quire:stream_divergences", "Repeats that differed from what the client had been given"
        )
        self.superseded = counter("quire:superseded", "Later attempts put into the queue")
        self.repeated_tokens = counter("quire:repeated_tokens", "Equal repeats dropped")
        streams = Gauge("quire:gateway_streams", "Live streams", ["model_name"], registry=registry)
        self._streams = streams.labels(model_name)
        ended = Counter(
            "vllm:request_success",
            "Ended requests by reason",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._ended = {
            reason: ended.labels(model_name, _ENDED.get(reason, "error")) for reason in FinishReason
        }

    def watch_streams(self, num_streams: Callable[[], int]) -> None:
        """Where the number of live streams is read."""
        self._streams.set_function(num_streams)

    def ended(self, reason: FinishReason, total_s: float, num_prompt: int, num_output: int) -> None:
        """Counts an end."""
        self._ended[reason].inc()
        self._request_s.observe(total_s)
        self._prompt_tokens.inc(num_prompt)
        self._request_prompt_tokens.observe(num_prompt)
        self._request_output_tokens.observe(num_output)

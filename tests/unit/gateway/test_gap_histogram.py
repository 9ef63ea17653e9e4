"""A GapHistogram shows what Prometheus' own histogram would."""

from collections.abc import Sequence

import pytest
from prometheus_client import Histogram, generate_latest

from gateway.gap_histogram import GapHistogram
from servicekit.metrics import TOKEN_GAP_BUCKETS_S, new_registry


def shown_by_prometheus(bounds: Sequence[float], values: Sequence[float]) -> list[str]:
    registry = new_registry()
    histogram = Histogram("quire:x", "An X.", ["a", "b"], buckets=bounds, registry=registry)
    for value in values:
        histogram.labels("one", "two").observe(value)
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def shown_by_ours(bounds: Sequence[float], values: Sequence[float]) -> list[str]:
    registry = new_registry()
    labels = {"a": "one", "b": "two"}
    histogram = GapHistogram("quire:x", "An X.", labels=labels, bounds=bounds, registry=registry)
    for value in values:
        histogram.observe(value)
    return generate_latest(registry).decode().splitlines()


@pytest.mark.parametrize("bounds", [TOKEN_GAP_BUCKETS_S, (1.0, 2.5)])
def test_it_shows_what_prometheus_own_histogram_shows(bounds: Sequence[float]) -> None:
    """On a bound, between two, below the lowest, above the highest."""
    values = [bounds[0], bounds[0] / 2, bounds[1], bounds[1] * 1.01, bounds[-1], bounds[-1] * 3, 0]
    assert shown_by_ours(bounds, values) == shown_by_prometheus(bounds, values)


def test_it_is_there_before_anything_was_observed() -> None:
    assert 'quire:x_count{a="one",b="two"} 0.0' in shown_by_ours((1.0,), ())

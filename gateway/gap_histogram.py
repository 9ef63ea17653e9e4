"""A histogram for what happens at each token, without what Prometheus' own costs."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class GapHistogram(Collector):
    """A histogram of one series, observed and scraped on the event loop's thread.

    Prometheus' own takes two locks and a walk over its buckets for each observation.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        *,
        labels: dict[str, str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._family = (name, documentation)
        self._labels = labels
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Counts a value in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """The family with its one series."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(*self._family, labels=tuple(self._labels))
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family

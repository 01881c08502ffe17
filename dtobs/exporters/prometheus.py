"""The table as a Prometheus exposition, by prometheus_client (extra ``prometheus``; imported when first used)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dtobs.errors import DependencyMissing
from dtobs.exporters.look import Look
from dtobs.exporters.metrics import PREFIX, TABLE, Metric
from dtobs.exporters.totals import BUCKETS

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


class RunCollector:
    """A custom collector for any registry of prometheus_client; `look` is called once a scrape."""

    def __init__(self, look: Callable[[], Look]) -> None:
        self._look = look

    def collect(self) -> Iterator[Family]:
        """One family a metric, those without a value left out."""
        yield from families(self._look())

    def describe(self) -> list[Family]:
        """Nothing: a registry then does not scrape when the collector is registered."""
        return []


def exposition(look: Look) -> bytes:
    """The text format, about 0.1 ms a rank. Raises DependencyMissing without prometheus_client."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import generate_latest
    except ModuleNotFoundError:
        raise DependencyMissing("prometheus-client", "prometheus") from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(lambda: look))
    return generate_latest(registry)


def families(look: Look) -> Iterator[Family]:
    """The metric families of one look."""
    for metric in TABLE:
        family = _family(metric, look)
        if family.samples:
            yield family


def _family(metric: Metric, look: Look) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    name, labels = f"{PREFIX}{metric.name}", ("run", *metric.labels)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, metric.help, labels=labels)
        if look.totals.count:
            total, buckets = 0, []
            for bound, count in zip((*map(str, BUCKETS), "+Inf"), look.totals.buckets, strict=True):
                total += count
                buckets.append((bound, float(total)))
            histogram.add_metric([look.run], buckets, look.totals.seconds)
        return histogram
    assert metric.source is not None
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(name, metric.help, labels=labels)
    for values, value in metric.source(look):
        family.add_metric([look.run, *values], value)
    return family

"""The table as a Prometheus exposition, by prometheus_client (extra ``prometheus``; imported when first used)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtobs.errors import DependencyMissing
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.metrics import PREFIX, RANK, TABLE, Metric
from dtobs.exporters.sources import Sample
from dtobs.exporters.totals import BUCKETS

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.core import Metric as Family

_PLACE = "@rank@"
"""Stands for the rank in the line that is repeated."""
FEW = 32
"""So many lines may be repeated: one for each part of a step, for example."""


class RunCollector:
    """A custom collector for any registry of prometheus_client; `look` is called once a scrape."""

    def __init__(self, look: Callable[[], MonitorSnapshot]) -> None:
        self._look = look

    def collect(self) -> Iterator[Family]:
        """One family a metric, those without a value left out."""
        yield from families(self._look())

    def describe(self) -> list[Family]:
        """Nothing: a registry then does not scrape when the collector is registered."""
        return []


def exposition(look: MonitorSnapshot) -> bytes:
    """The text format. Raises DependencyMissing without prometheus_client.

    Of a metric with values of many ranks, prometheus_client writes the first sample, and the others repeat its line
    with their rank and value: at 1,024 ranks that is a third of the time.
    """
    try:
        import prometheus_client.utils  # noqa: F401
        from prometheus_client.exposition import generate_latest
    except ModuleNotFoundError:
        raise DependencyMissing("prometheus-client", "prometheus") from None
    parts: list[bytes] = []
    for metric in TABLE:
        samples = list(metric.source(look)) if metric.labels[:1] == RANK and metric.source is not None else []
        if 0 < len({labels[1:] for labels, _ in samples}) <= FEW:
            parts.append(_per_rank(metric, samples, look.run))
        elif (family := _family(metric, look)).samples:
            parts.append(generate_latest(_Families([family])))
    return b"".join(parts)


@dataclass(frozen=True)
class _Families:
    """What `generate_latest` asks of a registry."""

    families: list[Family]

    def collect(self) -> list[Family]:
        return self.families


def _per_rank(metric: Metric, samples: list[Sample], run: str) -> bytes:
    from prometheus_client import utils
    from prometheus_client.exposition import generate_latest

    written: Callable[[float], str] = utils.floatToGoString
    head, around = (
        "",
        dict[tuple[str, ...], tuple[str, str]](),
    )  # by the labels after the rank: what stands before and after it in the line
    lines: list[str] = []
    for (rank, *others), value in samples:
        rest = tuple(others)
        if rest not in around:
            family = _empty(metric)
            family.add_metric([run, _PLACE, *rest], 0.0)
            head, _, line = generate_latest(_Families([family])).decode().rstrip("\n").rpartition("\n")
            before, _, after = line.partition(f'rank="{_PLACE}"')  # no label's value has such quotes
            around[rest] = f'{before}rank="', f'"{after.removesuffix("0.0")}'
        before, after = around[rest]
        lines.append(f"{before}{rank}{after}{written(value)}\n")
    return f"{head}\n{''.join(lines)}".encode()


def families(look: MonitorSnapshot) -> Iterator[Family]:
    """The metric families of one look."""
    for metric in TABLE:
        family = _family(metric, look)
        if family.samples:
            yield family


def _family(metric: Metric, look: MonitorSnapshot) -> Family:
    from prometheus_client.core import HistogramMetricFamily

    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(f"{PREFIX}{metric.name}", metric.help, labels=("run", *metric.labels))
        if look.totals.count:
            total, buckets = 0, []
            for bound, count in zip((*map(str, BUCKETS), "+Inf"), look.totals.buckets, strict=True):
                total += count
                buckets.append((bound, float(total)))
            histogram.add_metric([look.run], buckets, look.totals.seconds)
        return histogram
    assert metric.source is not None
    family = _empty(metric)
    for values, value in metric.source(look):
        family.add_metric([look.run, *values], value)
    return family


def _empty(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    """The family of a counter or a gauge without samples."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(f"{PREFIX}{metric.name}", metric.help, labels=("run", *metric.labels))

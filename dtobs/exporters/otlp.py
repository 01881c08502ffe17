"""The table as OpenTelemetry instruments, pushed over OTLP/HTTP (extra ``otel``; imported when first used).

Everything is configured by OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_METRIC_EXPORT_INTERVAL``, ``OTEL_RESOURCE_ATTRIBUTES``, ...). Names, units and labels are those of the table;
`run` is the attribute ``run``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dtobs.errors import DependencyMissing
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.metrics import TABLE, Metric
from dtobs.exporters.totals import BUCKETS, StepTotals

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
_LOOK_SECONDS = 1.0
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the user has named an OTLP endpoint that takes metrics, and has not switched them off."""
    return environment.get("OTEL_METRICS_EXPORTER") != "none" and any(environment.get(name) for name in VARIABLES)


def resource_of(run: str) -> Resource:
    """What OpenTelemetry calls the origin of metrics and spans. Raises DependencyMissing without its packages."""
    try:
        from opentelemetry.sdk.resources import Resource
    except ModuleNotFoundError:
        raise DependencyMissing("opentelemetry-sdk", "otel") from None
    return Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "dtobs"), "service.instance.id": run})


class OtlpPush:
    """Pushes the metrics of a monitor until closed. Raises DependencyMissing without the OpenTelemetry packages.

    `look` is called from the exporter's thread, once an export. `reader` replaces the OTLP reader, for tests.
    """

    def __init__(
        self, look: Callable[[], MonitorSnapshot], totals: StepTotals, run: str, reader: MetricReader | None = None
    ) -> None:
        try:
            from opentelemetry.sdk.metrics import MeterProvider
        except ModuleNotFoundError:
            raise DependencyMissing("opentelemetry-sdk", "otel") from None
        self._look = look
        self._last: tuple[float, MonitorSnapshot] | None = None
        self._lock = threading.Lock()
        self._provider = MeterProvider([reader or _otlp_reader()], resource_of(run), shutdown_on_exit=False)
        self._attributes = {"run": run}
        self._make(totals)

    def close(self) -> None:
        """Push once more and stop; bounded by the exporter's own timeout."""
        self._provider.shutdown(timeout_millis=5_000)

    def _make(self, totals: StepTotals) -> None:
        meter = self._provider.get_meter("dtobs")
        for metric in TABLE:
            name, unit = f"dtobs_{metric.name}", _UNITS.get(metric.unit, "1")
            if metric.kind == "histogram":
                histogram = meter.create_histogram(
                    name, unit, metric.help, explicit_bucket_boundaries_advisory=list(BUCKETS)
                )
                totals.listeners.append(self._recorder(histogram))
            elif metric.kind == "counter":
                meter.create_observable_counter(name, [self._callback(metric)], unit, metric.help)
            else:
                meter.create_observable_gauge(name, [self._callback(metric)], unit, metric.help)

    def _recorder(self, histogram: Any) -> Callable[[npt.NDArray[np.float64]], None]:
        def record(walls: npt.NDArray[np.float64]) -> None:
            for wall in walls:
                histogram.record(float(wall), self._attributes)

        return record

    def _callback(self, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        def observe(_: CallbackOptions) -> Iterator[Observation]:
            assert metric.source is not None
            for values, value in metric.source(self._once()):
                yield Observation(value, {**self._attributes, **dict(zip(metric.labels, values, strict=True))})

        return observe

    def _once(self) -> MonitorSnapshot:
        """One look for all instruments of an export."""
        with self._lock:
            now = time.monotonic()
            if self._last is None or now - self._last[0] > _LOOK_SECONDS:
                self._last = (now, self._look())
            return self._last[1]


def _otlp_reader() -> MetricReader:
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ModuleNotFoundError:
        raise DependencyMissing("opentelemetry-exporter-otlp-proto-http", "otel") from None
    return PeriodicExportingMetricReader(OTLPMetricExporter())

"""Grafana panels as plain dictionaries: the few kinds that our dashboards use, laid out on the 24-column grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dtobs.exporters.metrics import BY_NAME

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24
_GRAFANA_UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}


@dataclass(frozen=True)
class Query:
    """A PromQL expression and how its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel before it has a place. `metric` is the row of the table that its unit and description come from."""

    title: str
    kind: str  #: timeseries, stat, table, bargauge
    queries: tuple[Query, ...]
    metric: str = ""
    unit: str = ""
    width: int = 8
    height: int = 8
    thresholds: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    stacked: bool = False
    instant: bool = False
    description: str = ""
    empty: str = ""  #: why there may be nothing to draw
    mappings: tuple[dict[str, Any], ...] = ()
    transformations: tuple[dict[str, Any], ...] = ()


@dataclass
class PanelGrid:
    """Gives panels their ids and places, row by row."""

    panels: list[dict[str, Any]] = field(default_factory=list)
    _x: int = 0
    _y: int = 0
    _row_height: int = 0

    def row(self, title: str, panels: Sequence[Panel]) -> None:
        """A titled row, then its panels from left to right."""
        self._new_line()
        self.panels.append(
            {
                "type": "row",
                "title": title,
                "id": len(self.panels) + 1,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": self._y},
            }
        )
        self._y += 1
        for panel in panels:
            self._place(panel)

    def _place(self, panel: Panel) -> None:
        if self._x + panel.width > _COLUMNS:
            self._new_line()
        place = {"h": panel.height, "w": panel.width, "x": self._x, "y": self._y}
        self.panels.append(_panel(panel, len(self.panels) + 1, place))
        self._x += panel.width
        self._row_height = max(self._row_height, panel.height)

    def _new_line(self) -> None:
        self._y += self._row_height
        self._x = self._row_height = 0


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    metric = BY_NAME[panel.metric] if panel.metric else None
    unit = panel.unit or (_GRAFANA_UNITS.get(metric.unit, "short") if metric else "short")
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description or (f"{metric.help}." if metric else ""),
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [_target(query, index, panel) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel, unit), "overrides": []},
        "options": _options(panel),
        "transformations": list(panel.transformations),
    }


def _target(query: Query, index: int, panel: Panel) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend,
        "range": not panel.instant,
        "instant": panel.instant,
        "format": "table" if panel.kind == "table" else "time_series",
    }


def _defaults(panel: Panel, unit: str) -> dict[str, Any]:
    steps = [{"value": value, "color": colour} for value, colour in panel.thresholds]
    defaults: dict[str, Any] = {
        "unit": unit,
        "noValue": panel.empty or "not measured yet",
        "color": {"mode": "thresholds" if panel.kind in ("stat", "bargauge") else "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": list(panel.mappings),
    }
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 0,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if len(panel.thresholds) > 1 else "off"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    match panel.kind:
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area", "textMode": "auto"}
        case "bargauge":
            return {"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "basic"}
        case "table":
            return {"showHeader": True, "cellHeight": "sm"}
        case _:
            raise ValueError(f"no such panel: {panel.kind}")

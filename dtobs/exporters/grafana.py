"""The dashboard "Run overview", generated from the table of metrics."""

from __future__ import annotations

from typing import Any

from dtobs.exporters.panels import DATASOURCE, Panel, PanelGrid, Query

UID = "dtobs-run-overview"
TITLE = "dtobs / Run overview"
SCHEMA_VERSION = 39
_RUN = 'run="$run"'
_RANK = 'run="$run",rank=~"$rank"'


def run_overview() -> dict[str, Any]:
    """The dashboard as Grafana (10 and later) imports it."""
    layout = PanelGrid()
    layout.row("At a glance", _glance())
    layout.row("Learning", _learning())
    layout.row("Where the time goes", _time())
    layout.row("Communication and memory", _resources())
    layout.row("dtobs itself", _own())
    return {
        "uid": UID,
        "title": TITLE,
        "description": "One training run: is it healthy, is it learning, where does the time go.",
        "tags": ["dtobs", "pytorch", "distributed"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": [_annotation()]},
        "links": [],
        "panels": layout.panels,
    }


def expressions(dashboard: dict[str, Any], run: str, rank: str = ".*") -> list[str]:
    """Every query of a dashboard with its variables filled in, as Grafana would send it."""
    found = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", [])]
    found += [a["expr"] for a in dashboard["annotations"]["list"]]
    return [e.replace("$__rate_interval", "1m").replace("$run", run).replace("$rank", rank) for e in found]


def _variables() -> list[dict[str, Any]]:
    common = {"datasource": DATASOURCE, "type": "query", "refresh": 2, "sort": 1, "hide": 0}
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0},
        {
            **common,
            "name": "run",
            "label": "Run",
            "query": "label_values(dtobs_run_info, run)",
            "sort": 2,
            "multi": False,
            "includeAll": False,
        },
        {
            **common,
            "name": "rank",
            "label": "Rank",
            "query": f"label_values(dtobs_steps_total{{{_RUN}}}, rank)",
            "sort": 3,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
        },
    ]


def _annotation() -> dict[str, Any]:
    return {
        "name": "Findings",
        "enable": True,
        "iconColor": "red",
        "datasource": DATASOURCE,
        "expr": f"max by (code, severity) (dtobs_findings{{{_RUN}}}) > 0",
        "titleFormat": "{{code}}",
        "textFormat": "{{severity}}",
        "tagKeys": "code",
        "step": "15s",
    }


def _one(metric: str, legend: str = "") -> Query:
    """The largest value that the run has."""
    return Query(f"max({metric}{{{_RUN}}})", legend)


def _each(metric: str, legend: str = "rank {{rank}}") -> Query:
    """A line for each of the chosen ranks."""
    return Query(f"max by (rank) ({metric}{{{_RANK}}})", legend)


def _rate(aggregate: str, metric: str, legend: str, labels: str = _RANK) -> Query:
    """How fast a counter grows, put together as `aggregate` says."""
    return Query(f"{aggregate} (rate({metric}{{{labels}}}[$__rate_interval]))", legend)


def _lines(title: str, metric: str, *queries: Query, **look: Any) -> Panel:
    """Curves over time; those of `metric` by rank where no queries are given."""
    return Panel(title, "timeseries", queries or (_each(metric),), metric, **look)


def _stat(title: str, metric: str, queries: tuple[Query, ...], *steps: tuple[float | None, str]) -> Panel:
    """A number of today, coloured by its size."""
    unit = "none" if metric == "dtobs_step" else ""
    return Panel(title, "stat", queries, metric, unit, width=4, height=5, thresholds=steps)


def _glance() -> list[Panel]:
    states = ("running", "waiting", "suspended", "dead", "missing")
    ranks = tuple(Query(f'sum(dtobs_ranks{{{_RUN},state="{state}"}})', state) for state in states)
    critical, warnings = (
        (Query(f'sum(dtobs_findings{{{_RUN},severity="{severity}"}})', severity),)
        for severity in ("critical", "warning")
    )
    goodput = (Query(f"avg(dtobs_goodput_ratio{{{_RUN}}})"),)
    stalled = "dtobs_stalled_seconds"
    columns = {"excludeByName": {"Time": True, "Value": True}, "renameByName": {}}
    return [
        _stat("Critical findings", "dtobs_findings", critical, (None, "green"), (1.0, "red")),
        _stat("Warnings", "dtobs_findings", warnings, (None, "green"), (1.0, "orange")),
        _stat("Ranks", "dtobs_ranks", ranks, (None, "blue")),
        _stat("Standing still for", stalled, (_one(stalled),), (None, "green"), (1.0, "red")),
        _stat("Step", "dtobs_step", (_one("dtobs_step"),), (None, "blue")),
        _stat("Goodput", "dtobs_goodput_ratio", goodput, (None, "red"), (0.5, "orange"), (0.8, "green")),
        Panel(
            "Open findings",
            "table",
            (Query(f"max by (code, rank) (dtobs_finding_rank{{{_RUN}}})"),),
            metric="dtobs_finding_rank",
            empty="no finding is open",
            width=12,
            height=7,
            instant=True,
            transformations=({"id": "organize", "options": columns},),
        ),
        Panel(
            "Silence of each rank",
            "bargauge",
            (_each("dtobs_heartbeat_age_seconds"),),
            metric="dtobs_heartbeat_age_seconds",
            width=12,
            height=7,
            thresholds=((None, "green"), (60.0, "orange"), (300.0, "red")),
        ),
    ]


def _learning() -> list[Panel]:
    mean = Query(f"avg(dtobs_loss{{{_RUN}}})", "training, mean of ranks")
    tokens = (
        f"max(rate(dtobs_global_tokens_total{{{_RUN}}}[$__rate_interval]))"
        f" or sum(rate(dtobs_tokens_total{{{_RUN}}}[$__rate_interval]))"
    )
    return [
        _lines(
            "Loss",
            "dtobs_loss",
            mean,
            _one("dtobs_validation_loss", "validation"),
            empty="the loop reports no loss: session.report(loss=…)",
        ),
        _lines(
            "Gradient norm",
            "dtobs_local_gradient_norm",
            _each("dtobs_local_gradient_norm", "rank {{rank}}, before reduction"),
            _one("dtobs_reduced_gradient_norm", "after reduction"),
            empty="no gradient has been read",
        ),
        _lines(
            "Learning rate",
            "dtobs_learning_rate",
            _one("dtobs_learning_rate", "learning rate"),
            empty="no optimizer was seen",
            unit="sci",
        ),
        _lines(
            "Tokens a second, all ranks",
            "dtobs_tokens_total",
            Query(tokens, "tokens/s"),
            empty="the loop reports no tokens: session.report(tokens=…)",
            description="As the training counts them, each token once; without its figure the sum of the ranks' own.",
        ),
        _lines(
            "Gradient noise scale",
            "dtobs_gradient_noise_scale_tokens",
            _one("dtobs_gradient_noise_scale_tokens", "tokens"),
            empty="needs two data ranks, reported tokens and some hundred steps",
        ),
        _lines(
            "FLOPs utilisation",
            "dtobs_mfu_ratio",
            _one("dtobs_mfu_ratio", "MFU"),
            _one("dtobs_hfu_ratio", "HFU"),
            empty="no peak is known for this device (--run.peak_flops), or no FLOPs are reported",
        ),
    ]


def _time() -> list[Panel]:
    rate = f"rate(dtobs_step_duration_seconds_bucket{{{_RUN}}}[$__rate_interval])"
    quantiles = (
        Query(f"histogram_quantile({q}, sum by (le) ({rate}))", name)
        for q, name in ((0.5, "median"), (0.99, "99th percentile"))
    )
    return [
        _lines("Step duration", "dtobs_step_duration_seconds", *quantiles),
        _lines(
            "Own work a step, by rank",
            "dtobs_busy_seconds",
            description="Step times are equal on all ranks because they wait for each other; own work is not.",
        ),
        _lines("Late to the first collective, by rank", "dtobs_arrival_skew_seconds"),
        _lines(
            "Parts of the step, mean of ranks",
            "dtobs_phase_seconds_total",
            _rate("avg by (phase)", "dtobs_phase_seconds_total", "{{phase}}"),
            unit="percentunit",
            stacked=True,
        ),
        _lines(
            "Exposed communication, by rank",
            "dtobs_exposed_communication_seconds",
            empty="the ranks do not communicate",
        ),
        _lines(
            "What slowness costs",
            "dtobs_slowdown_ratio",
            _one("dtobs_slowdown_ratio", "all"),
            Query(f"max by (stage) (dtobs_slowdown_stage_ratio{{{_RUN}}})", "stage {{stage}}"),
            Query(f"max by (fix) (dtobs_slowdown_returned_ratio{{{_RUN}}})", "returned by {{fix}}"),
            empty="at most 64 ranks are simulated at every scrape; `dtobs whatif` takes more",
            description="Time over that of the same operations made equal; the share of the loss that a fix returns.",
        ),
        _lines(
            "Pipeline bubble, by rank",
            "dtobs_pipeline_bubble_ratio",
            _each("dtobs_pipeline_bubble_ratio"),
            _one("dtobs_pipeline_bubble_replayed_ratio", "replayed"),
            _one("dtobs_pipeline_bubble_ideal_ratio", "schedule"),
            empty="no pipeline in this run",
            description="Above the replay: communication and late ranks. Replay above the schedule: uneven stages.",
        ),
        _lines("Waiting for data, by rank", "dtobs_data_wait_seconds"),
        _lines(
            "Time lost, by reason",
            "dtobs_badput_seconds_total",
            _rate("avg by (reason)", "dtobs_badput_seconds_total", "{{reason}}", _RUN),
            unit="percentunit",
            stacked=True,
            width=16,
        ),
        _lines(
            "Age of the last checkpoint",
            "dtobs_checkpoint_age_seconds",
            _one("dtobs_checkpoint_age_seconds", "age"),
            empty="no checkpoint was written yet",
        ),
    ]


def _resources() -> list[Panel]:
    return [
        _lines(
            "Bytes given to collectives, by rank",
            "dtobs_collective_bytes_total",
            _rate("sum by (rank)", "dtobs_collective_bytes_total", "rank {{rank}}"),
            empty="the ranks do not communicate",
            unit="Bps",
        ),
        _lines(
            "Bus bandwidth, by operation and group",
            "dtobs_bus_bandwidth_bytes_per_second",
            Query(f"min by (op, group) (dtobs_bus_bandwidth_bytes_per_second{{{_RUN}}})", "{{op}}, {{group}}"),
            empty="no host waits for collectives of its own ranks alone: dtobs trace has those of devices",
            unit="Bps",
        ),
        _lines("Host memory, by rank", "dtobs_rss_bytes"),
        _lines(
            "Device memory, by rank",
            "dtobs_device_memory_bytes",
            _each("dtobs_device_memory_bytes"),
            _one("dtobs_device_memory_limit_bytes", "limit"),
            empty="no device: this run is on CPUs",
        ),
    ]


def _own() -> list[Panel]:
    return [
        _lines(
            "Cost inside the training process",
            "dtobs_probe_seconds_total",
            _rate("max by (rank)", "dtobs_probe_seconds_total", "rank {{rank}}"),
            unit="percentunit",
            thresholds=((None, "green"), (0.005, "orange")),
        ),
        _lines(
            "Processor share of the monitors",
            "dtobs_monitor_cpu_seconds_total",
            Query(f"sum(rate(dtobs_monitor_cpu_seconds_total{{{_RUN}}}[$__rate_interval]))", "monitors"),
            unit="percentunit",
        ),
        _lines(
            "Failures of probes and monitor",
            "dtobs_monitor_errors_total",
            Query(f"sum(dtobs_probe_failures_total{{{_RUN}}})", "probes switched off"),
            Query(f"sum by (part) (dtobs_monitor_errors_total{{{_RUN}}})", "monitor: {{part}}"),
        ),
    ]

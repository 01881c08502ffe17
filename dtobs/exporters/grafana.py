"""The dashboard "Run overview", generated from the table of metrics."""

from __future__ import annotations

from typing import Any

from dtobs.exporters.panels import DATASOURCE, Layout, Panel, Query

UID = "dtobs-run-overview"
TITLE = "dtobs / Run overview"
SCHEMA_VERSION = 39
_RUN = 'run="$run"'
_RANK = 'run="$run",rank=~"$rank"'


def run_overview() -> dict[str, Any]:
    """The dashboard as Grafana (10 and later) imports it."""
    layout = Layout()
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
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "hide": 0,
        },
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


def _glance() -> list[Panel]:
    def count(state: str) -> Query:
        return Query(f'sum(dtobs_ranks{{{_RUN},state="{state}"}})', state)

    def findings(severity: str) -> Query:
        return Query(f'sum(dtobs_findings{{{_RUN},severity="{severity}"}})', severity)

    def stat(title: str, metric: str, queries: tuple[Query, ...], *steps: tuple[float | None, str]) -> Panel:
        unit = "none" if metric == "dtobs_step" else ""
        return Panel(title, "stat", queries, metric, unit, width=4, height=5, thresholds=steps)

    return [
        stat("Critical findings", "dtobs_findings", (findings("critical"),), (None, "green"), (1.0, "red")),
        stat("Warnings", "dtobs_findings", (findings("warning"),), (None, "green"), (1.0, "orange")),
        stat(
            "Ranks",
            "dtobs_ranks",
            tuple(count(state) for state in ("running", "waiting", "suspended", "dead", "missing")),
            (None, "blue"),
        ),
        stat(
            "Standing still for",
            "dtobs_stalled_seconds",
            (Query(f"max(dtobs_stalled_seconds{{{_RUN}}})"),),
            (None, "green"),
            (1.0, "red"),
        ),
        stat("Step", "dtobs_step", (Query(f"max(dtobs_step{{{_RUN}}})"),), (None, "blue")),
        stat(
            "Goodput",
            "dtobs_goodput_ratio",
            (Query(f"avg(dtobs_goodput_ratio{{{_RUN}}})"),),
            (None, "red"),
            (0.5, "orange"),
            (0.8, "green"),
        ),
        Panel(
            "Open findings",
            "table",
            (Query(f"max by (code, rank) (dtobs_finding_rank{{{_RUN}}})"),),
            metric="dtobs_finding_rank",
            empty="no finding is open",
            width=12,
            height=7,
            instant=True,
            transformations=(
                {
                    "id": "organize",
                    "options": {"excludeByName": {"Time": True, "Value": True}, "renameByName": {}},
                },
            ),
        ),
        Panel(
            "Silence of each rank",
            "bargauge",
            (Query(f"max by (rank) (dtobs_heartbeat_age_seconds{{{_RANK}}})", "rank {{rank}}"),),
            metric="dtobs_heartbeat_age_seconds",
            width=12,
            height=7,
            thresholds=((None, "green"), (60.0, "orange"), (300.0, "red")),
        ),
    ]


def _learning() -> list[Panel]:
    return [
        Panel(
            "Loss",
            "timeseries",
            (
                Query(f"avg(dtobs_loss{{{_RUN}}})", "training, mean of ranks"),
                Query(f"max(dtobs_validation_loss{{{_RUN}}})", "validation"),
            ),
            metric="dtobs_loss",
            empty="the loop reports no loss: session.report(loss=…)",
        ),
        Panel(
            "Gradient norm",
            "timeseries",
            (
                Query(f"max by (rank) (dtobs_local_gradient_norm{{{_RANK}}})", "rank {{rank}}, before reduction"),
                Query(f"max(dtobs_reduced_gradient_norm{{{_RUN}}})", "after reduction"),
            ),
            metric="dtobs_local_gradient_norm",
            empty="no gradient has been read",
        ),
        Panel(
            "Learning rate",
            "timeseries",
            (Query(f"max(dtobs_learning_rate{{{_RUN}}})", "learning rate"),),
            metric="dtobs_learning_rate",
            empty="no optimizer was seen",
            unit="sci",
        ),
        Panel(
            "Tokens a second, all ranks",
            "timeseries",
            (
                Query(
                    f"max(rate(dtobs_global_tokens_total{{{_RUN}}}[$__rate_interval]))"
                    f" or sum(rate(dtobs_tokens_total{{{_RUN}}}[$__rate_interval]))",
                    "tokens/s",
                ),
            ),
            metric="dtobs_tokens_total",
            empty="the loop reports no tokens: session.report(tokens=…)",
            description="As the training counts them, each token once; without its figure the sum of the ranks' own.",
        ),
        Panel(
            "Gradient noise scale",
            "timeseries",
            (Query(f"max(dtobs_gradient_noise_scale_tokens{{{_RUN}}})", "tokens"),),
            metric="dtobs_gradient_noise_scale_tokens",
            empty="needs two data ranks, reported tokens and some hundred steps",
        ),
        Panel(
            "Model FLOPs utilisation",
            "timeseries",
            (Query(f"max(dtobs_mfu_ratio{{{_RUN}}})", "MFU"),),
            metric="dtobs_mfu_ratio",
            empty="no peak is known for this device (--run.peak_flops), or no FLOPs are reported",
        ),
    ]


def _time() -> list[Panel]:
    rate = f"rate(dtobs_step_duration_seconds_bucket{{{_RUN}}}[$__rate_interval])"
    return [
        Panel(
            "Step duration",
            "timeseries",
            tuple(
                Query(f"histogram_quantile({q}, sum by (le) ({rate}))", name)
                for q, name in ((0.5, "median"), (0.99, "99th percentile"))
            ),
            metric="dtobs_step_duration_seconds",
        ),
        Panel(
            "Own work a step, by rank",
            "timeseries",
            (Query(f"max by (rank) (dtobs_busy_seconds{{{_RANK}}})", "rank {{rank}}"),),
            metric="dtobs_busy_seconds",
            description="Step times are equal on all ranks because they wait for each other; own work is not.",
        ),
        Panel(
            "Late to the first collective, by rank",
            "timeseries",
            (Query(f"max by (rank) (dtobs_arrival_skew_seconds{{{_RANK}}})", "rank {{rank}}"),),
            metric="dtobs_arrival_skew_seconds",
        ),
        Panel(
            "Parts of the step, mean of ranks",
            "timeseries",
            (
                Query(
                    f"avg by (phase) (rate(dtobs_phase_seconds_total{{{_RANK}}}[$__rate_interval]))",
                    "{{phase}}",
                ),
            ),
            metric="dtobs_phase_seconds_total",
            unit="percentunit",
            stacked=True,
        ),
        Panel(
            "Exposed communication, by rank",
            "timeseries",
            (Query(f"max by (rank) (dtobs_exposed_communication_seconds{{{_RANK}}})", "rank {{rank}}"),),
            metric="dtobs_exposed_communication_seconds",
            empty="the ranks do not communicate",
        ),
        Panel(
            "What slowness costs",
            "timeseries",
            (
                Query(f"max(dtobs_slowdown_ratio{{{_RUN}}})", "all"),
                Query(f"max by (stage) (dtobs_slowdown_stage_ratio{{{_RUN}}})", "stage {{stage}}"),
                Query(f"max by (fix) (dtobs_slowdown_returned_ratio{{{_RUN}}})", "returned by {{fix}}"),
            ),
            metric="dtobs_slowdown_ratio",
            empty="at most 64 ranks are simulated at every scrape; `dtobs whatif` takes more",
            description="Time over that of the same operations made equal; the share of the loss that a fix returns.",
        ),
        Panel(
            "Pipeline bubble, by rank",
            "timeseries",
            (
                Query(f"max by (rank) (dtobs_pipeline_bubble_ratio{{{_RANK}}})", "rank {{rank}}"),
                Query(f"max(dtobs_pipeline_bubble_replayed_ratio{{{_RUN}}})", "replayed"),
                Query(f"max(dtobs_pipeline_bubble_ideal_ratio{{{_RUN}}})", "schedule"),
            ),
            metric="dtobs_pipeline_bubble_ratio",
            empty="no pipeline in this run",
            description="Above the replay: communication and late ranks. Replay above the schedule: uneven stages.",
        ),
        Panel(
            "Waiting for data, by rank",
            "timeseries",
            (Query(f"max by (rank) (dtobs_data_wait_seconds{{{_RANK}}})", "rank {{rank}}"),),
            metric="dtobs_data_wait_seconds",
        ),
        Panel(
            "Time lost, by reason",
            "timeseries",
            (
                Query(
                    f"avg by (reason) (rate(dtobs_badput_seconds_total{{{_RUN}}}[$__rate_interval]))",
                    "{{reason}}",
                ),
            ),
            metric="dtobs_badput_seconds_total",
            unit="percentunit",
            stacked=True,
            width=16,
        ),
        Panel(
            "Age of the last checkpoint",
            "timeseries",
            (Query(f"max(dtobs_checkpoint_age_seconds{{{_RUN}}})", "age"),),
            metric="dtobs_checkpoint_age_seconds",
            empty="no checkpoint was written yet",
        ),
    ]


def _resources() -> list[Panel]:
    return [
        Panel(
            "Bytes given to collectives, by rank",
            "timeseries",
            (
                Query(
                    f"sum by (rank) (rate(dtobs_collective_bytes_total{{{_RANK}}}[$__rate_interval]))",
                    "rank {{rank}}",
                ),
            ),
            metric="dtobs_collective_bytes_total",
            empty="the ranks do not communicate",
            unit="Bps",
        ),
        Panel(
            "Host memory, by rank",
            "timeseries",
            (Query(f"max by (rank) (dtobs_rss_bytes{{{_RANK}}})", "rank {{rank}}"),),
            metric="dtobs_rss_bytes",
        ),
        Panel(
            "Device memory, by rank",
            "timeseries",
            (
                Query(f"max by (rank) (dtobs_device_memory_bytes{{{_RANK}}})", "rank {{rank}}"),
                Query(f"max(dtobs_device_memory_limit_bytes{{{_RUN}}})", "limit"),
            ),
            metric="dtobs_device_memory_bytes",
            empty="no device: this run is on CPUs",
        ),
    ]


def _own() -> list[Panel]:
    return [
        Panel(
            "Cost inside the training process",
            "timeseries",
            (
                Query(
                    f"max by (rank) (rate(dtobs_probe_seconds_total{{{_RANK}}}[$__rate_interval]))",
                    "rank {{rank}}",
                ),
            ),
            metric="dtobs_probe_seconds_total",
            unit="percentunit",
            thresholds=((None, "green"), (0.005, "orange")),
        ),
        Panel(
            "Processor share of the monitors",
            "timeseries",
            (Query(f"sum(rate(dtobs_monitor_cpu_seconds_total{{{_RUN}}}[$__rate_interval]))", "monitors"),),
            metric="dtobs_monitor_cpu_seconds_total",
            unit="percentunit",
        ),
        Panel(
            "Failures of probes and monitor",
            "timeseries",
            (
                Query(f"sum(dtobs_probe_failures_total{{{_RUN}}})", "probes switched off"),
                Query(f"sum by (part) (dtobs_monitor_errors_total{{{_RUN}}})", "monitor: {{part}}"),
            ),
            metric="dtobs_monitor_errors_total",
        ),
    ]

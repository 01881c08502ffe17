"""Alert rules for Prometheus and their promtool tests, as YAML text: one for each code, and a few direct ones.

Findings are debounced by the monitor already. Each rule looks back five minutes, because a run that dies takes its
monitor with it soon after the finding was scraped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dtobs.findings import CATALOGUE, Code, Severity

_RANKS = (
    '{{ range query (printf "max by (rank) (max_over_time(dtobs_finding_rank{run=%q,code=%q}[5m]))"'
    " $labels.run $labels.code) }} {{ .Labels.rank }}{{ end }}"
)


@dataclass(frozen=True)
class Alert:
    """One rule. `firing` and `quiet` are input series (name, values a minute) of its promtool tests."""

    name: str
    runbook: str  #: file name below alerts/runbooks, without the suffix
    expr: str
    severity: str
    summary: str
    description: str
    firing: tuple[tuple[str, str], ...]
    quiet: tuple[tuple[str, str], ...]
    labels: tuple[tuple[str, str], ...]  #: of the alert that fires in the test
    expected: str  #: the description as the test gets it
    wait: str = "0s"
    advice: str = ""


def alerts() -> list[Alert]:
    """All rules, findings first, in the order of the catalogue."""
    return [*(_of_code(code) for code in CATALOGUE.values()), *_direct()]


def alert_name(code: str) -> str:
    """DtobsRankDead for rank-dead."""
    return "Dtobs" + "".join(part.capitalize() for part in code.split("-"))


def _of_code(code: Code) -> Alert:
    series = f'dtobs_findings{{run="r",code="{code.name}",severity="{code.severity.value}"}}'
    rank = f'dtobs_finding_rank{{run="r",code="{code.name}",rank="3"}}'
    return Alert(
        name=alert_name(code.name),
        runbook=code.name,
        expr=f'max by (run, code) (max_over_time(dtobs_findings{{code="{code.name}",severity!="note"}}[5m])) > 0',
        severity=code.severity.value,
        summary=code.title,
        description=f"Run {{{{ $labels.run }}}}, ranks:{_RANKS}. {code.next_step}",
        firing=((series, "0 0 1x10"), (rank, "_ _ 1x10")),
        quiet=((series, "0x12"),),
        labels=(("code", code.name), ("run", "r")),
        expected=f"Run r, ranks: 3. {code.next_step}",
        advice=code.next_step,
    )


def _direct() -> Iterable[Alert]:
    critical, warning = Severity.CRITICAL.value, Severity.WARNING.value
    yield Alert(
        "DtobsRunStalled",
        "run-stalled",
        "max by (run) (max_over_time(dtobs_stalled_seconds[2m])) > 0",
        critical,
        "Nothing moves on any rank",
        "Run {{ $labels.run }} stands still. Read `dtobs diagnose` on its directory.",
        (('dtobs_stalled_seconds{run="r"}', "0 0 70+60x10"),),
        (('dtobs_stalled_seconds{run="r"}', "0x12"),),
        (("run", "r"),),
        "Run r stands still. Read `dtobs diagnose` on its directory.",
    )
    yield Alert(
        "DtobsHeartbeatOld",
        "heartbeat-old",
        "max by (run, rank) (dtobs_heartbeat_age_seconds) > 900",
        critical,
        "A rank has not been heard of for 15 minutes",
        "Rank {{ $labels.rank }} of run {{ $labels.run }} is silent.",
        (('dtobs_heartbeat_age_seconds{run="r",rank="1"}', "1 1 1000+60x10"),),
        (('dtobs_heartbeat_age_seconds{run="r",rank="1"}', "1x12"),),
        (("rank", "1"), ("run", "r")),
        "Rank 1 of run r is silent.",
    )
    yield Alert(
        "DtobsNoSteps",
        "no-steps",
        "sum by (run) (increase(dtobs_steps_total[15m])) == 0 and on (run) max by (run) (dtobs_steps_total) > 0"
        ' and on (run) max by (run) (dtobs_ranks{state=~"starting|running|loading|waiting|silent|suspended"}) > 0',
        critical,
        "Ranks run but no step was finished for 15 minutes",
        "Run {{ $labels.run }} makes no steps.",
        (('dtobs_steps_total{run="r",rank="0"}', "5x60"), ('dtobs_ranks{run="r",state="running"}', "2x60")),
        (('dtobs_steps_total{run="r",rank="0"}', "5+5x60"), ('dtobs_ranks{run="r",state="running"}', "2x60")),
        (("run", "r"),),
        "Run r makes no steps.",
        wait="1m",
    )
    yield Alert(
        "DtobsProbeFailed",
        "probe-failed",
        "max by (run, rank) (dtobs_probe_failures_total) > 0",
        warning,
        "A probe failed and switched itself off",
        "Rank {{ $labels.rank }} of run {{ $labels.run }} is observed only in part.",
        (('dtobs_probe_failures_total{run="r",rank="1"}', "0 0 1x10"),),
        (('dtobs_probe_failures_total{run="r",rank="1"}', "0x12"),),
        (("rank", "1"), ("run", "r")),
        "Rank 1 of run r is observed only in part.",
    )
    yield Alert(
        "DtobsMonitorFailing",
        "monitor-failing",
        "sum by (run, part) (increase(dtobs_monitor_errors_total[10m])) > 0",
        warning,
        "A monitor cannot do part of its work",
        "The monitor of run {{ $labels.run }} fails in: {{ $labels.part }}.",
        (('dtobs_monitor_errors_total{run="r",part="journal"}', "0 0 1+1x10"),),
        (('dtobs_monitor_errors_total{run="r",part="journal"}', "0x12"),),
        (("part", "journal"), ("run", "r")),
        "The monitor of run r fails in: journal.",
    )
    yield Alert(
        "DtobsMonitorGone",
        "monitor-gone",
        "last_over_time(dtobs_run_ended[15m]) == 0 unless dtobs_run_ended",
        warning,
        "A monitor is gone while its ranks still trained",
        "Run {{ $labels.run }} is no longer watched.",
        (('dtobs_run_ended{run="r"}', "0 0 _x20"),),
        (('dtobs_run_ended{run="r"}', "0 1 _x20"),),
        (("run", "r"),),
        "Run r is no longer watched.",
        wait="1m",
    )


def rules_yaml() -> str:
    """``dtobs.rules.yml``."""
    lines = ["# Generated by `python -m dtobs.exporters.generate`; do not edit.", "groups:"]
    by_group = {"dtobs-findings": [a for a in alerts() if a.runbook in CATALOGUE]}
    by_group["dtobs-run"] = [a for a in alerts() if a.runbook not in CATALOGUE]
    for group, members in by_group.items():
        lines += [f"  - name: {group}", "    rules:"]
        for alert in members:
            lines += [
                f"      - alert: {alert.name}",
                f"        expr: {_quoted(alert.expr)}",
                f"        for: {alert.wait}",
                "        labels:",
                f"          severity: {alert.severity}",
                "        annotations:",
                f"          summary: {_quoted(alert.summary)}",
                f"          description: {_quoted(alert.description)}",
                f"          runbook: {_quoted(_runbook(alert))}",
            ]
    return "\n".join(lines) + "\n"


def promtool_yaml() -> str:
    """promtool's tests: each alert fires on its fault, late enough and with its texts, and is quiet on the twin."""
    lines = [
        "# Generated by `python -m dtobs.exporters.generate`; do not edit.",
        "rule_files:",
        "  - ../dtobs.rules.yml",
        "evaluation_interval: 1m",
        "tests:",
    ]
    for alert in alerts():
        labels = {"severity": alert.severity, **dict(alert.labels)}
        firing: dict[str, Any] = {
            "exp_labels": labels,
            "exp_annotations": {"summary": alert.summary, "description": alert.expected, "runbook": _runbook(alert)},
        }
        when = {"no-steps": "20m", "monitor-gone": "10m"}.get(alert.runbook, "4m")
        lines += _test(alert, "fires", alert.firing, [("0m", []), (when, [firing])])
        lines += _test(alert, "stays quiet", alert.quiet, [(when, [])])
    return "\n".join(lines) + "\n"


def _test(
    alert: Alert, what: str, series: tuple[tuple[str, str], ...], checks: list[tuple[str, list[dict[str, Any]]]]
) -> list[str]:
    lines = [f"  - name: {_quoted(f'{alert.name} {what}')}", "    interval: 1m", "    input_series:"]
    for name, values in series:
        lines += [f"      - series: {_quoted(name)}", f"        values: {_quoted(values)}"]
    lines.append("    alert_rule_test:")
    for when, expected in checks:
        # JSON is YAML: the expectation needs no layout of its own.
        lines += [
            f"      - eval_time: {when}",
            f"        alertname: {alert.name}",
            f"        exp_alerts: {json.dumps(expected, ensure_ascii=False)}",
        ]
    return lines


def _runbook(alert: Alert) -> str:
    return f"alerts/runbooks/{alert.runbook}.md"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

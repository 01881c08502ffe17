"""The table of times from fault to verdict."""

from __future__ import annotations

import json
from typing import Any

from tests.benchmarks.drill_table import main


def row(fault: str, code: str | None, wrapper: str, seconds: float | None, **changes: Any) -> dict[str, Any]:
    said = {"fault": fault, "family": "hangs", "wrapper": wrapper, "expected": code, "found": code}
    return {**said, "seconds": seconds, "passed": True, "skipped": None, **changes}


def test_median_and_worst_of_each_cause_over_several_runs(tmp_path, capsys):
    first = [
        row("none", None, "ddp", None),
        row("killed", "rank-dead", "ddp", 0.1),
        row("killed", "rank-dead", "pp", 0.4),
    ]
    second = [
        row("killed", "rank-dead", "ddp", 0.2),
        row("absent", "rank-not-joined", "ddp", 2.4),
        row("absent", "rank-not-joined", "tp", 9.0, passed=False),
        row(
            "out-of-memory",
            "rank-oom-killed",
            "ddp",
            None,
            skipped="no memory control group can be made here",
        ),
    ]
    paths = []
    for n, rows in enumerate((first, second)):
        paths.append(tmp_path / f"{n}.json")
        paths[-1].write_text(json.dumps(rows))
    assert main([str(path) for path in paths]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| cause | injected by | layouts | found | median s | worst s |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `rank-dead` | killed | ddp, pp | 3 of 3 | 0.2 | 0.4 |",
        "| `rank-not-joined` | absent | ddp, tp | 1 of 2 | 2.4 | 2.4 |",
        "",
        "Healthy twins without any finding: 1 of 1.",
    ]

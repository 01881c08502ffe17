"""The table of dtobs/README.md: seconds from a fault to its verdict, median and worst, from the drill's own figures.

    dtobs drill --json > drill.json            # once or several times
    python -m tests.benchmarks.drill_table drill.json …

One row a cause: where it was injected, how often it was found, how long that took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def table(rows: Iterable[Row]) -> str:
    """Markdown. `rows` are those of ``dtobs drill --json``, of any number of runs."""
    causes: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["family"] == "hangs" and row["expected"] and not row.get("skipped"):
            causes[row["expected"]].append(row)
    lines = [
        "| cause | injected by | layouts | found | median s | worst s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for code, found in sorted(causes.items(), key=lambda item: (_median(item[1]), item[0])):
        seconds = _seconds(found)
        figures = f"{statistics.median(seconds):.1f} | {max(seconds):.1f}" if seconds else "– | –"
        good = sum(row["passed"] for row in found)
        faults, layouts = _several(found, "fault"), _several(found, "wrapper")
        lines.append(f"| `{code}` | {faults} | {layouts} | {good} of {len(found)} | {figures} |")
    return "\n".join(lines) + "\n"


def quiet(rows: Iterable[Row]) -> str:
    """One sentence on the healthy twins."""
    twins = [row for row in rows if row["expected"] is None]
    good = sum(row["passed"] for row in twins)
    return f"Healthy twins without any finding: {good} of {len(twins)}.\n"


def _seconds(rows: list[Row]) -> list[float]:
    return [row["seconds"] for row in rows if row["seconds"] is not None and row["passed"]]


def _median(rows: list[Row]) -> float:
    return statistics.median(_seconds(rows) or [float("inf")])


def _several(rows: list[Row], field: str) -> str:
    return ", ".join(dict.fromkeys(str(row[field]) for row in rows))


def main(argv: list[str] | None = None) -> int:
    """Print the table of one or several runs of the drill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="what `dtobs drill --json` printed")
    args = parser.parse_args(argv)
    rows = [row for file in args.files for row in json.loads(file.read_text())]
    sys.stdout.write(table(rows) + "\n" + quiet(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

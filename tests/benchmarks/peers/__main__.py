"""Command line of the benchmark: a Markdown table, or one JSON object with --json."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from tests.benchmarks.peers.measure import MODEL, Plan, Turn, installed, measure, ratio, seconds
from tests.harness import run_ranks

OURS = ("runtime", "runtime + dtobs")
GROUPS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    # name: ranks, contenders beside our own, flags of the runtime
    "1 rank": (1, ("plain loop", "Accelerate", "Lightning Fabric"), ()),
    "2 ranks, DDP": (2, ("plain loop", "Accelerate", "Lightning Fabric"), ()),
    "2 ranks, FSDP2": (2, ("plain FSDP2 loop",), ("--parallel.shard", "2")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    if not options.json:
        print("| ranks | ours | over | CPU, ratio (5–95 %) | wall, ratio (5–95 %) | its CPU ms a step and rank |")
        print("| --- | --- | --- | --- | --- | --- |")
    for group in options.groups:
        ranks, peers, layout = GROUPS[group]
        plan = Plan((*installed(peers), *OURS), options.rounds, options.steps, (*MODEL, *layout))
        results = run_ranks(measure, ranks, plan, timeout=3600)
        rows = compare(group, [turn for result in results for turn in result.value[1]], plan, ranks)
        found += rows
        if not options.json:
            print("\n".join(map(_row, rows)), flush=True)
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    return 0


def compare(group: str, turns: list[Turn], plan: Plan, ranks: int) -> list[dict[str, Any]]:
    """Each of ours over each peer, and observed over not observed."""
    rows = []
    for ours in OURS:
        for name in plan.names:
            if name == ours or (ours == "runtime" and name in OURS):
                continue
            times = {w: (seconds(turns, ours, w), seconds(turns, name, w)) for w in ("cpu", "wall")}
            rows.append(
                {
                    "group": group,
                    "ours": ours,
                    "over": name,
                    "cpu": asdict(ratio(*times["cpu"])),
                    "wall": asdict(ratio(*times["wall"])),
                    "over_cpu_ms": 1e3 * sum(times["cpu"][1]) / plan.rounds / plan.steps / ranks,
                }
            )
    return rows


def _row(found: dict[str, Any]) -> str:
    """One row of the Markdown table."""
    times = (f"{t['value']:.3f} ({t['low']:.3f}–{t['high']:.3f})" for t in (found["cpu"], found["wall"]))
    cells = (found["group"], found["ours"], found["over"], *times, f"{found['over_cpu_ms']:.0f}")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())

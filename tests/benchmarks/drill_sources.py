"""The table of real drills in dtobs/logs/README.md: what each source, alone, tells of one and the same real job.

    dtobs drill --quick --keep drills/ --json > drill.json
    python -m tests.benchmarks.drill_sources drills/ drill.json

Of every kept drill the recording, the Flight Recorder dumps and stacks of its captures, its console output (without
the lines of dtobs itself) and counts as NCCL RAS tells them (made of the dumps, for Gloo has no RAS) are diagnosed
each for itself. Cells as in the table of `tests.unit.calls.table`; "cause" is the right rank under another code that
says the same of it, "other" a finding that names other ranks, and must not stand there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtobs.diagnose.target import diagnose_target
from dtobs.errors import DtobsError
from dtobs.findings import Confidence, Finding

SOURCES = ("recording", "dumps", "console", "RAS, once", "stacks")
_RAS_NAMES = {"all_reduce": "AllReduce", "broadcast": "Broadcast", "all_gather": "AllGather", "barrier": "AllReduce"}


def table(drills: Path, rows: list[dict[str, Any]]) -> str:
    """Markdown: one row a fault, one column a source."""
    lines = [f"| real drill | {' | '.join(SOURCES)} |", f"| --- |{' --- |' * len(SOURCES)}"]
    for row in rows:
        kept = drills / f"hangs-{row['fault']}-{row['wrapper']}"
        if row["family"] != "hangs" or row.get("skipped") or not kept.is_dir():
            continue
        cells = [cell(row, found) for found in judged(kept)]
        lines.append(f"| `{row['fault']}`: {row['expected'] or 'healthy'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def judged(kept: Path) -> Iterator[Finding | str | None]:
    """The verdict of each source; the words "no file" where it left nothing."""
    captures = sorted((kept / "run" / "captures").glob("*/"))
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: Path(scratch, name) for name in SOURCES[1:]}
        for folder in folders.values():
            folder.mkdir()
        dumps = sorted(captures[-1].glob("rank-*.fr.json")) if captures else []
        for path in dumps:
            shutil.copy(path, folders["dumps"] / f"rank-{int(path.name[5:10])}.json")
        if dumps:
            (folders["RAS, once"] / "ras.json").write_text(json.dumps(_ras(dumps)))
        for path in kept.glob("rank-*.log"):
            text = "".join(line for line in path.read_text(errors="replace").splitlines(True) if "dtobs: " not in line)
            (folders["console"] / path.name).write_text(text)
        for path in captures[-1].glob("rank-*.stacks.txt") if captures else []:
            shutil.copy(path, folders["stacks"] / f"rank_{int(path.name[5:10])}.txt")
        for folder in (kept / "run", *folders.values()):
            if not any(path.stat().st_size for path in folder.iterdir()):
                yield "no file"
                continue
            try:
                yield diagnose_target([str(folder)]).verdict
            except DtobsError as error:
                yield f"cannot tell ({type(error).__name__})"


def cell(row: dict[str, Any], found: Finding | str | None) -> str:
    """What a source made of a drill that did something to rank 1, or to nobody."""
    if isinstance(found, str):
        return found
    if row["expected"] is None:
        return "quiet" if found is None else f"WRONG: {found.code} {found.ranks}"
    if found is None:
        return "–"
    sure = "found" if found.confidence is Confidence.CERTAIN else found.confidence.value
    if found.code == row["expected"] and set(found.ranks) <= set(row.get("ranks") or [1]):
        return sure
    if not found.ranks or found.code == "dumps-missing":
        return f"cannot tell ({found.code})"
    if set(found.ranks) <= set(row.get("ranks") or [1]):
        return f"rank ({found.code}, {sure})"
    return f"other: {found.code} {list(found.ranks)} {sure}"


def _ras(dumps: list[Path]) -> dict[str, Any]:
    """Launches of every operation by every rank of every group, as RAS would count them."""
    communicators: dict[str, list[dict[str, Any]]] = {}
    for rank, path in enumerate(dumps):
        counts: dict[str, Counter[str]] = {}
        for entry in json.loads(path.read_text()).get("entries", []):
            name = entry["profiling_name"].partition(":")[2]
            counts.setdefault(":".join(entry["process_group"]), Counter())[_RAS_NAMES.get(name, "AllReduce")] += 1
        for group, made in counts.items():
            communicators.setdefault(group, []).append(
                {"rank": rank, "host": "a", "pid": 1000 + rank, "cuda_dev": 0, "collective_counts": dict(made)}
            )
    return {
        "nccl_version": "2.28.7",
        "ras": {},
        "communicators": [
            {"hash": f"0x{number + 1:x}", "size": len(dumps), "missing_ranks": [], "ranks": ranks}
            for number, ranks in enumerate(communicators.values())
        ],
    }


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drills", type=Path, help="what dtobs drill --keep left")
    parser.add_argument("rows", type=Path, help="what dtobs drill --json printed")
    args = parser.parse_args(argv)
    sys.stdout.write(table(args.drills, json.loads(args.rows.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())

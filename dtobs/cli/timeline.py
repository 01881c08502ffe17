"""Draw what the ranks did in chosen steps: phases, pipeline micro-batches, messages and waits.

RUN is a run directory; without one, the newest below ./runs. Prints a line a rank, where the time of its steps went,
the pipeline's bubble (measured, replayed, the schedule's own) and what would make it smaller. With -o it writes a
Chrome trace for ui.perfetto.dev (.json, .json.gz) or a picture (.svg).

examples:
  dtobs timeline
  dtobs timeline runs/20261120T120000Z-run --steps 10-12 -o timeline.json
  dtobs timeline runs/20261120T120000Z-run -o timeline.svg
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np

from dtobs.cli import Exit
from dtobs.errors import UsageError, opening
from dtobs.recording.view import RunView, load_run
from dtobs.timeline.bubble import Bubble, measure
from dtobs.timeline.chrome import chrome_trace
from dtobs.timeline.partition import partition
from dtobs.timeline.picture import bubble_line, svg, text
from dtobs.timeline.pipeline import pipelines, read_steps
from dtobs.timeline.pipeline_advice import advise, layers_of
from dtobs.timeline.spans import Timeline, timeline
from dtobs.tui.source import newest_run

_MOST = 16
_FORMATS = (".json", ".json.gz", ".svg")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory (default: the newest in ./runs)")
    parser.add_argument("--steps", metavar="A-B", help="which steps, such as 12 or 10-12 (default: the last 3)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"write {', '.join(_FORMATS)}")
    parser.add_argument("--json", action="store_true", help="print the Chrome trace instead of the picture")


def run(args: argparse.Namespace) -> int:
    """Draw, and write where asked."""
    first, last = _steps(args.steps)
    output: Path | None = args.output
    if output is not None and not output.name.endswith(_FORMATS):
        raise UsageError(f"-o {output}: give a name that ends in {', '.join(_FORMATS)}")
    target = Path(args.run or newest_run(Path.cwd()))
    with opening(target):
        view = load_run(target, with_capture=False)
    found = timeline(view, first, last)
    steps = [step for plan in pipelines(view) for step in read_steps(view, plan, 4096) if step.step == found.steps[-1]]
    bubbles = [bubble for step in steps if (bubble := measure(step)) is not None]
    if args.json:
        print(json.dumps(chrome_trace(found)))
    else:
        print(text(found, shutil.get_terminal_size((100, 24)).columns), end="")
        for line in _partitions(view, found):
            print(line)
        for bubble in bubbles:
            print(bubble_line(bubble))
        tried = (advice for step in steps for advice in advise(step, layers_of(view, step.plan)))
        for line in dict.fromkeys(advice.line() for advice in tried):
            print(f"try {line}")
    if output is not None:
        _write(output, found, bubbles[0] if len(bubbles) == 1 else None)
        if not args.json:
            print(f"written: {output}")
    return Exit.NOTHING_FOUND


def _partitions(view: RunView, found: Timeline) -> list[str]:
    """Where the time went, of at most `_MOST` ranks: those that waited least, whom the others waited for, first."""
    records = {r: view.rank_steps(r) for r in found.ranks}
    parts = [partition(r, steps[np.isin(steps["step"], found.steps)]) for r, steps in records.items()]
    known = [part for part in parts if part is not None]
    chosen = sorted(known, key=lambda p: -p.busy)[:_MOST]
    return [f"time of rank {part.rank}: {part.line()}" for part in sorted(chosen, key=lambda p: p.rank)]


def _steps(given: str | None) -> tuple[int | None, int | None]:
    if given is None:
        return None, None
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", given)
    if not match:
        raise UsageError(f"--steps {given}: give a step or a range, such as 12 or 10-12")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise UsageError(f"--steps {given}: the range ends before it begins")
    return first, last


def _write(path: Path, found: Timeline, bubble: Bubble | None) -> None:
    data = svg(found, bubble) if path.name.endswith(".svg") else json.dumps(chrome_trace(found))
    raw = data.encode()
    try:
        path.write_bytes(gzip.compress(raw) if path.name.endswith(".gz") else raw)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error

"""What the monitor costs: ``python -m tests.benchmarks.monitor [--ranks 8] [--seconds 30] [--parts] [--json]``.

Simulated ranks do ten steps a second beside a real monitor process; its processor time (start-up apart), its memory and
the time until it served are read from /proc. One core is 100 %.

With ``--parts``: processor milliseconds of a look at the run, of counting its steps, of a scrape (the text of the
metrics, all ranks on one node) and of a pass of all detectors, each the least of several, every rank having done a
step in between. A monitor lets dear detectors rest between two passes; here each is asked in every pass. With ``--laws
N``, every rank has written N looks of each of three laws: the gradient ledger, the update audit and the conservation
of collectives, in data-parallel groups of up to 64 ranks.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from dtobs.detectors import KNOWN, run_detectors
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.prometheus import exposition
from dtobs.exporters.totals import StepTotals
from dtobs.host.process import read_process
from dtobs.monitor.address import addresses
from dtobs.recording.laws import CONSERVATION, LEDGER, SKETCHES, UPDATES, WINDOW, MessageEnd, ReductionRule, Side
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView, load_run
from dtobs.testing.fake_run import FakeRun

T = TypeVar("T")
_TICK = 0.1
_ROUNDS = 5


def measure(ranks: int, seconds: float) -> dict[str, float]:
    """Processor share, memory in MB and seconds (wall and processor) until the monitor serves."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        run = FakeRun(root, world=ranks, ranks_per_node=ranks)
        run.steps(200)
        begin = time.monotonic()
        monitor = subprocess.Popen([sys.executable, "-m", "dtobs.monitor", str(root)], stderr=subprocess.DEVNULL)
        try:
            while 0 not in addresses(RunDirectory(root)):
                time.sleep(0.01)
            wall, start = time.monotonic() - begin, read_process(monitor.pid).cpu_seconds
            train(run, seconds)
            state = read_process(monitor.pid)
        finally:
            monitor.terminate()
            monitor.wait()
    return {
        "ranks": ranks,
        "start_seconds": wall,
        "start_cpu_seconds": start,
        "cpu_share": (state.cpu_seconds - start) / seconds,
        "rss_mb": state.rss_bytes / 1e6,
    }


def write_laws(run: FakeRun, looks: int) -> None:
    """`looks` healthy looks of each law on every rank: eight tensors, all looked at in turn."""
    names = [f"blocks.{n}.weight" for n in range(8)]
    chance = np.random.default_rng(1)
    together = [list(range(first, min(first + 64, run.world))) for first in range(0, run.world, 64)]
    groups = [run.group(f"data {ranks[0]}", tuple(ranks)) for ranks in together]
    for number, ranks in zip(groups, together, strict=True):
        shares = chance.normal(size=(looks, len(ranks), SKETCHES))
        sums = shares.sum(1)
        window = chance.normal(size=4 * WINDOW)
        for place, rank in enumerate(ranks):
            fake = run.rank(rank).collective("all_reduce", group=number)
            fake.meta("law", name="ledger", since=0, rows=names, sets=[ranks], of=[0] * len(names))
            fake.meta(
                "law",
                name="updates",
                since=0,
                kinds={"0": ""},
                optimizers=[0] * len(names),
                rows=names,
                dtypes=["float32"] * len(names),
            )
            ledger, updates, calls = (fake.recorder.law(law) for law in (LEDGER, UPDATES, CONSERVATION))
            for look in range(looks):
                step, row = look, look % len(names)
                for side, value in ((Side.LOCAL, shares[look, place]), (Side.FINAL, sums[look] / len(ranks))):
                    record = np.zeros((), LEDGER.dtype)
                    record["step"], record["row"], record["side"], record["value"] = step, row, side, value
                    record["scale"] = 3.0
                    ledger.append(record)
                record = np.zeros((), UPDATES.dtype)
                record["step"], record["row"], record["count"], record["before"] = step, row, WINDOW, window
                record["after"] = record["rest"] = window[: 3 * WINDOW]
                updates.append(record)
                for end, value in ((MessageEnd.IN, shares[look, place]), (MessageEnd.OUT, sums[look])):
                    record = np.zeros((), CONSERVATION.dtype)
                    record["step"], record["group"], record["call"], record["end"] = step, number, look + 1, end
                    record["rule"], record["source"], record["target"] = ReductionRule.SUM, -1, -1
                    record["value"], record["scale"], record["epsilon"], record["count"] = value, 3.0, 2.0**-23, 1024
                    record["digest"] = look + 1 if end == MessageEnd.OUT else look * 4096 + rank + 10_000
                    calls.append(record)


def measure_parts(ranks: int, laws: int = 0) -> dict[str, float]:
    """Processor milliseconds by part, the least of `_ROUNDS`."""
    best: dict[str, float] = {}

    def timed(part: str, work: Callable[[], T]) -> T:
        begin = time.process_time()
        result = work()
        best[part] = min(best.get(part, float("inf")), (time.process_time() - begin) * 1e3)
        return result

    with tempfile.TemporaryDirectory() as folder:
        run = FakeRun(Path(folder) / "run", world=ranks, ranks_per_node=ranks)
        run.steps(32)
        if laws:
            write_laws(run, laws)
        totals, view = StepTotals(), None

        def look(before: RunView | None) -> RunView:
            return load_run(run.directory.root, previous=before, with_capture=False)

        for n in range(_ROUNDS + 1):
            if n == 1:
                best.clear()  # what only a first look reads
            view = timed("look_ms", functools.partial(look, view))
            timed("count_steps_ms", functools.partial(totals.update, view, view.ranks))
            timed("scrape_ms", functools.partial(exposition, MonitorSnapshot(view, totals=totals)))
            view.memo.pop(KNOWN, None)  # none rests
            found = timed("detectors_ms", functools.partial(run_detectors, view))
            if found:
                raise AssertionError(f"a healthy run has a finding: {found[0].summary}")
            run.steps(1)
    return {"ranks": ranks, **best}


def train(run: FakeRun, seconds: float) -> None:
    """Every rank does a step and a collective each tick."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for rank in run.ranks:
            rank.clock_ns = time.monotonic_ns() - 100_000_000
            rank.step().collective("all_reduce")
        time.sleep(_TICK)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--parts", action="store_true", help="what a look, a scrape and a pass of detectors take")
    parser.add_argument("--laws", type=int, default=0, metavar="N", help="with --parts: looks of each law and rank")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result = measure_parts(args.ranks, args.laws) if args.parts else measure(args.ranks, args.seconds)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:>18} {value:.4g}")


if __name__ == "__main__":
    main()

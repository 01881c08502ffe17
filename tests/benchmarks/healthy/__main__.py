"""Command line of the soak: one line a run, a table a layout at the end; exit code 1 when any run was not clean."""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path

from tests.benchmarks.healthy.layouts import LAYOUTS
from tests.benchmarks.healthy.run import PILOT_STEPS, Outcome, steps_for, train


class Soak:
    """Runs trainings; `pilots` are the short first ones that say how fast a layout is here."""

    def __init__(self, folder: Path, cache: Path, seconds: float, seed: int) -> None:
        self.folder, self.cache, self.seconds, self.seed = folder, cache, seconds, seed
        self.pilots: dict[str, Outcome] = {}
        self._locks = {name: threading.Lock() for name in LAYOUTS}

    def run(self, number: int, name: str) -> Outcome:
        """One run of a layout, after its pilot."""
        if not self.seconds:
            outcome = self._train(f"{number:04d}-{name}", name, PILOT_STEPS, number)
            self._say(f"{number + 1}", outcome)
            return outcome
        with self._locks[name]:
            if name not in self.pilots:
                self.pilots[name] = self._train(f"pilot-{name}", name, PILOT_STEPS)
                self._say("pilot", self.pilots[name])
        pilot = self.pilots[name]
        if not pilot.steps:
            return Outcome(name, problems=["its pilot did not train"])
        outcome = self._train(f"{number:04d}-{name}", name, steps_for(self.seconds, pilot), number)
        self._say(f"{number + 1}", outcome)
        return outcome

    def _train(self, folder: str, name: str, steps: int, number: int = 0) -> Outcome:
        limit = 600 + 20 * self.seconds
        return train(name, LAYOUTS[name], steps, self.folder / folder, self.cache, limit, self.seed + number)

    @staticmethod
    def _say(number: str, outcome: Outcome) -> None:
        state = "clean" if outcome.clean else "NOT CLEAN"
        print(
            f"{number:>5} {outcome.layout:24} {outcome.steps:6} steps {outcome.seconds:6.0f} s  {state}",
            flush=True,
        )
        for line in (*outcome.findings, *outcome.problems):
            print(f"      {line}", flush=True)
        if outcome.leftovers:
            print(f"      {outcome.leftovers} processes left over", flush=True)
        if not outcome.clean:
            print(f"      kept: {outcome.run_dir}", flush=True)


def table(outcomes: Iterable[Outcome], pilots: Iterable[Outcome]) -> str:
    """Markdown: a row a layout and a sum. Pilots count in every column but the first three."""
    full, every = list(outcomes), [*outcomes, *pilots]
    rows = [
        "| layout | runs | steps | seconds | with findings | with problems | processes left | exits not 0 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in [*dict.fromkeys(o.layout for o in full), "all"]:
        own = [o for o in full if name in (o.layout, "all")]
        all_of = [o for o in every if name in (o.layout, "all")]
        cells = [
            *(len(own), sum(o.steps for o in own), round(sum(o.seconds for o in own))),
            *(sum(bool(o.findings) for o in all_of), sum(bool(o.problems) for o in all_of)),
            *(sum(o.leftovers for o in all_of), sum(any(o.exit_codes) for o in all_of)),
        ]
        rows.append(f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=len(LAYOUTS), help="over the layouts in turn (default: one each)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training in each run; 0: short runs only")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has another")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--folder", type=Path, help="where run directories go (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="healthy-"))
    soak = Soak(folder, folder / "corpora", options.seconds, options.seed)
    names = list(islice(cycle(options.layouts), options.runs))
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(soak.run, range(len(names)), names))
    pilots = list(soak.pilots.values())
    if options.json:
        options.json.write_text(json.dumps([asdict(o) for o in (*outcomes, *pilots)], indent=1) + "\n")
    print(f"\n{table(outcomes, pilots)}")
    unclean = sum(not o.clean for o in (*outcomes, *pilots))
    print(f"\n{len(outcomes)} runs of about {options.seconds:g} s and {len(pilots)} pilots: {unclean} not clean")
    return 1 if unclean else 0


if __name__ == "__main__":
    raise SystemExit(main())

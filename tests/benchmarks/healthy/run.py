"""One healthy training from start to the last process gone, and everything that was wrong with it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dtobs.diagnose import diagnose, gather
from dtobs.errors import DtobsError
from dtobs.recording.journal import read_journal
from dtobs.recording.view import RunView, load_run
from tests.benchmarks.healthy.layouts import Layout
from tests.benchmarks.healthy.observed import missing
from tests.harness import torchrun
from tests.harness.evidence import tail
from tests.harness.processes import processes_with_token, wait_until_gone

PILOT_STEPS = 40
LEFTOVER_SECONDS = 30.0
"""The monitor outlives the ranks by a few seconds."""


@dataclass
class Outcome:
    """What became of one run. `seconds` is the time from its first to its last step, `pace` the median step's."""

    layout: str
    steps: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    leftovers: int = 0
    exit_codes: list[int] = field(default_factory=list)
    run_dir: str = ""
    pace: float = 0.0

    @property
    def clean(self) -> bool:
        """Nothing at all was wrong."""
        return not (self.findings or self.problems or self.leftovers or any(self.exit_codes))


def train(name: str, layout: Layout, steps: int, folder: Path, cache: Path, timeout: float, seed: int = 0) -> Outcome:
    """Run all legs of `layout` for `steps` steps in total into `folder`; the folder stays when it was not clean."""
    run_dir = folder / "run"
    outcome = Outcome(name, run_dir=str(run_dir))
    for share, extra in layout.legs:
        units = max(1, round(steps * share / layout.per_unit))
        arguments = [*layout.program, layout.length, str(units), *layout.flags, *extra, "--run-dir", run_dir]
        if layout.program[0] == "-m":
            arguments += ["--data.cache", cache, "--seed", str(seed)]
        with torchrun(arguments, layout.world, timeout=timeout) as command:
            try:
                code = command.wait()
            except TimeoutError as error:
                outcome.problems.append(str(error))
                code = -1
            outcome.exit_codes.append(code)
            if code:
                outcome.problems.append(f"exit code {code}: {tail(command.stderr_path)}")
                return outcome
            outcome.leftovers += len(wait_until_gone(processes_with_token(command.token), timeout=LEFTOVER_SECONDS))
    judge(outcome, layout)
    if outcome.clean:
        shutil.rmtree(folder)
    return outcome


def judge(outcome: Outcome, layout: Layout) -> None:
    """Add what the recording, the monitor's journal and a diagnosis say."""
    run_dir = Path(outcome.run_dir)
    try:
        view = load_run(run_dir)
        found = diagnose(gather(run_dir)).findings
        live = [entry.finding for entry in read_journal(run_dir / "findings.jsonl")]
    except (DtobsError, OSError) as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
        return
    outcome.steps, outcome.seconds, outcome.pace = _length(view)
    outcome.findings = sorted({f"{f.code} {list(f.ranks)}: {f.summary}" for f in (*found, *live)})
    pipeline = "--parallel.pipeline" in layout.flags
    outcome.problems += missing(view, reports_loss=layout.reports_loss, pipeline=pipeline)
    outcome.problems += [f"capture {path.name}" for path in sorted(run_dir.glob("captures/*"))]
    for log in sorted(run_dir.glob("nodes/*/monitor.log")):
        lines = log.read_text(errors="replace").splitlines()
        outcome.problems += [f"monitor: {line}" for line in lines if " WARNING " in line or " ERROR " in line]


def steps_for(seconds: float, pilot: Outcome) -> int:
    """How many steps take about `seconds`, by a first short run."""
    return max(PILOT_STEPS, round(seconds / max(pilot.pace, 1e-4)))


def _length(view: RunView) -> tuple[int, float, float]:
    """Steps, seconds from the first to the last, seconds of the median one."""
    records = [view.rank_steps(rank) for rank in view.ranks]
    if not records or not all(len(r) for r in records):
        return 0, 0.0, 0.0
    first, last = records[0][0], records[0][-1]
    pace = float(np.median(records[0]["end_ns"] - records[0]["begin_ns"])) / 1e9
    done = int(last["step"] - first["step"]) + 1
    return done, max(pace * done, float(last["end_ns"] - first["begin_ns"]) / 1e9), pace

"""Silent data corruption: single bits flipped at random in small real trainings, and what is found of them.

A trial is a whole training of three ranks, recorded like any job and judged by the detectors from that recording
alone. What the flip did is measured apart, from the weights and losses that the same training ends with without it.
"""

from __future__ import annotations

import random
import shutil
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dtobs.detectors import run_detectors
from dtobs.drills import worker
from dtobs.drills.capabilities import Confinement
from dtobs.drills.flipped_job import Ended, Flip
from dtobs.drills.perform import context, rank_environment
from dtobs.errors import DtobsError, TargetError
from dtobs.findings import CATALOGUE, Finding
from dtobs.recording.view import load_run

RANKS = 3
"""So that of replicas that differ one can be the odd one."""
STEPS = 40
STRUCK = (24, 32)
"""The steps in which a bit may be flipped: late enough that the detectors know what is usual."""
HIDDEN = 64
BITS = 32
ROUNDING = 1e-6
"""Of the norm of the final weights, or of a loss: below it a change is one that another order of a sum makes too."""
TWIN_EVERY = 20
_MEMORY = ("parameter", "local gradient", "reduced gradient", "optimizer state", "activation")
TARGETS: dict[str, tuple[str, ...]] = {
    "ddp": _MEMORY,  # its messages are waited for in C++, where nothing can be put in between
    "by-hand": (*_MEMORY, "message"),
    "fsdp": (*_MEMORY, "message"),
    "zero1": (*_MEMORY, "message"),
}
"""What can be struck, by layout. "zero1": gradients summed by hand, each rank steps some parameters and sends them."""
_PATIENCE_SECONDS = 120.0
_GOODBYE_SECONDS = 2.0
Effect = Literal["none", "rounding", "measurable"]


@dataclass(frozen=True)
class Trial:
    """One training. `change` is by how much the final weights changed, of their norm; NaN where they are not finite.

    `findings` are those of silent errors, as the detectors ordered them; `others` are of hangs or slowness.
    """

    layout: str
    flip: Flip | None
    struck: str
    effect: Effect
    change: float
    findings: tuple[Finding, ...]
    others: tuple[Finding, ...]

    @property
    def wrong(self) -> str:
        """What is said that cannot be so; "" where nothing is."""
        for finding in self.findings:
            if self.flip is None:
                return f"{finding.code} where nothing was flipped: {finding.summary}"
            if finding.step is not None and finding.step < self.flip.step + 1:
                return f"{finding.code} of step {finding.step}, before the flip: {finding.summary}"
            if finding.ranks and self.flip.rank not in finding.ranks:
                return f"{finding.code} names others than rank {self.flip.rank}: {finding.summary}"
        return ""

    @property
    def steps_to_it(self) -> int | None:
        """Steps from the flip to the first that a finding names."""
        known = [finding.step for finding in self.findings if finding.step is not None]
        return min(known) - self.flip.step - 1 if known and self.flip is not None else None

    @property
    def rank_named(self) -> bool:
        """Whether the first finding accuses the struck rank and nobody else."""
        return bool(self.findings) and self.flip is not None and self.findings[0].ranks == (self.flip.rank,)

    @property
    def parameter_named(self) -> bool:
        """Whether a finding names the struck tensor; an activation and a message have no such name."""
        said: set[object] = set()
        for each in (e for finding in self.findings for e in finding.evidence):
            several = each.get("parameters")
            said |= {each.get("parameter"), *(several if isinstance(several, (list, tuple)) else ())}
        return bool(self.struck) and self.struck in said

    def to_json(self) -> dict[str, Any]:
        """A row."""
        flip = self.flip
        return {
            "layout": self.layout,
            "target": flip.target if flip is not None else None,
            "rank": flip.rank if flip is not None else None,
            "step": flip.step + 1 if flip is not None else None,
            "bit": flip.bit if flip is not None else None,
            "struck": self.struck,
            "effect": self.effect,
            "change": self.change if np.isfinite(self.change) else None,
            "found": [finding.code for finding in self.findings],
            "summary": self.findings[0].summary if self.findings else None,
            "steps": self.steps_to_it,
            "rank_named": self.rank_named,
            "parameter_named": self.parameter_named,
            "wrong": self.wrong or None,
            "others": [f"{finding.code}: {finding.summary}" for finding in self.others],
        }


def draw(count: int, seed: int, layouts: Sequence[str] = tuple(TARGETS)) -> dict[str, list[Flip | None]]:
    """`count` flips over the layouts in turn; a trial without one first, and after each `TWIN_EVERY` flips."""
    found: dict[str, list[Flip | None]] = {}
    chance = random.Random(seed)
    for number in range(count):
        layout = layouts[number % len(layouts)]
        mine = found.setdefault(layout, [None])
        if len(mine) % (TWIN_EVERY + 1) == 0:
            mine.append(None)
        step = chance.randrange(*STRUCK)
        flip = Flip(
            chance.choice(TARGETS[layout]), chance.randrange(RANKS), step, chance.random(), chance.randrange(BITS)
        )
        mine.append(flip)
    return found


def play_all(
    flips: dict[str, list[Flip | None]],
    folder: Path,
    *,
    hidden: int = HIDDEN,
    told: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Do all trials below `folder`, layout by layout; recordings of those in which nothing is wrong are not kept.

    `told` hears of each trial. Raises TargetError where the ranks end or stand still.
    """
    trials = []
    for layout, wanted in flips.items():
        for trial in _play(layout, wanted, folder / layout, hidden):
            told(trial)
            trials.append(trial)
    return trials


def _play(layout: str, flips: Sequence[Flip | None], folder: Path, hidden: int) -> Iterable[Trial]:
    folder.mkdir(parents=True)
    fields = {"run_dir": folder, "wrapper": layout, "flips": flips, "steps": STEPS, "hidden": hidden}
    pipes = [context().Pipe() for _ in range(RANKS)]
    ranks = [
        context().Process(
            target=worker.main, args=("flips", fields, rank_environment(rank, RANKS), folder, pipe[1], Confinement())
        )
        for rank, pipe in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    for _, theirs in pipes:
        theirs.close()
    twin: list[Ended] = []
    try:
        for number, flip in enumerate(flips):
            ended = [_receive(pipe, rank, folder) for rank, (pipe, _) in enumerate(pipes)]
            twin = twin or ended
            run_dir = folder / str(number)
            trial = _judge(layout, flip, ended, twin, run_dir)
            if not trial.wrong:
                shutil.rmtree(run_dir)
            yield trial
    finally:
        for pipe, _ in pipes:
            pipe.close()
        for rank in ranks:
            rank.join(_GOODBYE_SECONDS)
            if rank.is_alive():
                rank.kill()
                rank.join()


def _receive(pipe: Any, rank: int, folder: Path) -> Ended:
    try:
        if pipe.poll(_PATIENCE_SECONDS):
            found: Ended = pipe.recv()
            return found
        why = f"did not end a training within {_PATIENCE_SECONDS:.0f} s: is the machine too busy?"
    except EOFError:
        why = "ended early"
    log = folder / f"rank-{rank}.log"
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    raise TargetError(f"rank {rank} of the drill {why} {' '.join(last)}".strip())


def _judge(layout: str, flip: Flip | None, ended: list[Ended], twin: list[Ended], run_dir: Path) -> Trial:
    view = load_run(run_dir)
    findings = run_detectors(view)
    if view.damaged:
        raise DtobsError(f"the recording {run_dir} could not be judged: {view.damaged[0]}")
    silent = tuple(finding for finding in findings if CATALOGUE[finding.code].family == "silent")
    others = tuple(finding for finding in findings if finding not in silent)
    effect, change = _effect(ended, twin)
    struck = next((each.struck for each in ended if each.struck), "")
    return Trial(layout, flip, struck, effect, change, silent, others)


def _effect(ended: list[Ended], twin: list[Ended]) -> tuple[Effect, float]:
    """What became of weights and losses, on the rank where they changed most."""
    pairs = list(zip(ended, twin, strict=True))
    if all(a.weights.tobytes() == b.weights.tobytes() and a.losses == b.losses for a, b in pairs):
        return "none", 0.0
    with np.errstate(all="ignore"):
        change = max(
            (float(np.linalg.norm(a.weights.astype(float) - b.weights) / np.linalg.norm(b.weights)) for a, b in pairs),
            key=lambda value: value if np.isfinite(value) else np.inf,
        )
        apart = max(
            abs(x - y) / abs(y) if np.isfinite(x) else np.inf
            for a, b in pairs
            for x, y in zip(a.losses, b.losses, strict=True)
        )
    small = np.isfinite(change) and change <= ROUNDING and apart <= ROUNDING
    return ("rounding" if small else "measurable"), change


def table(trials: Iterable[Trial]) -> str:
    """Markdown: a row for each layout and target, and one of all; then what found how many."""
    struck = [trial for trial in trials if trial.flip is not None]
    rows: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in struck:
        assert trial.flip is not None
        rows[trial.layout, trial.flip.target].append(trial)
    lines = [
        "| layout | a bit of | flips | no change | rounding: found | measurable: found | missed, at most"
        " | steps | rank | parameter |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    order = [(layout, target) for layout, targets in TARGETS.items() for target in targets if (layout, target) in rows]
    for layout, target in order:
        lines.append(f"| {layout} | {target} | {_cells(rows[layout, target])} |")
    lines.append(f"| all | | {_cells(struck)} |")
    lines += ["", "| found by | first | also |", "| --- | --- | --- |"]
    first = Counter(trial.findings[0].code for trial in struck if trial.findings)
    every = Counter(code for trial in struck for code in {finding.code for finding in trial.findings})
    lines += [f"| `{code}` | {first[code]} | {count - first[code]} |" for code, count in every.most_common()]
    return "\n".join(lines) + "\n"


def _cells(trials: list[Trial]) -> str:
    by: dict[str, list[Trial]] = {e: [t for t in trials if t.effect == e] for e in ("none", "rounding", "measurable")}
    found = [trial for trial in trials if trial.findings]
    missed = [trial.change for trial in by["measurable"] if not trial.findings]
    known = sorted(trial.steps_to_it for trial in found if trial.steps_to_it is not None)
    steps = f"{statistics.median_low(known)} ({known[-1]})" if known else "–"
    cells = [
        str(len(trials)),
        str(len(by["none"])),
        *(f"{sum(bool(t.findings) for t in by[e])} of {len(by[e])}" for e in ("rounding", "measurable")),
        f"{max(missed):.1g}" if missed else "–",
        steps,
        f"{sum(t.rank_named for t in found)} of {len(found)}",
        f"{sum(t.parameter_named for t in found)} of {len(found)}",
    ]
    return " | ".join(cells)


def summary(trials: Sequence[Trial]) -> str:
    """One sentence of the trials without a flip, and one of what was said wrongly."""
    twins = [trial for trial in trials if trial.flip is None]
    quiet = sum(not trial.findings and trial.effect == "none" for trial in twins)
    wrong = [trial for trial in trials if trial.wrong]
    text = f"Trainings in which nothing was flipped, quiet and equal to the bit: {quiet} of {len(twins)}."
    return f"{text} Findings that cannot be so: {len(wrong)}.\n"


def failed(trials: Sequence[Trial]) -> bool:
    """Whether anything was accused wrongly, or a training without a flip was not as it should be."""
    return any(trial.wrong or (trial.flip is None and trial.effect != "none") for trial in trials)

"""Each law's equation with its residual, in the runtime's own layouts: both sides as recorded, in healthy trainings.

``python -m tests.benchmarks.residuals [LAYOUT …]`` trains layouts of ``tests.benchmarks.healthy``, every law looking at
all there is, and prints the table of ``tests/benchmarks/README.md``. With ``--run DIR`` it reads a run that exists.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtobs.detectors.silent.audit import audits
from dtobs.detectors.silent.corrupted_communication import residuals
from dtobs.detectors.silent.gradient_ledger import SAME_FACTOR
from dtobs.detectors.silent.ledger_looks import judged_looks
from dtobs.detectors.silent.loss_weights import EQUAL
from dtobs.detectors.silent.mixing import EXACT
from dtobs.detectors.silent.replicas import replica_sets
from dtobs.recording.laws import LOSS_WEIGHTS
from dtobs.recording.view import RunView, load_run
from tests.benchmarks.healthy.layouts import LAYOUTS
from tests.harness import torchrun

STEPS = 24
EVERYTHING = "ledger=all,updates=all,conservation=all"


@dataclass(frozen=True)
class Equation:
    """One law in one run: how often its equation was checked, the largest residual, and what it may be.

    `why` says why it was not checked, where `checked` is 0.
    """

    law: str
    equation: str
    checked: int
    worst: float
    allowed: float
    why: str = ""

    @property
    def holds(self) -> bool:
        """Whether no residual is larger than it may be."""
        return self.worst <= self.allowed


def equations(view: RunView) -> Iterator[Equation]:
    """The laws in order, each with what was recorded of it."""
    yield from _ledger(view)
    yield from _updates(view)
    yield _loss_weights(view)
    differs = [copies.differs for copies in replica_sets(view, always=True)]
    yield Equation(
        "replicas", "digest(θ of r) = digest(θ of q)", sum(d.size for d in differs), sum(d.sum() for d in differs), 0
    )
    off = residuals(view)
    yield Equation("L7", "what went in = what came out", len(off), float(off.max(initial=0.0)), 1.0)


def _ledger(view: RunView) -> Iterator[Equation]:
    judged = judged_looks(view)
    known = [one for one in judged if np.isfinite(one.factors).any()]
    left = [r for one in known for r, f in zip(one.residuals, one.factors, strict=True) if np.isfinite(f)]
    exact = [r for r in left if r <= EXACT]
    # Gradients that travel in BF16 are right to three per cent; all others to the precision of FP32.
    allowed = EXACT if not left or len(exact) >= 0.5 * len(left) else 0.03
    why = _off(view, "ledger")
    yield Equation("L1", "S(H of r) = λ Σ S(G of q)", len(left), max(left, default=0.0), allowed, why)
    apart = [float(np.nanmax(one.factors) / np.nanmin(one.factors) - 1) for one in known if len(one.ranks) > 1]
    yield Equation("L1", "λ of r = λ of q", len(apart), max(apart, default=0.0), max(SAME_FACTOR, 10 * allowed), why)


def _updates(view: RunView) -> Iterator[Equation]:
    found = audits(view)
    off = [audit.theta_off[audit.theta_off >= 0] for audit in found if audit.kind]
    elements = np.concatenate(off) if off else np.zeros(0)
    worst = float(elements.max(initial=0.0))
    yield Equation("L2", "θ' = optimizer(θ, g, m, v) in FP64", len(elements), worst, 1.0)
    sums = sum(int((audit.records["summed"] > 0).sum()) for audit in found)
    changed = sum(int(audit.drifted.any(axis=1).sum()) for audit in found)
    yield Equation("L2", "θ, m, v at rest: the same bits", sums, changed, 0)


def _loss_weights(view: RunView) -> Equation:
    ratios = []
    for rank in view.ranks:
        records = view.law(LOSS_WEIGHTS, rank)
        one = records[(records["losses"] == 1) & (records["tokens"] > 0)]
        for step in np.unique(one["step"]):
            weights = (one["total"] / one["tokens"])[one["step"] == step]
            ratios.append(float(weights.max() / weights.min() - 1))
    why = _off(view, "loss weights")
    return Equation("L3", "every token of a step weighs the same", len(ratios), max(ratios, default=0.0), EQUAL, why)


def _off(view: RunView, probe: str) -> str:
    entries = [entry for rank in view.ranks for entry in view.meta(rank).probes.values() if entry["name"] == probe]
    return next((str(entry.get("short") or entry["reason"]) for entry in entries if entry.get("reason")), "")


def train(name: str, folder: Path) -> RunView:
    """A short run of a layout with all laws looking at everything. Raises RuntimeError where it fails."""
    layout = LAYOUTS[name]
    arguments = [*layout.program, layout.length, str(STEPS), *layout.flags, "--run-dir", folder / name]
    arguments += ["--data.cache", folder / "corpora"]
    with torchrun(arguments, layout.world, env={"DTOBS_PROBES": EVERYTHING}, timeout=600) as command:
        if command.wait():
            raise RuntimeError(f"{name} failed: {command.stderr}")
    return load_run(folder / name)


def row(name: str, found: list[Equation]) -> str:
    """A line of the table: of each equation the largest residual, and in brackets how often it was checked."""
    cells = []
    for each in found:
        if not each.checked:
            cells.append(f"– ({each.why})" if each.why else "–")
        else:
            cells.append(f"{each.worst:.2g}{'' if each.holds else ' BROKEN'} ({each.checked:,})")
    return f"| {name} | {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where an equation does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help="of tests.benchmarks.healthy (default: all)")
    parser.add_argument("--run", type=Path, metavar="DIR", help="read this run instead")
    options = parser.parse_args(argv)
    if unknown := set(options.layouts) - set(LAYOUTS):
        parser.error(f"there is no layout {sorted(unknown)[0]!r}; they are {', '.join(LAYOUTS)}")
    broken = headed = False
    with tempfile.TemporaryDirectory() as scratch:
        for name in [options.run.name] if options.run else options.layouts or list(LAYOUTS):
            view = load_run(options.run) if options.run else train(name, Path(scratch))
            found = list(equations(view))
            if not headed:
                print(f"| layout | {' | '.join(f'{each.law}: {each.equation}' for each in found)} |")
                print("| --- " * (len(found) + 1) + "|")
                print(f"| allowed | {' | '.join(f'{each.allowed:g}' for each in found)} |")
            headed = True
            broken |= not all(each.holds for each in found)
            print(row(name, found), flush=True)
    return int(broken)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())

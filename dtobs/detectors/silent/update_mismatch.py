"""update-mismatch: a parameter or its moments are not what the optimizer's own arithmetic makes of them.

What it does: the steps of AdamW, Adam and SGD are computed again in FP64, from small windows of parameter, gradient
and moments that ranks copy around the step (`audit`). Named are ranks that made something else of equal numbers than
their replicas, moments that follow from no gradient in a few windows where all others are right, and parameters
that move by a constant times what their learning rate says. What differs in every step alike on all ranks (clamps,
masks and projections in a hook of the step) is somebody's intention and is not named.

Why it hurts: the optimizer does not do what the program says: a learning rate that is ignored, a broken kernel, a
device that computes wrongly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from dtobs.detectors.peers import outliers
from dtobs.detectors.silent.audit import Audit, Window, audits, copies
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

LEAST_LOOKS = 8
"""Windows of a rank that are right before one that is not is an accusation."""
SELDOM = 0.25
LEAST_ALIKE = 3
OFF = 0.02
_SETTINGS = ("lr", "weight_decay", "beta1", "beta2", "eps", "done", "flags")


def update_mismatch(view: RunView) -> list[Finding]:
    """At most one finding of each of the three kinds."""
    known = [audit for audit in audits(view) if audit.kind]
    return [*_other_than_replicas(view, known), *_moments(known), *_factors(known)]


def _other_than_replicas(view: RunView, known: list[Audit]) -> Iterator[Finding]:
    for name, step, windows in copies(view, known):
        if len({_given(window) for window in windows}) > 1:
            continue
        made = {audit.rank: audit.after[n].tobytes() for audit, n in windows}
        if len(set(made.values())) == 1:
            continue
        odd, majority = outliers(made)
        wrong = [a.rank for a, n in windows if a.theta_wrong[n].any() or a.state_wrong[n].any()]
        if not majority and 0 < len(wrong) < len(windows):
            odd, majority = wrong, True
        yield Finding(
            "update-mismatch",
            f"the optimizer of {ranks_text(odd)} made something else of {name} in step {step} than its replicas did of"
            " the same parameter, gradient and moments"
            if majority
            else f"the optimizers of {ranks_text(odd)} made different things of the same {name} in step {step}",
            tuple(odd),
            Confidence.CERTAIN,
            step=step,
            aspect="replicas",
            expect="",
            evidence=(
                {"what": "update audit", "parameter": name, "ranks": sorted(made)[:64], "computed_wrong": wrong},
            ),
        )
        return


def _given(window: Window) -> bytes:
    audit, n = window
    settings = [audit.records[name][n].tobytes() for name in _SETTINGS]
    return b"".join([audit.before[n].tobytes(), *settings])


def _moments(known: list[Audit]) -> Iterator[Finding]:
    """Moments that no gradient explains, now and then on some ranks only."""
    bad: dict[tuple[int, str], set[int]] = defaultdict(set)
    good: dict[tuple[int, str], set[int]] = defaultdict(set)
    seldom: dict[int, bool] = {}
    for audit in known:
        wrong = audit.state_wrong.any(axis=1) & audit.moved
        few = len(audit) - wrong.sum() >= LEAST_LOOKS and wrong.mean() <= SELDOM
        seldom[audit.rank] = few and seldom.get(audit.rank, True)
        for n, step in enumerate(audit.records["step"].tolist()):
            (bad if wrong[n] else good)[step, audit.name(n)].add(audit.rank)
    for (step, name), ranks in sorted(bad.items()):
        alone = len({audit.rank for audit in known}) == 1 or good.get((step, name))
        struck = [rank for rank in ranks if seldom[rank]]
        if struck and alone:
            yield Finding(
                "update-mismatch",
                f"the moments that the optimizer of {ranks_text(struck)} made of {name} in step {step} follow from no"
                " gradient; it computed right in all other windows looked at",
                tuple(struck),
                Confidence.LIKELY,
                step=step,
                aspect="moments",
                expect="",
                evidence=({"what": "update audit", "parameter": name, "windows_wrong": len(bad)},),
            )
            return


def _factors(known: list[Audit]) -> Iterator[Finding]:
    """Parameters that move by a constant times what their learning rate says, in all newer windows."""
    found: dict[int, tuple[int, list[str], float]] = {}
    for audit in known:
        if audit.kind != "adam":
            continue  # of SGD nothing tells a changed step from a changed gradient
        right = ~audit.state_wrong.any(axis=1)
        off = np.isfinite(audit.ratio) & (np.abs(audit.ratio - 1) > OFF) & audit.theta_wrong.any(axis=1) & right
        judged = np.isfinite(audit.ratio)
        if not off.any():
            continue
        first = int(np.argmax(off))
        since = judged[first:]
        if off.sum() >= LEAST_ALIKE and off[first:].sum() >= 0.75 * since.sum() and len(set(_steps(audit, off))) > 1:
            names = list(dict.fromkeys(audit.name(int(n)) for n in np.flatnonzero(off)))
            found[audit.rank] = (_steps(audit, off)[0], names, float(np.median(audit.ratio[off])))
    if not found:
        return
    step, names, factor = found[min(found)]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    yield Finding(
        "update-mismatch",
        f"{names[0]}{more} {'move' if more else 'moves'} {factor:.3g} times as far as the learning rate says on"
        f" {ranks_text(found)}, since step {step}: the optimizer steps with another one than its groups hold",
        tuple(found),
        Confidence.LIKELY,
        step=step,
        aspect="learning rate",
        fault=False,
        evidence=tuple(
            {"what": "update audit", "rank": rank, "factor": f, "parameters": who[:16]}
            for rank, (_, who, f) in sorted(found.items())[:16]
        ),
    )


def _steps(audit: Audit, which: np.ndarray) -> list[int]:
    return [int(step) for step in audit.records["step"][which]]

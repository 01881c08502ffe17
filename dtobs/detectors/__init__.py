"""Detectors: what was recorded → what is wrong. Pure, without torch, the same ones live and after the end.

A family is a package whose ``DETECTORS`` lists its detectors, one file a code.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from dtobs.detectors.base import Detector
from dtobs.detectors.hangs.stall import moved_on
from dtobs.detectors.performance.throughput_drop import lasts
from dtobs.expectations import is_declared
from dtobs.findings import Confidence, Finding, Severity, Trait
from dtobs.recording.view import RunView

FAMILIES = ("hangs", "silent", "performance")
RESTS = 100.0
"""A detector of `_RESTING` that took a second of processor time is not asked again for that many seconds."""
DEAR = 0.1
"""Seconds of processor time below which a detector never rests: in a small job each is asked in every pass."""
_RESTING = ("silent",)
KNOWN = "findings"
"""In the memo of a view: what each detector found at an earlier look."""

__all__ = ["FAMILIES", "Detector", "detectors", "is_over", "run_detectors"]


def detectors(families: Sequence[str] = FAMILIES) -> tuple[Detector, ...]:
    """The detectors of `families`, in order. Raises ModuleNotFoundError for a family there is not."""
    found: list[Detector] = []
    for family in families:
        found += import_module(f"dtobs.detectors.{family}").DETECTORS
    return tuple(found)


def run_detectors(view: RunView, families: Sequence[str] = FAMILIES) -> list[Finding]:
    """Everything that is wrong with the run: the gravest first, then by step and code.

    A detector that cannot cope with what it reads does not silence the others: a line in ``view.damaged`` says which.
    Of a run that is looked at again and again, what is dear at thousands of ranks is asked less often (`RESTS`).
    """
    found: list[Finding] = []
    earlier: dict[str, _Known] = view.memo.setdefault(KNOWN, {})
    for family in families:
        for detector in detectors([family]):
            name = f"{detector.__module__}.{getattr(detector, '__name__', '')}"
            known = earlier.get(name)
            if family in _RESTING and known is not None and known.holds(view):
                found += known.findings
                continue
            begin = time.thread_time()
            try:
                findings = detector(view)
            except Exception as error:  # noqa: BLE001 - recordings come from anywhere; said in `damaged`, not hidden
                view.damaged.append(f"{detector.__module__} failed: {type(error).__name__}: {error}")
                continue
            findings = [finding for finding in findings if not _meant(view, finding)]
            found += findings
            earlier[name] = _Known(view.now_ns, time.thread_time() - begin, _states(view), findings)
    view.shared.clear()  # of thousands of ranks it is much, and views are kept
    return sorted(found, key=_order)


def is_over(view: RunView, finding: Finding, found_ns: int, found: Sequence[Finding]) -> bool:
    """Whether what a look of `found_ns` has told and the present one does not tell any more has come to its end.

    A hang is over when the run trains again, and a fall of its pace when the pace is back or is told in other words.
    What made a model wrong is not over when the steps since are right: the job may have gone on to something else.
    """
    if finding.traits & Trait.HANG:
        return moved_on(view, found_ns)
    if finding.traits & Trait.LASTS and finding.confidence is not Confidence.POSSIBLE:
        return False
    if finding.code != "throughput-drop" or any(other.code == finding.code for other in found):
        return True
    try:
        return not lasts(view, finding)
    except Exception as error:  # noqa: BLE001 - as above
        view.damaged.append(f"{lasts.__module__} failed: {type(error).__name__}: {error}")
        return True


def _meant(view: RunView, finding: Finding) -> bool:
    """Whether every rank of it declared that it does this on purpose (`dtobs.expectations`)."""
    word, ranks = finding.expect, [rank for rank in finding.ranks or view.ranks if rank in view.ranks]
    return bool(word and ranks) and all(is_declared(word or "", view.meta(rank).policy) for rank in ranks)


@dataclass(frozen=True)
class _Known:
    """What a detector found at an earlier look, at what price, and the states of the ranks then."""

    at_ns: int
    seconds: float
    states: bytes
    findings: list[Finding]

    def holds(self, view: RunView) -> bool:
        """Whether it is too early to ask again; it never is where a rank has ended since, or somebody asks."""
        young = 0 < view.now_ns - self.at_ns < RESTS * self.seconds * 1e9
        return self.seconds > DEAR and young and not view.asked and self.states == _states(view)


def _states(view: RunView) -> bytes:
    return bytes(view.pages["state"].tobytes())


def _order(finding: Finding) -> tuple[int, int, str, tuple[int, ...]]:
    return (
        (Severity.CRITICAL, Severity.WARNING, Severity.NOTE).index(finding.severity),
        -1 if finding.step is None else finding.step,
        finding.code,
        finding.ranks,
    )

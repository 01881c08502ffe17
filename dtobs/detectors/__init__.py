"""Detectors: what was recorded → what is wrong. Pure, without torch, the same ones live and after the end.

A family is a package whose ``DETECTORS`` lists its detectors, one file a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from dtobs.detectors.base import Detector
from dtobs.findings import Finding
from dtobs.recording.view import RunView

FAMILIES = ("hangs", "silent", "performance")

__all__ = ["FAMILIES", "Detector", "detectors", "run_detectors"]


def detectors(families: Sequence[str] = FAMILIES) -> tuple[Detector, ...]:
    """The detectors of `families`, in order. Raises ModuleNotFoundError for a family there is not."""
    found: list[Detector] = []
    for family in families:
        found += import_module(f"dtobs.detectors.{family}").DETECTORS
    return tuple(found)


def run_detectors(view: RunView, families: Sequence[str] = FAMILIES) -> list[Finding]:
    """Everything that is wrong with the run: critical first, then by step and code.

    A detector that cannot cope with what it reads does not silence the others: a line in ``view.damaged`` says which.
    """
    found: list[Finding] = []
    for detector in detectors(families):
        try:
            found += detector(view)
        except Exception as error:  # noqa: BLE001 - recordings come from anywhere; said in `damaged`, not hidden
            view.damaged.append(f"{detector.__module__} failed: {type(error).__name__}: {error}")
    view.shared.clear()  # of thousands of ranks it is much, and views are kept
    return sorted(found, key=_order)


def _order(finding: Finding) -> tuple[bool, int, str, tuple[int, ...]]:
    return (
        finding.severity.value != "critical",
        -1 if finding.step is None else finding.step,
        finding.code,
        finding.ranks,
    )

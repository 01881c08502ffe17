"""Findings: which ranks, since which step, on what evidence, how sure we are and what to do next.

A healthy run has none. Their codes are the rows of `dtobs.catalogue`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol

from dtobs.catalogue import CATALOGUE, PREFLIGHT, Code, Family, Severity, Trait

__all__ = ["CATALOGUE", "Code", "Confidence", "Family", "Finding", "Severity", "Trait", "exit_code"]


class HasSeverity(Protocol):
    """What is wrong, however it is kept."""

    @property
    def severity(self) -> str: ...


def exit_code(findings: Iterable[HasSeverity]) -> int:
    """What a command says to the shell of `findings`: 0 nothing found, 3 warnings, 4 something critical."""
    severities = {finding.severity for finding in findings}
    return 4 if Severity.CRITICAL in severities else 3 if severities else 0


class Confidence(StrEnum):
    """How far the evidence goes."""

    POSSIBLE = "possible"
    LIKELY = "likely"
    CERTAIN = "certain"

    @property
    def order(self) -> int:
        """2 for certain, 0 for possible."""
        return ("possible", "likely", "certain").index(self.value)


def _says_what(record: dict[str, Any]) -> bool:
    return "what" in record


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    `evidence` are the records it rests on, JSON-ready, each with at least ``what``; `since_ns` is monotonic.
    """

    code: str
    summary: str
    ranks: tuple[int, ...] = ()
    confidence: Confidence = Confidence.LIKELY
    step: int | None = None
    group: str | None = None
    evidence: tuple[Annotated[dict[str, Any], _says_what], ...] = ()
    next_step: str = ""
    since_ns: int = 0
    severity: Severity = field(default=Severity.WARNING)
    early: bool = False  #: said because somebody asked: the run stands still, for less than its hang timeout

    def __post_init__(self) -> None:
        known = CATALOGUE.get(self.code) or PREFLIGHT[self.code]
        object.__setattr__(self, "ranks", tuple(sorted(int(r) for r in self.ranks)))
        object.__setattr__(self, "severity", Severity.WARNING if self.early else known.severity)
        if not self.next_step:
            object.__setattr__(self, "next_step", known.next_step)

    @property
    def traits(self) -> Trait:
        """What the catalogue knows of its code."""
        return CATALOGUE[self.code].traits

    @property
    def key(self) -> tuple[str, tuple[int, ...], str | None]:
        """Findings with equal keys describe the same problem."""
        return (self.code, self.ranks, self.group)

    def to_json(self) -> dict[str, Any]:
        """The finding as in the diagnosis JSON (``dtobs.diagnosis/1``)."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "confidence": self.confidence.value,
            "ranks": list(self.ranks),
            "step": self.step,
            "group": self.group,
            "summary": self.summary,
            "evidence": list(self.evidence),
            "next_step": self.next_step,
            **({"early": True} if self.early else {}),
        }

"""Findings: which ranks, since which step, on what evidence, how sure we are and what to do next.

A healthy run has none. Their codes are the rows of `dtobs.catalogue`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol

from dtobs.catalogue import CATALOGUE, PREFLIGHT, Code, Family, Severity, Trait
from dtobs.expectations import EXPECTATIONS, how_to_declare

__all__ = ["CATALOGUE", "Code", "Confidence", "Family", "Finding", "Severity", "Trait", "exit_code"]


class HasSeverity(Protocol):
    """What is wrong, however it is kept."""

    @property
    def severity(self) -> str: ...


def exit_code(findings: Iterable[HasSeverity]) -> int:
    """What a command says to the shell of `findings`: 0 nothing, 3 notes or warnings, 4 something critical."""
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


Key = tuple[str, tuple[int, ...], str | None, str]
"""Code, ranks, group and aspect of a finding."""


def _known(code: str) -> Code:
    return CATALOGUE.get(code) or PREFLIGHT[code]


def _says_what(record: dict[str, Any]) -> bool:
    return "what" in record


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    `evidence` are the records it rests on, JSON-ready, each with at least ``what``; `since_ns` is monotonic. `group` is
    the process group it happened in, `aspect` what of its code it is about, where a run may have several.
    """

    code: str
    summary: str
    ranks: tuple[int, ...] = ()
    confidence: Confidence = Confidence.LIKELY
    step: int | None = None
    group: str | None = None
    aspect: str = ""
    evidence: tuple[Annotated[dict[str, Any], _says_what], ...] = ()
    next_step: str = ""
    since_ns: int = 0
    severity: Severity = field(default=Severity.WARNING)
    early: bool = False  #: said because somebody asked: the run stands still, for less than its hang timeout
    expect: str | None = None  #: the word that declares it (`dtobs.expectations`); None: its code's, "": none does
    fault: bool | None = None  #: more than a note although a word declares it; None: critical or not merely possible

    def __post_init__(self) -> None:
        known = _known(self.code)
        object.__setattr__(self, "ranks", tuple(sorted(int(r) for r in self.ranks)))
        word = known.expect if self.expect is None else self.expect if self.expect in EXPECTATIONS else ""
        sure = known.severity is Severity.CRITICAL or self.confidence is not Confidence.POSSIBLE
        fault = sure if self.fault is None else self.fault
        note = word and not fault and not EXPECTATIONS[word].costs
        severity = Severity.WARNING if self.early else Severity.NOTE if note else known.severity
        step, how = self.next_step or known.next_step, how_to_declare(word) if word else ""
        object.__setattr__(self, "expect", word)
        object.__setattr__(self, "fault", fault)
        object.__setattr__(self, "severity", severity)
        object.__setattr__(self, "next_step", step if step.endswith(how) else f"{step} {how}")

    @property
    def traits(self) -> Trait:
        """What the catalogue knows of its code."""
        return CATALOGUE[self.code].traits

    @property
    def key(self) -> Key:
        """Findings with equal keys describe the same problem."""
        return (self.code, self.ranks, self.group, self.aspect)

    def to_json(self) -> dict[str, Any]:
        """The finding as in the diagnosis JSON (``dtobs.diagnosis/1``)."""
        return {
            "code": self.code,
            "severity": self.severity.value,
            "confidence": self.confidence.value,
            "ranks": list(self.ranks),
            "step": self.step,
            "group": self.group,
            **({"aspect": self.aspect} if self.aspect else {}),
            "summary": self.summary,
            "evidence": list(self.evidence),
            "next_step": self.next_step,
            **({"early": True} if self.early else {}),
            **({"expect": self.expect, "fault": self.fault} if self.expect or _known(self.code).expect else {}),
        }

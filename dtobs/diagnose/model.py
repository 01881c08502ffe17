"""A diagnosis: the verdict, the findings, and what each rank is doing. Rendered by `dtobs.reports`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dtobs.diagnose.pictures import Pictures
from dtobs.findings import Finding
from dtobs.logs import INTERRUPTED

SCHEMA = "dtobs.diagnosis/1"


@dataclass(frozen=True)
class RankStatus:
    """One rank at the moment of the look.

    `state` is a word of `dtobs.recording.rank.State`. `stack` are the innermost frames of its main thread, the most
    recent first; empty without a capture. `line` is the user's own among them.
    """

    rank: int
    state: str
    step: int | None  #: None when nothing tells, as in Flight Recorder dumps
    phase: str
    last_collective: str = ""
    site: str = ""  #: where the last collective was called
    waits_in: str = ""  #: the collective or message that it is blocked in, where that is known
    waited_seconds: float | None = None  #: blocked on communication for so long
    silent_seconds: float | None = None  #: since it last published anything
    pid: int = 0
    host: str = ""
    ending: str = ""  #: how its process ended; "" while it lives or nobody knows
    stack: tuple[str, ...] = ()
    line: str = ""

    def to_json(self) -> dict[str, Any]:
        """As in the diagnosis JSON; what is not known is null."""
        return {
            "state": self.state,
            "step": self.step,
            "phase": self.phase or None,
            "last_collective": self.last_collective or None,
            "site": self.site or None,
            "waits_in": self.waits_in or None,
            "waited_seconds": self.waited_seconds,
            "silent_seconds": self.silent_seconds,
            "pid": self.pid or None,
            "host": self.host or None,
            "ending": self.ending or None,
            "stack": list(self.stack),
        }


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a run. `verdict` is the root cause and one of `findings`; None when nothing was found."""

    target: str
    world_size: int
    verdict: Finding | None
    findings: tuple[Finding, ...]
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    missing_ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  #: what a reader should know beside: unreadable files, a pause that is no stall yet
    pictures: Pictures = field(default_factory=Pictures)
    told_step: int | None = None  #: the latest step that a log tells, also of nobody it names

    @property
    def interrupted(self) -> bool:
        """Whether logs tell that a person, a signal or the scheduler ended the job."""
        return any(note.startswith(INTERRUPTED) for note in self.notes)

    @property
    def without_verdict(self) -> str:
        """What to say where there is no verdict."""
        return "interrupted from outside, nothing else found" if self.interrupted else "nothing found"

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as ``dtobs.diagnosis/1``; `dtobs/reports/diagnosis.schema.json` describes it."""
        verdict = self.verdict
        return {
            "schema": SCHEMA,
            "target": self.target,
            "world_size": self.world_size,
            "verdict": None
            if verdict is None
            else {
                "code": verdict.code,
                "ranks": list(verdict.ranks),
                "confidence": verdict.confidence.value,
                "summary": verdict.summary,
            },
            "findings": [finding.to_json() for finding in self.findings],
            "ranks": {str(rank): status.to_json() for rank, status in sorted(self.ranks.items())},
            "missing_ranks": list(self.missing_ranks),
            "notes": list(self.notes),
        }

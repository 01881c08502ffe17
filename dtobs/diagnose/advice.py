"""Whether to start a job again, and where not: for people, schedulers and requeue scripts.

The answer is drawn from a diagnosis alone. Workload: the same program fails the same way on any host. Machine: a host
is to blame, and is named where the evidence names it. A restart is useless where the workload is to blame, or where
the last attempts ended by the same root without a step between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtobs.diagnose.model import Diagnosis
from dtobs.findings import Confidence, Finding, Trait
from dtobs.logs import ENDED_WELL, INTERRUPTED, NO_FURTHER

SCHEMA = "dtobs.advice/1"


@dataclass(frozen=True)
class Advice:
    """`cause`: workload, machine or unknown. `restart`: yes, no or unsure."""

    cause: str
    restart: str
    reason: str
    leave_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As ``dtobs.advice/1``."""
        return {
            "schema": SCHEMA,
            "cause": self.cause,
            "restart": self.restart,
            "reason": self.reason,
            "leave_out": list(self.leave_out),
        }


def advise(diagnosis: Diagnosis, earlier: Sequence[Diagnosis] = ()) -> Advice:
    """The advice for the last attempt; `earlier` are the attempts before it, oldest first."""
    verdict = diagnosis.verdict
    if verdict is None:
        for words, restart in ((INTERRUPTED, "yes"), (ENDED_WELL, "no")):
            if any(words in note for note in diagnosis.notes):
                return Advice("unknown", restart, words)
        return Advice("unknown", "unsure", "nothing is found wrong")
    if any(before.verdict is not None and _same(before, diagnosis) for before in earlier):
        return Advice(_cause(verdict), "no", f"the attempt before ended the same way: {verdict.code}")
    if storm := next((note for note in diagnosis.notes if NO_FURTHER in note), None):
        return Advice(_cause(verdict), "no", storm)
    cause = _cause(verdict)
    hosts = _hosts(diagnosis, verdict) if cause == "machine" else ()
    if cause == "workload":
        return Advice(cause, "no", f"{verdict.code}: the same program will fail the same way")
    if cause == "machine" and not hosts:
        return Advice(cause, "unsure", f"{verdict.code}: no line names the host to leave out")
    return Advice(cause, "yes", verdict.summary, hosts)


def _cause(verdict: Finding) -> str:
    if verdict.confidence is Confidence.POSSIBLE:
        return "unknown"
    if Trait.MACHINE in verdict.traits or _failed_hosts(verdict):
        return "machine"
    return "unknown" if Trait.TRANSIENT in verdict.traits else "workload"


def _same(before: Diagnosis, now: Diagnosis) -> bool:
    """Whether both ended by one root with no step between them."""
    first, second = before.verdict, now.verdict
    if first is None or second is None or (first.code, first.ranks) != (second.code, second.ranks):
        return False
    return _step(now) <= _step(before)


def _step(diagnosis: Diagnosis) -> int:
    told = -1 if diagnosis.told_step is None else diagnosis.told_step
    return max((status.step for status in diagnosis.ranks.values() if status.step is not None), default=told)


def _hosts(diagnosis: Diagnosis, verdict: Finding) -> tuple[str, ...]:
    """The hosts that the evidence names, or those of the accused, where only some hosts have any."""
    if named := _failed_hosts(verdict):
        return named
    all_hosts = {status.host for status in diagnosis.ranks.values() if status.host}
    accused = {diagnosis.ranks[rank].host for rank in verdict.ranks if rank in diagnosis.ranks} - {""}
    return tuple(sorted(accused)) if accused and accused < all_hosts else ()


def _failed_hosts(verdict: Finding) -> tuple[str, ...]:
    """Hosts of which a kernel or a scheduler tells that they failed."""
    return tuple(sorted({str(record["failed_host"]) for record in verdict.evidence if record.get("failed_host")}))

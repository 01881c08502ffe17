"""Runs the detectors on the evidence, adds what the monitor saw while the run lived, and ranks the causes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from dtobs.detectors import run_detectors
from dtobs.detectors.hangs.stall import Stall, silence
from dtobs.diagnose.gather import Evidence
from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.diagnose.run_pictures import run_pictures
from dtobs.diagnose.status import statuses
from dtobs.findings import CATALOGUE, Confidence, Finding, Severity
from dtobs.recording.journal import Entry
from dtobs.recording.rank import State
from dtobs.recording.view import RunView
from dtobs.words import duration_text

_NOTICED_SECONDS = 5.0
_CRASHES = {
    "uncaught-exception",
    "rank-dead",
    "rank-oom-killed",
    "rank-exited-early",
}
_GOES_ON = {"reduce-op-mismatch"}
"""Codes of the hang family that stop no run."""
_PASSING = {
    "rank-not-joined",
    "stuck-in-dataloader",
    "stuck-in-checkpoint",
    "gil-held",
    "rank-stopped",
    "network-stalled",
}
"""Codes that a run may recover from."""
_SAYS_WHY = _PASSING - {"rank-not-joined", "network-stalled"} | {"device-stopped", "unused-parameters"}
"""Codes that say why a rank did not join its peers."""
_ENDED_FROM_OUTSIDE = (State.DEAD, State.TERMINATED, State.INTERRUPTED)
_NUMBERS = {"gradient-nonfinite", "loss-nonfinite"}
_ABOUT_NUMBERS = re.compile(r"\bnan\b|\binf\b|non-?finite|infinity|overflow", re.IGNORECASE)


def diagnose(evidence: Evidence) -> Diagnosis:
    """The diagnosis of what was gathered."""
    view = evidence.view
    seen = [] if evidence.judged else run_detectors(view)
    found = merge(seen, [e for e in evidence.journal if not _went_on(view, e)])
    ordered = rank_causes(found)
    notes = list(dict.fromkeys(view.damaged))
    quiet = silence(view)
    if quiet is not None and not quiet.exceeded and quiet.seconds > _NOTICED_SECONDS:
        notes.insert(0, _pause(quiet))
    ranks = statuses(view)
    if not ordered and (ended := _ended_from_outside(ranks)):
        notes.insert(0, ended)
    return Diagnosis(
        target=evidence.target,
        world_size=view.world_size,
        verdict=ordered[0] if ordered else None,
        findings=tuple(ordered),
        ranks=ranks,
        missing_ranks=tuple(view.missing_ranks) if len(view.pages) else (),
        notes=tuple(notes),
        pictures=run_pictures(view, ordered, ranks),
    )


def merge(now: Iterable[Finding], journal: Iterable[Entry]) -> list[Finding]:
    """What is seen now, and what was seen live and has scrolled away since; the same matter once, since it began.

    The surer of two views of it wins; guesses of the moment give way to what explains the end now.
    """
    found = {finding.key: finding for finding in now}
    explained = any(CATALOGUE[code].family == "hangs" for code, _, _ in found)
    for entry in journal:
        earlier = entry.finding
        same = found.get(earlier.key)
        if same is None and (
            _outgrown(earlier, found.values())
            or _first_sign(earlier, found.values())
            or _before_the_capture(earlier, found.values())
            or (explained and _only_possible(earlier))
        ):
            continue
        if same is None or earlier.confidence.order > same.confidence.order:
            found[earlier.key] = earlier
        elif earlier.since_ns and (not same.since_ns or earlier.since_ns < same.since_ns):
            found[earlier.key] = replace(same, since_ns=earlier.since_ns)
    return list(found.values())


def _went_on(view: RunView, entry: Entry) -> bool:
    """Whether the run trained on after a hang was found, so that the hang is over though nobody has said so yet.

    Only steps and collectives count: a hung rank that is interrupted still publishes its end.
    """
    if entry.finding.code not in _PASSING or not len(view.pages):
        return False
    return max(int(view.pages[name].max()) for name in ("step_begin_ns", "collective_ns")) > entry.t_ns


def _outgrown(earlier: Finding, now: Iterable[Finding]) -> bool:
    """Whether the same matter is seen now with more ranks, or with the group that it is about."""
    return any(
        f.code == earlier.code and earlier.group in (f.group, None) and set(f.ranks) >= set(earlier.ranks) for f in now
    )


def _first_sign(earlier: Finding, now: Iterable[Finding]) -> bool:
    """Whether it was a rank that stood still while the kernel ran out of memory, before it killed that rank."""
    killed = {rank for f in now if f.code == "rank-oom-killed" for rank in f.ranks}
    return earlier.code in _PASSING and bool(earlier.ranks) and set(earlier.ranks) <= killed


def _before_the_capture(earlier: Finding, now: Iterable[Finding]) -> bool:
    """Whether it only says that ranks do not join, and by now it is known why."""
    why = {rank for f in now if f.code in _SAYS_WHY for rank in f.ranks}
    return earlier.code == "rank-not-joined" and bool(earlier.ranks) and set(earlier.ranks) <= why


def _only_possible(earlier: Finding) -> bool:
    """Whether it was a guess about an end that is better understood now."""
    return earlier.confidence is Confidence.POSSIBLE and CATALOGUE[earlier.code].family == "hangs"


def rank_causes(found: Iterable[Finding]) -> list[Finding]:
    """The findings, the root cause first: what stopped the run, surest and earliest, then the rest by severity."""
    ordered = sorted(found, key=_order)
    if ordered and ordered[0].code == "uncaught-exception" and _ABOUT_NUMBERS.search(ordered[0].summary):
        # A program that raises because its numbers are not finite reports a cause that a detector saw before.
        for finding in ordered[1:]:
            if finding.code in _NUMBERS:
                ordered.remove(finding)
                return [finding, *ordered]
    return ordered


def _order(finding: Finding) -> tuple[int, int, float, bool, float, str, tuple[int, ...]]:
    stops = CATALOGUE[finding.code].family == "hangs" and finding.code not in _GOES_ON
    kind = 0 if stops else 1 if finding.severity is Severity.CRITICAL else 2
    return (
        kind,
        int(finding.confidence is Confidence.POSSIBLE),
        finding.since_ns or math.inf if kind == 0 else _step(finding),
        finding.code not in _CRASHES,
        _step(finding),
        finding.code,
        finding.ranks,
    )


def _step(finding: Finding) -> float:
    return math.inf if finding.step is None else finding.step


def _ended_from_outside(ranks: dict[int, RankStatus]) -> str:
    """A job that somebody ended is in order, but its reader may not know that somebody did."""
    ways = sorted({status.ending for status in ranks.values() if status.state in _ENDED_FROM_OUTSIDE})
    if not ways:
        return ""
    return f"the job did not finish: its ranks were {' and '.join(ways)}, which is how a launcher ends a job"


def _pause(quiet: Stall) -> str:
    limit = duration_text(quiet.threshold_seconds)
    return f"nothing has moved for {duration_text(quiet.seconds)}; it counts as a stall after {limit} ({quiet.why})"

"""``rank-dead``: a rank's process is gone without a word: no exception, no normal end.

Why it hurts: the peers see a broken connection at best, and wait forever at worst. The evidence is the kernel's word
that the process is gone, and its exit status where somebody saw it end. Ranks that a launcher terminated after another
one failed are not accused, nor is a process that ends badly after it closed its session.
"""

from __future__ import annotations

from dtobs.catalogue import after_signal
from dtobs.detectors.hangs.describe import stack_evidence, where
from dtobs.detectors.hangs.endings import End, Ending
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import ranks_do

_SILENT = (End.DIED, End.TERMINATED, End.INTERRUPTED)
_TOLD_NEXT = (
    "Find who told this one process to end (kill, a scheduler, a debugger): the others were not. Restart from the last "
    "checkpoint."
)
_EXITED = "Look at what it printed last: it left by itself with that exit code (os._exit, or a native library's exit)."
_LEFT = "Look at the line shown: it ended its process there by os._exit, which skips what Python does at an end."


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for each way in which ranks ended."""
    return situation.told(_by_way(situation, [e for e in situation.causes if e.kind in _SILENT and e.rank in left]))


def aborted(situation: Situation, left: frozenset[int]) -> Told:
    """Ranks that aborted, where nothing explains it: communication libraries abort ranks that did no wrong."""
    ended = [e for e in situation.endings.values() if e.kind is End.ABORTED and e.rank in left]
    return Told(_by_way(situation, ended))


def _by_way(situation: Situation, dead: list[Ending]) -> list[Finding]:
    ways: dict[str, list[Ending]] = {}
    for ending in dead:
        ways.setdefault(ending.way, []).append(ending)
    return [_finding(situation, way, endings) for way, endings in ways.items()]


def _finding(situation: Situation, way: str, endings: list[Ending]) -> Finding:
    first = endings[0]
    ranks = tuple(e.rank for e in endings)
    view = situation.view
    everybody = len(ranks) == len(view.ranks) > 1
    seen = first.timed and first.kind is not End.ABORTED
    confidence = Confidence.CERTAIN if seen else Confidence.POSSIBLE if everybody else Confidence.LIKELY
    crash = view.rank(first.rank).crash
    traced = crash is not None and crash.stack is not None
    left = _LEFT if traced else _EXITED
    following = left if first.exit_code > 0 else after_signal(-first.exit_code, shown=traced)
    places = {where(situation, e.rank) for e in endings[:8]}
    whose = f"rank {first.rank} " if len(places) > 1 else ""
    pids = ", ".join(str(e.process.pid) for e in endings[:8] if e.process)
    return Finding(
        "rank-dead",
        f"{ranks_do(ranks, 'are')} dead: {'every process' if everybody else f'pid {pids}'} {way}, "
        f"{whose}last {where(situation, first.rank)} of step {int(view.page(first.rank)['step'])}",
        ranks,
        confidence,
        step=int(view.page(first.rank)["step"]),
        evidence=tuple(record for e in endings[:8] for record in stack_evidence(situation, e.rank)),
        next_step=_TOLD_NEXT if first.told else following,
        since_ns=first.t_ns - int(view.page(first.rank)["clock_offset_ns"]),
    )

"""``rank-exited-early``: a rank finished normally while its peers still train.

Why it hurts: the peers wait for a collective that will never be joined, or lose the connection. The evidence: the rank
closed its session or exited with code 0, and its last sequence number is behind what its peers wait in, or waited in
before they ended normally as well.
"""

from __future__ import annotations

from dtobs.detectors.hangs.batches import SKIPPED_NEXT, skipped_step
from dtobs.detectors.hangs.describe import group_name, waiters, waiting_evidence, waits_in
from dtobs.detectors.hangs.endings import TOGETHER_NS, End, raised_at
from dtobs.detectors.hangs.p2p_unmatched import message_counts
from dtobs.detectors.hangs.situation import LEFT, Absence, Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import ranks_text

_HANDLED_NEXT = (
    "Look at the output of this rank for an error that it handled, and end with another exit code than 0 after one: who"
    " starts the job takes it for complete."
)
_OWES_NEXT = "Compare the sends and receives of the two ranks: in one step, one of them left out a message."
_LAUNCHER_NEXT = (
    "Look at the output of the launcher (Ray's driver) for an error in what this rank trains with: the launcher handles"
    " it, and ends all ranks."
)
_LEFT_NEXT = "Look at what made this rank leave (sys.exit, an error it handled) while its peers went on."


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for all ranks that left their peers waiting."""
    if _told_together(situation):
        return Told()
    lost = any(e.kind is End.PEER_LOST for e in situation.endings.values())
    gone = [a for a in situation.absences if situation.endings[a.rank].kind in LEFT and a.rank in left]
    owing = {a.rank: said for a in gone if (said := _owes(situation, a))}
    gone = [a for a in gone if a.rank in owing] or gone
    return situation.told([_finding(situation, gone)] if gone and (situation.stuck or lost or _over(situation)) else [])


def _over(situation: Situation) -> bool:
    """Whether the peers that waited ended normally as well: they handled what the call that could not end raised."""
    return all(ending.kind in LEFT for ending in situation.endings.values())


def _told_together(situation: Situation) -> bool:
    """Whether every rank was told to end and then left in order, as programs do that handle an interruption."""
    at = [ending.t_ns for ending in situation.endings.values() if ending.told and ending.kind in LEFT]
    return 0 < len(at) == len(situation.endings) and max(at) - min(at) < TOGETHER_NS


def _owes(situation: Situation, absence: Absence) -> str:
    """How many messages the peers that lost the connection to this rank exchanged with it, where the two differ."""
    for rank in absence.waiting if not absence.group else ():
        counts = message_counts(situation, rank, absence.rank)
        if situation.endings[rank].kind is End.PEER_LOST and counts["sent"] != counts["received"]:
            return f": {counts['said']}"
    return ""


def _finding(situation: Situation, gone: list[Absence]) -> Finding:
    view = situation.view
    ranks = tuple(a.rank for a in gone)
    first = gone[0]
    done, others = (int(view.page(r)["steps_done"]) for r in (first.rank, first.waiting[0]))
    steps = f" after {done} steps" if done or others else ""
    steps += f", of which its peers did {others}" if done != others else ""
    skipped = skipped_step(view, first.rank, first.waiting[0]) if len(ranks) == 1 else ""
    owes = _owes(situation, first)
    return Finding(
        "rank-exited-early",
        f"{ranks_text(ranks)} {_how(situation, first.rank)}{steps}, {_peers(situation, first, len(ranks))}"
        f"{owes}{skipped}",
        ranks,
        Confidence.POSSIBLE if _by_launcher(situation, first.rank) else Confidence.CERTAIN,
        step=int(view.page(first.rank)["step"]),
        group=group_name(situation, first.group) if first.group else None,
        evidence=(
            *({"what": "end", "rank": r, "how": situation.endings[r].kind.value} for r in ranks[:8]),
            *waiting_evidence(situation, first),
        ),
        next_step=_OWES_NEXT if owes else _next_step(situation, first.rank, skipped),
        since_ns=first.since_ns,
    )


def _next_step(situation: Situation, rank: int, skipped: str) -> str:
    if skipped:
        return SKIPPED_NEXT
    if _by_launcher(situation, rank):
        return _LAUNCHER_NEXT
    if _over(situation):
        return _HANDLED_NEXT
    return _LEFT_NEXT if situation.endings[rank].exit_code else ""


def _peers(situation: Situation, absence: Absence, count: int) -> str:
    call = waits_in(situation, absence.waiting[0]).removeprefix("in ")
    without = f"without {call}, which {ranks_text(absence.waiting, 4)}"
    if _by_launcher(situation, absence.rank):
        return f"{without} waited in; their launcher then ended them all"
    if _over(situation):
        return f"{without} waited in and then ended normally as well: an error was handled there"
    lost = [rank for rank in absence.waiting if situation.endings[rank].kind is End.PEER_LOST]
    if absence.group or not lost:
        return f"while {waiters(situation, absence)}"
    return f"and {ranks_text(lost)} lost the connection to {'it' if count == 1 else 'them'}"


def _by_launcher(situation: Situation, rank: int) -> bool:
    """Whether its launcher took it out of the training, of which nothing says that it was over."""
    return situation.view.rank(rank).ended_by_launcher


def _how(situation: Situation, rank: int) -> str:
    if _by_launcher(situation, rank):
        return "left the training"
    left_at = situation.view.meta(rank).process.get("left_at")
    by = left_at.get("by", "sys.exit") if isinstance(left_at, dict) else ""
    place = raised_at({"frame": left_at})
    return situation.endings[rank].left_by or (f"ended normally by {by} at {place}" if place else "ended normally")

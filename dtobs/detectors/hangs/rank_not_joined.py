"""``rank-not-joined``: a rank lives and never issued the collective that its peers wait in.

Why it hurts: the peers wait until their timeout, and their error messages name themselves, not the rank that is
missing. The evidence is the issue frontier: the last sequence number of every rank in that group. Where the rank is
instead comes from its stack at the capture, else from its phase and its last call.
"""

from __future__ import annotations

from dtobs.detectors.hangs.absent import together
from dtobs.detectors.hangs.describe import (
    blocked_in,
    circle_evidence,
    group_name,
    stack_evidence,
    still_working,
    waiters,
    waiting_evidence,
    waits_there,
    where,
    working_evidence,
)
from dtobs.detectors.hangs.situation import Situation, Told, communicating_thread, ended_thread, undone_by_device
from dtobs.detectors.hangs.stall import compiles
from dtobs.findings import Confidence, Finding
from dtobs.host.stacks import ThreadStack
from dtobs.words import count, duration_text, ranks_do, ranks_text

_STEPS_PAST = 2
"""Later steps in which a rank made the calls of other groups: a call that it has not made by then is left out."""

_THREAD_NEXT = "Fix what that thread raised, and have it hand its errors over to who waits for it."
_COMPILES_NEXT = (
    "Give it time. Where it compiles anew in mid-run, the rank got a shape that was new to it: pad the batches, or"
    " torch.compile(dynamic=True)."
)
_UNDONE_NEXT = "Match the sends and receives of these ranks: a message that nobody answers holds up the whole device."


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for all ranks that are missing where their peers wait, and of which nobody knows why."""
    found: list[Finding] = []
    missing = [a.rank for a in situation.absences if a.rank in situation.idle and a.rank in left]
    for ranks, absence in together(situation, missing):
        verb = "is" if len(ranks) == 1 else "are, the first of them,"
        seen = situation.main_stack(ranks[0]) is not None
        awaited = bool(absence.waiting) and situation.blocked[absence.waiting[0]].peer < 0
        thread = communicating_thread(situation.view, ranks[0])
        waits = waits_there(situation, ranks[0]) if thread is None else ""
        undone = undone_by_device(situation.view, ranks[0])
        sure = bool(absence.group) and (seen or awaited) and situation.overdue(ranks)
        found.append(
            Finding(
                "rank-not-joined",
                f"{ranks_do(ranks, 'have')} not joined: {waiters(situation, absence)}, "
                f"and {ranks_text(ranks)} {verb} {where(situation, ranks[0])}{waits}"
                f"{_quiet(situation, ranks[0], alone=not waits)}"
                f"{_undone(undone, len(ranks)) or still_working(situation, ranks)}{_handed_over(thread)}",
                ranks,
                Confidence.POSSIBLE if thread is not None else Confidence.CERTAIN if sure else Confidence.LIKELY,
                step=int(situation.view.page(ranks[0])["step"]),
                group=group_name(situation, absence.group) if absence.group else None,
                evidence=(
                    *waiting_evidence(situation, absence),
                    *working_evidence(situation, ranks[0]),
                    *stack_evidence(situation, ranks[0]),
                ),
                next_step=_next_step(situation, ranks[0], undone),
                since_ns=absence.since_ns,
            )
        )
    return situation.told(found)


def gone_past(situation: Situation, left: frozenset[int]) -> Told:
    """A rank of a circle that went on for steps without the call that another rank waits in: it left that call out."""
    circle = situation.circle(left)
    for rank in circle:
        at = situation.blocked[rank]
        for missing in situation.awaited(rank) if at.peer < 0 else ():
            steps = situation.calls.steps_shared_since(rank, at.group, at.seq, missing) if missing in circle else 0
            if steps >= _STEPS_PAST:
                return situation.told([_gone_past(situation, rank, missing, steps)])
    return Told()


def _gone_past(situation: Situation, rank: int, missing: int, steps: int) -> Finding:
    at = situation.blocked[rank]
    busy = next((s for s in situation.view.rank(missing).stacks if s.mentions("torch/distributed/checkpoint/")), None)
    done = f"rank {missing}, a thread of which is still at {busy.frames[0]}," if busy is not None else f"rank {missing}"
    return Finding(
        "rank-not-joined",
        f"rank {missing} has not joined: rank {rank} waits {blocked_in(situation, rank)}, and {done} went on for "
        f"{steps} steps without it, and now waits {blocked_in(situation, missing)} for rank {rank}",
        (missing,),
        Confidence.LIKELY,
        step=int(situation.view.page(rank)["step"]),
        group=group_name(situation, at.group),
        evidence=circle_evidence(situation, [rank, missing]),
        since_ns=int(situation.view.page(missing)["wait_since_ns"]),
    )


def unrecorded(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for ranks that wait, as far as anything shows, for ranks of which nothing is recorded."""
    stalled = situation.stall
    if stalled is None or situation.absences or situation.view.contacts or not left.issuperset(stalled.ranks):
        return Told()  # of other nodes' ranks `lost_nodes` tells
    waiting = {rank: unseen for rank in sorted(situation.blocked) if (unseen := situation.unrecorded(rank))}
    if not waiting:
        return Told()
    first, unseen = next(iter(waiting.items()))
    longest = duration_text(situation.waited_seconds(first))
    finding = Finding(
        "rank-not-joined",
        f"rank {first} has waited {longest} {blocked_in(situation, first)}; nothing is recorded of "
        f"{ranks_text(unseen)}, so that who holds it up cannot be told",
        unseen,
        Confidence.POSSIBLE,
        step=int(situation.view.page(first)["step"]),
        next_step="Look at these ranks with `dtobs attach PID`; dtobs.attach() in each records it, also without an "
        "optimizer.",
        evidence=tuple(stack_evidence(situation, first)),
        since_ns=int(situation.view.page(first)["wait_since_ns"] or situation.view.page(first)["collective_ns"]),
    )
    return Told([finding])


def _next_step(situation: Situation, rank: int, undone: list[str]) -> str:
    if undone and any(way in undone[0] for way in (":send ", ":recv ")):
        return _UNDONE_NEXT
    if compiles(situation.view.rank(rank).stacks):
        return _COMPILES_NEXT
    return _THREAD_NEXT if ended_thread(situation.view, rank) is not None else ""


def _undone(calls: list[str], ranks: int) -> str:
    """What the first rank's device stands in: its host then hangs wherever it has something to launch, and polls."""
    later = f" and {count(len(calls) - 1, 'later call')}" if len(calls) > 1 else ""
    whose = "its device" if ranks == 1 else "the device of the first"
    return f"; {whose} has not done {calls[0]}{later}" if calls else ""


def _handed_over(thread: ThreadStack | None) -> str:
    """The end of a sentence about a rank whose main thread waits for one that communicates; or ""."""
    if thread is None:
        return ""
    call = next(frame.function for frame in thread.frames if "/dtobs/" not in frame.file)
    return f"; there it waits for a thread of its own, which is in {call}: a rank that has not called that may be why"


def _quiet(situation: Situation, rank: int, *, alone: bool) -> str:
    page = situation.view.page(rank)
    silent = (situation.view.now_ns - int(page["heartbeat_ns"])) / 1e9
    if silent <= 1:
        return ""
    return f"{'' if alone else ','} and has not been heard of for {duration_text(silent)}"

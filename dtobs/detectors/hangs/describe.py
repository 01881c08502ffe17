"""Words and evidence records that the hang detectors share."""

from __future__ import annotations

from typing import Any

from dtobs.detectors.hangs.endings import raised_at
from dtobs.detectors.hangs.situation import (
    Absence,
    Situation,
    constructing,
    ended_thread,
    thread_beside,
    working_thread,
)
from dtobs.detectors.hangs.stall import compiles
from dtobs.host.stacks import Frame, ThreadStack
from dtobs.words import duration_text, ranks_do, ranks_text

_MAX_RANKS_SHOWN = 8
_MAX_FRAMES = 12
_MAX_MESSAGE = 160

Evidence = dict[str, Any]


def phase_name(situation: Situation, rank: int) -> str:
    """The phase a rank is in, "" when it is in none."""
    return situation.view.rank(rank).phase


def collective(situation: Situation, rank: int, group: int, seq: int) -> str:
    """What `rank` called as `seq` of `group`: "all_reduce(sum, float32[1024]) #42 of group default"."""
    call = situation.calls.call(rank, group, seq)
    what = str(situation.calls.op(rank, int(call["op"]))) if call is not None else "a collective"
    return f"{what} #{seq} of group {group_name(situation, group)}"


def blocked_in(situation: Situation, rank: int) -> str:
    """What a blocked rank waits in and from where: "in barrier() #1 of group default at train.py:9 in main"."""
    at = situation.blocked[rank]
    site = situation.calls.site(rank, at.site)
    if at.peer < 0:
        call = situation.calls.call(rank, at.group, at.seq)
        site = situation.calls.site(rank, int(call["site"])) if call is not None else None
    line = f"at {site}" if site is not None and site.line else line_of(situation, rank)
    return f"{waits_in(situation, rank)} {line}".rstrip()


def waits_in(situation: Situation, rank: int) -> str:
    """The same without the line: "in barrier() #1 of group default", "to receive float32[3] #2 from rank 0"."""
    at = situation.blocked[rank]
    if at.peer < 0:
        return f"in {collective(situation, rank, at.group, at.seq)}"
    op = situation.calls.op(rank, at.op)
    sizes = ", ".join(f"{d}{list(s)}" for d, s in zip(op.dtypes, op.shapes, strict=False)) or "a message"
    way = f"to send {sizes} #{at.seq} to" if op.op == "send" else f"to receive {sizes} #{at.seq} from"
    return f"{way} rank {at.peer}"


def circle_evidence(situation: Situation, ranks: list[int]) -> tuple[Evidence, ...]:
    """What each of the ranks waits in, and its stack."""
    waiting = [
        {
            "what": "waiting",
            "rank": rank,
            "operation": blocked_in(situation, rank).removeprefix("in "),
            "for": situation.awaited(rank)[:_MAX_RANKS_SHOWN],
            "seconds": round(situation.waited_seconds(rank), 1),
        }
        for rank in ranks
    ]
    return (*waiting, *(record for rank in ranks[:4] for record in stack_evidence(situation, rank)))


def working_evidence(situation: Situation, rank: int) -> tuple[Evidence, ...]:
    """The time of a core that `rank` was seen to use, where it is at work."""
    if not situation.works(rank):
        return ()
    return ({"what": "processor time", "rank": rank, "cores": round(situation.view.cores[rank], 2)},)


def still_working(situation: Situation, ranks: tuple[int, ...]) -> str:
    """The end of a sentence about `ranks`: that they work or wait for a disk, so that they may come yet; or ""."""
    if any(compiles(situation.view.rank(rank).stacks) for rank in ranks):
        return "; torch compiles there, which may take minutes"
    works = [rank for rank in ranks if situation.works(rank)]
    if not works:
        slow = [rank for rank in ranks if situation.slow_disk(rank)]
        return f"; {ranks_do(slow, 'wait')} for a disk or a network file system, which may only be slow" if slow else ""
    who = ranks_text(works) if len(works) < len(ranks) else "it" if len(ranks) == 1 else "they"
    return (
        f"; {who} {'uses' if len(works) == 1 else 'use'} a processor core, so this may be long work or an endless loop"
    )


def group_name(situation: Situation, group: int) -> str:
    """The group as its creator named it."""
    known = situation.calls.groups.get(group)
    return str(known) if known is not None else f"{group:08x}"


def line_of(situation: Situation, rank: int) -> str:
    """ "at train.py:30 in step" from the rank's stack, else "somewhere after" its last call of a collective; or ""."""
    frame = user_frame(situation, rank)
    if frame is not None:
        return f"at {frame}"
    site = situation.calls.last_site(rank)
    return f"somewhere after {site}" if site is not None else ""


def user_frame(situation: Situation, rank: int) -> Frame | None:
    """The innermost frame of the user's own code in the captured stack."""
    stack = situation.main_stack(rank)
    return stack.user_frame if stack is not None else None


def where(situation: Situation, rank: int) -> str:
    """ "in forward at train.py:30 in step", as far as it is known."""
    phase, line = phase_name(situation, rank), line_of(situation, rank)
    return " ".join(part for part in (f"in {phase}" if phase else "", line) if part) or "at a place nobody recorded"


def waits_there(situation: Situation, rank: int) -> str:
    """The end of a clause about where `rank` is: ", where it waits for its child process 71 (sleep 9)", or for a thread
    of its own, or for a lock, with what another thread of it does meanwhile; or "".

    Only of a rank whose stack was seen at the same moment, and which has not moved since.
    """
    capture = situation.view.capture
    if capture is None or situation.main_stack(rank) is None:
        return ""
    ended = ended_thread(situation.view, rank)
    if ended is not None:
        return f", where it waits for its threads, of which {_raised_in_thread(ended)}"
    thread = working_thread(situation.view, rank)
    if thread is not None:
        return f", where it waits for a thread of its own, which is at {thread.user_frame}"
    waits_for = capture.ranks[rank].waits_for
    if not waits_for and (thread := thread_beside(situation.view, rank)) is not None:
        waits_for = f"a lock or a thread, while a thread of its own is at {thread.user_frame}"
    process = situation.view.process(rank)
    if not waits_for and process is not None and process.wchan.startswith("futex"):
        waits_for = "a lock or a thread of its own"  # who owns the lock the kernel does not know
    return f", where it waits for {waits_for}" if waits_for else ""


def _raised_in_thread(error: dict[str, Any]) -> str:
    """ "prefetch has ended by KeyError: 'x' at train.py:8 in fill": an exception as it is recorded."""
    message = " ".join(str(error.get("message", "")).split())[:_MAX_MESSAGE]
    place = f" at {raised_at(error)}" if raised_at(error) else ""
    name = str(error.get("type") or "an exception").rpartition(".")[2]
    return f"{error['thread']} has ended by {name}{f': {message}' if message else ''}{place}"


def _in_construction(situation: Situation, rank: int) -> str:
    name = constructing(situation.view, rank)
    return f" in {name} {line_of(situation, rank)}" if name else ""


def waiting_evidence(situation: Situation, absence: Absence) -> list[Evidence]:
    """The peers that wait, and how far every rank of the group came."""
    calls, found = situation.calls, []
    for rank in absence.waiting[:_MAX_RANKS_SHOWN]:
        call, at = calls.call(rank, absence.group, absence.seq), situation.blocked[rank]
        site = calls.site(rank, int(call["site"]) if call is not None and at.peer < 0 else at.site)
        found.append(
            {
                "what": "waiting",
                "rank": rank,
                "operation": waits_in(situation, rank).removeprefix("in "),
                "site": str(site) if site else "",
                "seconds": round(situation.waited_seconds(rank), 1),
            }
        )
    if absence.group and situation.blocked[absence.waiting[0]].peer < 0:
        shown = sorted({absence.rank, *absence.waiting[:_MAX_RANKS_SHOWN]})
        found.append(
            {
                "what": "last issued in the group",
                "group": group_name(situation, absence.group),
                "seq": {str(rank): calls.issued(rank, absence.group) for rank in shown},
            }
        )
    return found


def stack_evidence(situation: Situation, rank: int) -> list[Evidence]:
    """The captured stack of the rank's main thread and what the kernel said of it."""
    found: list[Evidence] = []
    stack = situation.main_stack(rank)
    if stack is not None:
        found.append({"what": "stack", "rank": rank, "frames": frames(stack)})
    process = situation.view.process(rank)
    if process is not None:
        seen = {"what": "process", "rank": rank, "pid": process.pid, "state": process.state or process.ending}
        found.append(seen | ({"wchan": process.wchan} if process.wchan else {}))
    return found


def frames(stack: ThreadStack) -> list[str]:
    """The innermost frames as text."""
    return [str(frame) for frame in stack.frames[:_MAX_FRAMES]]


def waiters(situation: Situation, absence: Absence) -> str:
    """ "rank 0 has waited 75 s in all_reduce(…) #42 of group default"."""
    ranks = absence.waiting
    if not ranks:
        return "its peers wait"
    longest = duration_text(max(situation.waited_seconds(rank) for rank in ranks))
    place = f" {waits_in(situation, ranks[0])}" if absence.group else _in_construction(situation, ranks[0])
    return f"{ranks_do(ranks, 'have', 4)} waited {longest}{place}"

"""What all hang detectors start from: who ended, who is blocked on whom, and who is missing where its peers wait."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dtobs.calls.absent import HeldUp, missing_in
from dtobs.calls.lost_step import LostStep, believed, lost_steps
from dtobs.calls.waits import circle_in
from dtobs.detectors.hangs.calls import ON_DEVICES, Blocked, Calls
from dtobs.detectors.hangs.endings import End, Ending, all_told, causes, endings
from dtobs.detectors.hangs.messages import settle
from dtobs.detectors.hangs.mismatch import Mismatch, dealt_apart, mismatches
from dtobs.detectors.hangs.stall import WORKING_CORES, Stall, stall
from dtobs.events import Phase
from dtobs.findings import CATALOGUE, Finding, Trait
from dtobs.host.loader_workers import POOL
from dtobs.host.stacks import ThreadStack
from dtobs.recording.told import told_ns, until
from dtobs.recording.view import RunView

LEFT = (End.CLOSED, End.EXITED)
_GAVE_UP = (End.TIMED_OUT, End.PEER_LOST, End.ABORTED)
TOO_LONG_SECONDS = 600.0
"""NCCL's own timeout: the longest that jobs are built to wait."""
_COMMUNICATION = ("/torch/distributed/",)
_HANDING_OVER = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")
_CONSTRUCTION = ("init_process_group", "_new_group_with_tag")
_NOT_COMMUNICATION = (
    "/torch/distributed/checkpoint/",
    "/torch/distributed/elastic/",
    "/torch/distributed/run.py",
)


@dataclass(frozen=True)
class Absence:
    """A rank that never issued what its peers are blocked in.

    `group` and `seq` are 0 where the peers' wait could not be tied to a collective.
    """

    rank: int
    group: int
    seq: int
    waiting: tuple[int, ...]  #: ranks blocked there
    since_ns: int  #: when the first of them began to wait


@dataclass(frozen=True)
class Told:
    """The result of one rule: its findings, and the ranks that later rules need not explain any more."""

    findings: list[Finding] = field(default_factory=list)
    ranks: frozenset[int] = frozenset()


@dataclass
class Situation:
    """One look at a run, interpreted."""

    view: RunView
    stall: Stall | None
    calls: Calls
    endings: dict[int, Ending]
    causes: list[Ending]
    blocked: dict[int, Blocked]  #: by rank; those that gave up waiting included
    mismatches: list[Mismatch] = field(default_factory=list)
    lost_steps: list[LostStep] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)

    @property
    def disagreed(self) -> bool:
        """Whether a disagreement is what stopped the run, so that what followed is its consequence."""
        groups = {at.group for at in self.blocked.values()}
        if self.broken and any(d.group in groups for d in self.lost_steps):
            return True  # the rank with a call too many waits in the end for one that never comes
        return self.broken and any(
            (m.group in groups if m.code == "collective-mismatch" else m.stopped) or self._ended_in(m.step)
            for m in self.mismatches
            if Trait.GOES_ON not in CATALOGUE[m.code].traits
        )

    def _ended_in(self, step: int) -> bool:
        """Whether the run ended in `step` by what backends do to ranks.

        Small messages get a few calls past the first that does not fit.
        """
        gave_up = any(e.kind in (End.PEER_LOST, End.ABORTED) for e in self.endings.values())
        return gave_up and not self.causes and step >= max(int(self.view.page(r)["step"]) for r in self.view.ranks)

    @property
    def stuck(self) -> bool:
        """Whether the run has stopped moving, or a rank gave up waiting, which says the same."""
        return self.stall is not None or any(e.kind is End.TIMED_OUT for e in self.endings.values())

    @property
    def early(self) -> bool:
        """Whether the run stands still for somebody who asks, and not yet long enough for an alarm."""
        return self.stall is not None and not self.stall.exceeded

    @property
    def broken(self) -> bool:
        """Whether training has stopped: the run is stuck, or a rank ended by itself."""
        return self.stuck or bool(self.causes) or any(e.kind in _GAVE_UP for e in self.endings.values())

    @cached_property
    def halted(self) -> dict[int, str]:
        """Living ranks that do not run at all, whatever they were doing, each with its code; {} unless stuck."""
        return {r: code for r in self.view.ranks if self.stuck and self._lives(r) and (code := _halt(self.view, r))}

    def unrecorded(self, rank: int) -> tuple[int, ...]:
        """Whom a blocked rank may wait for although nothing of them is recorded: its peer, or members of its group."""
        at = self.blocked[rank]
        members = (at.peer,) if at.peer >= 0 else self.calls.members(at.group) if at.group else ()
        return tuple(sorted(set(members) - set(self.view.ranks)))

    @cached_property
    def idle(self) -> tuple[int, ...]:
        """Living ranks that wait for nobody, although others wait for them or they should move; () unless stuck."""
        still = set(self.stall.ranks) if self.stall is not None else set()
        awaited = {absence.rank for absence in self.absences} | still
        return tuple(r for r in self.view.ranks if self.stuck and self._lives(r) and r in awaited - set(self.blocked))

    @cached_property
    def suspects(self) -> frozenset[int]:
        """Ranks that may be a cause; all others merely wait, or ended because a peer did."""
        left = {a.rank for a in self.absences if self.endings[a.rank].kind in LEFT and not self.causes}
        return frozenset({*(e.rank for e in self.causes), *self.halted, *self.idle, *left})

    def told(self, findings: Iterable[Finding]) -> Told:
        """Findings that account for the ranks they accuse, and for everybody who is no suspect."""
        found = list(findings)
        if not found:
            return Told()
        return Told(found, frozenset(self.view.ranks) - self.suspects | {rank for f in found for rank in f.ranks})

    def _lives(self, rank: int) -> bool:
        """Whether a rank has not ended, as far as anybody knows, and its end is no cause itself."""
        return self.endings[rank].kind in (End.OPEN, End.TERMINATED) and self.endings[rank] not in self.causes

    def awaited(self, rank: int) -> list[int]:
        """Ranks that have to act before `rank` can go on; [] for a rank that is not blocked."""
        at = self.blocked.get(rank)
        return _awaited(self, rank, at) if at is not None else []

    def circle(self, left: frozenset[int]) -> list[int]:
        """Ranks among `left` that wait each for the next, the last for the first; [] where none do."""
        return circle_in({rank: self.awaited(rank) for rank in self.blocked if rank in left}) if self.stuck else []

    def unmatched(self, rank: int) -> bool:
        """Whether `rank` waits in a send or a receive of which its peer has not issued the other half."""
        at, peer, calls = self.blocked[rank], self.blocked[rank].peer, self.calls
        fewer = peer >= 0 and any(
            calls.exchanged(rank, peer, mine, group) > calls.exchanged(peer, rank, other, group)
            for mine, other in (("recv", "send"), ("send", "recv"))
            for group in calls.exchange_groups(rank, peer)
        )
        return fewer or (peer >= 0 and bool(calls.other_tags(rank, at)))

    def main_stack(self, rank: int) -> ThreadStack | None:
        """The stack of the rank's main thread at the capture; None where there is none or the rank moved on."""
        return self.view.rank(rank).stack

    def works(self, rank: int) -> bool:
        """Whether its process was seen at work of late: who works may come yet."""
        return self.view.cores.get(rank, 0.0) >= WORKING_CORES

    def slow_disk(self, rank: int) -> bool:
        """Whether the kernel says that its process waits for a disk or a network file system: it may only be slow."""
        process = self.view.process(rank)
        return process is not None and process.alive and process.state == "D"

    def overdue(self, ranks: Iterable[int]) -> bool:
        """Whether `ranks` cannot only be slow any more: a peer gave up, or has waited `TOO_LONG_SECONDS` for ranks that
        do nothing. No stack tells a download, a slow write or a subprocess from one that never returns.
        """
        if any(self.works(rank) or self.slow_disk(rank) for rank in ranks):
            return False
        waited = max(map(self.waited_seconds, self.blocked), default=0.0)
        return waited >= TOO_LONG_SECONDS or any(e.kind is End.TIMED_OUT for e in self.endings.values())

    def wait_begin_ns(self, rank: int) -> int:
        """When `rank` began to wait: its host in a call, else its device in the last one, or for a message some time
        before the host was heard of for the last time.
        """
        page, at = self.view.page(rank), self.blocked.get(rank)
        called = 0 if at is not None and at.peer >= 0 else int(page["collective_ns"])
        return int(page["wait_since_ns"]) or called or int(page["heartbeat_ns"])

    def waited_seconds(self, rank: int) -> float:
        """How long `rank` has been blocked, or had been when it ended."""
        page = self.view.page(rank)
        since = self.wait_begin_ns(rank)
        ending = self.endings[rank]
        until = ending.t_ns - int(page["clock_offset_ns"]) if ending.over else self.view.now_ns
        return max(0.0, (until - since) / 1e9) if since else 0.0


def interpret(view: RunView) -> Situation:
    """Work out the situation of a run.

    A rank that is told to end may communicate about that (Lightning does): what it calls then in the place of what
    others had called before is not how the run came to stand.
    """
    situation = _interpret(view)
    after = _of_the_end(situation)
    return _interpret(until(view, after)) if after else situation


def _of_the_end(situation: Situation) -> dict[int, int]:
    """By rank that was told to end before others' call: the time of its first call that does not fit theirs."""
    found: dict[int, int] = {}
    for mismatch in situation.mismatches:
        ranks = [rank for party in mismatch.parties.parties for rank in party]
        calls = {r: situation.calls.call(r, mismatch.group, mismatch.seq) for r in ranks}
        made = {rank: int(call["t_ns"]) for rank, call in calls.items() if call is not None}
        told = {rank: told_ns(situation.view, rank) for rank in made}
        late = [rank for rank, t_ns in made.items() if 0 < told[rank] < t_ns]
        if late and len(late) < len(made):
            found |= {rank: min(made[rank], found.get(rank, made[rank])) for rank in late}
    return found


def _interpret(view: RunView) -> Situation:
    stalled = stall(view)
    ended = endings(view)
    calls = Calls(view)
    first = causes(ended, stalled=stalled is not None)
    situation = Situation(view, stalled, calls, ended, first, _blocked(view, calls, ended, stalled))
    situation.mismatches = mismatches(calls, moving=not situation.broken)
    if situation.broken:
        known = {(m.group, m.code) for m in situation.mismatches}
        situation.mismatches += [m for m in dealt_apart(view, calls) if (m.group, m.code) not in known]
    situation.lost_steps = believed(lost_steps(calls.program()), situation.mismatches)
    lost = {(d.group, d.rank): d.seq for d in situation.lost_steps}  # what a lost step explains is no second cause
    situation.mismatches = [
        m for m in situation.mismatches if not any(m.seq >= lost.get((m.group, r), m.seq + 1) for r in m.parties.odd)
    ]
    situation.absences = _absences(situation)
    return situation


def _blocked(view: RunView, calls: Calls, ended: dict[int, Ending], stalled: Stall | None) -> dict[int, Blocked]:
    found: dict[int, Blocked] = {}
    standing = set(stalled.ranks) if stalled is not None else set()  # of a run that was ended, as it was seen last
    if stalled is not None and all_told(ended):
        standing |= {rank for rank in view.ranks if ended[rank].told}
    all_left = all(e.kind in LEFT for e in ended.values()) and not any(c.lost for c in view.contacts.values())
    for rank in view.ranks:
        page = view.page(rank)
        last = Blocked(int(page["collective_group"]), int(page["collective_seq"]))
        if constructing(view, rank):
            last = Blocked(0, 0)  # whatever it called before is over
        if ended[rank].kind in _GAVE_UP:
            aside = calls.missed_aside(rank) if last.seq and not calls.behind(last.group, last.seq) else None
            found[rank] = aside or last
        elif ended[rank].over and rank not in standing:
            if all_left and calls.left_open(rank, last):
                found[rank] = last
        elif int(page["wait_since_ns"]):
            opened = calls.open_waits.get(rank)
            found[rank] = opened if opened is not None and opened.group else last
        elif _in_communication(view.rank(rank).stack):
            found[rank] = calls.last_message(rank) or last  # inside of it: NCCL may connect to the peer there
        elif communicating_thread(view, rank) is not None and (aside := calls.missed_aside(rank)) is not None:
            found[rank] = aside
    if stalled is not None and not any(rank in found for rank in stalled.ranks):
        found |= _blocked_on_device(view, calls, stalled)
    return settle(calls, found)


def constructing(view: RunView, rank: int) -> str:
    """The function of torch in which a rank makes a process group, by the stack at the capture; "" for none."""
    stack = view.rank(rank).stack
    frames = stack.frames if stack is not None else ()
    names = [f.function for f in frames if f.file.endswith("/torch/distributed/distributed_c10d.py")]
    if not any(name in _CONSTRUCTION for name in names):
        return ""
    return "init_process_group" if "init_process_group" in names else "new_group"


def _blocked_on_device(view: RunView, calls: Calls, stalled: Stall) -> dict[int, Blocked]:
    """In a stall in which no host waits: ranks whose last collective has not been issued by all its members, or has
    not been done by their device as the recorder of NCCL says, and ranks whose message has not been answered, where
    that leads to a rank that nothing holds up.

    On a GPU the stream waits, and the host runs on until it needs a result; where it then stands says nothing.
    """
    found: dict[int, Blocked] = {}
    asking: dict[int, Blocked] = {}
    for rank in stalled.ranks:
        page, process = view.page(rank), view.process(rank)
        group, seq = int(page["collective_group"]), int(page["collective_seq"])
        elsewhere = int(page["phase"]) in (Phase.DATA, Phase.CHECKPOINT) or (process and process.stopped)
        if seq and not elsewhere and (undone_by_device(view, rank) or calls.behind(group, seq)):
            found[rank] = Blocked(group, seq)
        elif not elsewhere and (asked := [m for m in calls.unanswered(rank) if calls.on_device(m.group)]):
            asking[rank] = asked[0]
    return found | asking if any(message.peer not in asking for message in asking.values()) else found


def undone_by_device(view: RunView, rank: int) -> list[str]:
    """Of a rank that has not moved since the capture: its newest calls to NCCL, in order, from the first on that the
    device had not done then; empty where it had done the last one.
    """
    seen = view.capture.ranks.get(rank) if view.capture is not None else None
    if seen is None or view.capture is None or int(view.page(rank)["heartbeat_ns"]) > view.capture.taken_ns:
        return []
    entries = (seen.flight_recorder or {}).get("entries")
    found: list[str] = []
    for entry in reversed(entries if isinstance(entries, list) else []):
        name = str(entry.get("profiling_name")) if isinstance(entry, dict) else ""
        if not name.startswith(ON_DEVICES) or entry.get("state") not in ("scheduled", "started"):
            break
        found.append(name)
    return found[::-1]


def _held_up(situation: Situation) -> tuple[list[HeldUp], list[HeldUp]]:
    """What blocked ranks wait in: collectives, then messages and waits that could not be tied to a collective."""
    waits: dict[tuple[int, int, int], list[int]] = {}
    for rank, at in situation.blocked.items():
        if at.peer < 0 or not situation.calls.answered(rank, at):  # else the peer has done its part
            waits.setdefault((at.group, at.seq, at.peer), []).append(rank)
    collectives: list[HeldUp] = []
    others: list[HeldUp] = []
    for (group, seq, peer), waiting in waits.items():
        held_by = _awaited(situation, waiting[0], situation.blocked[waiting[0]])
        sort = collectives if group and peer < 0 else others
        sort.append(HeldUp(group, seq, tuple(held_by), tuple(sorted(waiting)), 0))
    return collectives, others


def _absences(situation: Situation) -> list[Absence]:
    """Ranks that blocked ranks wait for and that are not blocked themselves, each in the call that it is missing in."""
    collectives, others = _held_up(situation)
    missing = {rank for at in [*collectives, *others] for rank in at.held_by} - set(situation.blocked)
    missing &= set(situation.view.ranks)  # of the others nobody knows what they do (`rank_not_joined.unrecorded`)
    first = missing_in(collectives, missing)
    left = missing.difference(*(ranks for ranks, _ in first))
    return sorted(
        (_absence(situation, rank, at) for ranks, at in [*first, *missing_in(others, left)] for rank in ranks),
        key=lambda found: found.rank,
    )


def _absence(situation: Situation, rank: int, at: HeldUp) -> Absence:
    """The absence of `rank` from what its peers wait in."""
    since = min(map(situation.wait_begin_ns, at.waiting))
    return Absence(rank, at.group, at.seq, at.waiting, since)


def _awaited(situation: Situation, rank: int, at: Blocked) -> list[int]:
    """Ranks that have to act before `rank` can go on."""
    calls, view = situation.calls, situation.view
    if at.peer >= 0:
        return [at.peer]
    if not at.group:  # blocked, nobody knows where: anyone who is not blocked may be the reason
        if others := [r for r in view.ranks if r != rank and not situation.endings[r].over]:
            return others
        lost = situation.endings[rank].kind is End.PEER_LOST
        return [r for r in view.ranks if lost and situation.endings[r].kind in LEFT]  # whose connection it was
    return calls.behind(at.group, at.seq)


def _halt(view: RunView, rank: int) -> str:
    """``rank-stopped``, ``gil-held`` or nothing."""
    process, capture = view.process(rank), view.capture
    if process is not None and process.stopped:
        return "rank-stopped"
    held = capture is not None and rank in capture.ranks and capture.ranks[rank].gil == "held"
    return "gil-held" if held and capture and int(view.page(rank)["heartbeat_ns"]) <= capture.taken_ns else ""


def communicating_thread(view: RunView, rank: int) -> ThreadStack | None:
    """The thread that communicates for the main one, which waits for it (an asynchronous checkpoint); None for none."""
    return next((stack for stack in _handed_over_to(view, rank) if _in_communication(stack)), None)


def working_thread(view: RunView, rank: int) -> ThreadStack | None:
    """The only thread that is in the user's own code, and not idle, while the main one waits for one; else None."""
    busy = [
        stack
        for stack in _handed_over_to(view, rank)
        if any(not frame.in_library for frame in stack.frames) and not _idle(stack)
    ]
    return busy[0] if len(busy) == 1 else None


def ended_thread(view: RunView, rank: int) -> dict[str, Any] | None:
    """The exception that ended the last thread of `rank` that one ended, where the main thread waits for a thread."""
    main = view.rank(rank).stack
    ended = [e for e in view.meta(rank).exceptions if e.get("thread")]
    return ended[-1] if ended and main is not None and _idle(main) else None


def thread_beside(view: RunView, rank: int) -> ThreadStack | None:
    """The only other thread in the user's own code, where the main one waits there for a lock or a thread; else None.

    ``with lock:`` has no frame of its own: the kernel says that it waits (a futex).
    """
    main, process = view.rank(rank).stack, view.process(rank)
    if main is None or not main.frames or main.frames[0].in_library:
        return None
    if process is None or not process.wchan.startswith("futex"):
        return None
    others = [s for s in view.rank(rank).stacks if s is not main and s.frames and not s.frames[0].in_library]
    return others[0] if len(others) == 1 else None


def _handed_over_to(view: RunView, rank: int) -> list[ThreadStack]:
    """The threads beside the main one where that waits for one of them."""
    main = view.rank(rank).stack
    if main is None or not _idle(main) or main.mentions(POOL):  # a pool's threads only hand on what processes do
        return []
    return [stack for stack in view.rank(rank).stacks if stack is not main]


def _idle(stack: ThreadStack) -> bool:
    """Whether it waits for another thread, as a worker does for its next task."""
    return bool(stack.frames) and stack.frames[0].file.endswith(_HANDING_OVER)


def _in_communication(stack: ThreadStack | None) -> bool:
    """Whether the innermost frame of a stack is torch's communication code."""
    if stack is None or not stack.frames:
        return False
    file = next((frame.file for frame in stack.frames if "/dtobs/" not in frame.file), "")
    return any(part in file for part in _COMMUNICATION) and not any(part in file for part in _NOT_COMMUNICATION)

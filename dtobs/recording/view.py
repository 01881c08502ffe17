"""RunView: N ranks' recordings as arrays, one moment in time. Detectors, TUI, exporter and diagnose read only this.

Loading needs no torch and no cooperation of the ranks: a live, hung, dead or torn run loads alike.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.codec import DecodeError, decode, parse
from dtobs.errors import RecordingError, TargetError, exists
from dtobs.events import EVENT_DTYPE, PIPELINE_DTYPE, STEP_DTYPE, RankState
from dtobs.host.process import ProcessState, boot_id, pid_namespace, read_process
from dtobs.recording.capture import Capture, latest_capture
from dtobs.recording.clocks import shift, shifts
from dtobs.recording.contact import Contact, read_contacts
from dtobs.recording.devices import DeviceSample, by_rank
from dtobs.recording.laws import Law
from dtobs.recording.meta import Group, Meta, read_meta
from dtobs.recording.page import MAX_WORLD, PAGE_DTYPE, PageReader, plausible
from dtobs.recording.rank import END_SIGNALS, TAIL_EVENTS, Rank, as_it_crashed, open_wait
from dtobs.recording.ring import EVENT_CAPACITY, STEP_CAPACITY, adapt, joined, read_ring
from dtobs.recording.ring_tail import read_tail
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.shared_files import SharedFile, read_shared_files
from dtobs.recording.step_window import StepWindow, aligned
from dtobs.recording.uncounted_time import Excused, read_excused
from dtobs.recording.watched import monitor_gone

KEPT_BYTES = 256 << 20
"""Of steps and events that one look hands to the next; where they are more, each look reads them again."""
_FRESH = {STEP_DTYPE: (128, STEP_CAPACITY), EVENT_DTYPE: (1024, EVENT_CAPACITY)}
"""So many of the newest records are read where the rest is known, and so many are kept in all."""
_SPARE = 8
_AMENDED = 32
"""Records that may still change after they were written."""


@dataclass
class RunView:
    """One look at a run.

    `pages` is PAGE_DTYPE[R], row i belongs to rank `ranks[i]` (ascending). `processes` and `capture` are what is
    known from outside; both may be empty. All times are on one axis, the monotonic clock of this host where ranks ran
    here, else of the first node. `now_ns` is the time of the look (of the last heartbeat, when the run is looked at
    from another host or after a reboot).
    """

    root: Path
    info: dict[str, Any]
    pages: npt.NDArray[np.void]
    now_ns: int
    processes: dict[int, ProcessState] = field(default_factory=dict)
    cores: dict[int, float] = field(default_factory=dict)  #: how many cores each rank was seen to use of late
    capture: Capture | None = None
    _clock: dict[int, int] = field(default_factory=dict, repr=False)  # by rank: added to the times of its host
    _windows: dict[int, StepWindow] = field(default_factory=dict, repr=False)
    _meta: dict[int, Meta] = field(default_factory=dict, repr=False)
    _meta_size: dict[int, tuple[Path, int]] = field(default_factory=dict, repr=False)
    _kept_steps: dict[int, npt.NDArray[np.void]] = field(default_factory=dict, repr=False)  # of an earlier look
    _kept_events: dict[int, npt.NDArray[np.void]] = field(default_factory=dict, repr=False)
    _steps: dict[int, npt.NDArray[np.void]] = field(default_factory=dict, repr=False)
    _events: dict[int, npt.NDArray[np.void]] = field(default_factory=dict, repr=False)
    _tails: dict[int, tuple[tuple[int, int], npt.NDArray[np.void]]] = field(default_factory=dict, repr=False)
    _waits: dict[int, tuple[npt.NDArray[np.void], np.void | None]] = field(default_factory=dict, repr=False)
    damaged: list[str] = field(default_factory=list)  #: files that could not be read, one line each
    paused: bool = False  #: the file ``paused`` lies in the run directory: its owner says that nothing need move
    excused: tuple[Excused, ...] = ()  #: when a monitor saw that nothing could move; such time does not count
    shared_files: tuple[SharedFile, ...] = ()  #: that several ranks of a node wrote over at one time
    contacts: dict[int, Contact] = field(default_factory=dict)  #: other nodes, as the lead knew them
    unwatched: tuple[int, ...] = ()  #: nodes of this host whose ranks live and whose monitor was killed
    files: object = None  #: what keeps the files at `root` as long as they are read
    shared: dict[str, Any] = field(default_factory=dict, repr=False)
    """What several rules work out of this look, by a name of their own."""
    memo: dict[str, Any] = field(default_factory=dict, repr=False)
    """What rules keep from one look to the next, by a name of their own; empty again when a rank is another."""
    asked: bool = False  #: somebody wants to know now: a standstill is judged before it is long enough for an alarm

    @cached_property
    def ranks(self) -> list[int]:
        """Ranks that recorded, ascending."""
        return [int(r) for r in self.pages["rank"]]

    @property
    def world_size(self) -> int:
        """Ranks the job has (also those that never recorded)."""
        said = int(self.pages["world_size"].max()) if len(self.pages) else 0
        # Rank 0 writes run.json after its page: for a moment it still speaks of the attempt before.
        current = not len(self.pages) or self.info.get("attempt", self.attempt) == self.attempt
        told = self.info.get("world_size") if current else None
        known = [n for n in (said, told) if isinstance(n, int) and n <= MAX_WORLD]
        return max([*known, len(self.pages)])

    def came(self, ranks: Iterable[int], since_ns: int) -> bool:
        """Whether all `ranks` that others waited for at `since_ns` issued a collective later, and nobody told any rank
        to end: a handler of that may issue one.
        """
        at = {int(page["rank"]): int(page["collective_ns"]) for page in self.pages}
        told = any(self.signals(rank) & END_SIGNALS for rank in self.ranks)
        return not told and all(at.get(rank, 0) > since_ns for rank in ranks)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the world without any recording in this attempt."""
        return sorted(set(range(self.world_size)) - set(self.ranks))

    @property
    def attempt(self) -> int:
        """The attempt looked at: the newest."""
        return int(self.pages["attempt"].max()) if len(self.pages) else 0

    @property
    def out_of_reach(self) -> frozenset[int]:
        """Ranks of nodes whose monitors do not answer: what is known of them is from before."""
        nodes = [n for n, contact in self.contacts.items() if contact.lost and contact.attempt == self.attempt]
        if not nodes:
            return frozenset()
        gone = np.isin(self.pages["node"], nodes) & (self.pages["state"] != RankState.CLOSED)
        return frozenset(self.pages["rank"][gone].tolist())

    @cached_property
    def devices(self) -> dict[int, tuple[DeviceSample, ...]]:
        """By rank: what the driver said of its device in this attempt, oldest first."""
        return by_rank(RunDirectory(self.root), self.attempt, self._clock)

    @cached_property
    def _row_of(self) -> dict[int, int]:
        return {rank: row for row, rank in enumerate(self.ranks)}

    def open_wait(self, rank: int) -> np.void | None:
        """The event of what `rank` waits for, as `open_wait` has it; kept while the rank publishes nothing."""
        events = self.tail_events(rank, TAIL_EVENTS)
        known = self._waits.get(rank)
        if known is None or known[0] is not events:
            known = self._waits[rank] = (events, open_wait(events))
        return known[1]

    def rank(self, rank: int) -> Rank:
        """What `rank` does, where it stands and how it ended. Raises KeyError when it did not record."""
        return Rank(self, rank, self.page(rank))

    def each_rank(self) -> list[Rank]:
        """All ranks that recorded, ascending."""
        return [Rank(self, rank, page) for rank, page in zip(self.ranks, self.pages, strict=True)]

    def page(self, rank: int) -> np.void:
        """The page of `rank`. Raises KeyError when it did not record."""
        return self.pages[self._row_of[rank]]  # type: ignore[no-any-return]

    def meta(self, rank: int) -> Meta:
        """What the numbers in the recording of `rank` stand for."""
        if rank not in self._meta:
            path = RunDirectory(self.root).meta(rank, self._attempt(rank))
            self._meta_size[rank] = path, _size(path)
            self._meta[rank] = meta = read_meta(path)
            for raised in meta.exceptions if self._clock.get(rank) else []:
                if isinstance(raised.get("t_ns"), int):
                    raised["t_ns"] += self._clock[rank]
        return self._meta[rank]

    def events(self, rank: int) -> npt.NDArray[np.void]:
        """The recent events of `rank`, EVENT_DTYPE, oldest first; empty when unreadable."""
        if rank not in self._events:
            path = RunDirectory(self.root).events(rank, self._attempt(rank))
            self._events[rank] = self._continued(rank, path, self._kept_events, EVENT_DTYPE)
        return self._events[rank]

    def tail_events(self, rank: int, last: int) -> npt.NDArray[np.void]:
        """The newest `last` of `events`, without reading the rest; kept while the rank publishes nothing."""
        if rank in self._events:
            return self._events[rank][-last:]
        page = self.page(rank)
        mark = (int(page["attempt"]), int(page["heartbeat_ns"]))
        if rank not in self._tails or self._tails[rank][0] != mark:
            path = RunDirectory(self.root).events(rank, mark[0])
            self._tails[rank] = (mark, shift(self._ring(path, EVENT_DTYPE, last), self._clock.get(rank, 0)))
        return self._tails[rank][1]

    def digests(self, rank: int) -> npt.NDArray[np.void]:
        """Parameter digests of `rank`: fields step, t_ns, digest u64[parameters]; empty when none."""
        path = RunDirectory(self.root).digests(rank, self._attempt(rank))
        return shift(self._ring(path, None), self._clock.get(rank, 0))

    def pipeline(self, rank: int, last: int | None = None) -> npt.NDArray[np.void]:
        """What the pipeline schedule of `rank` did recently, PIPELINE_DTYPE in the order of the ends; empty when none.

        With `last` only the newest `last` records are read.
        """
        path = RunDirectory(self.root).pipeline(rank, self._attempt(rank))
        return shift(self._ring(path, PIPELINE_DTYPE, last), self._clock.get(rank, 0))

    def law(self, law: Law, rank: int, last: int | None = None) -> npt.NDArray[np.void]:
        """What `rank` wrote down of a law, oldest first; empty when nothing. With `last` only the newest records."""
        path = RunDirectory(self.root).ring(law.name, rank, self._attempt(rank))
        return self._ring(path, law.dtype, last)

    def law_since(self, law: Law, rank: int, stamp: int, last: int) -> npt.NDArray[np.void]:
        """Of the newest `last` records of `law`, those after the one with `stamp` (0: all), oldest first."""
        path = RunDirectory(self.root).ring(law.name, rank, self._attempt(rank))
        for few in (_SPARE, last) if stamp else (last,):
            tail = self._ring(path, law.dtype, min(few, last), stamp)
            if not len(tail) or int(tail["stamp"][0]) <= stamp + 1:
                break
        return tail[tail["stamp"] > stamp]

    def rank_steps(self, rank: int) -> npt.NDArray[np.void]:
        """The step history of `rank`, STEP_DTYPE, oldest first."""
        if rank not in self._steps:
            path = RunDirectory(self.root).steps(rank, self._attempt(rank))
            self._steps[rank] = self._continued(rank, path, self._kept_steps, STEP_DTYPE)
        return self._steps[rank]

    def recent_steps(self, rank: int, last: int) -> npt.NDArray[np.void]:
        """The newest `last` of `rank_steps`, without reading the rest."""
        if rank in self._steps or rank in self._kept_steps:
            return self.rank_steps(rank)[-last:]
        path = RunDirectory(self.root).steps(rank, self._attempt(rank))
        done = int(self.page(rank)["steps_done"])
        return shift(self._ring(path, STEP_DTYPE, last, done), self._clock.get(rank, 0))

    def steps(self, last: int = 256) -> StepWindow:
        """The newest `last` steps of all ranks, aligned by step number."""
        if last not in self._windows:
            self._windows[last] = aligned([self.recent_steps(r, last) for r in self.ranks], last)
        return self._windows[last]

    def groups(self) -> dict[int, Group]:
        """Process groups by their number, as seen by any rank."""
        found: dict[int, Group] = {}
        for rank in self.ranks:
            found.update(self.meta(rank).groups)
        return found

    def process(self, rank: int) -> ProcessState | None:
        """What the kernel said of `rank`: the live look first, then the capture; None when nobody looked."""
        if rank in self.processes:
            return self.processes[rank]
        if self.capture and rank in self.capture.ranks:
            return self.capture.ranks[rank].process
        return None

    def signals(self, rank: int) -> frozenset[int]:
        """The signals that reached the Python of `rank`, as far as that was recorded."""
        try:
            with RunDirectory(self.root).signals(rank, self._attempt(rank)).open("rb") as file:
                return frozenset(file.read(64)) - {0}
        except OSError:
            return frozenset()

    def without(self, ranks: Iterable[int]) -> RunView:
        """The view as if `ranks` had not recorded; what was read of the others is not read again."""
        gone = set(ranks)
        seen = replace(
            self, pages=self.pages[~np.isin(self.pages["rank"], list(gone))], _windows={}, shared={}, memo={}
        )
        seen.processes = {rank: state for rank, state in self.processes.items() if rank not in gone}
        return seen

    def _attempt(self, rank: int) -> int:
        return int(self.page(rank)["attempt"])

    def _continued(
        self, rank: int, path: Path, kept: dict[int, npt.NDArray[np.void]], dtype: np.dtype[np.void]
    ) -> npt.NDArray[np.void]:
        """A whole ring. Of one that an earlier look has `kept` only the newest records are read, if they connect."""
        before, clock = kept.pop(rank, None), self._clock.get(rank, 0)
        fresh, capacity = _FRESH[dtype]
        if before is not None and len(before):
            if dtype == STEP_DTYPE:  # as many as the page says are new, and a few that may have been amended
                new = int(self.page(rank)["steps_done"]) - int(before["stamp"][-1])
                fresh = min(fresh, max(0, new) + _AMENDED + _SPARE)
            tail = shift(self._ring(path, dtype, fresh, int(before["stamp"][-1])), clock)
            if len(tail) and tail["stamp"][0] == 1:
                return tail  # it is all there is
            # The newest that were there before may have been amended since.
            if len(tail) and int(tail["stamp"][0]) + _AMENDED <= int(before["stamp"][-1]) <= int(tail["stamp"][-1]):
                known = int(np.searchsorted(before["stamp"], tail["stamp"][0]))
                return joined([before[:known], tail])[-capacity:]
        return shift(self._ring(path, dtype), clock)

    def _ring(
        self, path: Path, expected: np.dtype[np.void] | None, last: int | None = None, after: int = 0
    ) -> npt.NDArray[np.void]:
        empty = np.zeros(0, expected if expected is not None else [("step", "<i8")])
        if not path.exists():
            return empty
        try:
            records = read_ring(path) if last is None else read_tail(path, last, after)
            return records if expected is None else adapt(path, records, expected)
        except RecordingError as error:
            if str(error) not in self.damaged:
                self.damaged.append(str(error))
            return empty


def load_run(
    root: Path | str,
    *,
    processes: dict[int, ProcessState] | None = None,
    previous: RunView | None = None,
    with_capture: bool = True,
    host: tuple[str, int] | None = None,
) -> RunView:
    """Look at a run directory now.

    `processes` is what a monitor knows of the ranks' processes; without it they are looked up in /proc when this is
    the host that ran them. `previous` is the last look at the same run: meta entries that have not changed since are
    taken from it. Without `with_capture` the last capture is not read. `host` is the boot and the present time of the
    host that looks, when that is not this one. Raises TargetError when `root` is not a run
    directory; a damaged file in it is named in `damaged`.
    """
    root = Path(root)
    run = RunDirectory(root)
    if not (exists(root) and root.is_dir()):
        raise TargetError(f"there is no directory {root}. Give a run directory (runs/<UTC time>-<name>)")
    damaged = run.unreadable()
    parts: list[npt.NDArray[np.void]] = []
    for node in run.nodes():
        try:
            with contextlib.closing(PageReader(run.pages(node))) as reader:
                parts.append(_believable(run.pages(node), reader.read(), damaged))
        except RecordingError as error:
            damaged.append(str(error))
            continue
        damaged += [f"{run.pages(node)}: the page of local rank {slot} is broken" for slot in reader.torn]
    if not run.nodes() and not run.run_json.exists():
        raise TargetError(f"{root} is not a run directory of dtobs: it holds neither run.json nor nodes/")
    pages = joined(parts) if parts else np.zeros(0, PAGE_DTYPE)
    if len(pages):
        pages = pages[pages["attempt"] == pages["attempt"].max()]
        pages = pages[np.lexsort((-pages["heartbeat_ns"], pages["rank"]))]
        pages = pages[np.unique(pages["rank"], return_index=True)[1]]  # the last written of each rank
    try:
        info = run.read_run()
    except TargetError as error:
        info = {}
        damaged.append(str(error))
    try:
        contacts = read_contacts(run)
    except TargetError as error:
        contacts = {}
        damaged.append(str(error))
    if host is None and info and run.is_copy():  # what its processes do meanwhile is recorded elsewhere
        host, processes = ("", 0), {} if processes is None else processes
    boot, now_ns = host or (boot_id(), time.monotonic_ns())
    view = RunView(root, info, pages, now_ns, damaged=damaged, contacts=contacts)
    view.paused = run.paused.exists()
    view.excused = tuple(e for node in run.nodes() for e in read_excused(run.excused(node), boot))
    view.shared_files = tuple(f for node in run.nodes() for f in read_shared_files(run.shared_files(node)))
    _to_one_clock(view, boot)
    _reuse(view, previous)
    try:
        view.capture = _capture_of_attempt(run, view) if with_capture else None
    except TargetError as error:
        damaged.append(str(error))
    exits = _exits(run, view)
    view.processes = exits | (processes if processes is not None else _look(view, exits))
    for rank in view.processes.keys() & set(view.ranks):
        view.processes[rank] = as_it_crashed(view.processes[rank], run.stacks(rank, view._attempt(rank)))
    alive = [rank for rank in view.ranks if (p := view.processes.get(rank)) is not None and p.alive]
    view.unwatched = tuple(n for n in sorted({int(view.page(r)["node"]) for r in alive}) if monitor_gone(run, n))
    if len(pages) and (view.now_ns < int(view.pages["heartbeat_ns"].max()) or not _same_boot(view, boot)):
        view.now_ns = int(view.pages["heartbeat_ns"].max())
    return view


def ran_here(process: dict[str, Any]) -> bool:
    """Whether the process that a ``process`` entry describes can be looked at in our /proc.

    Containers of one machine share its boot and not their process ids.
    """
    here, ours = boot_id(), pid_namespace()
    return bool(process.get("boot_id", here) == here and process.get("pid_namespace", ours) == ours)


def _to_one_clock(view: RunView, here: str) -> None:
    """Bring the times of ranks of several hosts together."""
    by = shifts(view.pages, lambda rank: str(view.meta(rank).process.get("boot_id", here)), here)
    if by.any():
        view.pages = np.concatenate([shift(view.pages[n : n + 1], int(ns)) for n, ns in enumerate(by)])
        view._clock = dict(zip(view.ranks, by.tolist(), strict=True))
        view._meta.clear()  # read before the clocks were known
        view._meta_size.clear()


def _reuse(view: RunView, previous: RunView | None) -> None:
    """Take over what `previous` has read of ranks that are still the same, so that only what is new is read.

    Meta entries are kept of files that have not grown, since entries are only appended; rings are read on.
    """
    if previous is None or previous.root != view.root:
        return
    view._tails, view._waits = previous._tails, previous._waits
    before, now = _identities(previous), _identities(view)
    same = {rank for rank, identity in now.items() if before.get(rank) == identity}
    if before == now:
        view.memo = previous.memo
    for kept, older, newer in (
        (view._kept_steps, previous._kept_steps, previous._steps),
        (view._kept_events, previous._kept_events, previous._events),
    ):
        kept.update((rank, records) for rank, records in {**older, **newer}.items() if rank in same)
        if sum(records.nbytes for records in kept.values()) > KEPT_BYTES:
            kept.clear()
    for rank in same & previous._meta_size.keys():
        path, size = previous._meta_size[rank]
        if _size(path) == size:
            view._meta[rank], view._meta_size[rank] = previous._meta[rank], (path, size)


def _identities(view: RunView) -> dict[int, tuple[int, ...]]:
    """Of each rank the attempt, when it attached, and what is added to its times."""
    pages = view.pages
    who = zip(pages["rank"].tolist(), pages["attempt"].tolist(), pages["attach_ns"].tolist(), strict=True)
    return {rank: (attempt, attach_ns, view._clock.get(rank, 0)) for rank, attempt, attach_ns in who}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _believable(path: Path, pages: npt.NDArray[np.void], damaged: list[str]) -> npt.NDArray[np.void]:
    good = plausible(pages)
    if not good.all():
        damaged.append(f"{path}: {int((~good).sum())} pages hold numbers that no rank writes, and are left out")
    return np.asarray(pages[good])


def _same_boot(view: RunView, here: str) -> bool:
    """Whether the ranks ran on the host that looks since its last start, so that clocks mean something."""
    _, first = np.unique(view.pages["node"], return_index=True)
    ranks = (int(rank) for rank in view.pages["rank"][first])
    return any(view.meta(rank).process.get("boot_id") in (here, None) for rank in ranks)


def _look(view: RunView, exits: dict[int, ProcessState]) -> dict[int, ProcessState]:
    """The processes as this host's kernel has them, for ranks that ran here; a known ending is kept."""
    found: dict[int, ProcessState] = {}
    for row, rank in zip(view.pages, view.ranks, strict=True):
        if ran_here(view.meta(rank).process):
            state = read_process(int(row["pid"]), int(row["start_ticks"]))
            if state.alive or rank not in exits:
                found[rank] = state
    return found


def _exits(run: RunDirectory, view: RunView) -> dict[int, ProcessState]:
    """How ranks of this attempt ended, as the node monitors saw it."""
    ranks = {(int(p["node"]), int(p["pid"])): int(p["rank"]) for p in view.pages}
    found: dict[int, ProcessState] = {}
    for node in run.nodes():
        try:
            lines = run.exits(node).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                state = decode(ProcessState, parse(line))
            except DecodeError:
                continue  # the last line may be cut
            rank = ranks.get((node, state.pid))
            if rank is not None:
                found[rank] = state.shifted(view._clock.get(rank, 0))
    return found


def living(root: Path) -> dict[int, int]:
    """By rank, the processes of this host that train in a run directory now; {} where there is no run or none lives."""
    try:
        view = load_run(root, with_capture=False)
    except TargetError:
        return {}
    ended = (RankState.CLOSED, RankState.FAILED)
    open_ = [rank for rank in view.ranks if int(view.page(rank)["state"]) not in ended]
    return {r: int(view.page(r)["pid"]) for r in open_ if (p := view.process(r)) is not None and p.alive}


def _capture_of_attempt(run: RunDirectory, view: RunView) -> Capture | None:
    capture = latest_capture(run.captures)
    if capture is None or not len(view.pages):
        return None
    # A monitor captures the ranks of its own host, by that host's clock.
    by = next((view._clock[rank] for rank in sorted(capture.ranks) if rank in view._clock), 0)
    capture = replace(capture, taken_ns=capture.taken_ns + by)
    return None if capture.taken_ns < int(view.pages["attach_ns"].min()) else capture

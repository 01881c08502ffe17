"""One trace file as columns: what its device and its host did, and which calls of collectives that was."""

from __future__ import annotations

import gc
import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.timeline.kineto.names import KernelKind, TracedCall, call_of, kernel_kind, operation, ranks_of, whole
from dtobs.timeline.kineto.stream import Event, EventStream, arguments

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_NAMES = 1 << 20
LATEST_US = 1e17
"""No clock shows more; sums of what is accepted stay numbers."""
_RUNTIME = (
    *("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "xpu_driver"),
    *("mtia_runtime", "privateuse1_runtime", "privateuse1_driver"),
)
_SYNC = ("Synchronize", "StreamWaitValue")
_ALLOCATION = ("Malloc", "Free", "HostAlloc", "MemCreate", "MemMap", "MemUnmap", "MemRelease", "HostRegister")
_DATA = ("enumerate(DataLoader)", "DataLoader.", "dataloader")
_NUMBERS = {int, float}
_HOST_COMMUNICATION = ("gloo:", "mpi:", "ucc:", "xccl:", "nccl:")


@dataclass
class Spans:
    """Intervals in microseconds, one a row, in no order."""

    begin: Floats
    end: Floats

    def __len__(self) -> int:
        return len(self.begin)


@dataclass
class TracedRank:
    """What one file says of one rank. Times are microseconds as the file has them."""

    path: Path
    rank: int | None
    base_us: float  #: where the file's clock begins
    damage: str
    names: list[str]
    device: Spans
    kind: npt.NDArray[np.int8]
    name: Ints
    stream: Ints
    call: Ints  #: index into `calls`, -1 for what is no collective or says nothing of it
    launch: Floats  #: when the host began the launch; nan where the file does not say
    launched: Floats  #: when that launch returned
    calls: list[TracedCall]
    synchronising: Spans
    allocating: Spans
    loading: Spans  #: the host fetches data
    operators: Spans  #: of the host, for traces without a device
    steps: list[tuple[int, float, float]]
    host_only: bool = False
    notes: list[str] = field(default_factory=list)

    def of(self, kind: KernelKind) -> Spans:
        """The intervals in which the device ran kernels of one kind, in the trace's microseconds."""
        chosen = self.kind == kind
        return Spans(self.device.begin[chosen], self.device.end[chosen])

    def step_numbers(self) -> Ints | None:
        """The number of the ProfilerStep of each row, -1 before the first; None with fewer than two steps.

        That is the step in which the host launched it: where nothing synchronises, the host is done with all its steps
        while the device is in the first. What has no launch, before anything in its stream that has one, was launched
        before the trace began; where a stream has no launches at all, its own times tell.
        """
        if len({number for number, _, _ in self.steps}) < 2:
            return None
        begin, launched = self.device.begin, np.isfinite(self.launch)
        streams, which = np.unique(self.stream, return_inverse=True)
        first = np.full(len(streams), np.inf)
        np.minimum.at(first, which[launched], begin[launched])
        early = np.isfinite(first)[which] & (begin < first[which])
        when = np.where(launched, self.launch, np.where(early, -np.inf, begin))
        place = np.searchsorted(np.array([begin for _, begin, _ in self.steps]), when, side="right") - 1
        found: Ints = np.where(place < 0, -1, np.array([number for number, _, _ in self.steps])[place])
        return found


class _Columns:
    """What the events fill while they pass by: times as begin, end; whole numbers as rows of one long column."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.streams: dict[tuple[Any, Any], int] = {}
        self.calls: dict[TracedCall, int] = {}
        self.device, self.rows = array("d"), array("q")  # name, stream, kind, correlation, external id, call
        self.runtime, self.runtime_rows = array("d"), array("q")  # correlation, external id, thread
        self.records, self.record_rows = array("d"), array("q")  # call, external id, thread
        self.host, self.host_rows = array("d"), array("q")  # name, thread, call
        self.spans = {what: array("d") for what in ("sync", "alloc", "data", "op")}
        self.steps: list[tuple[int, float, float]] = []
        self.begun: dict[tuple[str, str], list[Event]] = {}  #: by thread: beginnings whose ends have not come
        self.kinds: dict[str, str] = {}  #: of the names of the runtime's calls
        self.handlers: dict[str, Callable[[Event, str, float, float], None]] = {
            **dict.fromkeys(("cpu_op", "user_annotation", "operator", "Operator"), self._host),
            **dict.fromkeys((*_RUNTIME, "Runtime"), self._runtime),
            **dict.fromkeys(("kernel", "Kernel"), self._kernel),
            **dict.fromkeys(("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), self._memory),
        }

    def number(self, name: str) -> int:
        found = self.numbers.get(name)
        if found is None:
            if len(self.numbers) >= MOST_NAMES:
                name = "(other names)"
            found = self.numbers.setdefault(name, len(self.numbers))
        return found

    def call(self, args: dict[str, Any]) -> int:
        found = call_of(args) if "Collective name" in args else None
        return -1 if found is None else self.calls.setdefault(found, len(self.calls))

    def add_batch(self, batch: list[Event]) -> None:
        """Take what is of use from a batch of events."""
        handlers = self.handlers
        for event in self._operators(batch):
            category, name, begin, duration = event.cat, event.name, event.ts, event.dur
            if event.ph != "X":
                if (whole_event := self._paired(event)) is not None:
                    self.add_batch([whole_event])
                continue
            if type(name) is not str or type(category) is not str:
                continue
            handler = handlers.get(category)
            if handler is None:
                if "," not in category:  # the format allows several categories
                    continue
                handler = next((handlers[c] for c in map(str.strip, category.split(",")) if c in handlers), None)
                if handler is None:
                    continue
            if type(begin) not in _NUMBERS or type(duration) not in _NUMBERS:
                begin, duration = _number(begin), _number(duration)
            if 0 <= duration < LATEST_US and -LATEST_US < begin < LATEST_US:
                handler(event, name, begin, begin + duration)

    def _operators(self, batch: list[Event]) -> Iterable[Event]:
        """Take PyTorch's operators, most of what a file has, all at once; what is left is taken one by one."""
        try:
            chosen = [e.cat == "cpu_op" and e.ph == "X" and e.name[:6] == "aten::" for e in batch]
            operators = list(compress(batch, chosen))
            begin = np.array([e.ts for e in operators], np.float64)
            duration = np.array([e.dur for e in operators], np.float64)
        except (TypeError, ValueError, OverflowError):  # something is no text or no number
            return batch
        known = (duration >= 0) & (duration < LATEST_US) & (np.abs(begin) < LATEST_US)
        self.spans["op"].frombytes(np.stack([begin, begin + duration], 1)[known].tobytes())
        return compress(batch, map(not_, chosen))

    def _paired(self, event: Event) -> Event | None:
        """The whole event that an end (E) closes with the last open beginning (B) of its thread, None where there is
        none. Kineto writes whole events (X); other tools that rewrite traces do not.
        """
        where = (str(event.pid), str(event.tid))
        if event.ph == "B" and len(self.begun) < MOST_NAMES:
            self.begun.setdefault(where, []).append(event)
        elif event.ph == "E" and self.begun.get(where):
            first = self.begun[where].pop()
            first.ph, first.dur = "X", _number(event.ts) - _number(first.ts)
            return first
        return None

    def _kernel(self, event: Event, name: str, begin: float, end: float) -> None:
        args = arguments(event)
        call = self.call(args)
        self._device(event, name, begin, end, args, KernelKind.COMMUNICATION if call >= 0 else kernel_kind(name), call)

    def _memory(self, event: Event, name: str, begin: float, end: float) -> None:
        self._device(event, name, begin, end, arguments(event), KernelKind.MEMORY, -1)

    def _device(
        self, event: Event, name: str, begin: float, end: float, args: dict[str, Any], kind: KernelKind, call: int
    ) -> None:
        where = (event.pid, args.get("stream", event.tid))
        try:
            stream = self.streams[where]
        except (KeyError, TypeError):
            stream = self.streams.setdefault((str(where[0]), str(where[1])), len(self.streams))
            if type(where[0]) is int and type(where[1]) is int:
                self.streams[where] = stream
        self.device.extend((begin, end))
        _row(
            self.rows,
            (self.number(name), stream, kind, args.get("correlation", -1), args.get("External id", -1), call),
        )

    def _runtime(self, event: Event, name: str, begin: float, end: float) -> None:
        args = arguments(event)
        self.runtime.extend((begin, end))
        _row(self.runtime_rows, (args.get("correlation", -1), args.get("External id", -1), event.tid))
        what = self.kinds.get(name)
        if what is None:
            what = "sync" if any(w in name for w in _SYNC) else "alloc" if any(w in name for w in _ALLOCATION) else ""
            if len(self.kinds) < MOST_NAMES:
                self.kinds[name] = what
        if what:
            self.spans[what].extend((begin, end))

    def _host(self, event: Event, name: str, begin: float, end: float) -> None:
        if name.startswith("aten::"):
            self.spans["op"].extend((begin, end))
        elif name == "record_param_comms":
            args = arguments(event)
            call = self.call(args)
            if call >= 0:
                self.records.extend((begin, end))
                _row(self.record_rows, (call, args.get("External id", -1), event.tid))
        elif name.startswith("ProfilerStep"):
            self.steps.append((whole(name.partition("#")[2], -1), begin, end))
        elif name.startswith(_HOST_COMMUNICATION):
            self.host.extend((begin, end))
            _row(self.host_rows, (self.number(name), event.tid, self.call(arguments(event))))
        elif name.startswith(_DATA):
            self.spans["data"].extend((begin, end))


def load(path: Path) -> TracedRank:
    """Read one file. Raises TargetError when it is no trace."""
    stream, columns = EventStream(path), _Columns()
    collecting = gc.isenabled()
    gc.disable()  # millions of events, none of them in a cycle
    try:
        for batch in stream.batches():
            columns.add_batch(batch)
    finally:
        if collecting:
            gc.enable()
    return _rank(stream, columns)


def _rank(stream: EventStream, columns: _Columns) -> TracedRank:
    meta = stream.meta
    distributed = meta.get("distributedInfo")
    info = distributed if isinstance(distributed, dict) else {}
    rank = whole(info.get("rank"), -1)
    groups = _groups(info)
    name, streams, kind, correlation, external, call = _ints(columns.rows, 6)
    device = _spans(columns.device)
    launch, launched, launched_by, threads = _launches(columns, correlation)
    found = TracedRank(
        path=stream.path,
        rank=rank if 0 <= rank < 1 << 24 else None,
        base_us=whole(meta.get("baseTimeNanoseconds")) / 1e3,
        damage=stream.damage,
        names=list(columns.numbers),
        device=device,
        kind=kind.astype(np.int8),
        name=name,
        stream=streams,
        call=_joined(columns, call, kind, external, launched_by, launch, threads),
        launch=launch,
        launched=launched,
        calls=[_with_ranks(c, groups) for c in columns.calls],
        synchronising=_spans(columns.spans["sync"]),
        allocating=_spans(columns.spans["alloc"]),
        loading=_spans(columns.spans["data"]),
        operators=_spans(columns.spans["op"]),
        steps=sorted(columns.steps, key=lambda s: s[1]),
    )
    if not len(found.device):
        _as_host(found, columns)
    elif (devices := _devices(columns, streams[kind != KernelKind.MEMORY])) > 1:
        found.notes.append(
            f"the file has kernels of {devices} devices: its figures are of all of them together, and what overlaps may"
            " do so on two of them; profile one process a device, or give each rank's file by itself"
        )
    _named_by_kernel(found, (len(groups) == 1 and next(iter(groups.values()))) or ())
    return found


def _devices(columns: _Columns, streams: Ints) -> int:
    """How many devices `streams` are on: a device is the process of its events."""
    device = {number: str(where[0]) for where, number in columns.streams.items()}
    return len({device[number] for number in np.unique(streams).tolist()})


def _as_host(rank: TracedRank, columns: _Columns) -> None:
    """Without a device, communication is what its backend's threads do, and compute the operators of the host."""
    rank.host_only = True
    names, threads, calls = _ints(columns.host_rows, 3)
    host = _spans(columns.host)
    begin, end = host.begin, host.end
    ops = rank.operators
    count, more = len(begin), len(ops)
    rank.device = Spans(np.concatenate([begin, ops.begin]), np.concatenate([end, ops.end]))
    kinds = [np.full(count, KernelKind.COMMUNICATION, np.int8), np.full(more, KernelKind.COMPUTE, np.int8)]
    rank.kind = np.concatenate(kinds)
    operator = np.full(more, len(rank.names))
    rank.names.append("aten operators")
    rank.name = np.concatenate([names, operator])
    rank.stream = np.concatenate([threads, np.full(more, -1)])
    rank.call = np.concatenate([calls, np.full(more, -1)])
    rank.launch = rank.launched = np.full(count + more, np.nan)


def _named_by_kernel(rank: TracedRank, everyone: tuple[int, ...]) -> None:
    """Give the communication that no record tells of the operation in its kernel's name."""
    known = {call: number for number, call in enumerate(rank.calls)}
    silent = np.flatnonzero((rank.kind == KernelKind.COMMUNICATION) & (rank.call < 0))
    for row in silent.tolist():
        op = operation(rank.names[rank.name[row]]) or "unknown"
        call = TracedCall(op, "", everyone, len(everyone))
        if call not in known:
            known[call] = len(rank.calls)
            rank.calls.append(call)
        rank.call[row] = known[call]


def _launches(columns: _Columns, correlation: Ints) -> tuple[Floats, Floats, Ints, Ints]:
    """For each row of the device: begin, end, external id and thread of the call that launched it."""
    rows = len(correlation)
    runtime = _spans(columns.runtime)
    begin, end = runtime.begin, runtime.end
    keys, external, threads = _ints(columns.runtime_rows, 3)
    if not len(keys) or not rows:
        return np.full(rows, np.nan), np.full(rows, np.nan), np.full(rows, -1), np.full(rows, -1)
    order = np.argsort(keys, kind="stable")
    place = np.minimum(np.searchsorted(keys[order], correlation), len(keys) - 1)
    at = order[place]
    known = (keys[at] == correlation) & (correlation >= 0)
    return (
        np.where(known, begin[at], np.nan),
        np.where(known, end[at], np.nan),
        np.where(known, external[at], -1),
        np.where(known, threads[at], -1),
    )


def _joined(
    columns: _Columns, call: Ints, kind: Ints, external: Ints, launched_by: Ints, launch: Floats, threads: Ints
) -> Ints:
    """Each communication's call: its own arguments', else those of the record that launched it."""
    records = _spans(columns.records)
    calls, ids, record_threads = _ints(columns.record_rows, 3)
    missing = np.flatnonzero((kind == KernelKind.COMMUNICATION) & (call < 0))
    if not len(records) or not len(missing):
        return call
    by_id: dict[int, int] = dict(zip(ids.tolist(), calls.tolist(), strict=True))
    by_id.pop(-1, None)
    by_thread = {int(t): _nested(records, np.flatnonzero(record_threads == t)) for t in np.unique(record_threads)}
    for row in missing.tolist():
        found = int(by_id.get(int(launched_by[row]), by_id.get(int(external[row]), -1)))
        mine = by_thread.get(int(threads[row]))
        if found < 0 and mine is not None and np.isfinite(launch[row]):
            inside = _around(records, *mine, float(launch[row]))
            found = int(calls[inside]) if inside >= 0 else -1
        call[row] = found
    return call


def _nested(spans: Spans, rows: Ints) -> tuple[Floats, Ints, Ints]:
    """One thread's spans in the order they begin: begin, row, and the place of the one that it lies in, -1 for none."""
    order = rows[np.argsort(spans.begin[rows], kind="stable")]
    outer = np.full(len(order), -1)
    open_: list[int] = []
    for place, row in enumerate(order.tolist()):
        while open_ and spans.end[order[open_[-1]]] < spans.end[row]:
            open_.pop()
        outer[place] = open_[-1] if open_ else -1
        open_.append(place)
    return spans.begin[order], order, outer


def _around(spans: Spans, begins: Floats, order: Ints, outer: Ints, at: float) -> int:
    """The row of the innermost span that the time `at` lies in, -1 for none."""
    place = int(np.searchsorted(begins, at, side="right")) - 1
    while place >= 0 and spans.end[order[place]] < at:
        place = int(outer[place])
    return int(order[place]) if place >= 0 else -1


def _groups(info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The process groups that the file's own head names."""
    config = info.get("pg_config")
    rows = [row for row in config if isinstance(row, dict)] if isinstance(config, list) else []
    return {str(row.get("pg_name")): ranks for row in rows if (ranks := ranks_of(row.get("ranks")))}


def _with_ranks(call: TracedCall, groups: dict[str, tuple[int, ...]]) -> TracedCall:
    ranks = call.ranks or groups.get(call.group, ())
    return TracedCall(call.op, call.group, ranks, call.size or len(ranks), call.nbytes, call.peers)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _row(column: array[int], row: tuple[Any, ...]) -> None:
    """Append a row, with -1 for what is no number."""
    before = len(column)
    try:
        column.extend(row)
    except (TypeError, OverflowError):
        del column[before:]
        column.extend(whole(value, -1) for value in row)


def _ints(column: array[int], width: int) -> Ints:
    """A column of each of the `width` numbers of a row."""
    found: Ints = np.frombuffer(column or array("q"), dtype=np.int64).reshape(-1, width).T.copy()
    return found


def _spans(column: array[float]) -> Spans:
    begin, end = np.frombuffer(column or array("d"), dtype=np.float64).reshape(-1, 2).T.copy()
    return Spans(begin, end)

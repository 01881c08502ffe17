"""One trace file as columns: what its device and its host did, and which calls of collectives that was."""

from __future__ import annotations

import gc
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.timeline.kineto.names import Call, Kind, call_of, kernel_kind, operation, ranks_of, whole
from dtobs.timeline.kineto.stream import Event, Stream

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_NAMES = 1 << 20
LATEST_US = 1e17
"""No clock shows more; sums of what is accepted stay numbers."""
_RUNTIME = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "privateuse1_runtime")
_SYNC = ("Synchronize", "StreamWaitValue")
_ALLOCATION = ("Malloc", "Free", "HostAlloc", "MemCreate", "MemMap", "MemUnmap", "MemRelease", "HostRegister")
_DATA = ("enumerate(DataLoader)", "DataLoader.", "dataloader")
_HOST_COMMUNICATION = ("gloo:", "mpi:", "ucc:", "xccl:", "nccl:")


@dataclass
class Spans:
    """Intervals in microseconds, one a row, in no order."""

    begin: Floats
    end: Floats

    def __len__(self) -> int:
        return len(self.begin)


@dataclass
class Rank:
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
    calls: list[Call]
    synchronising: Spans
    allocating: Spans
    loading: Spans  #: the host fetches data
    operators: Spans  #: of the host, for traces without a device
    steps: list[tuple[int, float, float]]
    host_only: bool = False
    notes: list[str] = field(default_factory=list)

    def of(self, kind: Kind) -> Spans:
        """The device's intervals of one kind."""
        chosen = self.kind == kind
        return Spans(self.device.begin[chosen], self.device.end[chosen])


class _Columns:
    """What the events fill while they pass by."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.streams: dict[tuple[Any, Any], int] = {}
        self.calls: dict[Call, int] = {}
        self.device = [array("d"), array("d")]
        self.rows = [array("q") for _ in range(6)]  # name, stream, kind, correlation, external id, call
        self.runtime = [array("d"), array("d")]
        self.runtime_rows = [array("q") for _ in range(3)]  # correlation, external id, thread
        self.records = [array("d"), array("d")]
        self.record_rows = [array("q") for _ in range(3)]  # call, external id, thread
        self.spans = {what: (array("d"), array("d")) for what in ("sync", "alloc", "data", "op")}
        self.operators = self.spans["op"]
        self.host = [array("d"), array("d")]
        self.host_rows = [array("q") for _ in range(3)]  # name, thread, call
        self.steps: list[tuple[int, float, float]] = []
        self.kinds: dict[str, str] = {}  #: of the names of the runtime's calls and the host's operators
        self.handlers: dict[str, Callable[[Event, str, float, float, dict[str, Any]], None]] = {
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

    def take(self, batch: list[Event]) -> None:
        """Take what is of use from a batch of events."""
        handlers = self.handlers
        for event in batch:
            category = event.get("cat")
            handler = handlers.get(category) if type(category) is str else None
            if handler is None or event.get("ph") != "X":
                continue
            begin, duration, name = event.get("ts"), event.get("dur"), event.get("name")
            if type(begin) is not float or type(duration) is not float:
                begin, duration = _number(begin), _number(duration)
            if 0 <= duration < LATEST_US and -LATEST_US < begin < LATEST_US and type(name) is str:
                args = event.get("args")
                handler(event, name, begin, begin + duration, args if type(args) is dict else {})

    def _kernel(self, event: Event, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        call = self.call(args)
        self._device(event, name, begin, end, args, Kind.COMMUNICATION if call >= 0 else kernel_kind(name), call)

    def _memory(self, event: Event, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        self._device(event, name, begin, end, args, Kind.MEMORY, -1)

    def _device(
        self, event: Event, name: str, begin: float, end: float, args: dict[str, Any], kind: Kind, call: int
    ) -> None:
        where = (str(event.get("pid")), str(args.get("stream", event.get("tid"))))
        self.device[0].append(begin)
        self.device[1].append(end)
        names, streams, kinds, correlations, externals, calls = self.rows
        names.append(self.number(name))
        streams.append(self.streams.setdefault(where, len(self.streams)))
        kinds.append(kind)
        correlations.append(whole(args.get("correlation"), -1))
        externals.append(whole(args.get("External id"), -1))
        calls.append(call)

    def _runtime(self, event: Event, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        self.runtime[0].append(begin)
        self.runtime[1].append(end)
        columns = self.runtime_rows
        columns[0].append(whole(args.get("correlation"), -1))
        columns[1].append(whole(args.get("External id"), -1))
        columns[2].append(_thread(event))
        what = self.kinds.get(name)
        if what is None:
            what = "sync" if any(w in name for w in _SYNC) else "alloc" if any(w in name for w in _ALLOCATION) else ""
            if len(self.kinds) < MOST_NAMES:
                self.kinds[name] = what
        if what:
            self.span(what, begin, end)

    def span(self, what: str, begin: float, end: float) -> None:
        self.spans[what][0].append(begin)
        self.spans[what][1].append(end)

    def _host(self, event: Event, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        if name.startswith("aten::"):
            self.operators[0].append(begin)
            self.operators[1].append(end)
            return
        if name == "record_param_comms":
            call = self.call(args)
            if call >= 0:
                self.records[0].append(begin)
                self.records[1].append(end)
                row = (call, whole(args.get("External id"), -1), _thread(event))
                for column, value in zip(self.record_rows, row, strict=True):
                    column.append(value)
        elif name.startswith("ProfilerStep"):
            self.steps.append((whole(name.partition("#")[2], -1), begin, end))
        elif name.startswith(_HOST_COMMUNICATION):
            self.host[0].append(begin)
            self.host[1].append(end)
            row = (self.number(name), _thread(event), self.call(args))
            for column, value in zip(self.host_rows, row, strict=True):
                column.append(value)
        elif name.startswith(_DATA):
            self.span("data", begin, end)


def load(path: Path) -> Rank:
    """Read one file. Raises TargetError when it is no trace."""
    stream, columns = Stream(path), _Columns()
    collecting = gc.isenabled()
    gc.disable()  # millions of events, none of them in a cycle
    try:
        for batch in stream.batches():
            columns.take(batch)
    finally:
        if collecting:
            gc.enable()
    return _rank(stream, columns)


def _rank(stream: Stream, columns: _Columns) -> Rank:
    meta = stream.meta
    distributed = meta.get("distributedInfo")
    info = distributed if isinstance(distributed, dict) else {}
    rank = whole(info.get("rank"), -1)
    groups = _groups(info)
    name, streams, kind, correlation, external, call = (_ints(c) for c in columns.rows)
    device = Spans(*(_floats(c) for c in columns.device))
    launch, launched, launched_by, threads = _launches(columns, correlation)
    found = Rank(
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
        synchronising=_spans(columns, "sync"),
        allocating=_spans(columns, "alloc"),
        loading=_spans(columns, "data"),
        operators=_spans(columns, "op"),
        steps=sorted(columns.steps, key=lambda s: s[1]),
    )
    if not len(found.device):
        _as_host(found, columns)
    _named_by_kernel(found, (len(groups) == 1 and next(iter(groups.values()))) or ())
    return found


def _as_host(rank: Rank, columns: _Columns) -> None:
    """Without a device, communication is what its backend's threads do, and compute the operators of the host."""
    rank.host_only = True
    names, threads, calls = (_ints(c) for c in columns.host_rows)
    begin, end = (_floats(c) for c in columns.host)
    ops = rank.operators
    count, more = len(begin), len(ops)
    rank.device = Spans(np.concatenate([begin, ops.begin]), np.concatenate([end, ops.end]))
    kinds = [np.full(count, Kind.COMMUNICATION, np.int8), np.full(more, Kind.COMPUTE, np.int8)]
    rank.kind = np.concatenate(kinds)
    operator = np.full(more, len(rank.names))
    rank.names.append("aten operators")
    rank.name = np.concatenate([names, operator])
    rank.stream = np.concatenate([threads, np.full(more, -1)])
    rank.call = np.concatenate([calls, np.full(more, -1)])
    rank.launch = rank.launched = np.full(count + more, np.nan)


def _named_by_kernel(rank: Rank, everyone: tuple[int, ...]) -> None:
    """Give the communication that no record tells of the operation in its kernel's name."""
    known = {call: number for number, call in enumerate(rank.calls)}
    silent = np.flatnonzero((rank.kind == Kind.COMMUNICATION) & (rank.call < 0))
    for row in silent.tolist():
        op = operation(rank.names[rank.name[row]]) or "unknown"
        call = Call(op, "", everyone, len(everyone))
        if call not in known:
            known[call] = len(rank.calls)
            rank.calls.append(call)
        rank.call[row] = known[call]


def _launches(columns: _Columns, correlation: Ints) -> tuple[Floats, Floats, Ints, Ints]:
    """For each row of the device: begin, end, external id and thread of the call that launched it."""
    rows = len(correlation)
    begin, end = (_floats(c) for c in columns.runtime)
    keys, external, threads = (_ints(c) for c in columns.runtime_rows)
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
    begin, end = (_floats(c) for c in columns.records)
    calls, ids, record_threads = (_ints(c) for c in columns.record_rows)
    missing = np.flatnonzero((kind == Kind.COMMUNICATION) & (call < 0))
    if not len(begin) or not len(missing):
        return call
    by_id: dict[int, int] = dict(zip(ids.tolist(), calls.tolist(), strict=True))
    by_id.pop(-1, None)
    by_thread = {int(t): np.flatnonzero(record_threads == t) for t in np.unique(record_threads)}
    for row in missing.tolist():
        found = int(by_id.get(int(launched_by[row]), by_id.get(int(external[row]), -1)))
        mine = by_thread.get(int(threads[row]))
        if found < 0 and mine is not None and np.isfinite(launch[row]):
            inside = mine[(begin[mine] <= launch[row]) & (launch[row] <= end[mine])]
            found = int(calls[inside[np.argmax(begin[inside])]]) if len(inside) else -1
        call[row] = found
    return call


def _groups(info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The process groups that the file's own head names."""
    config = info.get("pg_config")
    rows = [row for row in config if isinstance(row, dict)] if isinstance(config, list) else []
    return {str(row.get("pg_name")): ranks for row in rows if (ranks := ranks_of(row.get("ranks")))}


def _with_ranks(call: Call, groups: dict[str, tuple[int, ...]]) -> Call:
    ranks = call.ranks or groups.get(call.group, ())
    return Call(call.op, call.group, ranks, call.size or len(ranks), call.nbytes, call.peers)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _thread(event: Event) -> int:
    return whole(event.get("tid"), -1)


def _floats(column: array[float]) -> Floats:
    return np.array(column, dtype=np.float64)


def _ints(column: array[int]) -> Ints:
    return np.array(column, dtype=np.int64)


def _spans(columns: _Columns, what: str) -> Spans:
    return Spans(*(_floats(c) for c in columns.spans[what]))

"""One rank's dump as columns: a record array of its entries and small tables of what recurs in them.

Everything a hostile dump could hold is checked here; what does not fit raises DumpError.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.errors import DumpError
from dtobs.flight_recorder.operations import EntryKind, Name, parse_name

SCHEDULED, STARTED, COMPLETED, UNKNOWN, ISSUED = range(5)
"""States of an entry. An unknown state (of a newer schema) accuses nobody; of a call that is only known to be issued
the recorder never learns whether it ended.
"""

ENTRY_DTYPE = np.dtype(
    [
        ("record", "<i8"),  # position in the rank's whole history; the ring keeps the last ones
        ("seq", "<i8"),  # collective sequence number in the group
        ("created_ns", "<i8"),  # wall clock of the rank's host; 0 when not recorded
        ("group", "<i4"),
        ("signature", "<i4"),
        ("site", "<i4"),  # call site, −1 when the dump has no stacks
        ("source", "<i4"),  # group ranks of a send or a receive, else −1
        ("target", "<i4"),
        ("sub", "<i4"),  # position in a coalesced call that shares one sequence number; −1: lost
        ("kind", "u1"),
        ("state", "u1"),
        ("on_host", "u1"),  # 1: of a backend that completes its calls on the host, as Gloo does
    ]
)

MAX_ENTRIES = 2_000_000
MAX_TENSORS = 65_536
MAX_SEQ = 1 << 40
MAX_NS = 1 << 61
_STATES = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}
_ON_HOST = "gloo"
_HOOK = "c10d"
"""The recorder that torch 2.14 attaches to any backend. It writes each call again where the backend records, too."""
# Frames that every call passes through on its way into PyTorch.
_NOT_THE_USER = ("/torch/", "/typing_extensions.py", "/contextlib.py", "<string>")
_FIELDS = (
    "record_id",
    "collective_seq_id",
    "time_created_ns",
    "process_group",
    "profiling_name",
    "input_sizes",
    "input_dtypes",
    "output_sizes",
    "output_dtypes",
    "state",
    "retired",
    "is_p2p",
)
_DEFAULTS: dict[str, Any] = {
    "time_created_ns": 0,
    "process_group": ("", ""),
    "input_sizes": [],
    "input_dtypes": [],
    "output_sizes": [],
    "output_dtypes": [],
    "retired": False,
    "is_p2p": False,
}

_TYPES: dict[str, tuple[type, ...]] = {
    "record_id": (int,),
    "collective_seq_id": (int,),
    "time_created_ns": (int, float, type(None)),
    "profiling_name": (str,),
    "state": (str, int, type(None)),
    "retired": (bool, int, type(None)),
    "is_p2p": (bool, int, type(None)),
}


@dataclass
class RankColumns:
    """What one dump holds. `entries` index the three tables."""

    version: str
    entries: npt.NDArray[np.void]
    signatures: list[list[Any]]  #: [name, input sizes, input dtypes, output sizes, output dtypes]
    sites: list[str]
    groups: list[tuple[str, str]]  #: (name, description)
    memberships: dict[str, str] = field(default_factory=dict)  #: group name → its ranks as the dump's text
    untracked: dict[int, int] = field(default_factory=dict)  #: group → operations after its last entry
    backends: list[str] = field(default_factory=list)
    whole: bool = True  #: the recorder still holds the first calls of every group


def columns_of(dump: object) -> RankColumns:
    """Turn a decoded dump into columns. Raises DumpError when it is not a Flight Recorder dump.

    Schema 1 (torch 2.3) numbers sends and collectives together and does not say which ranks a group has: it is taken
    where all calls are collectives of the group of all ranks.
    """
    if isinstance(dump, dict) and _recorded_nothing(dump):
        dump = {**dump, "entries": []}
    if not isinstance(dump, dict) or not isinstance(dump.get("entries"), list):
        raise DumpError("it holds no list of entries: not a Flight Recorder dump")
    entries: list[Any] = dump["entries"]
    if len(entries) > MAX_ENTRIES:
        raise DumpError(f"it holds {len(entries)} entries, more than {MAX_ENTRIES}")
    try:
        return _columns(dump, entries)
    except DumpError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, IndexError) as error:
        raise DumpError(f"its entries are not as PyTorch writes them ({type(error).__name__}: {error})") from error


def _recorded_nothing(dump: dict[Any, Any]) -> bool:
    """Whether it is a dump in JSON of a recorder without entries: torch leaves out the list, not the tables."""
    tables = (dump.get("pg_config"), dump.get("pg_status"))
    return "entries" not in dump and isinstance(dump.get("version"), str) and all(isinstance(t, dict) for t in tables)


def _columns(dump: dict[Any, Any], entries: list[Any]) -> RankColumns:
    columns = _fields(_of_first_schema(entries) if entries and "seq_id" in entries[0] else entries)
    table = np.zeros(len(entries), ENTRY_DTYPE)
    table["site"] = table["source"] = table["target"] = -1
    names, name_index = _intern(columns["profiling_name"])
    groups, group_index = _intern_groups(columns["process_group"])
    signatures, signature_index = _signatures(columns)
    parsed = [parse_name(_text(name)) for name in names]
    if entries:
        table["record"] = np.array(columns["record_id"], np.int64)
        table["seq"] = np.array(columns["collective_seq_id"], np.int64)
        table["created_ns"] = np.array(columns["time_created_ns"], np.int64)
        _check_range(table)
        table["group"], table["signature"] = group_index, signature_index
        _apply_names(table, parsed, name_index, np.array(columns["is_p2p"], bool))
        table["state"] = _states(columns, table["on_host"] > 0)
        sites, table["site"] = _sites(entries)
        whole = _whole(table, entries)
        table = _once(table, np.array([p.backend == _HOOK for p in parsed], bool)[name_index])
        if not (np.diff(table["record"]) > 0).all():
            table = table[np.argsort(table["record"], kind="stable")]
        closes = np.array([row[0] == "coalesced" for row in signatures], bool)[table["signature"]]
        _settle_batches(table, closes)
        _settle_coalesced(table, closes, whole)
    else:
        sites, whole = [], True
    labels = [(_text(g[0]), _text(g[1]) if len(g) > 1 else "") for g in groups]
    return RankColumns(
        version=str(dump.get("version", ""))[:40],
        entries=table,
        signatures=signatures,
        sites=sites,
        groups=labels,
        memberships=_memberships(dump.get("pg_config")),
        untracked=_untracked(dump, entries, labels, parsed),
        backends=sorted({p.backend for p in parsed}),
        whole=whole,
    )


def _whole(table: npt.NDArray[np.void], entries: list[Any]) -> bool:
    """Whether no call before the first one of each group is gone.

    A ring that wrapped begins with a later record; one that was reset counts its records anew, but not its calls.
    """
    if table["record"].min() > 0:
        return False
    firsts = np.unique(table["group"], return_index=True)[1].tolist()
    counted = ((table["seq"][at], entries[at].get("p2p_seq_id", 0)) for at in firsts)
    return all(seq <= 1 and type(messages) is int and messages <= 1 for seq, messages in counted)


def _once(table: npt.NDArray[np.void], hooked: npt.NDArray[np.bool_]) -> npt.NDArray[np.void]:
    """Every call once: of groups whose backend records them itself without what the hook wrote."""
    return table[~(hooked & np.isin(table["group"], table["group"][~hooked]))] if hooked.any() else table


def _check_range(table: npt.NDArray[np.void]) -> None:
    """Numbers that can be added and multiplied by the ranks of any job within 64 bits. Raises DumpError."""
    for name, least, most in (("record", 0, MAX_NS), ("seq", 0, MAX_SEQ), ("created_ns", -MAX_NS, MAX_NS)):
        if (table[name] < least).any() or (table[name] > most).any():
            raise DumpError(f"a {name} in it is out of range ({table[name].min()} to {table[name].max()})")


def _fields(entries: list[Any]) -> dict[str, Sequence[Any]]:
    if not entries:
        return dict.fromkeys(_FIELDS, ())
    try:
        rows = list(map(itemgetter(*_FIELDS), entries))
    except KeyError:  # an older or a newer schema: only the first four are indispensable
        needed = [n for n in _FIELDS if n not in _DEFAULTS]
        absent = [n for n in needed if any(n not in e for e in entries)]
        if absent:
            raise DumpError(f"its entries have no {', '.join(absent)}: schema 2.0 or later is needed") from None
        rows = [tuple(e.get(n, _DEFAULTS.get(n)) for n in _FIELDS) for e in entries]
    columns: dict[str, Sequence[Any]] = dict(zip(_FIELDS, zip(*rows, strict=True), strict=True))
    for field_name, allowed in _TYPES.items():
        _check_types(columns[field_name], *allowed)
    if None in columns["time_created_ns"]:
        columns["time_created_ns"] = [t or 0 for t in columns["time_created_ns"]]
    return columns


def _of_first_schema(entries: list[Any]) -> list[Any]:
    """Entries of schema 1 as those of schema 2. Raises DumpError where the first says too little."""
    if any("collective_seq_id" in entry for entry in entries):
        return entries
    if any(entry.get("pg_id", 0) != 0 and "process_group" not in entry for entry in entries):
        raise DumpError(
            "its schema 1 does not name the ranks of a group, and it has several groups: torch 2.4 writes them"
        )
    if any(parse_name(_text(entry["profiling_name"])).kind != EntryKind.COLLECTIVE for entry in entries):
        raise DumpError("its schema 1 numbers sends and collectives together, and it has both: torch 2.4 does not")
    return [
        {
            **entry,
            "collective_seq_id": entry["seq_id"],
            "process_group": entry.get("process_group", ("0", "default_pg")),
        }
        for entry in entries
    ]


def _intern(values: Iterable[Any]) -> tuple[list[Any], npt.NDArray[np.int32]]:
    """The distinct values, and which of them each is. Their hash must be cheap: see `_check_types`."""
    listed = list(values)
    index = {value: i for i, value in enumerate(dict.fromkeys(listed))}
    return list(index), np.fromiter(map(index.__getitem__, listed), np.int32, len(listed))


def _check_types(values: Iterable[Any], *allowed: type) -> None:
    """Containers that hold one another many times over take for ever to hash or to convert; no dump has any here."""
    odd = set(map(type, values)) - {*allowed}
    if odd:
        found = ", ".join(sorted(t.__name__ for t in odd))
        raise DumpError(f"a field in it is of type {found}, not {allowed[0].__name__}")


def _intern_groups(values: Sequence[Any]) -> tuple[list[Any], npt.NDArray[np.int32]]:
    """Groups are tuples in a pickle and lists in JSON."""
    groups = list(map(tuple, values))
    _check_types(chain.from_iterable(groups), str)
    return _intern(groups)


def _signatures(columns: dict[str, Sequence[Any]]) -> tuple[list[list[Any]], npt.NDArray[np.int32]]:
    rows = zip(*(columns[n] for n in _FIELDS[4:9]), strict=True)
    # A hashable stand-in for nested lists. Version 4 writes what occurs twice once: lists that hold one another many
    # times over do not grow. The same data may rarely give two keys, and then has two numbers here and one in `load`.
    keys, index = _intern([marshal.dumps(row, 4) for row in rows])
    decoded = [marshal.loads(key) for key in keys]
    return [
        [
            parse_name(_text(name)).operation,
            _sizes(sizes_in),
            _texts(types_in),
            _sizes(sizes_out),
            _texts(types_out),
        ]
        for name, sizes_in, types_in, sizes_out, types_out in decoded
    ], index


def _states(columns: dict[str, Sequence[Any]], on_host: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    texts, index = _intern(columns["state"])
    codes = np.array([_STATES.get(text, UNKNOWN) for text in texts], np.uint8)[index]
    # Gloo never leaves "scheduled"; its recorder only retires the entry when the work is done. Others retire an entry
    # that they no longer follow, be it since the work timed out or since the hook returned.
    retired = (codes == SCHEDULED) & np.array(columns["retired"], bool)
    codes[retired] = np.where(on_host[retired], COMPLETED, ISSUED)
    return codes


def _apply_names(
    table: npt.NDArray[np.void], parsed: list[Name], index: npt.NDArray[np.int32], p2p: npt.NDArray[np.bool_]
) -> None:
    table["kind"] = np.array([p.kind for p in parsed], np.uint8)[index]
    table["source"] = np.array([p.source for p in parsed], np.int32)[index]
    table["target"] = np.array([p.target for p in parsed], np.int32)[index]
    table["on_host"] = np.array([p.backend == _ON_HOST for p in parsed], np.uint8)[index]
    table["kind"][p2p & (table["kind"] == EntryKind.COLLECTIVE)] = EntryKind.MARKER


def _settle_batches(table: npt.NDArray[np.void], closes: npt.NDArray[np.bool_]) -> None:
    """Give the sends and receives of a batch the state of the entry that closes it; their own never moves."""
    kind, group = table["kind"], table["group"]
    p2p = (kind == EntryKind.SEND) | (kind == EntryKind.RECV)
    # PyTorch does not always flag the closing entry.
    kind[1:][closes[1:] & p2p[:-1] & (group[1:] == group[:-1])] = EntryKind.MARKER
    for at in np.flatnonzero(kind == EntryKind.MARKER):
        back = at - 1
        while back >= 0 and group[back] == group[at] and p2p[back]:
            if table["state"][back] == SCHEDULED:
                table["state"][back] = table["state"][at]
            back -= 1


def _settle_coalesced(table: npt.NDArray[np.void], closes: npt.NDArray[np.bool_], whole: bool) -> None:
    """Number the parts of coalesced collectives, and give them the state of the call that closes them."""
    rows = np.flatnonzero(table["kind"] == EntryKind.COLLECTIVE)
    served = 2 * table["group"].astype(np.int64) + table["on_host"]  # two backends of one group both count from 1
    order = rows[np.lexsort((rows, table["seq"][rows], served[rows]))]
    group, seq = served[order], table["seq"][order]
    new = np.ones(len(order), bool)
    new[1:] = (group[1:] != group[:-1]) | (seq[1:] != seq[:-1])
    starts = np.flatnonzero(new)
    last = np.append(starts[1:], len(order)) - 1
    if not new.all():
        segment = np.cumsum(new) - 1
        table["sub"][order] = np.arange(len(order)) - starts[segment]
        table["state"][order] = table["state"][order[last]][segment]
    if not whole:
        oldest = np.unique(group[starts], return_index=True)[1]
        for begin, end in zip(starts[oldest], last[oldest], strict=True):
            if closes[order[end]]:
                _forget_parts(table, order[begin:end], order[end])


def _forget_parts(table: npt.NDArray[np.void], parts: npt.NDArray[np.int64], closing: np.int64) -> None:
    """Compare nothing of a coalesced call whose first parts the ring may have lost; that it was issued still counts."""
    table["kind"][parts] = EntryKind.MARKER
    table["sub"][closing] = -1
    if closing == 0:  # it may have closed a batch of sends and receives: then its state is theirs
        table["state"][closing] = UNKNOWN


def _sites(entries: list[Any]) -> tuple[list[str], npt.NDArray[np.int32]]:
    """Call sites; entries of one stack share its frame objects in a dump, so identity is a cheap key."""
    stacks = [entry.get("frames") or None for entry in entries]
    if not any(stacks):
        return [], np.full(len(entries), -1, np.int32)
    by_identity: dict[int, list[Any] | None] = dict(zip(map(id, stacks), stacks, strict=True))
    numbers: dict[int, int] = {}
    by_frames: dict[tuple[int, ...], int] = {}
    sites: dict[str, int] = {}
    for identity, frames in by_identity.items():
        if frames is None:
            numbers[identity] = -1
            continue
        key = tuple(map(id, frames))
        if key not in by_frames:
            by_frames[key] = sites.setdefault(_site(frames), len(sites))
        numbers[identity] = by_frames[key]
    return list(sites), np.fromiter(map(numbers.__getitem__, map(id, stacks)), np.int32, len(stacks))


def _site(frames: list[Any]) -> str:
    """The innermost frame outside PyTorch, as ``file.py:12 in function``."""
    chosen = frames[0]
    for frame in frames:
        if not any(part in frame["filename"] for part in _NOT_THE_USER):
            chosen = frame
            break
    return f"{_text(chosen['filename'])}:{int(chosen['line'])} in {_text(chosen['name'])}"


def _memberships(config: object) -> dict[str, str]:
    if not isinstance(config, dict):
        return {}
    found: dict[str, str] = {}
    for key, value in config.items():
        ranks = value.get("ranks") if isinstance(value, dict) else None
        if isinstance(ranks, list):
            ranks = str([int(r) for r in ranks])
        if isinstance(key, str) and isinstance(ranks, str) and len(ranks) > 2:
            found[key] = ranks
    return found


def _untracked(
    dump: dict[Any, Any], entries: list[Any], groups: list[tuple[str, str]], parsed: list[Name]
) -> dict[int, int]:
    """Gloo counts point-to-point operations without recording them: how many came after a group's last entry."""
    status = dump.get("pg_status")
    if not isinstance(status, dict) or not any(p.backend == "gloo" for p in parsed):
        return {}
    by_label = {label: i for i, label in enumerate(groups)}
    found: dict[int, int] = {}
    seen: set[Any] = set()
    for entry in reversed(entries):
        pg = entry.get("pg_id")
        if pg in seen or "op_id" not in entry:
            continue
        seen.add(pg)
        counters = status.get(str(pg))
        if isinstance(counters, dict):
            extra = int(counters.get("last_enqueued_collective", -1)) - int(entry["op_id"])
            label = (str(entry["process_group"][0]), str(entry["process_group"][1]))
            if extra > 0 and label in by_label:
                found[by_label[label]] = extra
        if len(seen) >= len(status):
            break
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise DumpError(f"a name in it is of type {type(value).__name__}, not text")
    return value[:1000]


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or len(value) > MAX_TENSORS:
        raise DumpError("element types in it are not a list")
    return [_text(v) for v in value]


def _sizes(value: Any) -> list[list[int]]:
    """Sizes as PyTorch writes them, of bounded extent: tensors × dimensions. Raises DumpError otherwise."""
    if not isinstance(value, list | tuple) or len(value) > MAX_TENSORS:
        raise DumpError("tensor sizes in it are not a list of lists")
    for size in value:
        if not isinstance(size, list | tuple) or len(size) > 64 or not all(type(n) is int for n in size):
            raise DumpError("tensor sizes in it are not lists of whole numbers")
        if any(n < -1 or n >= 1 << 62 for n in size):
            raise DumpError("a tensor size in it is out of range")
    return [list(size) for size in value]

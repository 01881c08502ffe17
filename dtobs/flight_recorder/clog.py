"""Reads `clog`, the log of collectives that torchcomms' ClogHook writes, one file a rank, as if it were a dump.

The format is described in torchcomms (``comms/torchcomms/hooks/clog``, version 1): ``C1|sig|all_reduce|…|comm=world``
defines a signature, ``C1|Q|…`` issues a call of it, ``S`` and ``E`` say that the device began and ended it. Calls are
counted for each communicator in the order in which they were issued. Of calls that CUDA graphs replay there is no
order, and of a log without ``S`` and ``E`` nobody knows what has ended: both are left out, and said.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtobs.errors import DumpError

_MAX_BYTES = 1 << 30
_KEPT = 4000
_MAX_TEXT = 200
_DTYPES = {
    "f32": "Float", "f64": "Double", "f16": "Half", "bf16": "BFloat16", "i32": "Int", "i64": "Long", "i16": "Short",
    "i8": "Char", "u8": "Byte", "bool": "Bool", "fp8e4m3": "Float8_e4m3fn", "fp8e5m2": "Float8_e5m2",
}  # fmt: skip
_PAIRED = {"send", "recv"}
_MESSAGES = {*_PAIRED, "batch_op_issue"}
"""What not every rank of a communicator calls. Of a batch the log does not tell who takes part in it."""
_MAX_LINE = 1 << 20  # the ranks of a split, and sizes for each rank


@dataclass
class _Log:
    """What one file says so far."""

    signatures: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)
    entries: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    open: dict[str, deque[dict[str, Any]]] = field(default_factory=lambda: defaultdict(deque))
    counts: dict[tuple[str, bool], int] = field(default_factory=lambda: defaultdict(int))
    ranks: dict[str, tuple[int, int]] = field(default_factory=dict)  #: communicator → rank, size
    members: dict[str, str] = field(default_factory=dict)
    base_seconds: float = 0.0
    lifecycle: bool = False
    graphs: bool = False


def looks_like_clog(head: bytes) -> bool:
    """Whether a file that begins so is a clog."""
    return head.startswith(b"V|1|base_timestamp=")


def read_clog(path: Path) -> tuple[int, dict[str, Any]]:
    """The rank of one file, and its calls as a Flight Recorder dump. Raises DumpError where that cannot be had."""
    log = _Log()
    try:
        with path.open("rb") as file:
            read = 0
            for raw in file:
                read += len(raw)
                if read > _MAX_BYTES:
                    break
                _take(log, raw[:_MAX_LINE].decode("utf-8", "replace").rstrip("\r\n"))
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror}") from error
    if not log.ranks:
        raise DumpError(f"{path} names no communicator (new_comm)")
    if log.graphs:
        raise DumpError(f"{path} holds calls of CUDA graphs, whose order it does not tell")
    if not log.lifecycle:
        raise DumpError(f"{path} has no S and E lines: nothing tells what has ended (event option LIFECYCLE)")
    world = max(log.ranks, key=lambda name: log.ranks[name][1])
    rank, size = log.ranks[world]
    return rank, {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": name, "ranks": log.members.get(name) or str(list(range(min(size, 100_000))))}
            for name in {entry["process_group"][0] for entry in log.entries}
            if name == world or name in log.members
        },
        "pg_status": {},
        "entries": list(log.entries),
    }


def _take(log: _Log, line: str) -> None:
    parts = line.split("|")
    if parts[0] == "V" and len(parts) > 2:
        log.base_seconds = _seconds(parts[2].partition("=")[2])
    elif parts[0] == "new_comm":
        told = _fields(parts[1:])
        rank, size = told.get("rank", ""), told.get("world_size", "")
        if rank.isdigit() and size.isdigit() and len(rank) < 8 and len(size) < 8 and "comm" in told:
            log.ranks[told["comm"]] = int(rank), int(size)
    elif parts[0] == "split":
        told = _fields(parts[1:])
        ranks = [int(one) for one in told.get("ranks", "").split(",") if one.isdigit() and len(one) < 8]
        if ranks and "child" in told:
            log.members[told["child"]] = str(ranks)
    elif parts[0][:1] == "G" and len(parts) > 2:
        log.graphs = True
    elif parts[0][:1] == "C" and len(parts) > 2 and parts[1] == "sig":
        log.signatures[parts[0]] = parts[2][:_MAX_TEXT], _fields(parts[3:])
    elif parts[0][:1] == "C" and len(parts) > 1:
        _event(log, parts[0], parts[1], _seconds(parts[-1]))


def _event(log: _Log, corr: str, kind: str, seconds: float) -> None:
    if corr not in log.signatures:
        return
    waiting = log.open[corr]
    if kind == "Q":
        entry = _entry(log, corr, seconds)
        log.entries.append(entry)
        waiting.append(entry)
    elif kind == "S":
        log.lifecycle = True
        first = next((entry for entry in waiting if entry["state"] == "scheduled"), None)
        if first is not None:
            first["state"], first["time_discovered_started_ns"] = "started", _ns(log, seconds)
    elif kind == "E" and waiting:
        log.lifecycle = True
        entry = waiting.popleft()
        entry["state"], entry["retired"], entry["time_discovered_completed_ns"] = "completed", True, _ns(log, seconds)


def _entry(log: _Log, corr: str, seconds: float) -> dict[str, Any]:
    op, told = log.signatures[corr]
    comm, message = told.get("comm", ""), op in _MESSAGES
    log.counts[comm, message] += 1
    me = log.ranks.get(comm, (0, 0))[0]
    name = f"{op} {me}{'->' if op == 'send' else '<-'}{told.get('peer', '0')}" if op in _PAIRED else op
    dtype = _DTYPES.get(told.get("dtype", ""), told.get("dtype", ""))
    number = sum(log.counts.values())
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (comm, comm),
        "collective_seq_id": log.counts[comm, False],
        "p2p_seq_id": log.counts[comm, True],
        "op_id": number,
        "profiling_name": f"torchcomms:{name}",
        "time_created_ns": _ns(log, seconds),
        "input_sizes": _sizes(told, "in"),
        "input_dtypes": [dtype],
        "output_sizes": _sizes(told, "out"),
        "output_dtypes": [dtype],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 0,
        "is_p2p": message,
        "frames": [],
    }


def _sizes(told: dict[str, str], way: str) -> list[list[int]]:
    text = told.get(f"{way}_count") or told.get(f"{way}_counts") or told.get(f"{way}_splits") or "0"
    return [[int(one)] for one in text.split(",")[:64] if one.isdigit() and len(one) < 16] or [[0]]


def _fields(parts: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (part.partition("=") for part in parts[:64]) if value}


def _seconds(text: str) -> float:
    try:
        value = float(text.lstrip("+")[:32])
    except ValueError:
        return 0.0
    return value if 0 <= value < 1e11 else 0.0


def _ns(log: _Log, seconds: float) -> int:
    return int((log.base_seconds + seconds) * 1e9)

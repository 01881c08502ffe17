"""The lines a rank or a monitor appended: meta entries, the journal of findings, and stacks as text."""

from __future__ import annotations

import json

from dtobs.host.stacks import main_thread, parse_stacks
from dtobs.recording.journal import open_entries, read_journal
from dtobs.recording.meta import read_meta
from tests.fuzz.mutate import jsonl_mutator
from tests.fuzz.scratch import scratch

_FOLDER = scratch("meta")
_PATH = _FOLDER / "x.jsonl"
_META = (
    {"t": "process", "pid": 7, "host": "a", "boot_id": "x"},
    {"t": "group", "id": 5, "name": "default", "ranks": [0, 1], "backend": "gloo", "description": "d"},
    {
        "t": "op",
        "id": 6,
        "op": "all_reduce",
        "reduce_op": "sum",
        "shapes": [[4]],
        "dtypes": ["f"],
        "root": -1,
    },
    {"t": "site", "id": 7, "file": "a.py", "line": 3, "function": "f"},
    {"t": "phase", "id": 40, "name": "mine"},
    {"t": "params", "params": [{"name": "w", "shape": [2], "dtype": "f", "replica": "r"}]},
    {"t": "exception", "type": "ValueError", "message": "no", "t_ns": 5},
    {"t": "probe", "name": "x", "state": "off"},
    {"t": "policy", "seed": "rank"},
    {"t": "layout", "kind": "ddp", "data_ranks": [0, 1]},
)
_JOURNAL = (
    {
        "event": event,
        "utc": "2026",
        "t_ns": 5,
        "attempt": 0,
        "since_ns": 3,
        "code": "straggler",
        "severity": "warning",
        "confidence": "likely",
        "ranks": [1],
        "step": 4,
        "group": None,
        "summary": "slow",
        "evidence": [{"what": "x"}],
        "next_step": "look",
    }
    for event in ("cleared", "found")
)
_STACKS = b'Thread 0x01 (most recent call first):\n  File "a.py", line 3 in f\n  g (b.py:4)\n    h (c.py)\n'
SEEDS = [
    b"\n".join(json.dumps(entry).encode() for entry in _META),
    b"\n".join(json.dumps(entry).encode() for entry in _JOURNAL),
    _STACKS,
]


def check(data: bytes) -> bool:
    """Read by every reader: what is not theirs is counted or left out. Returns whether one had a use for it."""
    _PATH.write_bytes(data)
    meta = read_meta(_PATH)
    for group in (*meta.groups.values(), *meta.ops.values(), *meta.sites.values()):
        str(group)
    entries = open_entries(read_journal(_PATH))
    thread = main_thread(parse_stacks(data.decode(errors="replace")))
    return bool(meta.groups or entries or thread)


mutate = jsonl_mutator

"""Who has come to the rendezvous: one small file a rank, from before there is a process group until it is there.

File ``rendezvous/<attempt>/<5-digit rank>.json``. Written at two or three instants of a job's start, so it is plain
JSON; it is all that is known of a job that never gets as far as its first collective.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dtobs.codec import DecodeError, Natural, decode
from dtobs.errors import RecordingDisabled, TargetError
from dtobs.host.process import boot_id, read_process, start_ticks
from dtobs.recording.rundir import RunDirectory, read_json, write_json

_SEEN = "seen"
_MOST_CAUSES = 8
State = Literal["started", "waiting", "met", "failed"]


@dataclass(frozen=True)
class Arrival:
    """One rank on its way. Times are UTC seconds; those in ns are of its host's monotonic clock, which nobody sets.

    `state`: "started" (the process runs and has not asked for the group), "waiting" (inside ``init_process_group``),
    "met", or "failed" (`error` was raised there, or before it asked where `site` is empty). `site` is the user's line
    that asked, `address` where the ranks are to meet. `uncaught`: `error` ended the program. `patience` is the hang
    timeout that the rank was given, 0 for none.
    """

    rank: Natural
    world_size: int
    attempt: int = 0
    state: State = "started"
    host: str = ""
    pid: int = 0
    ticks: int = 0
    boot_id: str = ""
    began: float = 0.0
    since: float = 0.0  #: in `state` since
    began_ns: Natural = 0
    since_ns: Natural = 0
    waited: float = 0.0  #: seconds inside init_process_group, once that is over
    site: str = ""
    address: str = ""
    error: str = ""
    uncaught: bool = False
    patience: float = 0.0
    seen_ns: Natural = 0  #: when its process was last seen alive by who watches the job start


def arrive(rank: int, world_size: int, attempt: int, patience: float = 0.0) -> Arrival:
    """This process, on its way."""
    now, now_ns = time.time(), time.monotonic_ns()
    return Arrival(
        rank,
        world_size,
        attempt,
        host=socket.gethostname(),
        pid=os.getpid(),
        ticks=start_ticks(os.getpid()),
        boot_id=boot_id(),
        began=now,
        since=now,
        began_ns=now_ns,
        since_ns=now_ns,
        patience=patience,
    )


def write_arrival(run: RunDirectory, arrival: Arrival) -> None:
    """Replace this rank's file. What cannot be written is left out: a job starts without it as well."""
    with contextlib.suppress(RecordingDisabled, OSError):
        write_json(_folder(run.root) / str(arrival.attempt) / f"{arrival.rank:05d}.json", vars(arrival))


def read_arrivals(root: Path) -> dict[int, Arrival]:
    """The ranks of the newest attempt by number; {} where none was recorded. Damaged files are left out."""
    attempts = sorted(int(p.name) for p in _listed(_folder(root)) if p.name.isdecimal())
    if not attempts:
        return {}
    found = {}
    for path in _listed(_folder(root) / str(attempts[-1])):
        if not re.fullmatch(r"\d{5,9}\.json", path.name):
            continue
        with contextlib.suppress(TargetError, DecodeError):
            arrival = decode(Arrival, read_json(path))
            found[arrival.rank] = arrival
    seen = _read_seen(root, attempts[-1])
    return {rank: replace(each, seen_ns=seen.get(f"{rank}:{each.pid}", 0)) for rank, each in found.items()}


def note_living(root: Path) -> None:
    """Write down which processes of this host live now, on their way: what is known once somebody has ended them all.

    File ``rendezvous/<attempt>/seen``: monotonic ns by ``rank:pid``; who is not alive keeps its time.
    """
    arrivals = read_arrivals(root)
    now = time.monotonic_ns()
    seen = {f"{r}:{a.pid}": now if lives(a) else a.seen_ns for r, a in arrivals.items() if a.boot_id == boot_id()}
    if seen:
        attempt = next(iter(arrivals.values())).attempt
        with contextlib.suppress(RecordingDisabled):
            write_json(_folder(root) / str(attempt) / _SEEN, seen)


def _read_seen(root: Path, attempt: int) -> dict[str, int]:
    with contextlib.suppress(TargetError, DecodeError):
        return decode(dict[str, Natural], read_json(_folder(root) / str(attempt) / _SEEN))
    return {}


def lives(arrival: Arrival) -> bool | None:
    """Whether its process is alive; None when it ran on a host that we cannot look at."""
    if arrival.boot_id != boot_id():
        return None
    return read_process(arrival.pid, arrival.ticks).alive


def seconds_waited(arrival: Arrival, until_ns: int = 0) -> float | None:
    """Seconds in ``init_process_group`` without a group; None for one that is not there, or whose end is unknown.

    `until_ns` is the moment to judge of a job that has ended: who was still seen then waited until then.
    """
    if arrival.state == "failed":
        return arrival.waited
    if arrival.state == "waiting" and until_ns and arrival.seen_ns == until_ns:
        return max(0, until_ns - arrival.since_ns) / 1e9
    if arrival.state != "waiting" or lives(arrival) is False:
        return None
    return _seconds_since(arrival, arrival.since, arrival.since_ns)


def seconds_on_the_way(arrival: Arrival, until_ns: int = 0) -> float:
    """Seconds since its process was first seen; until `until_ns` where that is given."""
    if until_ns:
        return max(0, until_ns - arrival.began_ns) / 1e9
    return _seconds_since(arrival, arrival.began, arrival.began_ns)


def _seconds_since(arrival: Arrival, then: float, then_ns: int) -> float:
    """By the monotonic clock on the host of `arrival`; by UTC on another, whose clock may be set differently."""
    if then_ns and arrival.boot_id == boot_id():
        return max(0, time.monotonic_ns() - then_ns) / 1e9
    return max(0.0, time.time() - then)


def become(arrival: Arrival, state: State, **changes: Any) -> Arrival:
    """The same rank a moment later."""
    return replace(arrival, state=state, since=time.time(), since_ns=time.monotonic_ns(), **changes)


def described(error: BaseException) -> str:
    """The kind of an error and the first line of what it says, and the same of the one that all began with."""
    first = error
    for _ in range(_MOST_CAUSES):  # they may go round in a circle
        first = first.__cause__ or first
    said, began = (f"{type(each).__name__}: {each}".splitlines()[0][:300] for each in (error, first))
    return said if first is error else f"{said} (raised from {began})"


def _folder(root: Path) -> Path:
    return root / "rendezvous"


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []

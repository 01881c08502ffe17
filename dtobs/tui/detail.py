"""One rank in full: where it is, its last steps and events, its stacks. Computed here, drawn elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtobs.events import EXPOSED_ALONG, STEP_PARTS, Kind, number_of, phase_name
from dtobs.host.stacks import folded
from dtobs.recording.meta import Meta
from dtobs.recording.rank import Rank
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView
from dtobs.tui import words
from dtobs.words import bytes_text, duration_text, runs_text

MAX_STEPS = 24
MAX_EVENTS = 60
_LOG_LINES, _LOG_BYTES, _LOG_WIDTH = 10, 8192, 400
_KERNEL_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device, uninterruptibly",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "I": "idle",
}


@dataclass(frozen=True)
class StepLine:
    """One step of the history; `parts` are seconds by name of STEP_PARTS and sum to `wall_seconds`."""

    step: int
    wall_seconds: float
    parts: dict[str, float]
    loss: float
    loss_said: bool
    local_norm: float


@dataclass(frozen=True)
class EventLine:
    """One event: how long ago, what, and of which collective."""

    age_seconds: float
    kind: str
    step: int
    what: str


@dataclass(frozen=True)
class RankDetail:
    """Everything about one rank. Newest first in `steps` and `events`."""

    rank: int
    facts: tuple[tuple[str, str], ...]
    steps: tuple[StepLine, ...]
    events: tuple[EventLine, ...]
    exception: str
    stack: tuple[
        str, ...
    ]  #: of the thread that trains or that ended it, from the user's line on, library frames folded
    stack_title: str
    stacks: str  #: of all its threads, as captured or as it crashed
    log: tuple[str, ...] = ()  #: what it printed last, where its output goes to a file of its own


def rank_detail(view: RunView, number: int) -> RankDetail:
    """The detail of rank `number`. Raises KeyError when it did not record."""
    rank = view.rank(number)
    seen = view.capture.ranks.get(number) if view.capture else None
    recent = view.recent_steps(number, MAX_STEPS)
    return RankDetail(
        number,
        tuple((label, text) for label, text in (*_facts(rank), ("waits", _waits(recent))) if text),
        tuple(_step(r) for r in recent[::-1]),
        tuple(_event(e, rank.meta, view.now_ns) for e in view.events(number)[-MAX_EVENTS:][::-1]),
        _exception(rank.meta),
        tuple(folded(str(f) for f in rank.stack.frames)) if rank.stack is not None else (),
        _stack_title(rank),
        rank.crash.text if rank.crash is not None else seen.stacks_text if seen else "",
        _log(RunDirectory(view.root).rank(number)),
    )


def _stack_title(rank: Rank) -> str:
    if rank.crash is not None:
        return f"stack of {'the thread that ended it' if rank.crash.stack is not None else 'its main thread'}"
    return f"stack of its main thread, captured {rank.view.capture.taken_utc if rank.view.capture else ''}"


def _log(folder: Path) -> tuple[str, ...]:
    """The last lines of the log of the rank that was written to last; () without one."""
    found: list[tuple[int, Path]] = []
    for path in (folder / "stdout.log", folder / "stderr.log"):
        with suppress(OSError):
            if (said := path.stat()).st_size:
                found.append((said.st_mtime_ns, path))
    if not found:
        return ()
    try:
        with max(found)[1].open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
            lines = file.read(_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple("".join(c if c.isprintable() else " " for c in line[:_LOG_WIDTH]) for line in lines[-_LOG_LINES:])


def _facts(rank: Rank) -> list[tuple[str, str]]:
    process, page = rank.process, rank.page
    kernel = process.ending if process is not None else ""
    if process is not None and process.alive:
        where = f", in {process.wchan}" if process.wchan not in ("", "0") else ""
        kernel = _KERNEL_STATES.get(process.state, process.state) + where
    call, waits_in, host = rank.call, rank.waits_in, rank.host or f"node {rank.get('node')}"
    group = call.group if call is not None else None
    failures = rank.get("probe_failures")
    return [
        ("process", f"pid {rank.pid} on {host}, local rank {rank.get('local_rank')}"),
        ("kernel", kernel),
        ("state", rank.state.value),
        ("phase", f"{rank.phase or 'none'}{_for(rank.phase_seconds)}"),
        ("blocked", f"in {waits_in}{_for(rank.waited_seconds)}" if waits_in is not None else ""),
        ("collective", str(call.op) if call is not None else ""),
        ("group", f"{group} #{call.seq}, ranks {runs_text(group.ranks)}" if call is not None and group else ""),
        ("call site", str(call.site or "") if call is not None else ""),
        ("issued", _ago(rank.since("collective_ns"))),
        ("heartbeat", _ago(rank.since("heartbeat_ns"))),
        ("memory", bytes_text(float(page["rss_bytes"]))),
        ("device", bytes_text(float(page["device_bytes"])) if page["device_bytes"] > 0 else ""),
        ("dtobs", f"{failures} probe failures" if failures else ""),
    ]


def _waits(records: npt.NDArray[np.void]) -> str:
    """What the last steps waited for, by dimension: ``data 12.0 ms, pipeline 3.0 ms a step``."""
    if not len(records):
        return ""
    spent = {along: float(records[f"exposed_{along}_ns"].mean()) / 1e9 for along in EXPOSED_ALONG}
    rest = float(records["exposed_ns"].mean()) / 1e9 - sum(spent.values())
    named = [(along, s) for along, s in (*spent.items(), ("other", rest)) if s >= 1e-4]
    parts = [f"{along} {duration_text(seconds)}" for along, seconds in named]
    return f"{', '.join(parts)} a step" if parts else ""


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f" for {words.age(seconds)}"


def _ago(seconds: float | None) -> str:
    return "" if seconds is None else f"{words.age(seconds)} ago"


def _step(record: np.void) -> StepLine:
    return StepLine(
        int(record["step"]),
        (int(record["end_ns"]) - int(record["begin_ns"])) / 1e9,
        {part: int(record[f"{part}_ns"]) / 1e9 for part in STEP_PARTS},
        float(record["loss"]),
        bool(record["losses"]) or bool(np.isfinite(record["loss"])),
        float(record["local_norm"]),
    )


def _op(e: np.void, meta: Meta) -> str:
    op = meta.ops.get(int(e["op"]))
    return op.op if op is not None else "collective"


def _collective(e: np.void, meta: Meta) -> str:
    group = meta.groups.get(int(e["group"]))
    return f"{_op(e, meta)} #{int(number_of(e['seq']))}{f' in {group}' if group else ''}".strip()


def _site(e: np.void, meta: Meta) -> str:
    site = meta.sites.get(int(e["site"]))
    return f"  {site}" if site else ""


_WHAT: dict[int, Callable[[np.void, Meta], str]] = {
    Kind.PHASE_BEGIN: lambda e, m: phase_name(int(e["phase"]), m.phases),
    Kind.PHASE_END: lambda e, m: phase_name(int(e["phase"]), m.phases),
    Kind.STEP_END: lambda e, m: duration_text(float(e["value"])) if e["value"] > 0 else "",
    Kind.COLLECTIVE: lambda e, m: _collective(e, m) + _site(e, m),
    Kind.WAIT_BEGIN: _collective,
    Kind.WAIT_END: lambda e, m: f"after {duration_text(float(e['value']))}",
    Kind.P2P: lambda e, m: f"{_op(e, m)} with {int(e['value'])} #{int(number_of(e['seq']))}" + _site(e, m),
}


def _event(e: np.void, meta: Meta, now: int) -> EventLine:
    kind = int(e["kind"])
    name = Kind(kind).name.lower().replace("_", " ") if kind in list(Kind) else f"kind {kind}"
    what = _WHAT[kind](e, meta) if kind in _WHAT else ""
    return EventLine(max(0, now - int(e["t_ns"])) / 1e9, name, int(e["step"]), what)


def _exception(meta: Meta) -> str:
    if not meta.exceptions:
        return ""
    last = meta.exceptions[-1]
    trace = last.get("traceback")
    lines = trace if isinstance(trace, str) else "\n".join(str(t).rstrip("\n") for t in trace or ())
    return lines.strip() or f"{last.get('type', 'exception')}: {last.get('message', '')}"

"""One rank in full: where it is, its last steps and events, its stacks. Computed here, drawn elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dtobs.events import STEP_PARTS, Kind, RankState
from dtobs.recording.meta import Meta
from dtobs.recording.view import RunView
from dtobs.tui import words
from dtobs.tui.rows import clock_shifts, op_name, phase_name, seconds_since

MAX_STEPS = 24
MAX_EVENTS = 60
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
    local_norm: float
    reduced_norm: float


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
    stacks: str
    stacks_utc: str


def rank_detail(view: RunView, rank: int) -> RankDetail:
    """The detail of `rank`. Raises KeyError when it did not record."""
    page, meta = view.page(rank), view.meta(rank)
    now = view.now_ns - int(clock_shifts(view)[view.ranks.index(rank)])
    seen = view.capture.ranks.get(rank) if view.capture else None
    return RankDetail(
        rank,
        tuple((label, text) for label, text in _facts(view, rank, page, meta, now) if text),
        tuple(_step(r) for r in view.recent_steps(rank, MAX_STEPS)[::-1]),
        tuple(_event(e, meta, now) for e in view.events(rank)[-MAX_EVENTS:][::-1]),
        _exception(meta),
        seen.stacks_text if seen else "",
        view.capture.taken_utc if view.capture and seen and seen.stacks_text else "",
    )


def _facts(view: RunView, rank: int, page: np.void, meta: Meta, now: int) -> list[tuple[str, str]]:
    process = view.process(rank)
    kernel = process.ending if process is not None else ""
    if process is not None and process.alive:
        where = f", in {process.wchan}" if process.wchan not in ("", "0") else ""
        kernel = _KERNEL_STATES.get(process.state, process.state) + where
    group = meta.groups.get(int(page["collective_group"]))
    op = meta.ops.get(int(page["collective_op"]))
    site = meta.sites.get(int(page["collective_site"]))
    phase = phase_name(int(page["phase"]), meta) or "none"
    host = str(meta.process.get("host", "")) or f"node {int(page['node'])}"
    return [
        ("process", f"pid {int(page['pid'])} on {host}, local rank {int(page['local_rank'])}"),
        ("kernel", kernel),
        ("says", RankState(int(page["state"])).name.lower() if int(page["state"]) in list(RankState) else ""),
        ("phase", f"{phase}{_for(now, int(page['phase_begin_ns']))}"),
        (
            "collective",
            f"{op or op_name(int(page['collective_op']), meta)}" if int(page["collective_op"]) else "",
        ),
        (
            "group",
            f"{group} #{int(page['collective_seq'])}, ranks {words.ranks(group.ranks)}" if group else "",
        ),
        ("call site", str(site) if site else ""),
        ("issued", _ago(now, int(page["collective_ns"]))),
        ("blocked", _for(now, int(page["wait_since_ns"])).strip()),
        ("heartbeat", _ago(now, int(page["heartbeat_ns"]))),
        ("memory", words.size(float(page["rss_bytes"]))),
        ("device", words.size(float(page["device_bytes"])) if page["device_bytes"] > 0 else ""),
        ("dtobs", _trouble(page)),
    ]


def _for(now: int, then: int) -> str:
    seconds = seconds_since(now, then)
    return "" if seconds is None else f" for {words.age(seconds)}"


def _ago(now: int, then: int) -> str:
    seconds = seconds_since(now, then)
    return "" if seconds is None else f"{words.age(seconds)} ago"


def _trouble(page: np.void) -> str:
    failures = int(page["probe_failures"])
    return f"{failures} probe failures" if failures else ""


def _step(record: np.void) -> StepLine:
    return StepLine(
        int(record["step"]),
        (int(record["end_ns"]) - int(record["begin_ns"])) / 1e9,
        {part: int(record[f"{part}_ns"]) / 1e9 for part in STEP_PARTS},
        float(record["loss"]),
        float(record["local_norm"]),
        float(record["reduced_norm"]),
    )


def _collective(e: np.void, meta: Meta) -> str:
    group = meta.groups.get(int(e["group"]))
    name = op_name(int(e["op"]), meta)
    return f"{name} #{int(e['seq'])}{f' in {group}' if group else ''}".strip()


def _site(e: np.void, meta: Meta) -> str:
    site = meta.sites.get(int(e["site"]))
    return f"  {site}" if site else ""


_WHAT: dict[int, Callable[[np.void, Meta], str]] = {
    Kind.PHASE_BEGIN: lambda e, m: phase_name(int(e["phase"]), m),
    Kind.PHASE_END: lambda e, m: phase_name(int(e["phase"]), m),
    Kind.STEP_END: lambda e, m: words.duration(float(e["value"])) if e["value"] > 0 else "",
    Kind.COLLECTIVE: lambda e, m: _collective(e, m) + _site(e, m),
    Kind.WAIT_BEGIN: _collective,
    Kind.WAIT_END: lambda e, m: f"after {words.duration(float(e['value']))}",
    Kind.P2P: lambda e, m: f"{op_name(int(e['op']), m)} with {int(e['value'])} #{int(e['seq'])}" + _site(e, m),
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
    lines = trace if isinstance(trace, str) else "".join(map(str, trace)) if isinstance(trace, list) else ""
    return lines.strip() or f"{last.get('type', 'exception')}: {last.get('message', '')}"

"""The pictures of a report on a recorded run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.detectors.hangs.situation import Situation, interpret
from dtobs.detectors.hangs.stall import last_movement_ns
from dtobs.diagnose.model import RankStatus
from dtobs.diagnose.pictures import (
    STRIP_COLUMNS,
    CallGrid,
    CallState,
    Pictures,
    RankTimeline,
    RankWait,
    grid_of,
    groups_shown,
    sample,
    wait_picture,
)
from dtobs.events import FIRST_CUSTOM_PHASE, Kind, Phase, RankState, walls_ns
from dtobs.findings import Finding
from dtobs.recording.rank import ENDED, State
from dtobs.recording.view import RunView

_STEPS_SHOWN = 6
_MAX_SECONDS = 60.0
_MIN_SECONDS = 0.1
_QUIET_SHARE = 0.25
"""How much of the strip shows that nothing moves any more."""
_MAX_SHOWN = 64
_ENDED, _CUSTOM, _WAITS, _SUSPENDED = 10, 11, 12, 13
_KINDS = (
    "nothing recorded",
    *(phase.name.lower() for phase in list(Phase)[1:]),
    "ended",
    "other",
    "waits",
    "suspended",
)


def run_pictures(view: RunView, findings: Sequence[Finding], statuses: dict[int, RankStatus]) -> Pictures:
    """Everything there is to draw; `findings` are the diagnosis', the root cause first."""
    situation = interpret(view)
    accused = frozenset(findings[0].ranks if findings else ())
    waits = wait_picture(_waits(situation, statuses), accused) if situation.broken else None
    return Pictures(
        waits=waits,
        strip=_strip(view),
        calls=tuple(_tables(situation)),
        environment=environment(view.info),
    )


def _waits(situation: Situation, statuses: dict[int, RankStatus]) -> dict[int, RankWait]:
    """Every blocked rank with those it waits for, and these with what they do instead."""
    calls, found = situation.calls, {}
    on_of: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for rank, at in situation.blocked.items():
        key = (at.group, at.seq, at.peer)
        if key not in on_of or not at.group:
            on_of[key] = tuple(situation.awaited(rank))
        if at.peer >= 0:
            operation, where = str(calls.op(rank, at.op)), ""
        else:
            group = calls.groups.get(at.group)
            call = calls.call(rank, at.group, at.seq)
            operation = str(calls.op(rank, int(call["op"]))) if call is not None else "communication"
            where = f" of {group}" if group is not None else ""
        status = statuses.get(rank)
        site = status.site if status is not None else ""
        exact = f"{operation} #{at.seq}{where}"
        if status is not None and status.state in (State.SUSPENDED, *ENDED):  # it waits for nobody
            found[rank] = RankWait(f"{status.state} in {exact}", site, waits=False)
        else:
            found[rank] = RankWait(f"{operation}{where}", site, on=on_of[key], exact=exact)
    for rank in sorted({r for wait in found.values() for r in wait.on} - found.keys()):
        status = statuses.get(rank)
        if status is None:
            continue
        phase = f" in {status.phase}" if status.phase else ""
        ending = f": {status.ending}" if status.ending else ""
        after = f", after {status.last_collective}" if status.last_collective else ""
        where = status.line or status.site
        found[rank] = RankWait(f"{status.state}{phase}{ending}{after}", where, waits=False)
    return found


def _strip(view: RunView) -> RankTimeline | None:
    """The phase of every rank, and when it waits for others, over its last steps and what came after."""
    if not len(view.pages):
        return None
    moved = last_movement_ns(view)
    steps = view.steps(_STEPS_SHOWN).records
    done = steps[steps["end_ns"] > 0]
    usual = float(np.median(walls_ns(done))) / 1e9 if len(done) else 1.0
    before = min(max(_STEPS_SHOWN * usual, _MIN_SECONDS), _MAX_SECONDS)
    # A hang is much longer than a step: the two are drawn beside each other, each on a scale of its own.
    quiet = max(0.0, (_last_ns(view) - moved) / 1e9)
    after = round(STRIP_COLUMNS * min(_QUIET_SHARE, quiet / before))
    at = moved + np.concatenate(
        (_middles(STRIP_COLUMNS - after, before) - round(before * 1e9), _middles(after, quiet) if after else [])
    ).astype(np.int64)
    cells = np.zeros((len(view.ranks), STRIP_COLUMNS), np.uint8)
    for row, rank in enumerate(view.ranks):
        cells[row] = _rank_cells(view, rank, at)
    return RankTimeline(
        "the phase each rank is in", before, tuple(view.ranks), _KINDS, cells, quiet if after else 0.0, after
    )


def _last_ns(view: RunView) -> int:
    """The end of what there is to show: now, or soon after the last of the ranks has ended."""
    ended = [_ended_ns(view, rank) for rank in view.ranks]
    if not all(ended):
        return view.now_ns
    return min(view.now_ns, max(ended) + max(0, max(ended) - last_movement_ns(view)) // 8)


def _ended_ns(view: RunView, rank: int) -> int:
    """When its process ended, or where nobody saw that, when it closed its session; 0 where it may live."""
    process = view.process(rank)
    if process is not None and not process.alive and process.ended_ns:
        return process.ended_ns
    if int(view.page(rank)["state"]) != RankState.CLOSED:
        return 0
    events = view.events(rank)
    return int(events["t_ns"][events["kind"] == Kind.CLOSE].max(initial=0))


def _middles(columns: int, seconds: float) -> npt.NDArray[np.float64]:
    """float64[columns]: nanoseconds to the middle of each of so many equal parts of `seconds`."""
    return np.round((np.arange(columns) + 0.5) * seconds * 1e9 / columns)


def _rank_cells(view: RunView, rank: int, at: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    events = view.events(rank)
    events = events[np.argsort(events["t_ns"], kind="stable")]
    phases = events[np.isin(events["kind"], (Kind.PHASE_BEGIN, Kind.PHASE_END))]
    number = np.where(phases["phase"] >= FIRST_CUSTOM_PHASE, _CUSTOM, np.minimum(phases["phase"], _ENDED - 1))
    number = np.where(phases["kind"] == Kind.PHASE_BEGIN, number, 0).astype(np.uint8)
    cells = sample(phases["t_ns"], number, at)
    waits = events[np.isin(events["kind"], (Kind.WAIT_BEGIN, Kind.WAIT_END))]
    blocked = sample(waits["t_ns"], (waits["kind"] == Kind.WAIT_BEGIN).astype(np.uint8), at)
    cells[blocked == 1] = _WAITS
    process, heartbeat = view.process(rank), int(view.page(rank)["heartbeat_ns"])
    if process is not None and not process.alive:
        cells[at > max(heartbeat, process.ended_ns)] = _ENDED
    elif process is not None and process.stopped:
        cells[at > heartbeat] = _SUSPENDED
    return cells


def _tables(situation: Situation) -> Iterator[CallGrid]:
    """The groups whose calls disagree, and those in which ranks are blocked."""
    about: dict[int, int] = {m.group: m.seq for m in situation.mismatches}
    about |= {d.group: d.seq for d in situation.lost_steps}
    waiting = Counter(at.group for at in situation.blocked.values() if at.group and at.peer < 0)
    for group in groups_shown(dict.fromkeys(about, 0) | waiting, about):
        yield _table(situation, group, about.get(group))


def _table(situation: Situation, group: int, about: int | None) -> CallGrid:
    calls, table = situation.calls, situation.calls.table
    first_open = min((at.seq for at in situation.blocked.values() if at.group == group), default=0)
    known = calls.groups.get(group)

    def state(row: int) -> CallState:
        at = situation.blocked.get(int(table.rank[row]))
        return "waiting" if at and (at.group, at.peer) == (group, -1) and table.seq[row] >= at.seq else "issued"

    def text(row: int) -> str:
        rank = int(table.rank[row])
        site = calls.site(rank, int(table.site[row]))
        return f"{calls.op(rank, int(table.op[row]))}{f' at {site}' if site is not None else ''}"

    return grid_of(
        table,
        group,
        str(known) if known is not None else f"group {group}",
        about or first_open or None,
        {r: calls.issued(r, group) for r in calls.members(group) if r in set(situation.view.ranks)},
        table.op,
        state,
        text,
        situation.view.out_of_reach,  # what they called later is not on record here
    )


def environment(info: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """What run.json says of the job, as names and values."""
    rows: list[tuple[str, str]] = []
    for name in ("name", "started", "world_size", "launch", "hosts", "mesh", "versions", "git", "argv"):
        value = info.get(name)
        if value is not None and value != []:
            rows.append((name.replace("_", " "), _shown(value)))
    config = info.get("config")
    if isinstance(config, dict):
        rows += [(f"config {name}", _shown(value)) for name, value in sorted(config.items(), key=str)[:_MAX_SHOWN]]
    return tuple((name[:80], text[:400]) for name, text in rows)


def _shown(value: Any, depth: int = 0) -> str:
    if isinstance(value, dict | list) and depth > 4:
        return "…"
    if isinstance(value, dict):
        said = ((key, given) for key, given in value.items() if key != "groups" and given not in ("", None, [], {}))
        pairs = list(said)[:_MAX_SHOWN]
        return ", ".join(f"{key} {_shown(given, depth + 1)}" for key, given in pairs)
    if isinstance(value, list):
        return " ".join(_shown(one, depth + 1) for one in value[:_MAX_SHOWN])
    return str(value)

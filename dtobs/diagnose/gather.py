"""Finds out what a target is and collects what there is to know about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dtobs.detectors.hangs.stall import last_movement_ns, quiet_period
from dtobs.errors import TargetError, exists
from dtobs.flight_recorder.names import NAMES
from dtobs.host.process import cores_used, read_process
from dtobs.recording.capture import Capture, RankCapture, load_capture
from dtobs.recording.journal import Entry, history, open_entries, read_journal, standing_entries
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView, load_run

TakeCapture = Callable[[RunView, str], Capture]
"""Looks at the living ranks of this host (`dtobs.monitor.capture.capture_ranks`)."""
_NAMES_SHOWN = 3
_REST_SECONDS = 1.0
"""For so long at least it is watched whether a process uses a core."""
_STILL_SECONDS = 1.0
"""A run that moved this recently is not disturbed for stacks."""


@dataclass(frozen=True)
class Evidence:
    """Everything a diagnosis rests on: one look at the run, and what its monitor had found and not cleared."""

    target: str
    view: RunView
    journal: tuple[Entry, ...] = ()
    past: tuple[Entry, ...] = ()  #: what was found and cleared again
    judged: bool = False  #: the journal says all that the detectors could: the view lacks what they need


def gather(target: str | Path, take_capture: TakeCapture | None = None) -> Evidence:
    """Collect the evidence of a run directory or of a capture inside one.

    With `take_capture`, a run that lives on this host and does not move is looked at afresh. Raises TargetError when
    the target is neither, and says what is there instead.
    """
    text, path = str(target), Path(target)
    if (path / "capture.json").is_file():
        return _from_capture(path)
    if not exists(path):
        raise TargetError(f"there is no {path}: give a run directory (runs/<UTC time>-<name>) or a capture in it")
    if not (path.is_dir() or path.is_file()):
        raise TargetError(f"{path} is a pipe or a device: give its text as standard input, dtobs diagnose - < {path}")
    if not path.is_dir():
        raise TargetError(
            f"{path} is a file: give the run directory or the folder of dumps that it is in, such as {path.parent}"
        )
    if not RunDirectory(path).nodes() and not RunDirectory(path).run_json.exists():
        raise TargetError(_nothing_known(path))
    view = load_run(path)
    view.asked = True
    if take_capture is not None:
        _look_afresh(view, take_capture)
    return Evidence(text, view, *_journal(view))


def _nothing_known(folder: Path) -> str:
    """Why there is nothing to diagnose in a folder, with some of what is in it instead."""
    seen = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    holds = f"holds {', '.join(seen[:_NAMES_SHOWN])}{' …' if len(seen) > _NAMES_SHOWN else ''}" if seen else "is empty"
    return (
        f"{folder} is neither a run directory of dtobs (with run.json or nodes/) nor a folder of Flight Recorder"
        f" dumps: it {holds}; {NAMES}"
    )


def _from_capture(folder: Path) -> Evidence:
    root = folder.resolve().parent.parent
    capture = load_capture(folder)
    try:
        view = load_run(root)
    except TargetError as error:
        raise TargetError(
            f"{folder} is a capture outside of its run directory: put it back under RUN_DIR/captures"
        ) from error
    view.capture = capture
    if capture.taken_ns >= last_movement_ns(view):
        # The run has not moved since: judge it as it stood then, whatever became of its processes later.
        view.now_ns = capture.taken_ns
        view.processes = {rank: seen.process for rank, seen in capture.ranks.items()}
    else:
        view.damaged.append(f"the run moved on after {folder.name}: its stacks are not of the present state")
    view.asked = True
    return Evidence(str(folder), view, *_journal(view))


def _journal(view: RunView) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """What is open, standstills before an alarm included, and what was cleared."""
    entries = read_journal(RunDirectory(view.root).findings)
    attempt = view.attempt if len(view.pages) else None
    return (*open_entries(entries, attempt), *standing_entries(entries, attempt)), tuple(history(entries))


def _look_afresh(view: RunView, take_capture: TakeCapture) -> None:
    quiet = quiet_period(view)
    if quiet is None or quiet.seconds < _STILL_SECONDS or not any(p.alive for p in view.processes.values()):
        return
    began = time.monotonic()
    fresh = take_capture(view, "dtobs diagnose")
    time.sleep(max(0.0, _REST_SECONDS - (time.monotonic() - began)))
    later = {rank: read_process(p.pid) for rank, p in view.processes.items() if p.alive}
    view.cores = cores_used(view.processes, later, time.monotonic() - began)
    known = view.capture
    if known is not None and known.taken_ns >= quiet.since_ns:
        fresh = replace(fresh, ranks=_merge(known.ranks, fresh.ranks))
    if fresh.ranks:
        view.capture = fresh
        view.processes |= {rank: seen.process for rank, seen in fresh.ranks.items()}


def _merge(before: dict[int, RankCapture], after: dict[int, RankCapture]) -> dict[int, RankCapture]:
    """The later look, with what only the earlier one of the same stillness saw."""
    merged = before | after
    for rank in before.keys() & after.keys():
        old, new = before[rank], after[rank]
        merged[rank] = replace(
            new,
            stacks_text=new.stacks_text or old.stacks_text,
            gil=old.gil if new.gil == "unknown" else new.gil,
            flight_recorder=new.flight_recorder or old.flight_recorder,
        )
    return merged

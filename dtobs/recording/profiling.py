"""Asking the ranks of a run for a profile of some steps: the request in the run directory, and what answers it.

``profile.json`` says which steps and where the traces go; each rank looks for it twice a second between two steps. A
rank answers with a trace, or with one line of why there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from dtobs.codec import DecodeError, decode
from dtobs.errors import TargetError, UsageError
from dtobs.events import RankState, walls_ns
from dtobs.recording.rundir import RunDirectory, read_json, write_json
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

MOST_STEPS = 100
LOOK_SECONDS = 0.5
"""How often a rank looks for a request."""
AHEAD_SECONDS = 2.0
"""How long before the first of the steps a request is written: all ranks have seen it by then, and begin together."""

_NEWEST_STEPS, _MOST_READ = 16, 16


@dataclass(frozen=True)
class Request:
    """Profile the steps from `first` to `last` on `ranks`; `name` is the folder below ``traces/``."""

    name: str
    first: int
    last: int
    ranks: tuple[int, ...]

    def folder(self, run: RunDirectory) -> Path:
        """Where the traces go."""
        return run.traces / self.name

    def trace(self, run: RunDirectory, rank: int) -> Path:
        """The trace of `rank`."""
        return self.folder(run) / f"rank-{rank:05d}.json.gz"

    def refusal(self, run: RunDirectory, rank: int) -> Path:
        """Where `rank` says why it has none."""
        return self.folder(run) / f"rank-{rank:05d}.failed"


def request_path(run: RunDirectory) -> Path:
    """The file that a request is written to; the newest counts."""
    return run.root / "profile.json"


def read_request(run: RunDirectory) -> Request | None:
    """The newest request; None where there is none. Raises TargetError for a file that is none."""
    value = read_json(request_path(run))
    if not value:
        return None
    try:
        request = decode(Request, value)
    except DecodeError as error:
        raise TargetError(f"{request_path(run)} is no request for a profile: {error}") from error
    name = request.name
    if Path(name).name != name or name in ("", ".", "..") or not 0 <= request.last - request.first < MOST_STEPS:
        raise TargetError(f"{request_path(run)} is no request for a profile")
    return request


def ask(view: RunView, steps: int, ranks: tuple[int, ...] = (), now: datetime | None = None) -> Request:
    """Write a request for the next `steps` steps of `ranks` (default: all). Raises UsageError where none can answer."""
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"--steps {steps}: give a number from 1 to {MOST_STEPS}")
    if not len(view.pages):
        raise UsageError(f"{view.root} has no rank to ask: nothing has recorded there")
    chosen = ranks or tuple(view.ranks)
    unknown = [rank for rank in chosen if rank not in view.ranks]
    if unknown:
        raise UsageError(f"{view.root}: {ranks_do(unknown, 'are')} not in the run")
    over = [r for r in chosen if _is_over(view, r)]
    if over:
        raise UsageError(f"{view.root}: {ranks_do(over, 'have')} ended; only a run that trains can be profiled")
    deaf = [r for r in chosen if not view.meta(r).process.get("profiler")]
    if deaf:
        raise UsageError(
            f'{view.root}: {ranks_text(deaf)} cannot be asked: attached without the probe "profiler", or by an older'
            " dtobs; start the run again to profile it"
        )
    rows = [view.ranks.index(rank) for rank in chosen]
    seconds = min(float(np.median(view.pages["step_ns"][rows])) / 1e9, _shortest(view, chosen))
    ahead = max(2, int(np.ceil(AHEAD_SECONDS / seconds)) if seconds > 0 else 2)
    first = int(view.pages["step"][rows].max()) + min(ahead, 100_000)
    name = f"{(now or datetime.now(UTC)):%Y%m%dT%H%M%S.%fZ}"[:19] + "Z"
    made = Request(name, first, first + steps - 1, chosen)
    run = RunDirectory(view.root)
    write_json(request_path(run), vars(made))
    return made


def _shortest(view: RunView, ranks: tuple[int, ...]) -> float:
    """Seconds of the shortest of the newest steps: a run's first ones take long and say little of those to come."""
    steps = (view.recent_steps(rank, _NEWEST_STEPS) for rank in ranks[:_MOST_READ])
    taken = [walls_ns(step) / 1e9 for step in steps]
    return min((float(seconds[seconds > 0].min()) for seconds in taken if (seconds > 0).any()), default=float("inf"))


def answers(run: RunDirectory, request: Request) -> tuple[dict[int, Path], dict[int, str]]:
    """The traces that are there, and what other ranks said instead, by rank."""
    traces, refusals = {}, {}
    for rank in request.ranks:
        if request.trace(run, rank).exists():
            traces[rank] = request.trace(run, rank)
        elif request.refusal(run, rank).exists():
            text = request.refusal(run, rank).read_text(encoding="utf-8", errors="replace")
            refusals[rank] = " ".join(text.split())[:300]
    return traces, refusals


def _is_over(view: RunView, rank: int) -> bool:
    process = view.process(rank)
    ended = int(view.page(rank)["state"]) in (RankState.CLOSED, RankState.FAILED)
    return ended or (process is not None and not process.alive)

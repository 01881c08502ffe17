"""What the screen shows, as data: a RunView and the open findings become a `Frame`. No drawing, no Textual."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dtobs.codec import finite
from dtobs.detectors.comparisons import comparisons_off
from dtobs.detectors.hangs.stall import Stall, quiet_period
from dtobs.events import phase_name, walls_ns
from dtobs.findings import Finding, Severity
from dtobs.recording.journal import Entry
from dtobs.recording.rank import ENDED, LONG_PHASES, State
from dtobs.recording.rundir import setting, total_steps
from dtobs.recording.stepless import stepless
from dtobs.recording.view import RunView
from dtobs.timeline.bubble import ideal, recent_shares
from dtobs.timeline.pipeline import pipelines
from dtobs.timeline.whatif import WhatIf, recent
from dtobs.tui import words
from dtobs.tui.rows import Accused, RankRow, rank_rows

Status = Literal["empty", "starting", "running", "quiet", "hurt", "ended", "broken", "gone"]
HISTORY_STEPS = 256
CURVE_STEPS = 4096
"""So many steps of one rank are drawn as curves over the run."""
_STILL_SECONDS = 3.0
_STILL_STEPS = 5
_FIRST_STEP_SECONDS = 30.0


@dataclass(frozen=True)
class FindingRow:
    """One open finding. `age_seconds` counts from when it began, `found_utc` is when it was written down."""

    code: str
    severity: str
    confidence: str
    ranks: tuple[int, ...]
    step: int | None
    summary: str
    next_step: str
    evidence: tuple[dict[str, Any], ...]
    found_utc: str
    age_seconds: float | None

    @property
    def key(self) -> str:
        """Findings with equal keys describe the same problem, seen in two looks."""
        return f"{self.code} {self.ranks} {self.step}"


@dataclass(frozen=True)
class Curve:
    """One figure over the steps that are still on record."""

    title: str
    first_step: int
    last_step: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class ScreenFrame:
    """Everything on the screen at one moment. None is "not known"; durations in seconds."""

    target: str
    name: str
    status: Status
    status_text: str
    world_size: int = 0
    hosts: int = 0
    layout: str = ""
    attempt: int = 0
    started: str = ""  #: UTC, ISO 8601
    elapsed_seconds: float | None = None
    remaining_seconds: float | None = None  #: at the present speed; None when the total is not known
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    loss_history: tuple[float, ...] = ()
    curves: tuple[Curve, ...] = ()
    validation_loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    mfu: float | None = None
    skew_seconds: float | None = None  #: the latest rank behind the first, at the step's first collective
    bubble: float | None = None  #: idle share of the pipeline with the widest bubble, as measured
    bubble_ideal: float | None = None  #: what its schedule cannot avoid
    slowdown: float | None = None  #: S of the what-if: the last steps' time over that of equal operations
    rows: tuple[RankRow, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    findings: tuple[FindingRow, ...] = ()  #: newest first
    history: tuple[
        FindingRow, ...
    ] = ()  #: found and cleared again, oldest first; `age_seconds` is how long they lasted
    unseen: tuple[str, ...] = ()  #: what is not looked at in this run, and why
    damaged: tuple[str, ...] = ()

    @property
    def counts(self) -> str:
        """How many ranks do what, the rarest first: ``1 × loading, 511 × waits in all_reduce``."""
        like = Counter(row.doing for row in self.rows)
        parts = [f"{number:,} × {doing}" for doing, number in sorted(like.items(), key=lambda pair: pair[1])]
        return ", ".join([*parts[:4], *(["…"] if len(parts) > 4 else [])]) if len(parts) > 1 else ""

    @property
    def over(self) -> bool:
        """Nothing more will happen in this run."""
        return self.status in ("ended", "broken", "gone")

    def count(self, severity: Severity) -> int:
        """Open findings of one severity."""
        return sum(f.severity == severity for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The frame as JSON (``dtobs.top/1``): NaN and infinity become null."""
        plain: dict[str, Any] = {"schema": "dtobs.top/1", **asdict(self)}
        for row, source in zip(plain["rows"], self.rows, strict=True):
            row["suspicious"] = source.suspicious
        found: dict[str, Any] = finite(plain)
        return found


def build_frame(
    view: RunView,
    entries: Iterable[Entry] = (),
    cleared: Iterable[Entry] = (),
    simulate: Callable[[RunView], WhatIf | None] = recent,
) -> ScreenFrame:
    """The frame of one look. `entries` are the open findings of the run, `cleared` the past ones, oldest first.

    `simulate` gives the what-if of the last steps; who looks again and again keeps a `RecentWhatIf`.
    """
    opened = list(entries)[::-1]
    rows = rank_rows(view, _accused(entry.finding for entry in opened))
    speed = _speed(view)
    status, text = _status(view, rows, speed.step_seconds)
    bubble, bound = _bubble(view)
    skews = [row.late_seconds for row in rows if row.late_seconds is not None]
    began = int(view.pages["attach_ns"].min()) if rows else 0
    end = _last_seen_ns(view) if status in ("ended", "broken") else view.now_ns
    total, step = total_steps(view.info), max((row.step for row in rows), default=None)
    left = max(0, total - step - 1) if total and step is not None and status == "running" else None
    return ScreenFrame(
        target=str(view.root),
        name=str(view.info.get("name") or view.root.name),
        status=status,
        status_text=text,
        world_size=view.world_size,
        hosts=len({row.host or row.node for row in rows}),
        layout=_layout(view.info),
        attempt=view.attempt,
        elapsed_seconds=max(0, end - began) / 1e9 if rows else None,
        started=str(view.info.get("started") or ""),
        remaining_seconds=left * speed.step_seconds if left is not None and speed.step_seconds else None,
        step=step,
        total_steps=total,
        loss=_mean([row.loss for row in rows]),
        loss_history=speed.losses,
        curves=speed.curves,
        validation_loss=_mean(_page_values(view, "validation_loss")),
        learning_rate=_mean(_page_values(view, "learning_rate")),
        gradient_norm=_mean(_page_values(view, "reduced_norm")),
        tokens_per_second=speed.tokens_per_second,
        step_seconds=speed.step_seconds,
        mfu=speed.mfu,
        skew_seconds=max(skews) if skews else None,
        bubble=bubble,
        bubble_ideal=bound,
        slowdown=cost.slowdown if (cost := simulate(view)) else None,
        rows=rows,
        missing_ranks=tuple(view.missing_ranks) if rows else (),
        findings=tuple(_finding(entry, end) for entry in opened),
        history=tuple(_finding(entry, end) for entry in cleared),
        unseen=tuple(off.text for off in comparisons_off(view)) if rows else (),
        damaged=tuple(view.damaged),
    )


def empty_frame(target: str, status: Status, text: str) -> ScreenFrame:
    """A frame without a recording: not there yet, or there no more."""
    return ScreenFrame(target, target.rstrip("/").rpartition("/")[2], status, text)


@dataclass(frozen=True)
class _Speed:
    losses: tuple[float, ...] = ()
    curves: tuple[Curve, ...] = ()
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None


def _speed(view: RunView) -> _Speed:
    """Throughput and curves from the steps of one rank: the ranks of a job go in step."""
    done = np.flatnonzero(view.pages["steps_done"] > 0)
    if not len(done):
        return _Speed()
    # The last stage of a pipeline has the loss, the first rank has not.
    speaking = np.flatnonzero(np.isfinite(view.pages["loss"]))
    speaker = view.ranks[int(speaking[0] if len(speaking) else done[0])]
    steps = view.recent_steps(speaker, CURVE_STEPS)
    told = (steps["losses"] > 0) | np.isfinite(steps["loss"])  # of a loop that reports none it is read now and then
    losses = tuple(steps["loss"][told][-HISTORY_STEPS:].tolist())
    walls = walls_ns(steps) / 1e9
    if not len(walls) or not np.median(walls[-32:]) > 0:
        return _Speed(losses)
    seconds = float(np.median(walls[-32:]))
    tokens = _tokens_per_step(view)
    flops = view.pages["model_flops"][np.isfinite(view.pages["model_flops"])]
    peak = setting(view.info, "run", "peak_flops")
    mfu = float(flops.mean()) / seconds / peak if len(flops) and peak else None
    said = (("loss", steps["loss"]), ("step time, s", walls), ("gradient norm", steps["reduced_norm"]))
    curves = tuple(_curve(title, steps["step"], values) for title, values in said if np.isfinite(values).sum() > 1)
    return _Speed(losses, curves, seconds, tokens / seconds if tokens else None, mfu)


def _curve(title: str, steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> Curve:
    good = np.isfinite(values)
    places = np.flatnonzero(good)[:: max(1, int(good.sum()) // 512)]
    return Curve(title, int(steps[0]), int(steps[-1]), tuple(values[places].tolist()))


def _last_seen_ns(view: RunView) -> int:
    """When the run that has ended was last alive: its last word, a process' end, or a look that saw it alive."""
    ends = [state.ended_ns for state in view.processes.values()]
    looked = view.capture.taken_ns if view.capture is not None else 0
    return max([int(view.pages["heartbeat_ns"].max()), looked, *ends])


def _tokens_per_step(view: RunView) -> float | None:
    """Of the whole job. Without the program's own figure each rank's tokens count: right for data parallel."""
    done = view.pages["steps_done"]
    with np.errstate(divide="ignore", invalid="ignore"):
        everybody, own = view.pages["global_tokens"] / done, view.pages["tokens"] / done
    known = np.isfinite(everybody)
    if known.any():
        return float(everybody[known][0])
    return float(own[np.isfinite(own)].sum()) if np.isfinite(own).any() else None


def _bubble(view: RunView) -> tuple[float | None, float | None]:
    """Measured and ideal, of the pipeline with the widest bubble; from the step history, which every source has."""
    shares = recent_shares(view)
    found = [
        (sum(shares[r] for r in plan.ranks) / len(plan.ranks), ideal(plan))
        for plan in (pipelines(view) if shares else [])
        if all(r in shares for r in plan.ranks)
    ]
    return max(found, key=lambda pair: pair[0], default=(None, None))


def _status(view: RunView, rows: Sequence[RankRow], step_seconds: float | None) -> tuple[Status, str]:
    if not rows:
        return "empty", "no rank has recorded yet"
    broken = [row for row in rows if row.state in ENDED and row.level == "bad"]
    if all(row.state in ENDED for row in rows):
        return _end(view, rows, broken)
    still = _still(view, step_seconds)
    hurt = [row for row in rows if row.level == "bad"]
    if hurt:
        which = f"rank {hurt[0].rank} {hurt[0].state}" if len(hurt) == 1 else f"{len(hurt)} ranks stopped or failed"
        return "hurt", f"{which}, {still}" if still else which
    if not view.processes:
        return "quiet", "last words; its processes cannot be seen from this host"
    if still:
        return "quiet", still
    if all(row.state == State.STARTING for row in rows):
        return "starting", "starting"
    return "running", "running"


def _end(view: RunView, rows: Sequence[RankRow], broken: Sequence[RankRow]) -> tuple[Status, str]:
    total, reached = total_steps(view.info), max(row.step for row in rows)
    early = total is not None and reached + 1 < total
    where = f" at step {reached:,} of {total:,}" if early else ""
    if broken:
        which = f"rank {broken[0].rank} {broken[0].state}" if len(broken) == 1 else f"{len(broken)} ranks failed"
        return "broken", f"ended{where}, {which}"
    if any(row.state in (State.INTERRUPTED, State.TERMINATED) for row in rows) and (early or total is None):
        return "ended", f"interrupted{where or f' at step {reached:,}'}"
    return "ended", f"ended{where}" if early else "ended, all ranks finished"


def _still(view: RunView, step_seconds: float | None) -> str:
    """How long nothing has moved, when that is many of the run's own steps; "" while it moves."""
    quiet = quiet_period(view)
    if quiet is None:
        return ""
    slow = max([step_seconds or 0.0, *(view.pages["step_ns"] / 1e9).tolist()])
    if quiet.seconds < max(_STILL_SECONDS, _STILL_STEPS * slow):
        return ""
    none = set(view.pages["rank"][view.pages["steps_done"] == 0].tolist()) - stepless(view)
    if none and quiet.seconds < _FIRST_STEP_SECONDS:
        return ""
    longer = {rank.get("phase") for rank in view.each_rank() if rank.phase} & set(LONG_PHASES)
    if longer and not quiet.exceeded:
        return f"in {phase_name(min(longer))} for {words.age(quiet.seconds)}"
    limit = "" if quiet.exceeded or not math.isfinite(quiet.threshold_seconds) else f" ({_limit(quiet)})"
    return f"standing still for {words.age(quiet.seconds)}{limit}"


def _limit(quiet: Stall) -> str:
    return f"a hang after {words.age(quiet.threshold_seconds)}"


def _accused(findings: Iterable[Finding]) -> dict[int, Accused]:
    """The worst severity of the findings that name each rank."""
    found: dict[int, Accused] = {}
    for finding in findings:
        for rank in finding.ranks if finding.severity is not Severity.NOTE else ():
            if found.get(rank) != "critical":
                found[rank] = "critical" if finding.severity == Severity.CRITICAL else "warning"
    return found


def _finding(entry: Entry, now_ns: int) -> FindingRow:
    f = entry.finding
    since = f.since_ns or entry.t_ns
    until = entry.t_ns if entry.event == "cleared" else now_ns
    age = (until - since) / 1e9 if since else None
    return FindingRow(
        f.code,
        f.severity.value,
        f.confidence.value,
        f.ranks,
        f.step,
        f.summary,
        f.next_step,
        f.evidence,
        entry.utc,
        age if age is not None and age >= 0 else None,
    )


def _layout(info: dict[str, Any]) -> str:
    """``replicate 2 × shard 4`` from the mesh in run.json; dimensions of size 1 say nothing."""
    mesh = info.get("mesh")
    if not isinstance(mesh, dict):
        return ""
    names = mesh.get("dim_names") or mesh.get("dims") or mesh.get("names") or ()
    shape = mesh.get("shape") or ()
    if not isinstance(names, list) or not isinstance(shape, list):
        return ""
    return " × ".join(f"{n} {s}" for n, s in zip(names, shape, strict=False) if s != 1)


def _page_values(view: RunView, name: str) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in view.pages[name]]


def _mean(values: Sequence[float | None]) -> float | None:
    """NaN where any is NaN: one rank's bad loss is the run's."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None

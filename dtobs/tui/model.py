"""What the screen shows, as data: a RunView and the open findings become a `Frame`. No drawing, no Textual."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from dtobs.events import RankState
from dtobs.findings import Severity
from dtobs.recording.journal import Entry
from dtobs.recording.rank import ENDED
from dtobs.recording.view import RunView
from dtobs.timeline.bubble import ideal, recent_shares
from dtobs.timeline.pipeline import pipelines
from dtobs.tui.rows import Accused, RankRow, rank_rows
from dtobs.words import duration_text

Status = Literal["empty", "starting", "running", "quiet", "hurt", "ended", "broken", "gone"]
HISTORY_STEPS = 256
_QUIET_SECONDS = 30.0


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
        """Equal for the same matter seen again."""
        return f"{self.code} {self.ranks} {self.step}"


@dataclass(frozen=True)
class Frame:
    """Everything on the screen at one moment. None is "not known"; durations in seconds."""

    target: str
    name: str
    status: Status
    status_text: str
    world_size: int = 0
    hosts: int = 0
    layout: str = ""
    attempt: int = 0
    elapsed_seconds: float | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    loss_history: tuple[float, ...] = ()
    validation_loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    mfu: float | None = None
    skew_seconds: float | None = None  #: the latest rank behind the first, at the step's first collective
    bubble: float | None = None  #: idle share of the pipeline with the widest bubble, as measured
    bubble_ideal: float | None = None  #: what its schedule cannot avoid
    rows: tuple[RankRow, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    findings: tuple[FindingRow, ...] = ()  #: newest first
    damaged: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Nothing more will happen in this run."""
        return self.status in ("ended", "broken", "gone")

    def count(self, severity: Severity) -> int:
        """Open findings of one severity."""
        return sum(f.severity == severity for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The frame as JSON (``dtobs.top/1``): NaN and infinity become null."""
        plain = {"schema": "dtobs.top/1", **asdict(self)}
        for row, source in zip(plain["rows"], self.rows, strict=True):
            row["suspicious"] = source.suspicious
        finite: dict[str, Any] = _finite(plain)
        return finite


def build_frame(view: RunView, entries: Iterable[Entry] = ()) -> Frame:
    """The frame of one look. `entries` are the open findings of the run, oldest first."""
    findings = tuple(_finding(entry, view) for entry in reversed(list(entries)))
    rows = rank_rows(view, _accused(findings))
    status, text = _status(view, rows)
    speed = _speed(view)
    bubble, bound = _bubble(view)
    skews = [row.late_seconds for row in rows if row.late_seconds is not None]
    began = int(view.pages["attach_ns"].min()) if rows else 0
    end = int(view.pages["heartbeat_ns"].max()) if status in ("ended", "broken") else view.now_ns
    return Frame(
        target=str(view.root),
        name=str(view.info.get("name") or view.root.name),
        status=status,
        status_text=text,
        world_size=view.world_size,
        hosts=len({row.host or row.node for row in rows}),
        layout=_layout(view.info),
        attempt=view.attempt,
        elapsed_seconds=max(0, end - began) / 1e9 if rows else None,
        step=max((row.step for row in rows), default=None),
        total_steps=_setting(view.info, "run", "steps"),
        loss=_mean([row.loss for row in rows]),
        loss_history=speed.losses,
        validation_loss=_mean(_page_values(view, "validation_loss")),
        learning_rate=_mean(_page_values(view, "learning_rate")),
        gradient_norm=_mean(_page_values(view, "reduced_norm")),
        tokens_per_second=speed.tokens_per_second,
        step_seconds=speed.step_seconds,
        mfu=speed.mfu,
        skew_seconds=max(skews) if skews else None,
        bubble=bubble,
        bubble_ideal=bound,
        rows=rows,
        missing_ranks=tuple(view.missing_ranks) if rows else (),
        findings=findings,
        damaged=tuple(view.damaged),
    )


def empty_frame(target: str, status: Status, text: str) -> Frame:
    """A frame without a recording: not there yet, or there no more."""
    return Frame(target, target.rstrip("/").rpartition("/")[2], status, text)


@dataclass(frozen=True)
class _Speed:
    losses: tuple[float, ...] = ()
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None


def _speed(view: RunView) -> _Speed:
    """Throughput from the recent steps of one rank: the ranks of a job go in step."""
    rank = next((int(p["rank"]) for p in view.pages if int(p["steps_done"]) > 0), None)
    if rank is None:
        return _Speed()
    # The last stage of a pipeline has the loss, the first rank has not.
    speaker = next((int(p["rank"]) for p in view.pages if math.isfinite(float(p["loss"]))), rank)
    history = view.recent_steps(speaker, HISTORY_STEPS)
    losses = tuple(float(v) for v in history["loss"])
    walls = (history["end_ns"] - history["begin_ns"])[-32:] / 1e9
    if not len(walls) or not np.median(walls) > 0:
        return _Speed(losses)
    seconds = float(np.median(walls))
    tokens = _tokens_per_step(view)
    flops = [float(p["model_flops"]) for p in view.pages if math.isfinite(float(p["model_flops"]))]
    peak = _setting_float(view.info, "run", "peak_flops")
    mfu = sum(flops) / len(flops) / seconds / peak if flops and peak else None
    return _Speed(losses, seconds, tokens / seconds if tokens else None, mfu)


def _tokens_per_step(view: RunView) -> float | None:
    """Of the whole job. Without the program's own figure each rank's tokens count: right for data parallel."""
    for page in view.pages:
        if math.isfinite(float(page["global_tokens"])) and int(page["steps_done"]) > 0:
            return float(page["global_tokens"]) / int(page["steps_done"])
    own = [
        float(p["tokens"]) / int(p["steps_done"])
        for p in view.pages
        if math.isfinite(float(p["tokens"])) and int(p["steps_done"]) > 0
    ]
    return sum(own) if own else None


def _bubble(view: RunView) -> tuple[float | None, float | None]:
    """Measured and ideal, of the pipeline with the widest bubble; from the step history, which every source has."""
    shares = recent_shares(view)
    found = [
        (sum(shares[r] for r in plan.ranks) / len(plan.ranks), ideal(plan))
        for plan in (pipelines(view) if shares else [])
        if all(r in shares for r in plan.ranks)
    ]
    return max(found, key=lambda pair: pair[0], default=(None, None))


def _status(view: RunView, rows: Sequence[RankRow]) -> tuple[Status, str]:
    if not rows:
        return "empty", "no rank has recorded yet"
    broken = [row.rank for row in rows if row.state in ENDED and row.level == "bad"]
    living = [row for row in rows if row.state not in ENDED]
    if not living:
        if broken:
            which = f"rank {broken[0]}" if len(broken) == 1 else f"{len(broken)} ranks"
            return "broken", f"ended, {which} failed"
        return "ended", "ended, all ranks finished"
    hurt = [row for row in rows if row.level == "bad"]
    if hurt:
        which = f"rank {hurt[0].rank} {hurt[0].state}" if len(hurt) == 1 else f"{len(hurt)} ranks stopped or failed"
        return "hurt", which
    if not view.processes:
        return "quiet", "last words; its processes cannot be seen from this host"
    if all(int(p["state"]) == RankState.STARTING for p in view.pages):
        return "starting", "starting"
    quiet = min(row.heartbeat_seconds or 0.0 for row in living)
    if quiet >= _QUIET_SECONDS:
        return "quiet", f"no sign of life for {duration_text(quiet)}"
    return "running", "running"


def _accused(findings: Iterable[FindingRow]) -> dict[int, Accused]:
    """The worst severity of the findings that name each rank."""
    found: dict[int, Accused] = {}
    for finding in findings:
        for rank in finding.ranks:
            if found.get(rank) != "critical":
                found[rank] = "critical" if finding.severity == Severity.CRITICAL else "warning"
    return found


def _finding(entry: Entry, view: RunView) -> FindingRow:
    f = entry.finding
    since = f.since_ns or entry.t_ns
    age = (view.now_ns - since) / 1e9 if since else None
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


def _setting(info: dict[str, Any], *path: str) -> int | None:
    value = _setting_float(info, *path)
    return None if value is None else int(value)


def _setting_float(info: dict[str, Any], *path: str) -> float | None:
    value: Any = info.get("config")
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if good else None


def _page_values(view: RunView, name: str) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in view.pages[name]]


def _mean(values: Sequence[float | None]) -> float | None:
    """NaN where any is NaN: one rank's bad loss is the run's."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value

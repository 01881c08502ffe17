"""A table of a job's operations, one row each, from CSV, Parquet or one of our own runs.

The columns are those of the design: step, rank, dp, pp, vpp, microbatch, op, start_ns, duration_ns; the last two may be
given in _us, _ms or _s. `vpp` and `microbatch` may be empty where they mean nothing. Commas, semicolons or tabs stand
between the columns of a CSV, and lines that begin with # are comments. In names case does not matter, nor whether
words are joined by a hyphen, an underscore or a space.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtobs.errors import DependencyMissing, TargetError, brief, opening
from dtobs.events import PipelineOp
from dtobs.recording.view import RunView
from dtobs.timeline.pipeline import pipelines, read_steps

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COMPUTATION = (
    "forward-compute",
    "backward-compute",
    "weight-gradient",
    "optimizer",
    "embedding",
    "layernorm",
    "clip",
    "gc",
    "loss",
    "data",
    "other",
)
MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
SYNCS = ("params-sync", "grads-sync")
OPS = (*COMPUTATION, *MESSAGES, *SYNCS)
MOST_ROWS = 1 << 25
_NUMBERS = ("step", "rank", "dp", "pp", "vpp", "microbatch")
_OPTIONAL = ("vpp", "microbatch")
_UNITS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_RECORDED = {
    PipelineOp.FORWARD: "forward-compute",
    PipelineOp.BACKWARD: "backward-compute",
    PipelineOp.BACKWARD_INPUT: "backward-compute",
    PipelineOp.BACKWARD_WEIGHT: "weight-gradient",
    PipelineOp.LOSS: "loss",
    PipelineOp.SEND_FORWARD: "forward-send",
    PipelineOp.RECV_FORWARD: "forward-recv",
    PipelineOp.SEND_BACKWARD: "backward-send",
    PipelineOp.RECV_BACKWARD: "backward-recv",
}


@dataclass
class Operations:
    """The rows as columns; times in nanoseconds, `op` an index into `OPS`, `stage` counted over the whole pipeline."""

    step: Ints
    rank: Ints
    dp: Ints
    pp: Ints
    stage: Ints
    microbatch: Ints
    op: Ints
    start: Floats
    duration: Floats

    def __len__(self) -> int:
        return len(self.step)

    def is_op(self, *names: str) -> npt.NDArray[np.bool_]:
        """Which rows are of these operations."""
        found: npt.NDArray[np.bool_] = np.isin(self.op, [OPS.index(name) for name in names])
        return found


def read_table(path: Path) -> Operations:
    """Read CSV or Parquet. Raises TargetError with the row where something cannot be right."""
    with opening(path):
        with path.open("rb") as stream:
            parquet = stream.read(4) == b"PAR1"
        columns, lines = _parquet(path) if parquet else _csv(path)
    missing = [n for n in (*_NUMBERS, "op") if n not in columns and n not in _OPTIONAL]
    missing += [f"{n}_ns" for n in ("start", "duration") if not any(f"{n}_{unit}" in columns for unit in _UNITS)]
    if missing:
        raise TargetError(f"{path}: the table has no column {', '.join(missing)}")
    count = len(columns["op"])
    if not count:
        raise TargetError(f"{path}: the table has no rows")
    numbers = {}
    for name in _NUMBERS:
        least = -1 if name in _OPTIONAL else 0
        empty = np.full(count, -1.0)
        found = _numbers(path, name, columns[name], lines, name in _OPTIONAL) if name in columns else empty
        _refuse(path, name, columns.get(name), (found < least) | (found != np.floor(found)) | (found >= 2**40), lines)
        numbers[name] = found.astype(np.int64)
    times = {name: _time(path, name, columns, lines) for name in ("start", "duration")}
    _refuse(path, "duration", None, times["duration"] < 0, lines, "is negative")
    codes = {name: code for code, name in enumerate(OPS)}
    said = [str(op) for op in columns["op"]]
    meant = {op: codes.get(_joined(op, "-"), -1) for op in set(said)}
    ops = np.array([meant[op] for op in said], dtype=np.int64)
    _refuse(
        path, "op", columns["op"], ops < 0, lines, f"is none of {', '.join(OPS[:8])}, {', '.join(MESSAGES + SYNCS)}"
    )
    stages = int(numbers["pp"].max()) + 1
    stage = np.maximum(numbers["vpp"], 0) * stages + numbers["pp"]
    named = (numbers["step"], numbers["rank"], numbers["dp"], numbers["pp"], stage, numbers["microbatch"])
    return Operations(*named, ops, times["start"], times["duration"])


def _joined(name: str, by: str) -> str:
    return by.join(re.split(r"[\s_-]+", name.strip().lower()))


def _column(name: str) -> str:
    return _joined(name, "_").replace("micro_batch", "microbatch")


def _csv(path: Path) -> tuple[dict[str, Sequence[object]], Sequence[int]]:
    """The columns by name, and the line of the file that each row stands in."""
    at, lines = 0, array("q")
    rows: list[list[str]] = []

    def said() -> Iterator[str]:
        nonlocal at
        for line in stream:
            at += 1
            if not line.startswith("#") and not line.isspace():
                yield line

    with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
        text = said()
        first = next(text, "")
        try:
            reader = csv.reader(chain([first], text), delimiter=max(",;\t", key=first.count))
            head = [_column(name) for name in next(reader, [])]
            for row in reader:
                if len(row) != len(head):
                    raise TargetError(f"{path}: row {at} has {len(row)} columns, the head has {len(head)}")
                if len(rows) >= MOST_ROWS:
                    raise TargetError(f"{path}: more than {MOST_ROWS} rows")
                rows.append(row)
                lines.append(at)
        except csv.Error as error:
            raise TargetError(f"{path}: row {at} is no CSV ({error})") from error
    if len(set(head)) != len(head):
        raise TargetError(f"{path}: a column stands twice in the head")
    return (dict(zip(head, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(head, ())), lines


def _parquet(path: Path) -> tuple[dict[str, Sequence[object]], Sequence[int]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DependencyMissing("pyarrow", "parquet") from error
    try:
        file = parquet.ParquetFile(path)
        if file.metadata.num_rows > MOST_ROWS:
            raise TargetError(f"{path}: more than {MOST_ROWS} rows")
        table = file.read()
    except (ArrowException, ValueError) as error:
        raise TargetError(f"{path} is no Parquet that can be read: {brief(error)}") from error
    return {_column(name): table.column(name).to_pylist() for name in table.column_names}, range(1, len(table) + 1)


def _numbers(path: Path, name: str, values: Sequence[object], lines: Sequence[int], optional: bool) -> Floats:
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.array([_number(value, optional) for value in values])
    if optional:
        found = np.where(np.isnan(found) & np.array([_is_empty(v) for v in values]), -1.0, found)
    _refuse(path, name, values, ~np.isfinite(found), lines)
    return found


def _is_empty(value: object) -> bool:
    return value is None or str(value).strip().lower() in ("", "nan", "none", "null")


def _number(value: object, optional: bool) -> float:
    if optional and _is_empty(value):
        return -1.0
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _time(path: Path, name: str, columns: dict[str, Sequence[object]], lines: Sequence[int]) -> Floats:
    unit = next(unit for unit in _UNITS if f"{name}_{unit}" in columns)
    column = f"{name}_{unit}"
    return _numbers(path, column, columns[column], lines, False) * _UNITS[unit]


def _refuse(
    path: Path,
    name: str,
    values: Sequence[object] | None,
    wrong: npt.NDArray[np.bool_],
    lines: Sequence[int],
    why: str = "",
) -> None:
    if wrong.any():
        row = int(wrong.argmax())
        shown = "" if values is None else f" {str(values[row])[:40]!r}"
        raise TargetError(f"{path}: row {lines[row]}: {name}{shown} {why or 'is not a number that it can be'}")


def from_run(view: RunView, last: int = 50) -> Operations:
    """The newest steps of one of our runs: its pipelines' records, else the phases of its steps.

    Raises TargetError when it recorded neither.
    """
    rows = list(_pipeline_rows(view, last)) or list(_phase_rows(view, last))
    if not rows:
        raise TargetError(f"{view.root} has no step that all its ranks finished")
    columns = list(zip(*rows, strict=True))
    step, rank, dp, pp, stage, batch, op = (np.array(column, dtype=np.int64) for column in columns[:7])
    start, duration = (np.array(column, dtype=np.float64) for column in columns[7:])
    return Operations(step, rank, dp, pp, stage, batch, op, start, duration)


Row = tuple[int, int, int, int, int, int, int, float, float]


def _pipeline_rows(view: RunView, last: int) -> Iterable[Row]:
    for dp, plan in enumerate(pipelines(view)):
        for step in read_steps(view, plan, last):
            for pp, rank in enumerate(plan.ranks):
                for chunk in step.chunks[rank]:
                    if chunk.op in _RECORDED:
                        op = OPS.index(_RECORDED[chunk.op])
                        where = (step.step, rank, dp, pp, chunk.stage, chunk.micro_batch)
                        yield (*where, op, float(chunk.begin_ns), float(chunk.duration_ns))


def _phase_rows(view: RunView, last: int) -> Iterable[Row]:
    """Without a pipeline a step is one micro-batch, with what is exposed of communication as its reduction.

    What a loop does besides (logging, a sleep) is a computation as well, or equal durations would seem to bring more
    than they do. Saving, validating and compiling are no part of a usual step.
    """
    window = view.steps(last)
    keep = window.valid.all(axis=0)
    parts = (
        ("data", "data"),
        ("other", "other"),
        ("forward", "forward-compute"),
        ("backward", "backward-compute"),
        ("exposed", "grads-sync"),
        ("optimizer", "optimizer"),
    )
    for dp, rank in enumerate(view.ranks):
        for record in window.records[dp][keep]:
            at = float(record["begin_ns"])
            for part, op in parts:
                duration = float(record[f"{part}_ns"])
                yield int(record["step"]), rank, dp, 0, 0, 0, OPS.index(op), at, duration
                at += duration

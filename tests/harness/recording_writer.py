"""A rank that records as fast as it can, every field tied to the others, and the checks of those ties."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtobs.events import EVENT_DTYPE, STEP_DTYPE
from dtobs.recording.meta import Parameter
from dtobs.recording.page import INDEX, PAGE_FLOATS, PAGE_INTS
from dtobs.recording.recorder import Recorder
from dtobs.recording.rundir import RunDirectory
from tests.harness.sync import Gate

PARAMETERS = 300
FIXED = ("rank", "local_rank", "node", "world_size", "attempt", "pid", "start_ticks", "attach_ns")
TIED = tuple(n for n in PAGE_INTS if n not in (*FIXED, "clock_offset_ns", "heartbeat_ns", "state"))


def write_until(rank: int, world_size: int, root: Path, stop: Gate, checked_every: int = 4096) -> int:
    """Record until the gate opens (or somebody kills us); ``writing-<rank>`` says that the first records are there."""
    recorder = Recorder(RunDirectory(root), rank, world_size, local_rank=rank)
    recorder.parameters([Parameter(f"p{n}", (1,), "float32") for n in range(PARAMETERS)])
    ints, floats = [INDEX[n] for n in TIED], [INDEX[n] for n in PAGE_FLOATS]
    page, record = recorder.page, np.zeros((), STEP_DTYPE)
    number = 0
    while number % checked_every or not stop.is_open():
        number += 1
        for index in ints:
            page.ints[index] = number
        for index in floats:
            page.floats[index] = number
        page.commit()
        small = number & 0xFFFF
        recorder.events.write(1, small, number, number, number, number, number, number, float(number))
        for name in _STEP_FIELDS:
            record[name] = number
        recorder.step(record)
        if number % 16 == 0:
            recorder.digests(number, np.full(PARAMETERS, number, np.uint64))
        recorder.meta.define("phase", number % 500 + 32, name=str(number % 500 + 32))
        if number == 32:
            Gate(root / f"writing-{rank}").open()
    recorder.close()
    return number


_STEP_FIELDS = tuple(n for n in STEP_DTYPE.names or () if not n.startswith("stamp"))


def check_pages(pages: npt.NDArray[np.void]) -> None:
    """All tied fields of each page come from one commit."""
    for page in pages:
        values = {int(page[name]) for name in TIED}
        if values != {0}:
            assert len(values | {int(page[name]) for name in PAGE_FLOATS}) == 1, page


def check_events(events: npt.NDArray[np.void]) -> None:
    """Each event is whole and the stamps go up by one, but for records in the making."""
    mine = events[events["kind"] == 1]
    for name in ("step", "group", "op", "site", "thread", "value"):
        assert (mine[name] == mine["seq"]).all(), name
    assert (mine["phase"] == mine["seq"] & 0xFFFF).all()
    assert (np.diff(events["stamp"].astype(np.int64)) > 0).all()
    assert events.dtype == EVENT_DTYPE


def check_steps(steps: npt.NDArray[np.void]) -> None:
    """Each step record is whole."""
    for name in _STEP_FIELDS:
        assert (steps[name] == steps["step"]).all(), name


def check_digests(digests: npt.NDArray[np.void]) -> None:
    """Each record of digests is whole."""
    assert (digests["digest"] == digests["step"][:, None].astype(np.uint64)).all()

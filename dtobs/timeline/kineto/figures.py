"""Where one rank's time goes, as the definitions of Holistic Trace Analysis have it.

`span` runs from the first to the last activity of the device. Communication is exposed where nothing computes.
Copies and sets of memory are neither compute nor communication, and not idle. Idle time is split by what the host did:
in a gap of the device up to the launch of what ends it the host allocates, synchronises or is simply late
(`host-bound`); from that launch on it is `launch`; and where the next kernel was launched before the gap began, it is
the price of a launch in a row when short, else `other`: it waits for something else, such as another stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtobs.timeline.kineto.intervals import clipped, gaps, length, shared, union, within
from dtobs.timeline.kineto.load import Floats, Ints, Spans, TracedRank
from dtobs.timeline.kineto.names import KernelKind

IDLE = ("host-bound", "launch", "synchronisation", "allocation", "other")
IN_A_ROW_US = 10.0
WINDOWS = ("whole", "steps")
TOP = 10


@dataclass
class Figures:
    """One rank in one window; microseconds."""

    rank: int
    window: str
    span: float
    compute: float
    communication: float
    exposed: float | None
    memory: float
    idle: float
    idle_by: dict[str, float]
    loading: float  #: of the idle time, while the host fetches data
    steps: int
    step: float  #: what a step takes; 0 where the trace has no steps
    kernels: list[tuple[str, str, int, float]]  #: name, kind, count, time: those that take longest
    host_only: bool
    notes: list[str] = field(default_factory=list)

    @property
    def overlap_percent(self) -> float | None:
        """The part of communication that something computes beside; None without communication."""
        if self.exposed is None or not self.communication:
            return None
        return 100.0 * (self.communication - self.exposed) / self.communication


def cut(rank: TracedRank, window: str) -> TracedRank:
    """The rank in one window: everything, or what was launched before the last ProfilerStep began."""
    if window == "whole":
        return rank
    if len({number for number, _, _ in rank.steps}) < 2:
        rank.notes.append("fewer than two ProfilerSteps: the window is the whole trace")
        return rank
    last = max(begin for _, begin, _ in rank.steps)
    if rank.host_only:
        return rows(rank, rank.device.begin < last)
    if not np.isfinite(rank.launch).any():
        rank.notes.append("the trace has no launches: the window is the whole trace")
        return rank
    with np.errstate(invalid="ignore"):
        return rows(rank, rank.launch < last)


def rows(rank: TracedRank, keep: npt.NDArray[np.bool_]) -> TracedRank:
    """The rank with some of its device's rows."""
    columns = {c: getattr(rank, c)[keep] for c in ("kind", "name", "stream", "call", "launch", "launched")}
    device = Spans(rank.device.begin[keep], rank.device.end[keep])
    return TracedRank(**{**rank.__dict__, **columns, "device": device})


def figures(rank: TracedRank, number: int, window: str) -> Figures:
    """Measure the rank as it is; `window` only names what it was cut to."""
    compute, communication = union(rank.of(KernelKind.COMPUTE)), union(rank.of(KernelKind.COMMUNICATION))
    memory = union(rank.of(KernelKind.MEMORY))
    busy = union(rank.device)
    span = float(busy.end[-1] - busy.begin[0]) if len(busy) else 0.0
    split, loading = _idle(rank, busy)
    talk = length(communication)
    steps = len({n for n, _, _ in rank.steps}) - (window == "steps" and len(rank.steps) > 1)
    return Figures(
        rank=number,
        window=window,
        span=span,
        compute=length(compute),
        communication=talk,
        exposed=talk - shared(communication, compute) if len(communication) else None,
        memory=length(memory),
        idle=span - length(busy) if len(busy) else 0.0,
        idle_by=split,
        loading=loading,
        steps=steps,
        step=_step_time(rank) or (span / steps if steps else 0.0),
        kernels=_kernels(rank),
        host_only=rank.host_only,
        notes=rank.notes,
    )


def _step_time(rank: TracedRank) -> float | None:
    """The median time between the ends of the device's work for two steps; None with fewer than three.

    A window begins amid a step, so that its span has no whole number of them.
    """
    numbers = rank.step_numbers()
    if numbers is None:
        return None
    ends = step_ends(numbers, rank.device.end)
    return float(np.median(np.diff(ends))) if len(ends) > 2 else None


def step_ends(numbers: Ints, ends: Floats) -> Floats:
    """When each step ended, by its number: the last of the `ends` of what is in it. What is in none has -1."""
    known = np.flatnonzero(numbers >= 0)
    order = known[np.argsort(numbers[known], kind="stable")]
    firsts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    found: Floats = np.maximum.reduceat(ends[order], firsts) if len(order) else np.empty(0)
    return found


def _kernels(rank: TracedRank) -> list[tuple[str, str, int, float]]:
    if not len(rank.name):
        return []
    times = np.bincount(rank.name, rank.device.end - rank.device.begin, len(rank.names))
    counts = np.bincount(rank.name, minlength=len(rank.names))
    kinds = dict(zip(rank.name.tolist(), rank.kind.tolist(), strict=True))
    found = []
    for row in np.argsort(-times, kind="stable").tolist():
        if counts[row]:
            found.append((rank.names[row], KernelKind(kinds[row]).name.lower(), int(counts[row]), float(times[row])))
    return found


def _idle(rank: TracedRank, busy: Spans) -> tuple[dict[str, float], float]:
    """The idle time by class, and how much of it passes while the host fetches data."""
    split = dict.fromkeys(IDLE, 0.0)
    holes = gaps(busy) if len(busy) else busy
    if not len(holes):
        return split, 0.0
    loading = union(rank.loading)
    data = float(within(loading, holes.begin, holes.end).sum())
    if rank.host_only:
        split["host-bound"] = length(holes)
        return split, data
    launch = _launch_that_ends(rank, holes)
    known = np.isfinite(launch)
    late = known & (launch > holes.begin)
    until = np.where(late, np.minimum(launch, holes.end), holes.begin)
    allocating = union(rank.allocating)
    synchronising = union(rank.synchronising)
    both = clipped(allocating, synchronising)
    allocation = within(allocating, holes.begin, until)
    waiting = np.maximum(within(synchronising, holes.begin, until) - within(both, holes.begin, until), 0.0)
    early = known & ~late
    size = holes.end - holes.begin
    split["allocation"] = float(allocation.sum())
    split["synchronisation"] = float(waiting.sum())
    split["host-bound"] = float(np.maximum(until - holes.begin - allocation - waiting, 0.0).sum())
    split["launch"] = float((holes.end - until)[late].sum() + size[early & (size <= IN_A_ROW_US)].sum())
    split["other"] = max(length(holes) - sum(split.values()), 0.0)
    return split, data


def _launch_that_ends(rank: TracedRank, holes: Spans) -> npt.NDArray[np.float64]:
    """For each gap, when the host launched what ends it; nan where the trace does not say."""
    order = np.argsort(rank.device.begin, kind="stable")
    at = np.searchsorted(rank.device.begin[order], holes.end, side="left")
    found: npt.NDArray[np.float64] = rank.launch[order[np.minimum(at, len(order) - 1)]]
    return found

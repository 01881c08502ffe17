"""Whether a run is stalled: since when nothing moved on any rank, and how long that may last.

The monitor's watchdog and the detectors of the hang family share this one judgement. A run moves when any rank
publishes its page, which happens at every step, phase, collective and wait. Nothing having moved is a stall only
beyond the largest of

* the floor: the run's ``hang_timeout``, 60 s where none was given;
* four times the run's own slow step (98th percentile of the last 128, the slowest left out: it is usually the first);
* the allowance of the phase that any living rank is in: start-up, first step, compilation, validation and checkpoint
  take long legitimately, and last longer where a longer floor was asked for; a captured stack may show a compilation
  that no phase names;
* what the program declared for the phase, or that it is paused (``session.pause``).

Time in which nothing could move does not count (`RunView.excused`), and while its owner keeps a file ``paused`` in
the run directory, as long as a process lives, nothing is a stall.

Who asks (`RunView.asked`) need not wait for that: a run that has stood still for an eighth of the floor, for ten of its
own slow steps and for twice its longest recent pause between steps stands still early, which is said as a possibility
and never alarms. At the start, in a checkpoint and in a validation it takes a little longer, and only processes that
use no core count. What the kernel says needs no more either: a suspended rank among others that are not is a stall
as early.

A slow run is not stalled, and neither is one whose ranks have all ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.events import Phase, RankState, walls_ns
from dtobs.findings import Finding
from dtobs.host.stacks import ThreadStack
from dtobs.recording.rank import END_SIGNALS
from dtobs.recording.stepless import FIRST_STEPS, stepless
from dtobs.recording.uncounted_time import excused_ns
from dtobs.recording.view import RunView
from dtobs.words import duration_text

DEFAULT_FLOOR_SECONDS = 60.0
STEP_FACTOR = 4.0
FIRST_STEP_FACTOR = 5.0
"""A rank that has done no step yet may take this many floors: lazy initialisation, autotuning, compilation."""
PHASE_FACTORS: dict[int, float] = {
    Phase.STARTUP: 8.0,
    Phase.COMPILE: 30.0,
    Phase.VALIDATION: 5.0,
    Phase.CHECKPOINT: 8.0,
}
"""How many floors each long phase may take. Start-up and checkpoint stay below NCCL's own timeout of 10 minutes."""
_MOVEMENTS = (
    "heartbeat_ns",
    "attach_ns",
    "step_begin_ns",
    "phase_begin_ns",
    "collective_ns",
    "wait_since_ns",
)
_COMPILER = (
    "torch/_dynamo/convert_frame.py",
    "torch/_dynamo/symbolic_convert.py",
    "torch/_dynamo/output_graph.py",
    "torch/_inductor/graph.py",
    "torch/_inductor/scheduler.py",
    "torch/_inductor/codecache.py",
    "torch/_inductor/async_compile.py",
    "torch/_inductor/cpp_builder.py",
    "triton/compiler/",
)
"""Files that are on a stack while something is compiled, and not while it runs."""
RESTING_CORES = 0.05
WORKING_CORES = 0.3
"""Up to the one a process does nothing, from the other on it is at work; one that polls lies between them."""
EARLY_SHARE = 1 / 8
EARLY_SECONDS = 4.0
EARLY_LONG = 1.5
"""How much longer it is where the threshold is that of a long phase; a compilation takes its whole share."""
_EARLY_STEPS = 10.0
_EARLY_PAUSES = 2.0
_STEPS = 128
_SAMPLED_RANKS = 16


@dataclass(frozen=True)
class Stall:
    """How long nothing has moved, and how long it may. `ranks` are those that still should move."""

    since_ns: int  #: monotonic time of the last movement of any rank
    seconds: float
    threshold_seconds: float
    why: str  #: what set the threshold, in words
    ranks: tuple[int, ...]
    early_seconds: float = float("inf")  #: from when on it is a standstill, for those who ask

    @property
    def exceeded(self) -> bool:
        """Whether it is a stall rather than a pause."""
        return self.seconds > self.threshold_seconds

    @property
    def standing(self) -> bool:
        """Whether it is long enough for an answer to somebody who asks."""
        return self.exceeded or self.seconds > self.early_seconds


def stall(view: RunView) -> Stall | None:
    """The stall that the run is in at the moment of `view`, None when it moves, has ended or may still take its time.

    Where somebody asked, a standstill is one.

    A run whose processes are gone is judged at the moment of its last capture, when nothing moved after it.
    """
    found = quiet_period(view)
    if found is None or not (found.standing if view.asked else found.exceeded):
        return None
    return found


def quiet_period(view: RunView) -> Stall | None:
    """How long nothing has moved, whether or not that is too long; None when no rank is left that should move."""
    moving = _should_move(view)
    if not moving.any():
        return None
    pages = view.pages[moving]
    since_ns = last_movement_ns(view)
    moment = _moment(view, since_ns)
    seconds = max(0, moment - since_ns - excused_ns(view.excused, since_ns, moment)) / 1e9
    threshold, why = _fixed_threshold(view, pages)
    if view.paused and any(process.alive for process in view.processes.values()):
        threshold, why = float("inf"), f"{view.root / 'paused'} is there"
    if seconds > threshold:  # only now is it worth reading the step histories
        slow = _slow_step_seconds(view, [int(rank) for rank in pages["rank"]])
        if STEP_FACTOR * slow > threshold:
            threshold, why = STEP_FACTOR * slow, f"its slow steps take {duration_text(slow)}"
        compiles = _compiling(view, since_ns)
        longer = PHASE_FACTORS[Phase.COMPILE] * _floor(pages)[0]
        if compiles is not None and longer > threshold:
            threshold, why = longer, f"rank {compiles} compiles, as its stack shows"
    early = _early(view, pages, threshold) if seconds > EARLY_SECONDS else float("inf")
    if early < min(seconds, threshold) and _one_suspended(view, pages):
        threshold, why = early, "a rank is suspended"
    return Stall(since_ns, seconds, threshold, why, tuple(int(rank) for rank in pages["rank"]), early)


def moved_on(view: RunView, since_ns: int) -> bool:
    """Whether the run trains again after a hang that it was in at `since_ns`: a step began, or every rank acted.

    A rank that is interrupted in a hang leaves its phases on the way out, and a handler of the interruption may call a
    collective: where ranks were told to end, only a step counts.
    """
    if not len(view.pages):
        return False
    if int(view.pages["step_begin_ns"].max()) > since_ns:
        return True
    if any(view.signals(rank) & END_SIGNALS for rank in view.ranks):
        return False
    did = np.max([view.pages[name] for name in ("collective_ns", "wait_since_ns", "phase_begin_ns")], axis=0)
    return bool((did > since_ns).all())


def finished(view: RunView, hang: Finding, since_ns: int) -> bool:
    """Whether the ranks that `hang` named at `since_ns` came, and all went on to the end of the program.

    Nobody does another step where it was the last barrier, or the last checkpoint, that took long. Who is through with
    its loader or its checkpoint need not call anybody after that: a loader's workers are joined as a program ends.
    """
    closed = len(view.pages) > 0 and bool((view.pages["state"] == RankState.CLOSED).all())
    calls = () if hang.code in ("stuck-in-dataloader", "stuck-in-checkpoint") else hang.ranks
    return closed and bool(hang.ranks) and view.came(calls, since_ns)


def stood_until_ns(view: RunView, hang: Finding) -> int:
    """When the ranks had done the step that a hang began in, monotonic; 0 where none has, or nobody knows."""
    ends = [0]
    for rank in view.ranks[:_SAMPLED_RANKS]:
        steps = view.rank_steps(rank)
        held_up = steps["end_ns"][(steps["begin_ns"] <= hang.since_ns) & (steps["end_ns"] > hang.since_ns)]
        ends += held_up[:1].tolist()
    return max(ends)


def _early(view: RunView, pages: npt.NDArray[np.void], threshold: float) -> float:
    """From how many seconds on a silence is a standstill, for those who ask; never within what was declared."""
    if threshold == float("inf"):
        return threshold
    if not _may_be_stuck(view, pages):
        return threshold
    share = EARLY_SHARE * min(threshold, EARLY_LONG * _floor(pages)[0])
    slow, pause = 0.0, 0.0
    for steps in _histories(view, [int(rank) for rank in pages["rank"]]):
        slow = max(slow, float(walls_ns(steps)[1:].max(initial=0)) / 1e9)
        pause = max(pause, float((steps["begin_ns"][1:] - steps["end_ns"][:-1]).max(initial=0)) / 1e9)
    declared = int(pages["phase_allowance_ns"].max()) / 1e9
    early = max(EARLY_SECONDS, share, _EARLY_STEPS * slow, _EARLY_PAUSES * pause, declared)
    return min(threshold, early)


def _may_be_stuck(view: RunView, pages: npt.NDArray[np.void]) -> bool:
    """Whether no rank is at long work: who starts, saves or validates, and does not wait, was seen to use no core."""
    phases = _phases(view, pages)
    if (phases == Phase.COMPILE).any():
        return False
    long = np.isin(phases, (Phase.STARTUP, Phase.CHECKPOINT, Phase.VALIDATION)) | _in_first_step(pages)
    return all(
        view.cores.get(rank, 1.0) <= RESTING_CORES
        for rank in pages["rank"][long & (pages["wait_since_ns"] == 0)].tolist()
    )


def _one_suspended(view: RunView, pages: npt.NDArray[np.void]) -> bool:
    """Whether the kernel says that some of the ranks are suspended and others are not: who suspends a job takes all."""
    found = {(p := view.process(int(rank))) is not None and p.stopped for rank in pages["rank"]}
    return len(found) == 2


def last_movement_ns(view: RunView) -> int:
    """Monotonic time at which a rank last published anything; 0 for a run without ranks."""
    return max(int(view.pages[name].max()) for name in _MOVEMENTS) if len(view.pages) else 0


def silent_ranks(view: RunView) -> set[int]:
    """Ranks that have not ended and have published nothing for longer than the hang timeout."""
    if not len(view.pages):
        return set()
    moved = np.max([view.pages[name] for name in _MOVEMENTS], axis=0)
    silent = (view.now_ns - moved) / 1e9 > _floor(view.pages)[0]
    return set(view.pages["rank"][silent & _should_move(view)].tolist())


def _should_move(view: RunView) -> npt.NDArray[np.bool_]:
    """bool[R]: ranks that have neither ended nor died, or that were alive in a capture taken after all movement."""
    open_: npt.NDArray[np.bool_] = ~np.isin(view.pages["state"], (RankState.CLOSED, RankState.FAILED))
    gone = np.array([(p := view.process(rank)) is not None and not p.alive for rank in view.ranks], bool)
    living: npt.NDArray[np.bool_] = open_ & ~gone
    capture = view.capture
    if living.any() or capture is None or not len(view.pages):
        return living
    if capture.taken_ns < last_movement_ns(view):
        return living
    seen = np.array([rank in capture.ranks and capture.ranks[rank].process.alive for rank in view.ranks])
    captured: npt.NDArray[np.bool_] = open_ & seen
    return captured


def _moment(view: RunView, since_ns: int) -> int:
    """When to judge: now while a process lives; else when the last capture looked, as nobody knows what came after."""
    lives = any(process.alive for process in view.processes.values())
    if lives or view.capture is None or view.capture.taken_ns < since_ns:
        return view.now_ns
    return view.capture.taken_ns


def _floor(pages: npt.NDArray[np.void]) -> tuple[float, str]:
    asked = int(pages["hang_timeout_ns"].max()) / 1e9
    return (asked, "the hang timeout") if asked else (DEFAULT_FLOOR_SECONDS, "the default hang timeout")


def _in_first_step(pages: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """bool[R]: ranks that have done no step, while no other has done several."""
    steps = pages["steps_done"]
    first: npt.NDArray[np.bool_] = (steps == 0) & (steps.max(initial=0) < FIRST_STEPS)
    return first


def _compiling(view: RunView, since_ns: int) -> int | None:
    """A rank that torch.compile was at work in when the run was captured, after all movement; None without one.

    A new shape compiles anew in the middle of a run, and no phase says so.
    """
    capture = view.capture
    if capture is None or capture.taken_ns < since_ns:
        return None
    for rank, seen in sorted(capture.ranks.items()):
        if compiles(seen.stacks):
            return rank
    return None


def compiles(stacks: Iterable[ThreadStack]) -> bool:
    """Whether torch compiles something in one of the threads of a process."""
    return any(thread.mentions(*_COMPILER) for thread in stacks)


def _phases(view: RunView, pages: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """int64[R]: the phase of each rank; 0 of those that take no steps, whose start-up never ends."""
    started = (pages["phase"] == Phase.STARTUP) & np.isin(pages["rank"], list(stepless(view)))
    phases: npt.NDArray[np.int64] = np.where(started, 0, pages["phase"])
    return phases


def _fixed_threshold(view: RunView, pages: npt.NDArray[np.void]) -> tuple[float, str]:
    choices = [_floor(pages)]
    floor = choices[0][0]
    if _in_first_step(pages).any():
        choices.append((FIRST_STEP_FACTOR * floor, "a rank has not finished its first step"))
    phases = set(_phases(view, pages).tolist())
    choices += [
        (factor * floor, f"a rank is in {Phase(phase).name.lower()}")
        for phase, factor in PHASE_FACTORS.items()
        if phase in phases
    ]
    choices.append((int(pages["phase_allowance_ns"].max()) / 1e9, "the program declared a long phase"))
    return max(choices, key=lambda choice: choice[0])


def _slow_step_seconds(view: RunView, ranks: list[int]) -> float:
    """The slow step of the slowest of up to 16 ranks, evenly chosen; 0 before the first step."""
    slow = 0.0
    for steps in _histories(view, ranks):
        # "lower": of few steps the slowest is left out, of one step it is that step.
        taken = np.quantile(walls_ns(steps), 0.98, method="lower")
        slow = max(slow, float(taken) / 1e9)
    return slow


def _histories(view: RunView, ranks: list[int]) -> Iterator[npt.NDArray[np.void]]:
    """The recent steps of up to 16 ranks that have any, evenly chosen."""
    for rank in ranks[:: max(1, len(ranks) // _SAMPLED_RANKS)]:
        steps = view.rank_steps(rank)[-_STEPS:]
        if len(steps):
            yield steps

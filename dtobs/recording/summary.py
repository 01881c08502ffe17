"""What a run did with its time: goodput over all its attempts, the largest loss, and what to try against it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from dtobs.recording.attempts import Clock, attempt_steps, earlier_attempts, highest_finished_step, last_end_ns
from dtobs.recording.journal import hung_since, read_journal, standing_share
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView
from dtobs.words import count, duration_text

PRODUCTIVE = ("forward", "backward", "optimizer")
MOST_RANKS = 16
"""Of a larger run, the ranks that are read: they train together, so that a few tell what all do."""
LEAST_STEPS, LEAST_SECONDS = 12, 20.0
LEAST_SHARE = 0.03
ADVICE = {
    "starting": "keep compiled code and tokenised data between runs",
    "restarts": "checkpoint more often, and look at what ended the attempts",
    "steps done again": "checkpoint more often",
    "standing still": "`dtobs diagnose` says for whom the others waited",
    "data": "give the loader more workers, or prepare the data beforehand",
    "communication": "see where with `dtobs timeline`; reduce less often, in larger buckets or in BF16",
    "waiting for slower ranks": "`dtobs top` shows who works longest; balance the inputs by cost",
    "waiting in the pipeline": "more micro-batches, or stages of equal length: `dtobs timeline` draws them",
    "checkpoints": "write them asynchronously, less often, or to faster storage",
    "validation": "validate less often, or on fewer batches",
    "other work in the steps": "look for logging, `.item()` and Python work between the phases",
    "between steps": "look at what runs between the steps",
}


@dataclass(frozen=True)
class Summary:
    """Seconds are means over ranks; `losses` and the productive ones sum to `elapsed`. `whole` says whether all steps
    were still on record: the history keeps the newest 4,096 of each rank.
    """

    ranks: int
    attempts: int
    steps: int
    tokens: float  #: of the whole job, in the steps on record; 0 when nobody said
    elapsed: float
    step_seconds: float  #: the median step
    losses: dict[str, float]
    whole: bool

    @property
    def goodput(self) -> float:
        """The share of the time that moved the training on."""
        return max(0.0, 1 - sum(self.losses.values()) / max(self.elapsed, 1e-9))

    @property
    def settled(self) -> bool:
        """Whether the run is long enough for its shares of time to be meaningful."""
        return self.steps >= LEAST_STEPS and self.elapsed >= LEAST_SECONDS

    def lines(self) -> list[str]:
        """What it did and its goodput; then the largest loss with what to try, where there is one."""
        restarts = f" and {count(self.attempts - 1, 'restart')}" if self.attempts > 1 else ""
        rate = f", {self.tokens / self.elapsed:,.0f} tokens a second" if self.tokens and self.whole else ""
        newest = "" if self.whole else "the newest "
        said = [
            f"{newest}{count(self.steps, 'step')} of {duration_text(self.step_seconds)} on"
            f" {count(self.ranks, 'rank')}{restarts} in {duration_text(self.elapsed)}{rate}: goodput {self.goodput:.0%}"
        ]
        worst = max(self.losses, key=lambda name: self.losses[name])
        share = self.losses[worst] / max(self.elapsed, 1e-9)
        if share >= LEAST_SHARE:
            lost = f"{duration_text(self.losses[worst])}, {share:.0%} of the time"
            said.append(f"the largest loss is {worst} ({lost}): {ADVICE[worst]}")
        return said


def summarise(view: RunView) -> Summary | None:
    """Of what is on record; None without a finished step."""
    ranks = view.ranks[:: -(-len(view.ranks) // MOST_RANKS) or 1]
    found = {rank: steps for rank in ranks if len(steps := view.rank_steps(rank))}
    if not found:
        return None
    first = next(iter(found))
    clock = Clock(str(view.meta(first).process.get("boot_id")), int(view.page(first)["clock_offset_ns"]))
    earlier = earlier_attempts(view.root, view.attempt, clock)
    done = highest_finished_step(earlier)
    hung = hung_since(e.finding for e in read_journal(RunDirectory(view.root).findings))
    each, walls, tokens = [], [], 0.0
    waited: dict[int, list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]] = {}  # by attempt, of each rank
    for rank, records in found.items():
        begin = int(records["begin_ns"][0])
        since = min([int(view.page(rank)["attach_ns"]), *(a.attach_ns for a in earlier)])
        whole = int(records["stamp"][0]) == 1
        every = [(a.number, s) for a in earlier if len(s := attempt_steps(view.root, rank, a.number, clock))]
        before = [steps for _, steps in every]
        every.append((view.attempt, records))
        parts, past = defaultdict[str, float](float), -1
        for number, steps in every:
            again = steps["step"] <= (done if number == view.attempt else past)
            past = max(past, int(steps["step"].max()))
            for name, seconds in _losses(steps, again, hung).items():
                parts[name] += seconds
            waited.setdefault(number, []).append((steps["step"], _waits(steps, again, hung)))
        if any(a.end_ns for a in earlier):
            started = min(int(steps["begin_ns"][0]) for steps in before) if before else begin
            parts["starting"] = (started - since) / 1e9
            parts["restarts"] = max(0, begin - last_end_ns(earlier)) / 1e9
        elif whole:
            parts["starting"] = (begin - since) / 1e9
        elapsed = sum(int(s["end_ns"][-1] - s["begin_ns"][0]) for _, s in every) / 1e9
        each.append((elapsed + parts.get("starting", 0.0) + parts.get("restarts", 0.0), parts))
        walls.append(np.concatenate([s["end_ns"] - s["begin_ns"] for _, s in every]) / 1e9)
        tokens += float(np.nansum(np.concatenate([s["tokens"] for _, s in every])))
    names = dict.fromkeys(name for _, parts in each for name in parts)
    losses = {name: float(np.mean([parts.get(name, 0.0) for _, parts in each])) for name in names}
    # Whoever waits least in a step waits for the transfer; what the others wait longer they wait for that rank.
    longer = sum(float(_beyond_least(of_ranks)) for of_ranks in waited.values())
    losses["waiting for slower ranks"] = longer
    losses["communication"] -= longer
    return Summary(
        ranks=view.world_size,
        attempts=view.attempt + 1,
        steps=max(len(w) for w in walls),
        tokens=tokens * len(view.ranks) / len(found) * _counted_once(view),
        elapsed=float(np.mean([elapsed for elapsed, _ in each])),
        step_seconds=float(np.median(np.concatenate(walls))),
        losses=losses,
        whole=all(int(records["stamp"][0]) == 1 for records in found.values()),
    )


def _counted_once(view: RunView) -> float:
    """Tokens of the job for each token of a rank: less than one where several ranks work on the same ones.

    As the training counts them in its ``global_tokens``; without that, 1, which is right for data parallel.
    """
    everybody, own = view.pages["global_tokens"], view.pages["tokens"]
    known = np.isfinite(everybody) & (everybody > 0)
    total = float(np.nansum(own))
    return float(everybody[known][0]) / total if known.any() and total > 0 else 1.0


def _waits(records: npt.NDArray[np.void], again: npt.NDArray[np.bool_], hung: Sequence[int]) -> npt.NDArray[np.float64]:
    """Seconds of communication that nothing hid in each step; 0 where the step is lost as a whole or stood still."""
    moving = np.where(again, 0.0, 1 - standing_share(records, hung))
    exposed, pipeline = (records[f"exposed{name}_ns"].astype(np.float64) / 1e9 for name in ("", "_pipeline"))
    waits: npt.NDArray[np.float64] = (exposed - pipeline) * moving
    return waits


def _beyond_least(of_ranks: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]) -> float:
    """What ranks wait, in the mean, longer than the one that waits least in the step: each their steps and waits."""
    steps = reduce(np.intersect1d, [mine for mine, _ in of_ranks])
    waits = np.array([of_rank[np.searchsorted(mine, steps)] for mine, of_rank in of_ranks])
    return float((waits.mean(axis=0) - waits.min(axis=0)).sum()) if len(steps) else 0.0


def _losses(records: npt.NDArray[np.void], again: npt.NDArray[np.bool_], hung: Sequence[int]) -> dict[str, float]:
    """Seconds by reason; steps that are done `again` are lost as a whole. `hung`: moments within hangs."""
    walls = records["end_ns"] - records["begin_ns"]
    still = np.where(again, 0.0, standing_share(records, hung))
    moving = np.where(again, 0.0, 1 - still)

    def spent(part: str) -> float:
        return float((records[f"{part}_ns"] * moving).sum()) / 1e9

    span = int(records["end_ns"][-1] - records["begin_ns"][0])
    pipeline = spent("exposed_pipeline")
    return {
        "steps done again": float(walls[again].sum()) / 1e9,
        "standing still": float((walls * still).sum()) / 1e9,
        "data": spent("data"),
        "communication": spent("exposed") - pipeline,
        "waiting in the pipeline": pipeline,
        "checkpoints": spent("checkpoint"),
        "validation": spent("validation"),
        "other work in the steps": spent("other"),
        "between steps": max(0.0, (span - float(walls.sum())) / 1e9),
    }

"""What a run did with its time: goodput over all its attempts, the largest loss, and what to try against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    for rank, records in found.items():
        begin = int(records["begin_ns"][0])
        since = min([int(view.page(rank)["attach_ns"]), *(a.attach_ns for a in earlier)])
        whole = int(records["stamp"][0]) == 1
        before = [s for a in earlier if len(s := attempt_steps(view.root, rank, a.number, clock))]
        parts = _losses(records, records["step"] <= done, hung)
        for number, steps in enumerate(before):
            past = [other["step"].max() for other in before[:number]]
            for name, seconds in _losses(steps, steps["step"] <= max(past, default=-1), hung).items():
                parts[name] += seconds
        if any(a.end_ns for a in earlier):
            started = min(int(steps["begin_ns"][0]) for steps in before) if before else begin
            parts["starting"] = (started - since) / 1e9
            parts["restarts"] = max(0, begin - last_end_ns(earlier)) / 1e9
        elif whole:
            parts["starting"] = (begin - since) / 1e9
        every = [*before, records]
        elapsed = sum(int(s["end_ns"][-1] - s["begin_ns"][0]) for s in every) / 1e9
        each.append((elapsed + parts.get("starting", 0.0) + parts.get("restarts", 0.0), parts))
        walls.append(np.concatenate([s["end_ns"] - s["begin_ns"] for s in every]) / 1e9)
        tokens += float(np.nansum(np.concatenate([s["tokens"] for s in every])))
    names = dict.fromkeys(name for _, parts in each for name in parts)
    losses = {name: float(np.mean([parts.get(name, 0.0) for _, parts in each])) for name in names}
    # Whoever waits least waits for the transfer; what the others wait longer they wait for slower ranks.
    least = min(parts["communication"] for _, parts in each)
    losses["waiting for slower ranks"] = losses["communication"] - least
    losses["communication"] = least
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

"""What a run did with its time: goodput over all its attempts, the largest loss, and what to try against it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from dtobs.events import Kind, walls_ns
from dtobs.findings import Finding
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
UNEVEN = 1.5
"""From how many times the median step on the mean one is said as well."""
MESSAGES = "waiting for messages"
ADVICE = {
    "starting": "keep compiled code and tokenised data between runs",
    "restarts": "look at what ended the attempts, and at what the launcher waits for before the next",
    "steps done again": "checkpoint more often",
    "standing still": "look for what only some ranks do, or do much longer",
    "data": "give the loader more workers, or prepare the data beforehand",
    "communication": "see where with `dtobs timeline`; reduce less often, in larger buckets or in BF16",
    "waiting for slower ranks": "`dtobs top` shows who works longest; balance the inputs by cost",
    "waiting in the pipeline": "more micro-batches, or stages of equal length: `dtobs timeline` draws them",
    MESSAGES: "`dtobs timeline` shows who is waited for; where ranks are stages of a pipeline, more"
    " micro-batches, or stages of equal length",
    "checkpoints": "write them asynchronously, less often, or to faster storage",
    "validation": "validate less often, or on fewer batches",
    "compiling": "keep compiled code between runs (TORCHINDUCTOR_CACHE_DIR), or give the compiler fewer shapes",
    "other work in the steps": "look for logging, `.item()` and Python work between the phases",
    "between steps": "look at what runs between the steps",
}

LATE = {
    "data": ("waits for data", "look at its loader, and at its share of the data"),
    "validation": ("validates", "let every rank validate a share, or validate less often"),
    "checkpoint": ("saves a checkpoint", "save in the background, or a share on every rank"),
    "compile": ("compiles", ADVICE["compiling"]),
    "other": ("does other work in the steps", ADVICE["other work in the steps"]),
    "computing": ("computes", ADVICE["waiting for slower ranks"]),
}
"""By what the rank does that the others wait for: how to say it, and what to try."""
MOSTLY = 0.6
"""The share of the waits that have to be for one reason, or one rank, before it is said of them all."""
NO_CORE_SHARE = 0.1
KEEPS_WAITING, RARELY = 0.3, 0.25
"""The share of the time that ranks wait at least while one of them keeps them waiting, and how rarely, measured by the
one that waits least beside it, that one waits itself.
"""


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
    step_seconds: float  #: the median step,
    mean_seconds: float  #: and the mean of all
    losses: dict[str, float]
    whole: bool
    late: tuple[str, int | None] = ("", None)
    """Of `LATE` what most waits for slower ranks were for, "" where it is no one thing; the rank, where it is one."""
    stood: str = ""  #: what the longest standstill looked like
    awaited: int | None = None  #: the rank that keeps the others waiting for messages
    no_core: float = 0.0  #: seconds that a rank could run and had no core, in whatever it did then
    crowded: tuple[int, int] = (0, 0)  #: the ranks of one host that have fewer cores than they are, and those cores

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
        uneven = self.mean_seconds >= UNEVEN * self.step_seconds
        mean = f" ({duration_text(self.mean_seconds)} on average)" if uneven else ""
        said = [
            f"{newest}{count(self.steps, 'step')} of {duration_text(self.step_seconds)}{mean} on"
            f" {count(self.ranks, 'rank')}{restarts} in {duration_text(self.elapsed)}{rate}: goodput {self.goodput:.0%}"
        ]
        worst = max(self.losses, key=lambda name: self.losses[name])
        share = self.losses[worst] / max(self.elapsed, 1e-9)
        if share >= LEAST_SHARE:
            lost, (part, rank), what, advice = self._part(self.losses[worst]), self.late, "", ADVICE[worst]
            if worst == "waiting for slower ranks" and part:
                does, advice = LATE[part]
                what = f", mostly while {'one of them' if rank is None else f'rank {rank}'} {does}"
            elif worst == MESSAGES and self.awaited is not None:
                what = f", mostly for rank {self.awaited}, which hardly waits itself"
                advice = "look at what it does between its messages"
            elif worst == "standing still" and self.stood:
                what, advice = ", as last seen", self.stood
            said.append(f"the largest loss is {worst} ({lost}){what}: {advice}")
        if self.no_core >= NO_CORE_SHARE * self.elapsed:
            said.append(
                f"in all that, a rank waited for a processor core ({self._part(self.no_core)}): give each rank cores of"
                " its own, or fewer threads to each"
            )
        elif self.crowded[1] and share >= LEAST_SHARE:
            said.append(
                f"{self.crowded[0]} ranks share {count(self.crowded[1], 'processor core')} of a host, so that some wait"
                " while others compute: give the job more cores, or fewer ranks to a host"
            )
        return said

    def _part(self, seconds: float) -> str:
        return f"{duration_text(seconds)}, {seconds / max(self.elapsed, 1e-9):.0%} of the time"


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
    journal = [e.finding for e in read_journal(RunDirectory(view.root).findings)]
    hung = hung_since(journal)
    each, walls, tokens = [], [], 0.0
    waited: dict[int, dict[int, tuple[npt.NDArray[np.void], npt.NDArray[np.float64]]]] = {}  # by attempt and rank
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
            waited.setdefault(number, {})[rank] = steps, _waits(steps, again, hung)
        if any(a.end_ns for a in earlier):
            started = min(int(steps["begin_ns"][0]) for steps in before) if before else begin
            parts["starting"] = (started - since) / 1e9
            parts["restarts"] = max(0, begin - last_end_ns(earlier)) / 1e9
        elif whole:
            parts["starting"] = (begin - since) / 1e9
        elapsed = sum(int(s["end_ns"][-1] - s["begin_ns"][0]) for _, s in every) / 1e9
        each.append((elapsed + parts.get("starting", 0.0) + parts.get("restarts", 0.0), parts))
        walls.append(np.concatenate([walls_ns(s) for _, s in every]) / 1e9)
        tokens += sum(float(np.nansum(s["tokens"])) for _, s in every)
    names = dict.fromkeys(name for _, parts in each for name in parts)
    losses = {name: float(np.mean([parts.get(name, 0.0) for _, parts in each])) for name in names}
    # Whoever waits least in a step waits for the transfer; what the others wait longer they wait for that rank.
    reasons: dict[tuple[str, int], float] = defaultdict(float)
    for of_ranks in waited.values():
        for reason, seconds in _beyond_least(of_ranks).items():
            reasons[reason] += seconds
    if not any(view.meta(rank).pipeline for rank in found):  # stages by hand, or ranks of which one serves the others
        losses[MESSAGES] = losses.pop("waiting in the pipeline")
    longer = sum(reasons.values())
    losses["waiting for slower ranks"] = longer
    losses["communication"] -= longer
    return Summary(
        ranks=view.world_size,
        attempts=view.attempt + 1,
        steps=max(len(w) for w in walls),
        tokens=tokens * len(view.ranks) / len(found) * _counted_once(view),
        elapsed=float(np.mean([elapsed for elapsed, _ in each])),
        step_seconds=float(np.median(np.concatenate(walls))),
        mean_seconds=float(np.mean(np.concatenate(walls))),
        losses=losses,
        whole=all(int(records["stamp"][0]) == 1 for records in found.values()),
        late=_most_of(reasons),
        stood=_stood(journal, list(found.values())),
        awaited=_awaited(view, ranks) if max(losses, key=lambda name: losses[name]) == MESSAGES else None,
        crowded=_crowded(view),
        no_core=float(np.mean([records["run_delay_ns"].sum() for records in found.values()])) / 1e9,
    )


def _stood(journal: Sequence[Finding], histories: Sequence[npt.NDArray[np.void]]) -> str:
    """What was seen last of the hang in the longest step."""
    longest, said = 0, ""
    for finding in (f for f in journal if hung_since([f])):
        for steps in histories:
            inside = steps[(steps["begin_ns"] <= finding.since_ns) & (finding.since_ns <= steps["end_ns"])]
            if len(inside) and (lasted := int(walls_ns(inside)[-1])) >= longest:
                longest, said = lasted, finding.summary
    return said


def _crowded(view: RunView) -> tuple[int, int]:
    """Of the host on which most ranks share a core: how many they are, and how many cores they may run on."""
    hosts: dict[str, list[set[int]]] = defaultdict(list)
    for rank in view.ranks:
        said = view.meta(rank).process
        if isinstance(cores := said.get("cores"), list) and cores:
            hosts[f"{said.get('host')} {said.get('boot_id')}"].append(set(cores))
    shared = ((len(each), len(set().union(*each))) for each in hosts.values())
    return max((pair for pair in shared if pair[0] > pair[1]), key=lambda pair: pair[0] / pair[1], default=(0, 0))


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


def _beyond_least(
    of_ranks: Mapping[int, tuple[npt.NDArray[np.void], npt.NDArray[np.float64]]],
) -> dict[tuple[str, int], float]:
    """What ranks wait, in the mean, longer than the one that waits least in the step: by what that one does then, of
    `LATE`, and who it is. Given are the steps and the waits of each.
    """
    found: dict[tuple[str, int], float] = defaultdict(float)
    steps = reduce(np.intersect1d, [records["step"] for records, _ in of_ranks.values()])
    if len(of_ranks) < 2 or not len(steps):
        return found
    at = [np.searchsorted(records["step"], steps) for records, _ in of_ranks.values()]
    waits = np.array([mine[rows] for (_, mine), rows in zip(of_ranks.values(), at, strict=True)])
    late, longer = waits.argmin(axis=0), waits.mean(axis=0) - waits.min(axis=0)
    more = []  # by part, in each step: how much more of it the late rank has than the mean of all
    for fields in (("data",), ("validation",), ("checkpoint",), ("compile",), ("other",), PRODUCTIVE):
        spent = np.array(
            [
                sum(records[f"{f}_ns"][rows] for f in fields)
                for (records, _), rows in zip(of_ranks.values(), at, strict=True)
            ]
        )
        more.append(spent[late, np.arange(len(steps))] - spent.mean(axis=0))
    reason, ranks, parts = np.argmax(more, axis=0), list(of_ranks), list(LATE)
    for part, rank, seconds in zip(reason.tolist(), late.tolist(), longer.tolist(), strict=True):
        found[parts[part], ranks[rank]] += seconds
    return found


def _most_of(reasons: Mapping[tuple[str, int], float]) -> tuple[str, int | None]:
    """What most of the waits were for, and the rank where most of those were for one."""
    parts: dict[str, float] = defaultdict(float)
    for (part, _), seconds in reasons.items():
        parts[part] += seconds
    part = max(parts, key=lambda one: parts[one], default="")
    if not part or parts[part] < MOSTLY * sum(parts.values()):
        return "", None
    rank = max((rank for one, rank in reasons if one == part), key=lambda rank: reasons[part, rank])
    return part, rank if reasons[part, rank] >= MOSTLY * parts[part] else None


def _awaited(view: RunView, ranks: Sequence[int]) -> int | None:
    """Of ranks that send each other messages, the one for which the others wait, in the events on record."""
    share = {}
    for rank in ranks:
        events = view.events(rank)
        if (events["kind"] == Kind.P2P).any():
            waited = float(events["value"][events["kind"] == Kind.WAIT_END].sum())
            share[rank] = waited * 1e9 / max(1, int(events["t_ns"].max()) - int(events["t_ns"].min()))
    if len(share) < 2:
        return None
    least, next_to_it = sorted(share, key=lambda rank: share[rank])[:2]
    rarely = share[next_to_it] >= KEEPS_WAITING and share[least] <= RARELY * share[next_to_it]
    return least if rarely else None


def _losses(records: npt.NDArray[np.void], again: npt.NDArray[np.bool_], hung: Sequence[int]) -> dict[str, float]:
    """Seconds by reason; steps that are done `again` are lost as a whole. `hung`: moments within hangs."""
    walls = walls_ns(records)
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
        "compiling": spent("compile"),
        "other work in the steps": spent("other"),
        "between steps": max(0.0, (span - float(walls.sum())) / 1e9),
    }

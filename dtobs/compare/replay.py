"""A suspect step done again, twice: was it a fault of the moment, of the machine, or is it in the program?

What each rank's parameters were after the step is compared to the bit, between the run and the two replays. A fault
that does not come back was of the moment (a flipped bit). One that comes back alike is in the program or its data. And
where the replays differ from each other, either the machine is unreliable or the training is not deterministic, which
is told apart by whether one rank differs or all do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

Digests = dict[str, int]


@dataclass(frozen=True)
class ReplayVerdict:
    """The verdict: "transient", "persistent", "software", "not deterministic" or "unclear"."""

    verdict: str
    step: int
    ranks: tuple[int, ...]
    parameter: str
    summary: str

    def to_json(self) -> dict[str, Any]:
        """``dtobs.replay/1``."""
        return {
            "schema": "dtobs.replay/1",
            "verdict": self.verdict,
            "step": self.step,
            "ranks": list(self.ranks),
            "parameter": self.parameter,
            "summary": self.summary,
        }


def judge(run: RunView, first: RunView, second: RunView, step: int) -> ReplayVerdict:
    """Compare what the parameters were after `step` in the run and in its two replays."""
    sides = [digests_after(view, step) for view in (run, first, second)]
    ranks = sorted(set.intersection(*(set(side) for side in sides)))
    if not ranks:
        lacks = [
            name for name, side in zip(("the run", "the first replay", "the second"), sides, strict=True) if not side
        ]
        said = f"after step {step} the parameters were not read in {' and '.join(lacks) or 'one rank of all three'}"
        return ReplayVerdict("unclear", step, (), "", f"{said}: nothing can be told of it")
    was, once, again = ({rank: side[rank] for rank in ranks} for side in sides)
    unsteady = tuple(rank for rank in ranks if once[rank] != again[rank])
    changed = tuple(rank for rank in ranks if was[rank] != once[rank])
    if unsteady:
        name = _first_difference(once[unsteady[0]], again[unsteady[0]])
        if len(unsteady) < len(ranks):
            said = (
                f"{ranks_do(unsteady, 'give')} another result of step {step} each time ({name}), and the others do not"
            )
            advice = "take its host out of the job and test its memory and device"
            return ReplayVerdict("persistent", step, unsteady, name, f"{said}: {advice}")
        said = f"step {step} gives another result each time on every rank ({name}): the training is not deterministic"
        return ReplayVerdict(
            "not deterministic",
            step,
            unsteady,
            name,
            f"{said}, so a replay cannot tell; see torch.use_deterministic_algorithms",
        )
    if changed:
        name = _first_difference(was[changed[0]], once[changed[0]])
        said = f"step {step} gives the same result twice, and not what {ranks_text(changed)} had then ({name})"
        return ReplayVerdict(
            "transient", step, changed, name, f"{said}: it was a fault of that moment, such as a flipped bit"
        )
    said = f"step {step} gives the same result again, twice, to the bit: what is wrong is in the program or its data"
    return ReplayVerdict("software", step, (), "", said)


def digests_after(view: RunView, step: int) -> dict[int, Digests]:
    """By rank, the digest of each parameter after `step`; ranks that did not read them then are left out."""
    found = {}
    for rank in view.ranks:
        table = view.meta(rank).params
        for record in view.digests(rank):
            if int(record["step"]) == step and len(record["digest"]) == len(table):
                found[rank] = {row.name: int(value) for row, value in zip(table, record["digest"], strict=True)}
    return found


def _first_difference(a: Digests, b: Digests) -> str:
    return next((name for name in a if a[name] != b.get(name)), "")

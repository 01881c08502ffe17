"""``unused-parameters``: a rank's backward did not reach parameters whose gradients DDP waits for.

Why it hurts: that rank's bucket is never reduced. Its peers wait in their backward for ever, or the rank's next forward
raises DDP's "Expected to have finished reduction", which names numbers instead of parameters. The evidence is the mark
that this rank's recording made when its backward ended, or DDP's own words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dtobs.detectors.hangs.describe import line_of, stack_evidence, waiters, waiting_evidence
from dtobs.detectors.hangs.endings import End, Ending
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.events import Kind
from dtobs.findings import Confidence, Finding
from dtobs.words import count, ranks_text

_REFUSED = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+: ([\w., ]+)")


@dataclass(frozen=True)
class Unused:
    """What one rank left out: the first parameter ("" when nobody said its name), how many, and in which step."""

    rank: int
    first: str
    count: int
    step: int
    ending: Ending | None = None  #: where DDP refused to go on


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for all ranks that left the same parameters out in the same step."""
    alike: dict[tuple[int, str, int], list[Unused]] = {}
    for one in unused(situation).values():
        if one.rank in left:
            alike.setdefault((one.step, one.first, one.count), []).append(one)
    return situation.told(_finding(situation, same) for _, same in sorted(alike.items()))


def _finding(situation: Situation, same: list[Unused]) -> Finding:
    first = same[0]
    view, ranks = situation.view, tuple(one.rank for one in same)
    absence = next((a for a in situation.absences if a.rank == first.rank), None)
    since = int(view.page(first.rank)["step_begin_ns"])
    what = count(first.count, "parameter") if first.count else "parameters"
    name = f", the first of them {first.first}" if first.first else ""
    if first.ending is not None:
        since = first.ending.t_ns - int(view.page(first.rank)["clock_offset_ns"])
        then = f"DDP refused the next forward{_at(first)}"
    else:
        then = f"{waiters(situation, absence)}" if absence else "its peers wait for them"
        then += f", and {ranks_text(ranks)} went on {line_of(situation, first.rank)}".rstrip()
    return Finding(
        "unused-parameters",
        f"the backward of {ranks_text(ranks)} in step {first.step} left {what} without a gradient{name}; {then}",
        ranks,
        Confidence.CERTAIN,
        step=first.step,
        evidence=(
            {"what": "unused parameters", "rank": first.rank, "first": first.first, "count": first.count},
            *(waiting_evidence(situation, absence) if absence else ()),
            *stack_evidence(situation, first.rank),
        ),
        since_ns=since,
    )


def _at(one: Unused) -> str:
    frame = (one.ending.exception or {}).get("frame") if one.ending else None
    return f" at {frame.get('file')}:{frame.get('line')}" if isinstance(frame, dict) else ""


def unused(situation: Situation) -> dict[int, Unused]:
    """What DDP said of each rank that it refused, and of those that their peers still wait for in that very step."""
    found: dict[int, Unused] = {}
    for ending in situation.causes:
        text = str((ending.exception or {}).get("message", ""))
        if ending.kind is End.EXCEPTION and _REFUSED in text:
            found[ending.rank] = _marked(situation, ending) or _said(text, ending)
    if not situation.stuck:
        return found
    for absence in situation.absences:
        marked = _mark(situation, absence.rank)
        call = situation.calls.call(absence.waiting[0], absence.group, absence.seq)
        if absence.rank not in found and marked and call is not None and marked.step == int(call["step"]):
            found[absence.rank] = marked
    return found


def _marked(situation: Situation, ending: Ending) -> Unused | None:
    marked = _mark(situation, ending.rank)
    if marked is None:
        return None
    return Unused(ending.rank, marked.first, marked.count, marked.step, ending)


def _mark(situation: Situation, rank: int) -> Unused | None:
    """The last mark, when it is of the last step that the rank finished or of the one it is in."""
    events = situation.view.events(rank)
    marks = events[events["kind"] == Kind.UNUSED_PARAMETERS]
    if not len(marks) or int(marks["step"][-1]) < int(situation.view.page(rank)["step"]) - 1:
        return None
    params, row = situation.view.meta(rank).params, int(marks["seq"][-1])
    name = params[row].name if row < len(params) else ""
    return Unused(rank, name, int(marks["value"][-1]), int(marks["step"][-1]))


def _said(text: str, ending: Ending) -> Unused:
    """From DDP's message alone: numbers of parameters, or their names under TORCH_DISTRIBUTED_DEBUG."""
    said = _INDICES.search(text)
    entries = [entry.strip() for entry in re.split(r"[ ,]+", said.group(1)) if entry.strip()] if said else []
    names = [entry for entry in entries if not entry.isdecimal()]
    step = int((ending.exception or {}).get("step") or 0)
    return Unused(ending.rank, names[0] if names else "", len(entries), max(0, step - 1), ending)

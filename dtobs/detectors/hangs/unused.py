"""Ranks whose backward left parameters without a gradient that DDP, and so their peers, waits for.

Told by the recording's own mark, made when such a backward has ended, or by DDP's words when the rank's next forward
finds out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtobs.detectors.hangs.endings import End, Ending
from dtobs.events import UNUSED_MARK, Kind

if TYPE_CHECKING:
    from dtobs.detectors.hangs.situation import Situation

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


def unused(situation: Situation) -> dict[int, Unused]:
    """By rank. Only ranks that DDP refused, and those that their peers still wait for in that very step."""
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
    marks = events[(events["kind"] == Kind.MARK) & (events["op"] == UNUSED_MARK)]
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

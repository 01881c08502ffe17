"""Why a rank does not move: the one place that decides between the codes for a rank that is alive and stuck.

In this order, most certain first: its process is suspended; native code holds its Python lock; its backward left out
what its peers wait for (the matter of `unused_parameters`); it waits for data; it is in a checkpoint; else it simply
has not joined its peers. The first two are causes whatever the rank was doing; the others only for ranks that are not
blocked in communication themselves.
"""

from __future__ import annotations

from dataclasses import replace

from dtobs.detectors.hangs.endings import End
from dtobs.detectors.hangs.situation import Absence, Situation
from dtobs.detectors.hangs.unused import unused
from dtobs.events import Phase

_LOADER = ("torch/utils/data/",)
_CHECKPOINT = ("torch/distributed/checkpoint/", "torch/serialization.py", "safetensors/")


def absent(situation: Situation) -> dict[int, tuple[str, Absence]]:
    """Ranks that hold up the run although they live, each with its code and who waits for it; {} unless stuck."""
    if not situation.stuck:
        return {}
    found: dict[int, tuple[str, Absence]] = {}
    explained = unused(situation)
    missing = {a.rank: a for a in situation.absences}
    for rank in situation.view.ranks:
        if situation.endings[rank].kind not in (End.OPEN, End.TERMINATED):
            continue
        absence = missing.get(rank) or Absence(rank, 0, 0, (), 0)
        if _stopped(situation, rank):
            found[rank] = ("rank-stopped", absence)
        elif _gil_held(situation, rank):
            found[rank] = ("gil-held", absence)
        elif rank in explained or rank in situation.blocked or (rank not in missing and not _still(situation, rank)):
            continue
        elif _in_loader(situation, rank):
            found[rank] = ("stuck-in-dataloader", absence)
        elif _in_checkpoint(situation, rank):
            found[rank] = ("stuck-in-checkpoint", absence)
        elif rank in missing:
            found[rank] = ("rank-not-joined", absence)
    return found


def _still(situation: Situation, rank: int) -> bool:
    """Whether the rank is among those that should move and do not; else only its peers' waiting tells against it."""
    return situation.stall is not None and rank in situation.stall.ranks


def alike(situation: Situation, code: str) -> list[tuple[tuple[int, ...], Absence]]:
    """All absent ranks with one code, together with the Absence of the first of them; [] where there is none.

    One cause in several groups is one matter: the Absence has everybody who waits for one of them in its place, and
    that place is the one in which most wait.
    """
    places: dict[tuple[int, int], list[Absence]] = {}
    together = [absence for found, absence in absent(situation).values() if found == code]
    if not together:
        return []
    for absence in together:
        places.setdefault((absence.group, absence.seq), []).append(absence)
    first = max(places.values(), key=lambda here: (len({r for a in here for r in a.waiting}), -here[0].rank))
    waiting = tuple(sorted({rank for absence in first for rank in absence.waiting}))
    since = min((a.since_ns for a in together if a.since_ns), default=0)
    return [(tuple(sorted(a.rank for a in together)), replace(first[0], waiting=waiting, since_ns=since))]


def _stopped(situation: Situation, rank: int) -> bool:
    process = situation.view.process(rank)
    return process is not None and process.stopped


def _gil_held(situation: Situation, rank: int) -> bool:
    capture = situation.view.capture
    if capture is None or rank not in capture.ranks or capture.ranks[rank].gil != "held":
        return False
    return int(situation.view.page(rank)["heartbeat_ns"]) <= capture.taken_ns


def _in_loader(situation: Situation, rank: int) -> bool:
    stack = situation.main_stack(rank)
    if int(situation.view.page(rank)["phase"]) == Phase.DATA:
        return True
    return stack is not None and stack.mentions(*_LOADER)


def _in_checkpoint(situation: Situation, rank: int) -> bool:
    stack = situation.main_stack(rank)
    if int(situation.view.page(rank)["phase"]) == Phase.CHECKPOINT:
        return True
    return stack is not None and stack.mentions(*_CHECKPOINT)

"""Compares the stacks of ranks: who is where its peers are not.

One look cannot tell a hang from a moment of training, so nothing it shows is more than possible. Ranks whose stacks
were the same in several looks stand still; one that moved is at work, and its peers' waiting is no hang yet: a note.
A rank in its own code while the others wait is named; ranks in different calls are named as that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from dtobs.findings import Confidence, Finding
from dtobs.stacks.model import WAITS, Doing, RankStack, Standing, standing
from dtobs.words import count, ranks_do, ranks_text, verb

_EVIDENCE = 8
_SHOWN = 4
_CODES = {
    Doing.DATA: "stuck-in-dataloader",
    Doing.CHECKPOINT: "stuck-in-checkpoint",
    Doing.MEETING: "rendezvous-incomplete",
    Doing.CODE: "rank-not-joined",
}

Stood = dict[int, Standing]


def judge(stacks: Sequence[RankStack], world: int = 0) -> tuple[list[Finding], list[str]]:
    """The findings, at most one cause, and notes. `world` is the number of ranks of the job, 0 where nobody says."""
    seen = {stack.rank: stack for stack in stacks}
    world = max(world, len(seen))
    where = {rank: standing(stack.frames) for rank, stack in seen.items() if stack.frames}
    notes = _unseen(seen, where, world)
    if suspended := tuple(sorted(rank for rank, stack in seen.items() if stack.suspended)):
        return [_suspended(suspended, seen, where)], notes
    if len(where) < 2:
        return [], [*notes, *(f"{ranks_do([rank], 'are')} {one.words()}" for rank, one in where.items())]
    moved = [rank for rank in where if seen[rank].still is False]
    if moved:
        return [], [*notes, _goes_on(moved, where)]
    live = all(seen[rank].still for rank in where)
    waits = WAITS if any(one.doing in WAITS for one in where.values()) else {Doing.MEETING}
    waiting = {rank: one for rank, one in where.items() if one.doing in waits}
    elsewhere = {rank: one for rank, one in where.items() if one.doing not in waits}
    if waiting and elsewhere:
        sure = live and len(where) == world and (2 * len(elsewhere) <= world)
        return [_elsewhere(waiting, elsewhere, seen, Confidence.LIKELY if sure else Confidence.POSSIBLE)], notes
    if waiting:
        found = _different_calls(waiting, seen, live=live, all_seen=len(where) == world)
        return ([found] if found is not None else []), notes + ([] if found else [_together(waiting)])
    found = _apart(elsewhere, seen, live=live, all_seen=len(where) == world)
    return ([found] if found is not None else []), notes + ([] if found else [_together(elsewhere)])


def _suspended(ranks: tuple[int, ...], seen: dict[int, RankStack], where: Stood) -> Finding:
    first = where.get(ranks[0])
    at = f", {first.words()}" if first is not None else ""
    others = [rank for rank, one in where.items() if rank not in ranks and one.doing in WAITS]
    wait = f", while {ranks_do(others, 'wait')} {where[others[0]].words()}" if others else ""
    text = f"{ranks_do(ranks, 'are')} suspended{at}{wait}"
    return Finding("rank-stopped", text, ranks, Confidence.CERTAIN, evidence=_records(ranks, seen, where))


def _elsewhere(waiting: Stood, elsewhere: Stood, seen: dict[int, RankStack], confidence: Confidence) -> Finding:
    """Ranks that are in none of the calls in which the others wait; of several, those whose reason is the plainest."""
    order = (Doing.DATA, Doing.CHECKPOINT, Doing.MEETING, Doing.CODE)
    doing = next(d for d in order if any(one.doing is d for one in elsewhere.values()))
    ranks = tuple(sorted(rank for rank, one in elsewhere.items() if one.doing is doing))
    held = tuple(rank for rank in elsewhere if seen[rank].holds_lock)
    code = _CODES[doing]
    if held and doing is Doing.CODE:
        code, ranks = "gil-held", held
    places: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        places[elsewhere[rank].words()].append(rank)
    said = ", ".join(f"{ranks_do(those, 'are')} {place}" for place, those in list(places.items())[:_SHOWN])
    said += f" and {count(len(places) - _SHOWN, 'other place')}" if len(places) > _SHOWN else ""
    said += f" and {verb(len(ranks), 'hold')} Python's lock" if code == "gil-held" else ""
    first = min(waiting)
    text = f"{said}, while {ranks_do(waiting, 'wait')} {waiting[first].words()}"
    if len(ranks) < len(elsewhere) or len({e.line for e in elsewhere.values()}) > 1:
        confidence = Confidence.POSSIBLE
    # Making a group is a wait as well: where most do it, the few may be the ones that left it out.
    named = () if doing is Doing.MEETING and 2 * len(ranks) > len(waiting | elsewhere) else ranks
    return Finding(code, text, named, confidence, evidence=_records((*ranks, first), seen, elsewhere | waiting))


def _different_calls(waiting: Stood, seen: dict[int, RankStack], *, live: bool, all_seen: bool) -> Finding | None:
    """All wait: in one call it is the network or nothing, in several they disagree."""
    crowds: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, one in waiting.items():
        crowds[one.doing, one.call, one.line].append(rank)
    if not any(call for _, call, _ in crowds):  # of the device and the backward nobody knows for whom they wait
        return None
    if len(crowds) < 2:
        if not live or not all_seen or next(iter(waiting.values())).doing is not Doing.COLLECTIVE:
            return None
        text = f"{ranks_do(waiting, 'are')} all {next(iter(waiting.values())).words()}, and nothing moves"
        return Finding("network-stalled", text, (), Confidence.POSSIBLE, evidence=_records(waiting, seen, waiting))
    sizes = sorted(crowds.values(), key=lambda ranks: (-len(ranks), ranks))
    calls = {call for doing, call, _ in crowds if doing in (Doing.COLLECTIVE, Doing.MESSAGE)}
    # A stack does not tell the group of a call: of more than two ranks the few may be right, and wait for one of many.
    ranks = tuple(sorted(waiting)) if len(waiting) == 2 and all_seen else ()
    if all(doing is Doing.MESSAGE for doing, _, _ in crowds):
        code = "p2p-unmatched"
    else:
        code = "collective-mismatch" if len(calls) > 1 or len({d for d, _, _ in crowds}) > 1 else "call-site-mismatch"
    sure = live and ranks and code == "collective-mismatch" and len(calls) > 1
    places = "; ".join(f"{ranks_text(r)} {waiting[r[0]].words()}" for r in sizes[:_SHOWN])
    text = f"ranks wait in different calls: {places}"
    confidence = Confidence.LIKELY if sure else Confidence.POSSIBLE
    return Finding(code, text, ranks, confidence, evidence=_records([r[0] for r in sizes], seen, waiting))


def _apart(elsewhere: Stood, seen: dict[int, RankStack], *, live: bool, all_seen: bool) -> Finding | None:
    """Nobody is in a call: on a device that answers late all stand at one line, and one rank apart is worth a word."""
    crowds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, one in elsewhere.items():
        crowds[one.doing, one.line].append(rank)
    if len(crowds) < 2 or not live:
        return None
    sizes = sorted(crowds.values(), key=lambda ranks: (-len(ranks), ranks))
    if 2 * len(sizes[0]) <= len(elsewhere) or not all_seen:
        return None
    ranks = tuple(sorted(r for one in sizes[1:] for r in one))
    rest = f"{ranks_do(sizes[0], 'are')} {elsewhere[sizes[0][0]].words()}"
    text = f"{ranks_do(ranks, 'are')} {elsewhere[ranks[0]].words()}, while {rest}"
    doing = elsewhere[ranks[0]].doing
    return Finding(
        _CODES[doing], text, ranks, Confidence.POSSIBLE, evidence=_records((*ranks, sizes[0][0]), seen, elsewhere)
    )


def _goes_on(moved: list[int], where: Stood) -> str:
    still = [rank for rank in where if rank not in moved]
    if not still:
        return "every rank moved between the looks: nothing hangs"
    waits = [rank for rank in still if where[rank].doing in WAITS]
    if not waits:
        return f"{ranks_do(moved, 'are')} at work: nothing hangs yet"
    return (
        f"{ranks_do(moved, 'are')} at work, {where[moved[0]].words()}, while {ranks_do(waits, 'wait')} "
        f"{where[waits[0]].words()}: a long step or a loop that does not end"
    )


def _together(where: Stood) -> str:
    places = {one.words() for one in where.values()}
    if len(places) == 1:
        return f"{ranks_do(where, 'are')} all {next(iter(places))}: their stacks do not tell them apart"
    return "ranks stand at different lines of their own code: their stacks do not tell whether they wait"


def _unseen(seen: dict[int, RankStack], where: Stood, world: int) -> list[str]:
    missing = [rank for rank in range(min(world, 100_000)) if rank not in seen]
    blind = [rank for rank in seen if rank not in where]
    notes = [f"no stacks of {ranks_text(missing)}: what they do is not known"] if missing else []
    return notes + ([f"the stacks of {ranks_text(blind)} could not be read"] if blind else [])


def _records(ranks: Iterable[int], seen: dict[int, RankStack], where: Stood) -> tuple[dict[str, Any], ...]:
    listed = [rank for rank in dict.fromkeys(ranks) if rank in where][:_EVIDENCE]
    return tuple({"what": f"stands {where[r].words()}", "rank": r, "where": seen[r].where} for r in listed)

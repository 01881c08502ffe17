"""Calls that do not fit together: which ranks called what, and from which lines. The rule behind five codes.

``collective-mismatch``, ``shape-mismatch``, ``dtype-mismatch``, ``reduce-op-mismatch``: the same group and sequence
number, and another operation, size, type or reduction (`mismatch`). ``call-site-mismatch``: a call more or fewer than
its peers made, of the same kind and size, which no backend notices (`dtobs.calls.lost_step`).

What stopped the run there explains whatever its ranks did after it: backends abort ranks that disagree, innocent ones
included, and connections break. Only a death that was seen and an exception of a rank's own remain causes beside it.
"""

from __future__ import annotations

from dtobs.calls.agree import went_apart
from dtobs.calls.lost_step import LostStep
from dtobs.calls.words import SPLITS_NEXT, lost_step_text, mismatch_text, went_apart_text
from dtobs.catalogue import CATALOGUE
from dtobs.detectors.hangs.batches import batches_apart
from dtobs.detectors.hangs.describe import Evidence, group_name
from dtobs.detectors.hangs.endings import End, Ending
from dtobs.detectors.hangs.mismatch import Mismatch
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.findings import Confidence, Finding

_MAX_CALLS_SHOWN = 8


def find(situation: Situation, left: frozenset[int]) -> Told:
    """The first such call of each kind in each group, whatever else happened: it rests on records alone."""
    found = [_mismatch(situation, m) for m in situation.mismatches]
    found += [_lost_step(situation, lost) for lost in situation.lost_steps]
    if not situation.disagreed:
        return Told(found)
    beside = {ending.rank for ending in situation.causes if _stands_beside(ending)}
    return Told(found, frozenset(situation.view.ranks) - beside)


def _stands_beside(ending: Ending) -> bool:
    if ending.kind is End.EXCEPTION:
        return not ending.about_communication
    return ending.timed or bool(ending.process and ending.process.oom_killed)


def _mismatch(situation: Situation, found: Mismatch) -> Finding:
    made = {ranks[0]: operation for operation, ranks in found.versions}
    place = f"#{found.seq} of group {group_name(situation, found.group)}"
    # From different lines, the sizes are not what is wrong: one side has made a call that the other has not.
    lines = {_site(situation, found, ranks[0]) for _, ranks in found.versions} - {""}
    said = mismatch_text(found.code, place, found.parties, lambda rank: f"{made[rank]}{_site(situation, found, rank)}")
    if found.said:
        rank = found.parties.odd[0]
        said = f"different sizes at {place}, {made[rank]}{_site(situation, found, rank)}: {found.said}"
    apart = _went_apart(situation, found)
    two = [party[0] for party in found.parties.parties]
    batches, advice = batches_apart(situation.view, *two) if len(two) == 2 and not found.said else ("", "")
    advice = advice or (SPLITS_NEXT if found.said else "")
    return Finding(
        found.code,
        (f"{said}; {apart}" if apart else said) + batches,
        found.parties.odd,
        found.parties.confidence,
        step=found.step,
        group=group_name(situation, found.group),
        evidence=tuple(_calls(situation, found)),
        next_step=advice or (CATALOGUE["collective-mismatch"].next_step if len(lines) > 1 else ""),
        since_ns=found.t_ns,
    )


def _went_apart(situation: Situation, found: Mismatch) -> str:
    """Since which call the two parties came from different lines, if they did so before the one that does not fit."""
    calls, parties = situation.calls, found.parties
    if len(parties.parties) != 2:
        return ""
    two = (parties.parties[0][0], parties.parties[1][0])

    def known(rank: int, site: int) -> bool:
        line = calls.site(rank, site)
        return line is not None and line.line > 0

    seq = went_apart(calls.table, found.group, found.seq, two, known)
    made = [calls.call(rank, found.group, seq) for rank in two] if seq is not None else []
    if seq is None or None in made:
        return ""
    lines = [str(calls.site(rank, int(call["site"]))) for rank, call in zip(two, made, strict=True) if call is not None]
    return went_apart_text(seq, parties, lines)


def _site(situation: Situation, found: Mismatch, rank: int) -> str:
    call = situation.calls.call(rank, found.group, found.seq)
    site = situation.calls.site(rank, int(call["site"])) if call is not None else None
    return f" at {site}" if site is not None else ""


def _calls(situation: Situation, found: Mismatch) -> list[Evidence]:
    shown = []
    for operation, ranks in found.versions:
        for rank in ranks[:_MAX_CALLS_SHOWN]:
            where = _site(situation, found, rank).removeprefix(" at ")
            shown.append({"what": "call", "rank": rank, "seq": found.seq, "operation": operation, "site": where})
    return shown


def _lost_step(situation: Situation, lost: LostStep) -> Finding:
    calls = situation.calls
    call, met = calls.call(lost.rank, lost.group, lost.seq), calls.call(lost.peer, lost.group, lost.seq)
    assert call is not None
    assert met is not None
    site, expected = (calls.site(int(c["rank"]), int(c["site"])) for c in (call, met))
    peers = f"rank {lost.peer}" if len(calls.members(lost.group)) == 2 else "its peers"
    group = group_name(situation, lost.group)
    return Finding(
        "call-site-mismatch",
        lost_step_text(lost.rank, lost.shift, peers, group, lost.seq, str(site), str(expected)),
        (lost.rank,) if lost.sure else tuple(sorted((lost.rank, lost.peer))),
        confidence=Confidence.LIKELY if lost.sure else Confidence.POSSIBLE,
        step=int(call["step"]),
        group=group,
        evidence=(
            {"what": "call", "rank": lost.rank, "seq": lost.seq, "step": int(call["step"]), "site": str(site)},
            {
                "what": "call",
                "rank": lost.peer,
                "seq": lost.seq,
                "step": int(met["step"]),
                "site": str(expected),
            },
            {"what": "shifted calls that agree by line and step", "calls": lost.agreeing, "shift": lost.shift},
        ),
        since_ns=int(call["t_ns"]),
    )

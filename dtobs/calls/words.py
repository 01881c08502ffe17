"""The sentences of findings about calls, the same for every source; what a call looks like each source says itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dtobs.calls.agree import Parties
from dtobs.words import count, ranks_text, verb

SPLITS_NEXT = "Let ranks exchange their counts first, and use what each was told as its output splits."
"""What to do about an all-to-all that does not deal out what is taken."""
_MAX_LENGTH = 40
_MAX_SIDES = 4
_WHAT = {
    "collective-mismatch": "different collectives",
    "shape-mismatch": "different sizes",
    "dtype-mismatch": "different element types",
    "reduce-op-mismatch": "different reductions",
}


def named(ranks: Sequence[int]) -> str:
    """``ranks 1, 4-7``, or only how many where that would be long."""
    text = ranks_text(ranks)
    return text if len(text) <= _MAX_LENGTH else count(len(ranks), "rank")


def mismatch_text(code: str, place: str, parties: Parties, made: Callable[[int], str]) -> str:
    """Who made one call in another way.

    `place`: "#5 of group default"; `made(rank)`: the call of the first rank of a party, with its line.
    """
    sides = [f"{named(ranks)} called {made(ranks[0])}" for ranks in parties.parties[:_MAX_SIDES]]
    if parties.majority:  # the odd ones first, then what the others did
        sides = [*sides[1:], sides[0]]
    return f"{_WHAT[code]} at {place}: {', but '.join(sides)}"


def went_apart_text(seq: int, parties: Parties, lines: Sequence[str]) -> str:
    """Since which call two parties came from different `lines`, the larger party's first."""
    usual, odd = (named(ranks) for ranks in parties.parties[:2])
    return f"{odd} had gone another way since #{seq}, which came from {lines[1]} there and from {lines[0]} on {usual}"


def lost_step_text(rank: int, shift: int, peers: str, group: str, seq: int, site: str, expected: str) -> str:
    """Who made calls more or fewer than its peers: `shift` of them, from the line `site` where `expected` was due."""
    calls = "one call" if abs(shift) == 1 else f"{abs(shift)} calls"
    return (
        f"rank {rank} made {calls} {'more' if shift > 0 else 'fewer'} than {peers} in group {group}: its call "
        f"#{seq} at {site} met the one at {expected}, and nothing noticed; results are mixed up from there on"
    )


def not_issued_text(missing: Sequence[int], call: str, waiting: Sequence[int], site: str = "") -> str:
    """Who has not issued a call, and who waits in it, from the line `site`."""
    return (
        f"{ranks_text(missing)} {verb(len(missing), 'have')} not issued {call}, in which {named(waiting)} "
        f"{verb(len(waiting), 'wait')}{f' at {site}' if site else ''}"
    )


def not_completed_text(ranks: Sequence[int], call: str, site: str, peers: str) -> str:
    """Whose device has not done a call that its peers have completed or started."""
    line = f" at {site}" if site else ""
    return f"{ranks_text(ranks)} issued {call}{line} and the device has not done it, while {peers}"


def all_issued_text(ranks: Sequence[int], call: str, site: str = "", left: int | None = None) -> str:
    """Everybody issued a call that does not complete; `left`: on so many of them only, None for all."""
    line = f" at {site}" if site else ""
    done = "none completes it" if left is None else f"{left} of them {verb(left, 'do')} not complete it"
    return f"{named(ranks)} all issued {call}{line} and {done}"


def circle_text(
    waits: Iterable[tuple[Sequence[int], str, Sequence[int]]],
    odd: Sequence[int] = (),
    alone: Sequence[int] = (),
    added: Sequence[int] = (),
) -> str:
    """The sentence about ranks that wait in a circle: who waits, in which call, for whom.

    `odd` came there by another order of calls than before; `alone`, unlike most of the others, left out or put off the
    call that those wait in; `added` alone made the call that they wait in.
    """
    parts = list(waits)
    chain = "; ".join(f"{named(ranks)} in {call} for {named(awaited)}" for ranks, call, awaited in parts[:_MAX_SIDES])
    more = f"; and {len(parts) - _MAX_SIDES} more" if len(parts) > _MAX_SIDES else ""
    order = f"; {ranks_text(odd)} called them in another order" if odd else ""
    if alone:
        order = f"; {ranks_text(alone)} alone left out or put off the call in which the others wait"
    elif added:
        order = f"; none of the others in its group has made the call that {ranks_text(added)} waits in"
    return f"ranks wait for each other in a circle: {chain}{more}{order}"

"""``unused-parameters``: a rank's backward did not reach parameters whose gradients DDP waits for.

Why it hurts: that rank's bucket is never reduced. Its peers wait in their backward for ever, or the rank's next forward
raises DDP's "Expected to have finished reduction", which names numbers instead of parameters. The evidence is the mark
that this rank's recording made when its backward ended, or DDP's own words.

What to do next: let every parameter take part in the loss on every rank and step (add ``0 * output.sum()`` of the
branch not taken), or pass ``find_unused_parameters=True``.
"""

from __future__ import annotations

from dtobs.detectors.hangs.describe import line_of, stack_evidence, waiters, waiting_evidence
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.detectors.hangs.unused import Unused, unused
from dtobs.findings import Confidence, Finding
from dtobs.words import count, ranks_text


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

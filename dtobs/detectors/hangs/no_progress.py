"""``no-progress``: nothing moves, and no rank waits for another.

Why it hurts: a process that waits for a lock, an answer from the network or a child that never ends raises nothing, and
no time-out of communication ends it. The evidence is its stack at the capture: inside the loop that trains, so that
training is not over, with no processor time used. Programs that idle outside that loop (they serve, they wait for
another job) are left alone, and so is who waits for a person. A child process may be at work meanwhile.
"""

from __future__ import annotations

from dtobs.detectors.hangs.describe import stack_evidence, waits_there, where
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.detectors.hangs.stall import RESTING_CORES
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Loop
from dtobs.words import duration_text, ranks_text

_FOR_A_PERSON = ("/pdb.py", "/bdb.py", "/code.py", "debugpy/", "pydevd", "/IPython/", "ipykernel/")
"""Files on a stack that waits for what somebody types."""


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for all ranks, where each of them stands in a loop that trains."""
    stalled = situation.stall
    if stalled is None or situation.causes or situation.absences or not left.issuperset(stalled.ranks):
        return Told()
    loops = {rank: loop for rank in stalled.ranks if (loop := _stands_in(situation, rank)) is not None}
    if len(loops) < len(stalled.ranks):
        return Told()
    first = stalled.ranks[0]
    waits = waits_there(situation, first)
    sure = all(loop.inner for loop in loops.values()) and "child process" not in waits
    verb = "is" if len(loops) == 1 else "are, the first of them,"
    finding = Finding(
        "no-progress",
        f"nothing has moved for {duration_text(stalled.seconds)}: {ranks_text(stalled.ranks)} {verb} "
        f"{where(situation, first)}{waits}, within the loop that trains ({loops[first]})",
        stalled.ranks,
        Confidence.LIKELY if sure else Confidence.POSSIBLE,
        step=int(situation.view.page(first)["step"]),
        evidence=tuple(record for rank in stalled.ranks[:4] for record in stack_evidence(situation, rank)),
        since_ns=stalled.since_ns,
    )
    return situation.told([finding])


def _stands_in(situation: Situation, rank: int) -> Loop | None:
    """The innermost loop of training that `rank`, which does nothing and waits for nobody, is in; None for none."""
    stack, capture = situation.main_stack(rank), situation.view.capture
    if stack is None or capture is None or rank in situation.blocked or stack.mentions(*_FOR_A_PERSON):
        return None
    if situation.view.cores.get(rank, 1.0) > RESTING_CORES or " the terminal " in capture.ranks[rank].waits_for:
        return None
    loops = sorted(situation.view.meta(rank).loops, key=lambda loop: loop.last - loop.first)
    around = (loop for frame in stack.frames for loop in loops if loop.has(frame))
    return next(around, None)

"""Which of its sends and receives a rank waits for, where it issued several before it began to wait.

A recording says of a wait what the rank issued last. A schedule of a pipeline issues sends, goes on, and waits for them
after later receives; and who waits for a batch needs all of it. What the other side has not answered decides.
"""

from __future__ import annotations

from dtobs.detectors.hangs.calls import Blocked, Calls


def settle(calls: Calls, blocked: dict[int, Blocked]) -> dict[int, Blocked]:
    """`blocked` with the message that each rank can be waiting for.

    Of several, it is one that leads to a rank that is not blocked itself, as that explains the wait.
    """
    options = {rank: _options(calls, rank, at) for rank, at in blocked.items()}
    if all(found == [blocked[rank]] for rank, found in options.items()):
        return blocked
    awaited: dict[Blocked, list[int]] = {}
    for at in {at for found in options.values() for at in found}:
        awaited[at] = [at.peer] if at.peer >= 0 else calls.behind(at.group, at.seq) if at.group else []
    settled: dict[int, Blocked] = {}
    news = True
    while news:
        free = {
            rank: at
            for rank, found in options.items()
            if rank not in settled
            for at in reversed(found)  # so that the likeliest counts
            if any(peer not in blocked or peer in settled for peer in awaited[at])
        }
        settled |= free
        news = bool(free)
    return {rank: settled.get(rank, found[0]) for rank, found in options.items()}


def _options(calls: Calls, rank: int, at: Blocked) -> list[Blocked]:
    """What the rank can be waiting for, the likeliest first."""
    if at.peer < 0:
        return [at]
    unanswered = calls.unanswered(rank)
    if calls.answered(rank, at):
        return unanswered or [at]
    batch = calls.batches.get(rank, set())
    return [at, *(m for m in unanswered if m.peer != at.peer and (m.group, m.peer, m.op) in batch)]

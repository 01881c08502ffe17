"""``uncaught-exception``: an exception of its own ended a rank; ``device-out-of-memory``: one that says so of a device.

Why it hurts: every other rank then reports a broken connection or a timeout, and the log's last lines are theirs.
Broken connections and timeouts are consequences and never accused, as long as anything else explains the end; where
nothing does, the first of them is reported as a possible cause, so that no crash goes unmentioned.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtobs.detectors.hangs.describe import Evidence, stack_evidence
from dtobs.detectors.hangs.endings import End, Ending, all_told
from dtobs.detectors.hangs.situation import LEFT, Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import middle_out, ranks_text

_MAX_TRACEBACK = 40
_MAX_MESSAGE = 300
_MAX_CAUSE = 200
_NO_MEMORY = "OutOfMemoryError"
"""What torch's allocators of devices raise. A host without memory raises a RuntimeError or a MemoryError."""
_WANTED = re.compile(r"Tried to allocate ([\d.]{1,12} [KMGTP]?i?B)")
_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]{1,200}\) (?:is killed by signal: ([\w ]{1,40})|exited unexpectedly)"
)
_WORKER_NEXT = "Look at why the loader's worker ended; the line is only where the rank was when it was told. "
_OF_SIGNAL = {
    "Killed": "Mostly its host or its control group had no memory left (dmesg): fewer workers, or less held by each.",
    "Bus error": "Mostly /dev/shm is full: a larger one (docker run --shm-size), or fewer workers.",
    "Segmentation fault": "Native code that the data set calls failed: load its samples with num_workers=0.",
}
_UNEXPLAINED = (End.PEER_LOST, End.TIMED_OUT)


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for each different exception that is a cause; ranks with the same one together."""
    causes = [e for e in situation.causes if e.kind is End.EXCEPTION and e.rank in left]
    return situation.told(_finding(situation, same, Confidence.CERTAIN) for same in _alike(causes))


def unexplained(situation: Situation, left: frozenset[int]) -> Told:
    """The first broken connection or timeout of a run that nothing else explains."""
    if all_told(situation.endings) or any(e.kind in LEFT for e in situation.endings.values()):
        return Told()
    ended = [e for e in situation.endings.values() if e.kind in _UNEXPLAINED and e.rank in left]
    first = sorted(ended, key=lambda e: (e.t_ns, e.rank))[:1]
    found = [_finding(situation, first, Confidence.POSSIBLE)] if first else []
    if first and first[0].kind is End.PEER_LOST:
        found = [_lost(situation, first[0], found[0])]
    return Told(found)


def _lost(situation: Situation, ending: Ending, finding: Finding) -> Finding:
    """What a broken connection says: that a peer has gone, and not which, nor that this rank did anything wrong."""
    place, unseen = ending.place, situation.view.missing_ranks
    why = f"nothing is recorded of {ranks_text(unseen)}" if unseen else "nothing recorded says which peer, or why"
    return replace(
        finding,
        summary=f"rank {ending.rank} lost the connection to a peer{f' at {place}' if place else ''}; {why}",
        next_step="Look in the console for the rank that failed before this one: a lost connection is a consequence.",
    )


def _alike(endings: Sequence[Ending]) -> list[list[Ending]]:
    groups: dict[tuple[str, str], list[Ending]] = {}
    for ending in endings:
        said = ending.exception or {}
        groups.setdefault((str(said.get("type")), ending.place or _message(ending)), []).append(ending)
    return list(groups.values())


def _finding(situation: Situation, endings: Sequence[Ending], confidence: Confidence) -> Finding:
    first = endings[0]
    said = first.exception or {}
    ranks = tuple(e.rank for e in endings)
    place = first.place
    name = str(said.get("type") or "an exception").rpartition(".")[2]
    message = _message(first)
    code, what = "uncaught-exception", f"raised {name}{f': {message}' if message else ''}{_raised_from(said, message)}"
    if name == _NO_MEMORY:
        wanted = _WANTED.search(message)
        code = "device-out-of-memory"
        what = f"ran out of device memory{f' while it asked for {wanted[1]}' if wanted else ''}"
    worker = _WORKER.search(message)
    dead = _OF_SIGNAL.get((worker[1] or "").strip(), "What the worker printed says more.") if worker else ""
    return Finding(
        code,
        f"{ranks_text(ranks)} {what}{f' at {place}' if place else ''}",
        ranks,
        confidence,
        step=int(said.get("step") or situation.view.page(first.rank)["step"]),
        next_step=f"{_WORKER_NEXT}{dead}" if dead else "",
        evidence=(*_evidence(first), *stack_evidence(situation, first.rank)),
        since_ns=first.t_ns - int(situation.view.page(first.rank)["clock_offset_ns"]),
    )


def _message(ending: Ending) -> str:
    text = " ".join(str((ending.exception or {}).get("message", "")).split())
    return middle_out(text, _MAX_MESSAGE)


def _raised_from(said: Mapping[str, Any], message: str) -> str:
    """The first of the errors that one was raised from by the program's own word; "" where it was not."""
    links = said.get("chain")
    links = links if isinstance(links, list) else []
    causes = list(itertools.takewhile(lambda link: isinstance(link, dict) and link.get("how") == "cause", links))
    if not causes:
        return ""
    text = " ".join(str(causes[-1].get("message", "")).split())[:_MAX_CAUSE]
    name = str(causes[-1].get("type") or "an exception").rpartition(".")[2]
    return f" (raised from {name}{f': {text}' if text else ''})" if text not in message or not text else ""


def _evidence(ending: Ending) -> list[Evidence]:
    said = ending.exception or {}
    trace = said.get("traceback") or []
    lines = trace.splitlines() if isinstance(trace, str) else [str(line).rstrip() for line in trace]
    return [
        {
            "what": "exception",
            "rank": ending.rank,
            "type": str(said.get("type", "")),
            "message": _message(ending),
            "at": ending.place,
            "traceback": lines[-_MAX_TRACEBACK:],
        }
    ]

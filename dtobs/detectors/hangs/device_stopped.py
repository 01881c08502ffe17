"""``device-stopped``: a rank issued a collective and its device does not get to it, while its peers' devices have.

Why it hurts: every host has issued the same calls, so nothing that Python records differs; only the devices know. The
evidence is the Flight Recorder of the capture, which says how far each device came in a group, and the device errors
(Xid) that the kernel logged for the rank's process.
"""

from __future__ import annotations

from dataclasses import replace

from dtobs.detectors.hangs.describe import Evidence, stack_evidence
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.errors import DumpError
from dtobs.findings import Confidence, Finding
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from dtobs.host.kernel_log import XID_NOTE
from dtobs.recording.capture import RankCapture
from dtobs.words import duration_text, ranks_text


def find(situation: Situation, left: frozenset[int]) -> Told:
    """What the devices say of a stall that the hosts do not explain; else the ranks whose devices reported errors."""
    if situation.stall is None or situation.causes or not left.issuperset(situation.stall.ranks):
        return Told()
    captured = _captured(situation)
    behind = [_with_errors(finding, captured) for finding in _behind(situation, captured)]
    return situation.told(behind or _only_errors(situation, captured))


def _captured(situation: Situation) -> dict[int, RankCapture]:
    """What the capture saw of ranks that have not moved since."""
    view = situation.view
    if view.capture is None:
        return {}
    still = [r for r in view.ranks if int(view.page(r)["heartbeat_ns"]) <= view.capture.taken_ns]
    return {rank: view.capture.ranks[rank] for rank in still if rank in view.capture.ranks}


def _behind(situation: Situation, captured: dict[int, RankCapture]) -> list[Finding]:
    if not any(map(situation.calls.on_device, situation.calls.groups)):
        return []  # other backends complete calls on the host, and their recorders do not tell when
    dumps = {r: seen.flight_recorder for r, seen in captured.items() if seen.flight_recorder is not None}
    if len(dumps) < 2:
        return []
    try:
        analysis = analyse_dumps(dumps_from_objects(dumps))
    except DumpError:
        return []
    found = [f for f in analysis.findings if f.code == "device-stopped"]
    since = situation.stall.since_ns if situation.stall else 0
    return [replace(f, since_ns=since, step=int(situation.view.page(f.ranks[0])["step"])) for f in found if f.ranks]


def _with_errors(finding: Finding, captured: dict[int, RankCapture]) -> Finding:
    errors = _errors({rank: captured[rank] for rank in finding.ranks if rank in captured})
    if not errors:
        return finding
    return replace(
        finding,
        summary=f"{finding.summary}; the kernel logged {errors[0]['error']}",
        confidence=Confidence.CERTAIN,
        evidence=(*finding.evidence, *errors),
    )


def _only_errors(situation: Situation, captured: dict[int, RankCapture]) -> list[Finding]:
    """Ranks of a stalled run for whose processes the kernel logged a device error."""
    errors = _errors(captured)
    ranks = tuple(dict.fromkeys(int(error["rank"]) for error in errors))
    if not ranks or situation.stall is None:
        return []
    stalled = duration_text(situation.stall.seconds)
    return [
        Finding(
            "device-stopped",
            f"the device of {ranks_text(ranks)} failed: the kernel logged {errors[0]['error']}; "
            f"nothing has moved for {stalled}",
            ranks,
            Confidence.LIKELY,
            step=int(situation.view.page(ranks[0])["step"]),
            evidence=(*errors, *stack_evidence(situation, ranks[0])),
            since_ns=situation.stall.since_ns,
        )
    ]


def _errors(captured: dict[int, RankCapture]) -> list[Evidence]:
    return [
        {"what": "device error", "rank": rank, "error": note.removeprefix(XID_NOTE)}
        for rank, seen in captured.items()
        for note in seen.notes
        if note.startswith(XID_NOTE)
    ]

"""What the tools answer: plain JSON from a diagnosis or a recording, every answer bounded in size.

An answer that would be longer than `MAX_CHARACTERS` loses the ends of its lists and says so. Nothing is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtobs.codec import finite
from dtobs.diagnose import Diagnosis, diagnose_target
from dtobs.errors import DtobsError, TargetError
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.metrics import TABLE
from dtobs.nodes.remote import is_address
from dtobs.recording.view import RunView, load_run
from dtobs.timeline.spans import timeline
from dtobs.words import ranks_text

MAX_CHARACTERS = 24_000
_MAX_TEXT = 2000
_MAX_LIST = 200
_FRAMES = 8
_NOTES = 20
_NO_RUN = "this target is no run directory: only diagnose, findings and ranks can be answered"


class Answers:
    """The answers about one target. Each is made afresh: a run that lives goes on."""

    def __init__(self, targets: list[str]) -> None:
        self._targets = targets

    def diagnose(self) -> dict[str, Any]:
        """The verdict in a sentence, with code, ranks, confidence, next step and notes."""

        def make() -> dict[str, Any]:
            found = self._diagnosis()
            verdict = found.verdict
            return {
                "target": found.target,
                "world_size": found.world_size,
                "verdict": None if verdict is None else _finding(verdict.to_json()),
                "findings": len(found.findings),
                "missing_ranks": ranks_text(found.missing_ranks) if found.missing_ranks else "none",
                "notes": list(found.notes[:_NOTES]),
            }

        return _answer(make)

    def findings(self, first: int = 0, count: int = 10) -> dict[str, Any]:
        """Findings `first` to `first + count`, the root cause first, each with its evidence."""

        def make() -> dict[str, Any]:
            found = self._diagnosis().findings
            chosen = [_finding(finding.to_json()) for finding in _part(found, first, count)]
            return {"total": len(found), "first": first, "findings": chosen}

        return _answer(make)

    def ranks(self, first: int = 0, count: int = 32, state: str = "") -> dict[str, Any]:
        """What ranks from number `first` on do, at most `count`, only those in `state` when it is given."""

        def make() -> dict[str, Any]:
            known = self._diagnosis().ranks
            fit = [r for r, status in sorted(known.items()) if r >= first and (not state or status.state == state)]
            states: dict[str, int] = {}
            for status in known.values():
                states[status.state] = states.get(status.state, 0) + 1
            shown = {str(rank): _short(known[rank].to_json()) for rank in _part(fit, 0, count)}
            return {"total": len(known), "states": states, "ranks": shown}

        return _answer(make)

    def timeline(self, rank: int = 0, steps: int = 1, first: int | None = None) -> dict[str, Any]:
        """Spans of one rank in its newest `steps` steps, or from step `first` on: what it did when, in microseconds."""

        def make() -> dict[str, Any]:
            view = self._view()
            if rank not in view.ranks:
                raise TargetError(f"rank {rank} has recorded nothing: there are {ranks_text(view.ranks)}")
            wanted = max(1, min(steps, 16))
            last = None if first is None else first + wanted - 1
            found = timeline(view.without(r for r in view.ranks if r != rank), first, last, wanted)
            start = found.begin_ns
            spans = [
                {
                    "track": span.track,
                    "name": span.name,
                    "begin_us": (span.begin_ns - start) // 1000,
                    "duration_us": (span.end_ns - span.begin_ns) // 1000,
                }
                for span in sorted(found.spans, key=lambda span: span.begin_ns)
            ]
            return {"rank": rank, "steps": list(found.steps), "total": len(spans), "spans": spans}

        return _answer(make)

    def metrics(self, contains: str = "", rank: int | None = None) -> dict[str, Any]:
        """The present value of each metric whose name contains the text, for one rank where one is given."""

        def make() -> dict[str, Any]:
            look = MonitorSnapshot(self._view())
            found: dict[str, Any] = {}
            for metric in TABLE:
                if contains not in metric.exposed or metric.source is None:
                    continue
                samples = [
                    {**dict(zip(metric.labels, labels, strict=False)), "value": value}
                    for labels, value in metric.source(look)
                    if rank is None or "rank" not in metric.labels or str(rank) in labels
                ]
                if samples:
                    found[metric.exposed] = samples[:_MAX_LIST]
            return {"total": len(found), "metrics": found}

        return _answer(make)

    def _diagnosis(self) -> Diagnosis:
        return diagnose_target(self._targets)

    def _view(self) -> RunView:
        if len(self._targets) != 1 or is_address(self._targets[0]):
            raise TargetError(_NO_RUN)
        try:
            return load_run(Path(self._targets[0]), with_capture=False)
        except DtobsError as error:
            raise TargetError(f"{_NO_RUN} ({error})") from error


def _answer(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` gives, within bounds; what cannot be had is an answer as well, for whoever asks is a program."""
    try:
        return bounded(make())
    except (DtobsError, OSError) as error:
        return {"error": str(error)[:_MAX_TEXT]}


def bounded(value: dict[str, Any]) -> dict[str, Any]:
    """The value, its texts and lists cut to `MAX_CHARACTERS` of JSON; "left_out" says where that was needed."""
    limit = _MAX_LIST
    whole = json.dumps(finite(value), default=str)
    shown: dict[str, Any] = _cut(json.loads(whole), limit, _MAX_TEXT)
    text = json.dumps(shown)
    while len(text) > MAX_CHARACTERS and limit > 1:
        limit //= 2
        shown = _cut(json.loads(whole), limit, max(80, _MAX_TEXT * limit // _MAX_LIST))
        text = json.dumps(shown)
    if len(text) > MAX_CHARACTERS:
        return {"error": "the answer is too long in every form: ask for less"}
    if text != whole:
        shown["left_out"] = "the answer was cut to fit: ask for fewer ranks, findings or steps to see all of it"
    return shown


def _cut(value: Any, limit: int, letters: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= letters else f"{value[: letters - 1]}…"
    if isinstance(value, list):
        return [_cut(one, limit, letters) for one in value[:limit]]
    if isinstance(value, dict):
        items = list(value.items())[: max(limit, 16)]
        return {str(key)[:200]: _cut(one, limit, letters) for key, one in items}
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _part(some: Any, first: int, count: int) -> Any:
    return list(some)[max(0, first) : max(0, first) + max(0, min(count, _MAX_LIST))]


def _finding(value: dict[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in value.items() if one not in (None, "", [])}


def _short(status: dict[str, Any]) -> dict[str, Any]:
    known = {key: one for key, one in status.items() if one not in (None, "", [])}
    if "stack" in known:
        known["stack"] = known["stack"][:_FRAMES]
    return known

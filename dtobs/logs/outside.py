"""What the scheduler says of a job: `sacct` tables and Kubernetes events (`kubectl get events`, as a table or JSON).

They say how steps and pods ended and nothing of collectives: out of memory and a lost node are causes, a time limit, a
cancellation and a preemption are notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dtobs.findings import Confidence, Finding
from dtobs.logs.analyse import INTERRUPTED

_HEAD, _LINES = 1 << 16, 1 << 12
_MAX_BYTES = 64 << 20
_MAX_ROWS = 200_000
_EVIDENCE = 8
_SHOWN = 160
_SACCT = re.compile(r"\s{0,40}JobID(?:Raw)?\b[^\n]{0,400}\bState\b")
_EVENTS = re.compile(r"(?:NAMESPACE\s{1,40})?LAST SEEN\s{1,40}TYPE\s{1,40}REASON\s{1,80}OBJECT\s{1,200}MESSAGE")
_SPACES = re.compile(r"\s{2,400}")
_OUTSIDE = {"TIMEOUT", "PREEMPTED", "CANCELLED", "DEADLINE", "REVOKED", "REQUEUED", "SUSPENDED"}
_POD_OUTSIDE = {"Evicted", "Preempted", "Preempting", "TaintManagerEviction", "NodeShutdown"}
_POD_MEMORY = {"OOMKilling", "OOMKilled", "SystemOOM"}
_NODE_LOST = {"NodeNotReady", "NodeNotSchedulable", "NodeControllerEviction"}


@dataclass(frozen=True)
class OutsideEvent:
    """One line of what was said: `kind` is memory, node or outside."""

    kind: str
    who: str
    text: str
    where: str


def looks_like_outside(head: bytes) -> bool:
    """Whether a file that begins so is what `sacct` or `kubectl get events` print."""
    if head.lstrip()[:1] == b"{":
        return b'"involvedObject"' in head[:_HEAD] and b'"reason"' in head[:_HEAD]
    first = "\n".join(head[:_LINES].decode("utf-8", "replace").splitlines()[:3])
    return _SACCT.search(first) is not None or _EVENTS.search(first) is not None


def read_outside(paths: Iterable[Path]) -> tuple[list[Finding], list[str]]:
    """The findings, at most one cause, and notes."""
    rows = [row for path in paths for row in rows_of(_text(path), str(path))]
    notes = [f"{INTERRUPTED}: {row.text} ({row.where})" for row in rows if row.kind == "outside"]
    for kind, code, said in (
        ("memory", "rank-oom-killed", "{} ran out of host memory: {}"),
        ("node", "rank-dead", "{} failed under the job: {}"),
    ):
        mine = [row for row in rows if row.kind == kind]
        if mine:
            records = tuple({"what": row.text, "where": row.where} for row in mine[:_EVIDENCE])
            text = said.format(mine[0].who, mine[0].text)
            return [Finding(code, text, (), Confidence.LIKELY, evidence=records)], notes[:1]
    return [], notes[:1]


def rows_of(text: str, where: str) -> list[OutsideEvent]:
    """The rows that mean something."""
    if text.lstrip()[:1] == "{":
        return _of_events(text, where)
    lines = text.splitlines()[:_MAX_ROWS]
    start = next((n for n, line in enumerate(lines[:3]) if _SACCT.match(line)), None)
    if start is not None:
        return _of_sacct(lines[start:], where, start + 1)
    return _of_event_table(lines, where)


def _of_sacct(lines: list[str], where: str, first: int) -> list[OutsideEvent]:
    parted = "|" in lines[0]
    names = [name.strip() for name in (lines[0].split("|") if parted else lines[0].split())]
    spans = _spans(lines[1]) if not parted and len(lines) > 1 and set(lines[1].strip()) <= {"-", " "} else []
    found = []
    for number, line in enumerate(lines[1:], first + 1):
        if parted:
            cells = [cell.strip() for cell in line.split("|")]
        elif spans:
            cells = [line[a:b].strip() for a, b in spans]
        else:
            cells = line.split()
        row = dict(zip(names, cells, strict=False))
        state = row.get("State", "").split(" ")[0].rstrip("+").upper()
        step = row.get("JobID") or row.get("JobIDRaw") or ""
        told = f"{state} of step {step[:40]}{_nodes(row)}, exit code {row.get('ExitCode', '?')[:12]}"
        place = f"{where}:{number}"
        if state.startswith("OUT_OF_ME"):
            found.append(OutsideEvent("memory", f"a task of step {step[:40]}", told, place))
        elif state in ("NODE_FAIL", "BOOT_FAIL"):
            found.append(OutsideEvent("node", f"a node of step {step[:40]}", told, place))
        elif state in _OUTSIDE:
            found.append(OutsideEvent("outside", step[:40], told, place))
    return found


def _nodes(row: dict[str, str]) -> str:
    return f" on {row['NodeList'][:80]}" if row.get("NodeList") else ""


def _spans(rule: str) -> list[tuple[int, int]]:
    """The columns under a rule of dashes."""
    return [(found.start(), found.end()) for found in re.finditer(r"-{1,200}", rule[:4000])]


def _of_event_table(lines: list[str], where: str) -> list[OutsideEvent]:
    head = next((n for n, line in enumerate(lines[:3]) if _EVENTS.match(line)), None)
    if head is None:
        return []
    skip = int(lines[head].startswith("NAMESPACE"))
    found = []
    for number, line in enumerate(lines[head + 1 :], head + 2):
        cells = _SPACES.split(line[:4000].strip(), maxsplit=4 + skip)[skip:]
        if len(cells) >= 4:
            found += _event(cells[2], cells[3], cells[4] if len(cells) > 4 else "", f"{where}:{number}")
    return found


def _of_events(text: str, where: str) -> list[OutsideEvent]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    items = value.get("items", [value]) if isinstance(value, dict) else []
    found = []
    for number, item in enumerate(items[:_MAX_ROWS] if isinstance(items, list) else [], 1):
        if not isinstance(item, dict):
            continue
        about = item.get("involvedObject")
        name = about.get("name") if isinstance(about, dict) else ""
        found += _event(str(item.get("reason")), str(name), str(item.get("message", "")), f"{where}, event {number}")
    return found


def _event(reason: str, who: str, message: str, where: str) -> list[OutsideEvent]:
    kind = (
        "memory" if reason in _POD_MEMORY
        else "node" if reason in _NODE_LOST
        else "outside" if reason in _POD_OUTSIDE
        else ""
    )  # fmt: skip
    told = f"{reason[:40]} of {who[:100]}: {' '.join(message.split())[:_SHOWN]}".rstrip(": ")
    return [OutsideEvent(kind, who[:100], told, where)] if kind else []


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""

"""Reading a run in trouble: findings by code, a capture with stacks."""

from __future__ import annotations

from dtobs.detectors.hangs import detect
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.recording.capture import Capture, RankCapture
from dtobs.recording.view import RunView


def found(view: RunView) -> dict[str, Finding]:
    """The findings of the family by code; each code once."""
    findings = detect(view)
    by_code = {f.code: f for f in findings}
    assert len(by_code) == len(findings), [f.summary for f in findings]
    return by_code


def captured(view: RunView, **stacks: str | tuple[str, str]) -> RunView:
    """Add a capture taken now; `rank_1="stack text"`, or a pair of Python lock and stack."""
    ranks = {}
    for name, given in stacks.items():
        rank = int(name.removeprefix("rank_"))
        gil, text = given if isinstance(given, tuple) else ("free", given)
        process = view.process(rank) or ProcessState(1, alive=True, state="S")
        ranks[rank] = RankCapture(rank, process, gil, text)  # type: ignore[arg-type]
    view.capture = Capture(view.now_ns, "", "test", ranks)
    return view


def stack(*lines: str) -> str:
    """What faulthandler prints, innermost first; a line is "file:line function"."""
    rows = []
    for line in lines:
        place, function = line.split(" ")
        file, number = place.rsplit(":", 1)
        rows.append(f'  File "{file}", line {number} in {function}')
    return "Thread 0x00007f0000000000 (most recent call first):\n" + "\n".join(rows) + "\n"

"""The table of `dtobs/logs/README.md`: which source tells which fault of one simulated job, and how surely.

``python -m tests.unit.calls.table`` prints it, with --write it goes into the README. "found": the right code and ranks,
certain; "likely" and "possible": the right code, less sure, and no other ranks; "rank": the right rank under another
name; "–": it accuses nobody; "WRONG" must never stand there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dtobs.detectors.hangs import detect
from dtobs.diagnose.analyse import rank_causes
from dtobs.findings import Confidence, Finding
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from dtobs.testing.layout import JobLayout
from dtobs.testing.recorded import recording_of
from dtobs.testing.simulate import SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of
from tests.unit.calls.sources import from_console, from_ras, from_stacks

README = Path(__file__).resolve().parents[3] / "dtobs/logs/README.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
FOUR, EIGHT = JobLayout(dp=4, tp=1, pp=1), JobLayout(dp=2, tp=2, pp=2)
JOBS: tuple[tuple[JobLayout, SimulatedFault | None], ...] = (
    (FOUR, None),
    (FOUR, SimulatedFault("rank-not-joined", 2)),
    (FOUR, SimulatedFault("collective-mismatch", 2, "dp")),
    (FOUR, SimulatedFault("shape-mismatch", 2, "dp")),
    (FOUR, SimulatedFault("dtype-mismatch", 2, "dp")),
    (FOUR, SimulatedFault("call-site-mismatch", 2, "dp")),
    (FOUR, SimulatedFault("network-stalled", 2, "dp")),
    (EIGHT, None),
    (EIGHT, SimulatedFault("rank-not-joined", 5, "tp")),
    (EIGHT, SimulatedFault("group-deadlock", 1)),
    (EIGHT, SimulatedFault("p2p-unmatched", 1)),
    (EIGHT, SimulatedFault("network-stalled", 3, "dp")),
)
SOURCES: dict[str, Callable[[SimulatedJob, Path], Finding | None]] = {
    "recording": lambda job, folder: next(iter(rank_causes(detect(recording_of(job, folder)))), None),
    "dumps": lambda job, _: next(iter(analyse_dumps(dumps_from_objects(dict(dumps_of(job)))).findings), None),
    "logs": from_console,
    "RAS, twice": from_ras,
    "RAS, once": lambda job, folder: from_ras(job, folder, samples=1),
    "stacks, thrice": from_stacks,
    "stacks, once": lambda job, folder: from_stacks(job, folder, still=None),
}
_MUTUAL = {"group-deadlock", "p2p-unmatched"}
"""Of these, every rank in the circle may be named."""


def cell(fault: SimulatedFault | None, layout: JobLayout, found: Finding | None) -> str:
    """What a source made of a job."""
    if fault is None:
        return "quiet" if found is None else "WRONG"
    if found is None or not found.ranks:
        return _sure(found) if found is not None and found.code == fault.name else "–"
    code, ranks = fault.expected(layout)
    if fault.name == "network-stalled":  # whom it holds up may be named
        group = set(layout.members(fault.rank, fault.axis))
        return (_sure(found) if found.code == code else "rank") if set(found.ranks) <= group else "WRONG"
    if fault.name in _MUTUAL and set(ranks) & set(found.ranks):
        return _sure(found) if found.code == code else "rank" if _modest(found) else "WRONG"
    if found.ranks != ranks:
        return "WRONG"
    return _sure(found) if found.code == code else "rank"


def _sure(found: Finding) -> str:
    return "found" if found.confidence is Confidence.CERTAIN else found.confidence.value


def _modest(found: Finding) -> bool:
    return found.confidence is Confidence.POSSIBLE


def table() -> str:
    """The table as Markdown."""
    lines = [f"| job | {' | '.join(SOURCES)} |", f"| --- |{' --- |' * len(SOURCES)}"]
    with tempfile.TemporaryDirectory() as root:
        for number, (layout, fault) in enumerate(JOBS):
            cells = []
            for place, read in enumerate(SOURCES.values()):
                job = SimulatedJob(layout, fault, steps=12, simulated_steps=6)
                cells.append(cell(fault, layout, read(job, Path(root, f"{number}-{place}"))))
            name = f"`{fault.name}`, rank {fault.rank}" if fault else "healthy"
            size = f"{layout.world_size} ranks"
            lines.append(f"| {size}: {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """The table in the README."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0].strip() + "\n"


if __name__ == "__main__":
    made = table()
    print(made, end="")
    if "--write" in sys.argv:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{made}{END}{rest.partition(END)[2]}")

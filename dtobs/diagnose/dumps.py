"""A diagnosis of a folder of Flight Recorder dumps, from a job that need never have heard of dtobs."""

from __future__ import annotations

from pathlib import Path

from dtobs.diagnose.dump_pictures import dump_pictures
from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.flight_recorder import DumpAnalysis, Dumps, analyse_dumps, load_dumps
from dtobs.flight_recorder.names import find_dumps
from dtobs.flight_recorder.snapshot import BY_FILE_TIMES

OURS = ("run.json", "capture.json", "nodes", "monitor.json")


def holds_dumps(path: Path) -> bool:
    """Whether `path` is a folder that is neither a run directory nor a capture and has files named like dumps."""
    if not path.is_dir() or any((path / name).exists() for name in OURS):
        return False
    return bool(find_dumps(path))


def diagnose_dumps(folder: Path) -> Diagnosis:
    """The diagnosis of the dumps in `folder`. Raises TargetError when none of them can be used."""
    return diagnosis_of(str(folder), load_dumps(folder))


def diagnosis_of(target: str, dumps: Dumps) -> Diagnosis:
    """The diagnosis of dumps that are loaded. Pure."""
    analysis = analyse_dumps(dumps)
    return Diagnosis(
        target=target,
        world_size=analysis.world_size,
        verdict=analysis.findings[0] if analysis.findings else None,
        findings=analysis.findings,
        ranks={status.rank: status for status in _statuses(analysis)},
        missing_ranks=analysis.missing_ranks,
        notes=(
            *(f"not used: {problem}" for problem in analysis.problems),
            *analysis.notes,
            *_caveats(analysis),
        ),
        pictures=dump_pictures(analysis),
    )


def _caveats(analysis: DumpAnalysis) -> list[str]:
    """What a reader must know of the evidence, which a finding holds and a summary does not say."""
    rests = any(record["what"] == BY_FILE_TIMES for f in analysis.findings for record in f.evidence)
    return [BY_FILE_TIMES] if rests else []


def _statuses(analysis: DumpAnalysis) -> list[RankStatus]:
    return [
        RankStatus(
            row.rank,
            "waiting" if row.waits_in else "unknown",
            None,
            "",
            last_collective=row.waits_in or row.last_call,
            site=row.waits_site or row.last_site,
        )
        for row in analysis.ranks
    ]

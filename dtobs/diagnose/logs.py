"""A diagnosis of console logs, from a job that need never have heard of dtobs."""

from __future__ import annotations

from pathlib import Path

from dtobs.diagnose.dumps import OURS
from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.errors import TargetError, opening
from dtobs.flight_recorder import looks_like_dump
from dtobs.logs import LogAnalysis, LogRank, analyse_logs, log_files, looks_like_log

_NOTHING = (
    "no line is one that dtobs knows of PyTorch, NCCL, a launcher, a scheduler or a training loop, so that this says"
    " nothing of the job"
)


def holds_logs(target: str) -> bool:
    """Whether `target` is ``-``, a file that is no dump, or a folder with logs that is no run directory or capture."""
    if target == "-":
        return True
    path = Path(target)
    if path.is_file():
        return not looks_like_dump(path)
    if not path.is_dir() or any((path / name).exists() for name in OURS):
        return False
    return any(looks_like_log(inner) for inner in path.rglob("*"))


def diagnose_logs(targets: list[str]) -> Diagnosis:
    """The diagnosis of the logs that `targets` name. Raises TargetError when there is no text in any of them."""
    for target in targets:
        if target != "-":
            with opening(target):
                Path(target).stat()
    files = log_files(targets)
    analysis = analyse_logs(files)
    if not analysis.bytes_read and any(file.problem for file in files):
        raise TargetError(next(file.problem for file in files if file.problem))
    return diagnosis_of_logs(", ".join("standard input" if t == "-" else t for t in targets), analysis)


def diagnosis_of_logs(target: str, analysis: LogAnalysis) -> Diagnosis:
    """The diagnosis of logs that are read. Pure."""
    return Diagnosis(
        target=target,
        world_size=analysis.world_size,
        verdict=analysis.findings[0] if analysis.findings else None,
        findings=analysis.findings,
        ranks={rank.rank: _status(rank) for rank in analysis.ranks},
        missing_ranks=analysis.missing_ranks,
        notes=analysis.notes if analysis.understood else (*analysis.notes, _NOTHING),
        told_step=analysis.step,
    )


def _status(rank: LogRank) -> RankStatus:
    state = "waiting" if rank.waits_in else "failed" if rank.ending else "unknown"
    return RankStatus(
        rank.rank,
        state,
        rank.step,
        "",
        last_collective=rank.waits_in,
        site=rank.site,
        ending=rank.ending,
        host=rank.host,
    )

"""Whatever a target is, its diagnosis: a run, a capture, monitors, or what a job left that never heard of dtobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtobs.diagnose.analyse import diagnose
from dtobs.diagnose.dumps import diagnose_dumps, holds_dumps
from dtobs.diagnose.folder import diagnose_folder, evidence_in
from dtobs.diagnose.gather import TakeCapture, gather
from dtobs.diagnose.logs import diagnose_logs, holds_logs
from dtobs.diagnose.model import Diagnosis
from dtobs.diagnose.monitors import gather_monitors
from dtobs.errors import UsageError, opening
from dtobs.nodes.remote import is_address


def diagnose_target(targets: Sequence[str], take_capture: TakeCapture | None = None) -> Diagnosis:
    """Diagnose what `targets` name: run directories, monitors' addresses, folders, files, or "-" for standard input.

    Raises DtobsError when none of them can be diagnosed.
    """
    named = list(targets)
    if all(map(is_address, named)):
        return diagnose(gather_monitors(named))
    if "-" in named:
        return diagnose_logs(named)
    if len(named) > 1:
        if not all(holds_logs(target) or evidence_in(Path(target)) for target in named):
            raise UsageError(
                "several targets can only be logs, or the addresses of one run's monitors (http://HOST:PORT)"
            )
        return diagnose_folder(*map(Path, named))
    target = Path(named[0])
    with opening(target):
        found = evidence_in(target)
        if found or holds_logs(str(target)):
            return diagnose_folder(target, found=found)
        if holds_dumps(target):
            return diagnose_dumps(target)
        return diagnose(gather(target, take_capture))

"""From a target to a verdict: gathers the evidence, runs all detectors, and ranks the causes.

::

    evidence = gather(Path("runs/20261120T120000Z-run"))
    diagnosis = diagnose(evidence)
    print(diagnosis.verdict)
"""

from __future__ import annotations

from dtobs.diagnose.analyse import diagnose
from dtobs.diagnose.dumps import diagnose_dumps, holds_dumps
from dtobs.diagnose.folder import diagnose_folder
from dtobs.diagnose.gather import Evidence, gather
from dtobs.diagnose.logs import diagnose_logs, holds_logs
from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.diagnose.monitors import gather_monitors
from dtobs.diagnose.ras import diagnose_ras
from dtobs.diagnose.target import diagnose_target

__all__ = [
    "Diagnosis",
    "Evidence",
    "RankStatus",
    "diagnose",
    "diagnose_dumps",
    "diagnose_folder",
    "diagnose_logs",
    "diagnose_ras",
    "diagnose_target",
    "gather",
    "gather_monitors",
    "holds_dumps",
    "holds_logs",
]

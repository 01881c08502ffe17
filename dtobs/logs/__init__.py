"""Console logs of any distributed job: from lines to a frontier, endings and findings.

`reader` hands out the lines that matter, `prefix` and `places` say whose they are, `templates` what they mean,
`evidence` collects, `frontier` makes the table of who issued what up to where, `hangs`, `crashes`, `meetings` and
`quality` are the rules. Nothing here executes, imports or unpickles what a log says.
"""

from __future__ import annotations

from dtobs.logs.analyse import ENDED_WELL, INTERRUPTED, NO_FURTHER, LogAnalysis, LogRank, analyse_logs
from dtobs.logs.reader import LogFile, begins_as_log, log_files, looks_like_log, named_like_log

__all__ = [
    "ENDED_WELL",
    "INTERRUPTED",
    "NO_FURTHER",
    "LogAnalysis",
    "LogFile",
    "LogRank",
    "analyse_logs",
    "begins_as_log",
    "log_files",
    "looks_like_log",
    "named_like_log",
]

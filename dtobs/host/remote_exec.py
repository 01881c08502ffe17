"""The Flight Recorder through `sys.remote_exec`: only when somebody asks, for the ranks' own Python runs a script then.

It needs Python 3.14 of the same minor version on both sides, and runs when the main thread next runs Python: a rank
that is blocked in native code answers when it comes back, if it does.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dtobs.errors import UsageError
from dtobs.host.flight_pipe import Dumped
from dtobs.host.training import TrainingProcess
from dtobs.words import count

_SECONDS = 8.0
_POLL_SECONDS = 0.2
_SCRIPT = """
def _dtobs_dump(path):
    import os, sys
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        try:
            text = getattr(c10d, name)()
        except Exception:
            continue
        with open(path + ".part", "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode())
        os.replace(path + ".part", path)
        return
_dtobs_dump({path!r})
del _dtobs_dump
"""


def remote_dumps(processes: Sequence[TrainingProcess], seconds: float = _SECONDS) -> Dumped:
    """Have every rank write its Flight Recorder. Raises UsageError where this Python cannot ask."""
    remote = getattr(sys, "remote_exec", None)
    if remote is None:
        mine = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UsageError(f"--remote-exec needs Python 3.14 here and in the ranks, this is {mine}: leave it out")
    folder = Path(tempfile.mkdtemp(prefix="dtobs-attach-"))
    problem, waiting = "", set[Path]()
    for one in processes:
        target = folder / f"dump_{one.rank}.json"
        script = folder / f"ask_{one.rank}.py"
        script.write_text(_SCRIPT.format(path=str(target)))
        try:
            remote(one.pid, str(script))
        except (OSError, RuntimeError, ValueError) as error:
            problem = problem or f"process {one.pid} cannot be asked: {error}"
        else:
            waiting.add(target)
    deadline = time.monotonic() + seconds
    while any(not file.exists() for file in waiting) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    written = sum(file.exists() for file in waiting)
    for script in folder.glob("ask_*.py"):
        script.unlink()
    late = f"{count(len(waiting) - written, 'rank')} did not answer: their main threads run no Python"
    return Dumped("the Flight Recorder", folder, written, problem or (late if written < len(waiting) else ""))

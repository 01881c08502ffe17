"""Flight Recorder dumps through torch's own pipe: a rank of ProcessGroupNCCL that was started with
TORCH_NCCL_DEBUG_INFO_PIPE_FILE reads ``<stem><rank>.pipe`` and dumps to ``<TEMP_FILE><rank>`` when a byte arrives.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtobs.host.training import TrainingProcess
from dtobs.words import count

_STEM = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_TEMP = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SECONDS = 8.0
_POLL_SECONDS = 0.2
MAX_BYTES = 512 << 20


@dataclass(frozen=True)
class Dumped:
    """Dumps that were written on request, copied to a folder of ours."""

    name: str
    folder: Path
    count: int
    problem: str = ""


def ask_dumps(processes: Sequence[TrainingProcess], seconds: float = _SECONDS) -> Dumped | None:
    """Ask every rank that has a pipe, and wait for what they write; None where none has one."""
    asked = [one for one in processes if one.setting(_STEM)]
    if not asked:
        return None
    files = {one.rank: _files(one) for one in asked}
    before = {file: _stamp(file) for some in files.values() for file in some}
    refused = [one.rank for one in asked if not _poke(Path(f"{one.setting(_STEM)}{one.rank}.pipe"))]
    waiting = {rank for rank in files if rank not in refused}
    folder = Path(tempfile.mkdtemp(prefix="dtobs-attach-"))
    deadline, sizes, written = time.monotonic() + seconds, dict[Path, tuple[int, int]](), 0
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank, file in [(r, f) for r in sorted(waiting) for f in files[r]]:
            now = _stamp(file)
            if now != before[file] and now == sizes.get(file):  # it has stopped growing
                written += _copy(file, folder / f"dump_{rank}")
                waiting.discard(rank)
            sizes[file] = now
    missing = len(refused) + len(waiting)
    problem = (
        f"{count(missing, 'rank')} of {len(asked)} wrote no Flight Recorder dump through {_STEM}" if missing else ""
    )
    return Dumped("the Flight Recorder", folder, written, problem)


def _files(one: TrainingProcess) -> list[Path]:
    """Where torch puts the dump: where it is told to, else in the cache folder, else where older ones did."""
    named = next((one.setting(name) for name in _TEMP if one.setting(name)), "")
    cache = one.setting("XDG_CACHE_HOME") or f"{one.setting('HOME') or '/tmp'}/.cache"
    stems = [named] if named else [f"{cache}/torch/comm_lib_trace_rank_", "/tmp/nccl_trace_rank_"]
    return [Path(f"{stem}{one.rank}") for stem in stems]


def _poke(pipe: Path) -> bool:
    """Write one byte to a pipe that somebody reads; never create a file, never wait."""
    try:
        if not stat.S_ISFIFO(pipe.stat().st_mode):
            return False
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(fd, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _stamp(file: Path) -> tuple[int, int]:
    try:
        seen = file.stat()
    except OSError:
        return 0, 0
    return seen.st_mtime_ns, seen.st_size


def _copy(file: Path, to: Path) -> int:
    try:
        if file.stat().st_size > MAX_BYTES:
            return 0
        shutil.copyfile(file, to)
    except OSError:
        return 0
    return 1

"""The Flight Recorder through `sys.remote_exec`: only when somebody asks, for the ranks' own Python runs a script then.

It needs Python 3.14 of the same minor version on both sides, and runs when the main thread next runs Python. A rank
that is blocked in native code opens its script when it comes back, however late: so a request that was not answered
keeps its folder, which nobody else may write to, with an empty script. Were it removed, the rank would print that it
is missing, and whoever made one of that name would have the rank run it.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dtobs.errors import UsageError
from dtobs.host.flight_pipe import MAX_BYTES, Dumped
from dtobs.host.training import TrainingProcess
from dtobs.words import count

_SECONDS = 8.0
_POLL_SECONDS = 0.2
_RECORDERS = ("nccl", "fr")
"""NCCL's, and that of all other backends. A process may have both."""
_SCRIPT = """
def _dtobs_dump(folder):
    import os, sys
    said = ""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    try:
        for name in {recorders!r}:
            try:
                text = getattr(c10d, f"_dump_{{name}}_trace_json")()
            except Exception:
                continue
            with open(os.path.join(folder, name), "wb") as file:
                file.write(text if isinstance(text, bytes) else text.encode())
    except Exception as error:
        said = repr(error)
    try:
        with open(os.path.join(folder, "answered"), "w") as file:
            file.write(said)
    except Exception:
        pass
_dtobs_dump({folder!r})
del _dtobs_dump
"""


def remote_dumps(processes: Sequence[TrainingProcess], seconds: float = _SECONDS, proc: Path = Path("/proc")) -> Dumped:
    """Have every rank write its Flight Recorder. Raises UsageError where this Python cannot ask."""
    remote = getattr(sys, "remote_exec", None)
    if remote is None:
        mine = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UsageError(f"--remote-exec needs Python 3.14 here and in the ranks, this is {mine}: leave it out")
    dumps = Path(tempfile.mkdtemp(prefix="dtobs-attach-"))
    requests = Path(tempfile.mkdtemp(prefix="dtobs-attach-"))
    asked, problems, written, silent = dict[int, Path](), list[str](), 0, 0
    try:
        for one in processes:
            folder = asked[one.pid] = requests / str(one.pid)
            try:
                remote(one.pid, str(_prepare(one.pid, folder, proc)))
            except (OSError, RuntimeError, ValueError) as error:
                problems.append(f"process {one.pid} cannot be asked: {error}")
                del asked[one.pid]
        deadline = time.monotonic() + seconds
        while any(_waits(pid, asked[pid], proc) for pid in asked) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
    finally:
        for folder in asked.values():
            _empty(folder)
        late = [pid for pid in asked if _waits(pid, asked[pid], proc)]
        for one in processes:
            if one.pid in asked and one.pid not in late:
                taken = sum(_take(asked[one.pid] / name, dumps / f"{name}_rank_{one.rank}.json") for name in _RECORDERS)
                written += bool(taken)
                silent += not taken
        for folder in requests.iterdir():
            if folder.name not in map(str, late):
                shutil.rmtree(folder, ignore_errors=True)
        if not late:
            shutil.rmtree(requests, ignore_errors=True)
    if silent:
        problems.append(f"{count(silent, 'rank')} answered without a Flight Recorder dump")
    if late:
        problems.append(
            f"{count(len(late), 'rank')} did not answer: their main threads run no Python. What was asked stays,"
            f" emptied, in {requests}: remove it when process {', '.join(map(str, late))} has ended, not before"
        )
    return Dumped("the Flight Recorder", dumps, written, "; ".join(problems))


def _prepare(pid: int, folder: Path, proc: Path) -> Path:
    """The script that a process is to run, where its user may read and write and nobody else. Raises OSError."""
    script = folder / "ask.py"
    folder.mkdir(mode=0o700)
    script.write_text(_SCRIPT.format(folder=str(folder), recorders=_RECORDERS))
    if os.geteuid() == 0:
        user, group = _owner(pid, proc)
        os.chown(script, user, group)
        os.chown(folder, user, group)
        folder.parent.chmod(0o711)
    try:
        same = (proc / str(pid) / "root" / script.relative_to("/")).samefile(script)
    except FileNotFoundError:
        same = False
    if not same:
        raise OSError(f"its {folder.parent.parent} is another (a container?): run dtobs beside it")
    return script


def _owner(pid: int, proc: Path) -> tuple[int, int]:
    """The user and group as which a process opens files."""
    fields = dict(line.split(":", 1) for line in (proc / str(pid) / "status").read_text().splitlines() if ":" in line)
    return int(fields["Uid"].split()[3]), int(fields["Gid"].split()[3])


def _waits(pid: int, folder: Path, proc: Path) -> bool:
    """Whether a process may still run its script."""
    return not (folder / "answered").exists() and (proc / str(pid)).exists()


def _empty(folder: Path) -> None:
    """Put an empty script in the place of the one that was asked for, at once: half of one would be an error."""
    empty = folder / "empty.py"
    if not folder.exists():
        return
    user = folder.stat()
    with empty.open("x") as file:
        if os.geteuid() == 0:
            os.fchown(file.fileno(), user.st_uid, user.st_gid)
    empty.replace(folder / "ask.py")


def _take(file: Path, to: Path) -> bool:
    """Copy what a rank wrote. Its folder is its user's: what is no plain file there is not followed."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with open(fd, "rb") as source:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > MAX_BYTES:
            return False
        with to.open("wb") as target:
            shutil.copyfileobj(source, target)
    return True

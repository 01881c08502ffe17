"""How ranks ended: torchrun's table and exit lines, srun's and DeepSpeed's words, signals."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dtobs.logs.evidence import LogEvidence, Sign
from dtobs.logs.failure_table import Failed, ended_by_torchrun
from dtobs.logs.ranks import RankMap
from dtobs.words import numbers

_EXITED = re.compile(r"Exited with exit code ([0-9]{1,5})\b")
DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}


@dataclass(frozen=True, slots=True)
class LoggedEnding:
    """The end of one rank; `rank` is None where nothing tells it. A negative code is a signal."""

    rank: int | None
    code: int
    where: str
    text: str
    order: int
    host: str = ""
    pid: int | None = None
    file: int = -1

    @property
    def signal(self) -> int | None:
        """The signal that ended it, also as a shell tells it (128 + n)."""
        if self.code < 0:
            return -self.code
        return self.code - 128 if 129 <= self.code <= 159 else None

    def words(self) -> str:
        """``signal 9 (SIGKILL)`` or ``exit code 1``."""
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"signal {self.signal} ({signal.Signals(self.signal).name})"
        except ValueError:
            return f"signal {self.signal}"


def endings(
    evidence: LogEvidence, signs: list[Sign], ranks: RankMap, over: Mapping[int, int] = MappingProxyType({})
) -> list[LoggedEnding]:
    """Every end that is told, one a rank where the rank is known; those that a launcher forced are left out.

    `over`: by file, the line up to which nothing counts, such as the end of an attempt that another one followed.
    """
    signs = [sign for sign in signs if sign.order > over.get(sign.file, -1)]
    forced = {int(s.fields["pid"]) for s in signs if s.kind == "forced" and "pid" in s.fields}
    forced |= ended_by_torchrun(evidence.failures)
    found = [
        _of_table(failed, ranks)
        for failed in evidence.failures
        if failed.exit_code is not None and failed.order > over.get(failed.file, -1)
    ]
    for sign in signs:
        found += _of_sign(sign, ranks)
    found += _of_mpirun(signs)
    best: dict[object, LoggedEnding] = {}
    for number, ending in enumerate(found):
        if ending.code and ending.pid not in forced:
            key: object = ending.rank if ending.rank is not None else ("?", ending.pid or number)
            best.setdefault(key, ending)
    return list(best.values())


def _of_table(failed: Failed, ranks: RankMap) -> LoggedEnding:
    assert failed.exit_code is not None
    text = failed.message or (failed.raised.text if failed.raised else "")
    return LoggedEnding(failed.rank, failed.exit_code, failed.where, text, failed.order, failed.host, failed.pid)


def _of_sign(sign: Sign, ranks: RankMap) -> list[LoggedEnding]:
    fields = sign.fields
    if sign.kind == "exit-code":
        rank = ranks.local(int(fields["local"]), sign.file)
        return [LoggedEnding(rank, int(fields["exit"]), sign.where, sign.text, sign.order, pid=int(fields["pid"]))]
    if sign.kind == "deepspeed-exit":
        code = int(fields.get("exit") or fields.get("code") or 0)
        return [
            LoggedEnding(
                sign.rank, code, sign.where, sign.text, sign.order, pid=int(fields["pid"]) if "pid" in fields else None
            )
        ]
    if sign.kind == "spawn-exit":
        number = getattr(signal, fields["signal"], signal.SIGTERM) if "signal" in fields else fields.get("number")
        code = -int(number) if number is not None else int(fields.get("exit", 1))
        rank = int(fields["rank"]) if "rank" in fields else sign.rank
        pid = int(fields["pid"]) if "pid" in fields else None
        return [LoggedEnding(rank, code, sign.where, sign.text, sign.order, fields.get("host", ""), pid)]
    if sign.kind == "died-with":  # the launcher's command names the process it started last, not this one
        number = getattr(signal, fields["signal"], signal.SIGKILL)
        return [LoggedEnding(sign.rank, -number, sign.where, sign.text, sign.order)]
    if sign.kind == "srun-task":
        told = _srun_code(fields["how"])
        tasks = numbers(fields["tasks"]) if told is not None else []
        return [
            LoggedEnding(task, told or 0, sign.where, sign.text, sign.order, fields["host"], file=sign.file)
            for task in tasks
        ]
    return []


def _of_mpirun(signs: list[Sign]) -> list[LoggedEnding]:
    """The process that mpirun saw end first: its name in one line, its code or signal in the next."""
    codes = {
        (s.file, s.order): int(s.fields["exit"]) if "exit" in s.fields else -int(s.fields["number"])
        for s in signs
        if s.kind == "mpi-code"
    }
    return [
        LoggedEnding(int(s.fields["rank"]), code, s.where, s.text, s.order, s.fields.get("host", ""))
        for s in signs
        if s.kind == "mpi-first" and (code := codes.get((s.file, s.order + 1))) is not None
    ]


def _srun_code(how: str) -> int | None:
    """What srun says a task ended with; None where it says nothing of it."""
    for words, number in (
        ("Killed", 9),
        ("Segmentation fault", 11),
        ("Aborted", 6),
        ("Bus error", 7),
        ("Terminated", 15),
    ):
        if how.startswith(words):
            return -number
    if how.startswith("Out Of Memory"):
        return -9
    told = _EXITED.match(how)
    return int(told[1]) if told else None

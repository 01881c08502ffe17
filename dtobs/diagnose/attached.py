"""A diagnosis of processes that run and were not prepared: read-only looks at /proc and their stacks, RAS, dumps.

Three looks, some seconds apart, tell who stands still and who is at work. What the job itself offers is asked as well:
NCCL RAS, and the Flight Recorder through torch's own pipe where its owner has switched that on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from dtobs.diagnose.combine import SourceFindings, combine
from dtobs.diagnose.dumps import diagnose_dumps
from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.errors import DtobsError, TargetError
from dtobs.findings import Confidence, Finding
from dtobs.host.activity import Activity, activities
from dtobs.host.blocked import waits_for
from dtobs.host.flight_pipe import Dumped, ask_dumps
from dtobs.host.process import ProcessState, read_process, start_ticks
from dtobs.host.pyspy import NoStacks, Spied, main_of, spy
from dtobs.host.training import TrainingProcess, named_processes, training_processes
from dtobs.ras import ask, is_ras_address
from dtobs.ras import judge as judge_ras
from dtobs.recording.rank import State
from dtobs.stacks import Doing, RankStack, judge, standing
from dtobs.stacks.model import WAITS
from dtobs.words import count, duration_text

LOOKS = 3
SECONDS = 10.0
_BUSY_SHARE, _BUSY_BYTES = 0.05, 1 << 20
"""A rank that used more than so much of a core, or read and wrote more, is at work though its line is the same."""
_SPY_SECONDS = 8.0
_AT_ONCE = 8
_MAX_FRAMES = 32
_MOST_AT_REST = 4
_RAS_ADDRESS = "localhost:28028"

Spy = Callable[[int, float], list[Spied]]


@dataclass
class Looked:
    """What was seen of one process, look by look."""

    process: TrainingProcess
    ticks: int
    states: list[ProcessState] = field(default_factory=list)
    threads: list[list[Spied]] = field(default_factory=list)
    activity: list[Activity] = field(default_factory=list)
    problem: str = ""


def find_processes(pids: Sequence[int], proc: Path = Path("/proc")) -> list[TrainingProcess]:
    """The ranks to look at. Raises TargetError where there are none, or several jobs and none is named."""
    if pids:
        found = named_processes(list(pids), proc)
        gone = [pid for pid in pids if not (proc / str(pid)).exists()]
        if gone:
            raise TargetError(f"there is no process {gone[0]} on this host")
        if ended := [pid for pid in pids if not read_process(pid, start_ticks(pid, proc), proc).alive]:
            raise TargetError(f"process {ended[0]} has ended; its console log may say why")
        if not found:
            raise TargetError(f"process {pids[0]} may not be read: run this as its owner or as root")
        return found
    found = training_processes(proc)
    if not found:
        raise TargetError(
            "no training process is seen on this host (none has RANK in its environment, or they are another user's): "
            "give their process ids"
        )
    jobs = {one.job for one in found}
    if len(jobs) > 1:
        firsts = [next(one for one in found if one.job == job) for job in sorted(jobs)]
        listed = "; ".join(f"{one.pid} ({one.command[:60]})" for one in firsts[:4])
        raise TargetError(f"{len(jobs)} jobs run on this host, name one of them by process ids: {listed}")
    return found


def diagnose_attached(
    processes: Sequence[TrainingProcess],
    seconds: float = SECONDS,
    *,
    spying: Spy = spy,
    sleep: Callable[[float], None] = time.sleep,
    proc: Path = Path("/proc"),
    extra: Sequence[SourceFindings] = (),
) -> Diagnosis:
    """Look at the processes several times and compare them; `extra` are other sources that were asked before."""
    looked = [Looked(one, start_ticks(one.pid, proc)) for one in processes]
    for number in range(LOOKS):
        if number:
            sleep(seconds / (LOOKS - 1))
        _look(looked, spying, proc)
    stacks = [_stack_of(one, seconds) for one in looked]
    world = max([one.world for one in processes] + [len(processes)])
    found, notes = judge([s for s in stacks if s.frames or s.suspended], world)
    found = [_resumable(finding, looked) for finding in found]
    notes = [*_problems(looked), *notes, *([] if found else _at_rest(looked, stacks, proc))]
    notes.append(
        f"{count(LOOKS, 'look')} within {duration_text(seconds)}, {count(len(looked), 'process', 'processes')}"
    )
    without = [one.pid for one in processes if _loads(one.pid, b"libtorch", proc) is False]
    if without:
        notes.append(
            f"{count(len(without), 'process', 'processes')} ({', '.join(map(str, without[:8]))}) without PyTorch:"
            " no training is seen there, so that this says nothing of the job"
        )
    ended = tuple(sorted(one.process.rank for one in looked if not one.states[-1].alive))
    if ended:
        notes.append(f"{count(len(ended), 'process', 'processes')} ended during the looks")
    mine = SourceFindings("their stacks", tuple(found))
    others = [*extra, *_ras(processes), *_flight_recorder(processes)]
    verdict, findings, more = combine([mine, *others])
    return Diagnosis(
        target=", ".join(f"process {one.pid}" for one in processes[:4]) + (" …" if len(processes) > 4 else ""),
        world_size=world,
        verdict=verdict,
        findings=tuple(findings),
        ranks={one.process.rank: _status(one, stack) for one, stack in zip(looked, stacks, strict=True)},
        notes=(*notes, *more),
    )


def _resumable(finding: Finding, looked: Sequence[Looked]) -> Finding:
    """Of suspended ranks, with the command that lets their processes go on."""
    if finding.code != "rank-stopped":
        return finding
    pids = " ".join(str(one.process.pid) for one in looked if one.process.rank in finding.ranks)
    return replace(finding, next_step=f"Resume with `kill -CONT {pids}`, and find out who stopped it.")


def _look(looked: Sequence[Looked], spying: Spy, proc: Path) -> None:
    def one(target: Looked) -> None:
        target.states.append(read_process(target.process.pid, target.ticks, proc))
        if not target.states[-1].alive:
            return
        try:
            target.threads.append(spying(target.process.pid, _SPY_SECONDS))
        except NoStacks as error:
            target.problem = str(error)

    did = activities((target.process.pid for target in looked), proc)
    for target in looked:
        target.activity.append(did[target.process.pid])
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(looked))), thread_name_prefix="look") as pool:
        list(pool.map(one, looked))


def _stack_of(one: Looked, seconds: float) -> RankStack:
    mains = [main for threads in one.threads if (main := main_of(threads)) is not None]
    frames = mains[-1].stack.frames if mains else ()
    still = len({main.stack.frames for main in mains}) == 1 if len(mains) > 1 else None
    if still and standing(frames).doing not in WAITS and _works(one.activity, seconds):
        still = False
    return RankStack(
        one.process.rank,
        frames,
        still=still,
        suspended=all(state.stopped for state in one.states),
        holds_lock=len(mains) == LOOKS and all(main.holds_lock for main in mains),
        where=f"process {one.process.pid}",
    )


def _works(activity: Sequence[Activity], seconds: float) -> bool:
    """Whether a process, or one below it, computes, reads or writes."""
    first, last = activity[0], activity[-1]
    busy = last.cpu_seconds - first.cpu_seconds > _BUSY_SHARE * seconds
    return busy or last.io_bytes - first.io_bytes > _BUSY_BYTES


def _at_rest(looked: Sequence[Looked], stacks: Sequence[RankStack], proc: Path) -> list[str]:
    """Ranks that stood at one line of their own in all looks and used no processor, with what the kernel says of that.

    Whether they hang only their owner knows: a program may be through, or wait for a person.
    """
    pids = {one.process.pid: one.process.rank for one in looked}
    said = []
    for one, stack in zip(looked, stacks, strict=True):
        if stack.still and one.states[-1].alive and standing(stack.frames).doing not in WAITS:
            waits = waits_for(one.process.pid, pids, proc)
            what = f" it waits for {waits}" if waits else " its line is the same in all looks"
            said.append(f"rank {one.process.rank} does nothing:{what}, and no processor is used")
    return said[:_MOST_AT_REST]


def _problems(looked: Sequence[Looked]) -> list[str]:
    """Why there are no stacks, each reason once."""
    said: dict[str, list[int]] = {}
    for one in looked:
        if one.problem and not one.threads:
            said.setdefault(one.problem, []).append(one.process.pid)
    return [f"no stacks of {count(len(pids), 'process', 'processes')}: {why}" for why, pids in said.items()]


def _status(one: Looked, stack: RankStack) -> RankStatus:
    state, at = one.states[-1], standing(stack.frames)
    word = State.UNKNOWN
    if not state.alive:
        word = State.DEAD
    elif stack.suspended:
        word = State.SUSPENDED
    elif stack.frames:
        waits = at.doing in WAITS and stack.still
        word = State.WAITING if waits else State.LOADING if at.doing is Doing.DATA else State.RUNNING
    return RankStatus(
        rank=one.process.rank,
        state=word.value,
        step=None,
        phase="" if at.doing in (Doing.CODE, Doing.COLLECTIVE, Doing.MESSAGE) or not stack.frames else at.doing.value,
        last_collective=at.call,
        site=at.line if at.call else "",
        pid=one.process.pid,
        ending="" if state.alive else state.ending,
        stack=tuple(str(frame) for frame in stack.frames[:_MAX_FRAMES]),
        line=at.line,
    )


def _ras(processes: Sequence[TrainingProcess]) -> list[SourceFindings]:
    """What NCCL RAS says, where the environment names its address or NCCL is loaded."""
    addresses = {one.setting("NCCL_RAS_ADDR") for one in processes} - {""}
    if not addresses and any(_loads(one.pid, b"libnccl") for one in processes):
        addresses = {_RAS_ADDRESS}
    told = []
    for address in sorted(addresses)[:1]:
        if any(one.setting("NCCL_RAS_ENABLE") == "0" for one in processes) or not is_ras_address(address):
            continue
        try:
            findings, notes = judge_ras([ask(address)])
        except DtobsError as error:
            told.append(SourceFindings("NCCL RAS", (), (str(error),)))
        else:
            told.append(SourceFindings("NCCL RAS", tuple(findings), tuple(notes)))
    return told


def _loads(pid: int, library: bytes, proc: Path = Path("/proc")) -> bool | None:
    """Whether a process has a library of that name loaded; None where that cannot be read."""
    try:
        with (proc / str(pid) / "maps").open("rb") as file:
            return library in file.read(16 << 20)
    except OSError:
        return None


def _flight_recorder(processes: Sequence[TrainingProcess]) -> list[SourceFindings]:
    dumped = ask_dumps(processes)
    return told_by_dumps(dumped) if dumped is not None else []


def told_by_dumps(dumped: Dumped) -> list[SourceFindings]:
    """Judge the dumps that the ranks wrote on request, and remove their folder."""
    try:
        if not dumped.count:
            return [SourceFindings(dumped.name, (), (dumped.problem,))]
        said = diagnose_dumps(dumped.folder)
    except DtobsError as error:
        return [SourceFindings(dumped.name, (), (str(error),))]
    finally:
        shutil.rmtree(dumped.folder, ignore_errors=True)
    notes = (*said.notes, dumped.problem) if dumped.problem else said.notes
    findings = tuple(_not_surer(finding) for finding in said.findings)
    return [SourceFindings(dumped.name, findings, notes)]


def _not_surer(finding: Finding) -> Finding:
    """Dumps of ranks that run were not written at one time."""
    return replace(finding, confidence=Confidence.LIKELY) if finding.confidence is Confidence.CERTAIN else finding

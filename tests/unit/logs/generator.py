"""Writes the console logs that jobs of real torch versions leave: fault × version × format × number of ranks.

The words of each version are those that torch, NCCL, torchrun and SLURM print; numbers and names are made up.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

VERSIONS = ("1.13", "2.1", "2.3", "2.4", "2.5", "2.9")
FORMATS = ("console", "tee", "files", "slurm", "label", "kubectl", "gz")
Lines = dict[int, list[str]]
"""The lines of each rank, in its own order."""


def work(version: str, rank: int, seq: int, op: str, numel: int, group_rank: int | None = None) -> str:
    """A watchdog's first line."""
    inner = {
        "1.13": f"OpType={op}, Timeout(ms)=600000",
        "2.1": f"OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000",
    }
    text = inner.get(version, inner["2.1"])
    head = (
        "[E ProcessGroupNCCL.cpp:737] "
        if version in ("1.13", "2.1")
        else f"[rank{rank}]:[E1206 18:44:12.715298746 ProcessGroupNCCL.cpp:607] "
    )
    who = rank if group_rank is None else group_rank
    return f"{head}[Rank {who}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, {text}) ran for 600061 milliseconds before timing out."


def group(version: str, name: str, rank: int, desc: str = "") -> str:
    """The name of a group before a watchdog's words."""
    if version == "2.3":
        return f"[PG {name} Rank {rank}]"
    if version == "2.4":
        return f"[PG {name} {f'({desc}) ' if desc else ''}Rank {rank}]"
    return f"[PG ID 1 PG GUID {name}{f'({desc})' if desc else ''} Rank {rank}]"


def status(
    version: str, rank: int, seq: int, issued: int, completed: int, name: str = "0", group_rank: int | None = None
) -> list[str]:
    """The line with the frontier, which torch prints from 2.3 on."""
    if version in ("1.13", "2.1"):
        return []
    head = f"[rank{rank}]:[E1206 18:44:12.715588844 ProcessGroupNCCL.cpp:1664] "
    head += group(version, name, rank if group_rank is None else group_rank, "default_pg" if name == "0" else "")
    if version == "2.3":
        return [
            f"{head} Timeout at NCCL work: {seq}, last enqueued NCCL work: {issued}, last completed NCCL work: {completed}."
        ]
    if version == "2.4":
        return [
            f"{head} Exception (either an error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: {issued}, last completed NCCL work: {completed}."
        ]
    return [
        f"{head}  failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {issued}, last completed work: {completed}"
    ]


def dump_signal(version: str, rank: int, source: int, issued: int, completed: int) -> list[str]:
    """What a rank prints that another one asked to dump."""
    if version in ("1.13", "2.1", "2.3"):
        return []
    head = f"[rank{rank}]:[E1206 18:44:13.1 ProcessGroupNCCL.cpp:1346] {group(version, '0', rank, 'default_pg')}"
    return [
        f"{head} Observed flight recorder dump signal from another rank via TCPStore.",
        f"{head} Received a dump signal due to a collective timeout from  rank {source} and we will try our best to dump the debug info. Last enqueued NCCL work: {issued}, last completed NCCL work: {completed}.This is most likely caused by incorrect usages of collectives, e.g., wrong sizes used across ranks, the order of collectives is not same for all ranks or the scheduled collective, for some reason, didn't run. ",
    ]


def after(version: str, rank: int) -> list[str]:
    """The consequences that every rank prints after a time-out."""
    head = "" if version in ("1.13", "2.1") else f"[rank{rank}]:"
    return [
        f"{head}[E ProcessGroupNCCL.cpp:621] [Rank {rank}] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.",
        f"{head}[E ProcessGroupNCCL.cpp:627] [Rank {rank}] To avoid data inconsistency, we are taking the entire process down.",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        f"  what():  [PG 0 Rank {rank}] Process group watchdog thread terminated with exception: [Rank {rank}] Watchdog caught collective operation timeout",
    ]


def steps(rank: int, last: int = 20) -> list[str]:
    """Progress, by the first rank as most loops print it, and a start-up line by each."""
    begun = [
        f"[rank{rank}]:[I ProcessGroupNCCL.cpp:905] [Rank {rank}] ProcessGroupNCCL initialization options: size: 8"
    ]
    return begun + ([f"step {n} loss {4 - n / 20:.3f} grad_norm 1.2" for n in range(last)] if rank == 0 else [])


@dataclass(frozen=True)
class Case:
    """A fault: its lines, the launcher's at the end, the verdict, and the versions that can tell it."""

    name: str
    lines: Callable[[str, int, int], Lines]
    code: str
    accused: Callable[[int, int], tuple[int, ...]]
    versions: tuple[str, ...] = VERSIONS
    exits: Callable[[int, int], dict[int, int]] | None = None


def not_joined(version: str, world: int, odd: int) -> Lines:
    found = {}
    for rank in range(world):
        lines = steps(rank)
        if rank == odd:
            lines += dump_signal(version, rank, (odd + 1) % world, 99, 99)
        else:
            lines += [
                work(version, rank, 100, "ALLREDUCE", 1024),
                *status(version, rank, 100, 102, 99),
                *after(version, rank),
            ]
        found[rank] = lines
    return found


def mismatch(version: str, world: int, odd: int) -> Lines:
    return {
        rank: [
            *steps(rank),
            work(version, rank, 100, "BROADCAST" if rank == odd else "ALLREDUCE", 1024),
            *status(version, rank, 100, 100, 99),
            *after(version, rank),
        ]
        for rank in range(world)
    }


def shapes(version: str, world: int, odd: int) -> Lines:
    return {
        rank: [
            *steps(rank),
            work(version, rank, 100, "ALLREDUCE", 77 if rank == odd else 1024),
            *status(version, rank, 100, 100, 99),
            *after(version, rank),
        ]
        for rank in range(world)
    }


def stalled(version: str, world: int, odd: int) -> Lines:
    return {
        rank: [
            *steps(rank),
            work(version, rank, 100, "ALLREDUCE", 1024),
            *status(version, rank, 100, 101, 99),
            *after(version, rank),
        ]
        for rank in range(world)
    }


def deadlock(version: str, world: int, odd: int) -> Lines:
    """Half of the ranks wait in one group for the other half, which waits in another."""
    found = {}
    for rank in range(world):
        mine = "2" if rank < world // 2 else "3"
        lines = steps(rank)
        for name in ("2", "3"):
            if name == mine:
                lines += [work(version, rank, 9, "ALLREDUCE", 64), *status(version, rank, 9, 9, 8, name)]
            else:
                lines += status(version, rank, 8, 8, 8, name)[:0]
        found[rank] = lines + after(version, rank)
    return found


def raised(version: str, world: int, odd: int) -> Lines:
    found = {}
    for rank in range(world):
        head = "" if version in ("1.13", "2.1") else f"[rank{rank}]: "
        if rank == odd:
            lines = [
                "Traceback (most recent call last):",
                '  File "/home/me/train.py", line 88, in <module>',
                "    main()",
                '  File "/home/me/data.py", line 31, in collate',
                "    return table[key]",
                "KeyError: 'tokens'",
            ]
        else:
            lines = [
                "Traceback (most recent call last):",
                '  File "/home/me/train.py", line 90, in step',
                "    dist.all_reduce(x)",
                '  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2501, in all_reduce',
                "    work = group.allreduce([tensor], opts)",
                "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error, NCCL version 2.20.5",
                "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            ]
        found[rank] = steps(rank) + [head + line for line in lines]
    return found


def out_of_memory(version: str, world: int, odd: int) -> Lines:
    new = "GPU 1 has a total capacity of 79.10 GiB of which 1.94 GiB is free. Process 12345 has 60.10 GiB memory in use. Including non-PyTorch memory, this process has 17.00 GiB memory in use."
    old = "(GPU 1; 79.10 GiB total capacity; 17.20 GiB already allocated; 0 bytes free; 19.15 GiB reserved in total by PyTorch)"
    found = raised(version, world, odd)
    text = (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. {old if version == '1.13' else new}"
    )
    found[odd] = [line.replace("KeyError: 'tokens'", text) for line in found[odd]]
    return found


def killed(version: str, world: int, odd: int) -> Lines:
    found = raised(version, world, odd)
    found[odd] = steps(odd)
    return found


def illegal(version: str, world: int, odd: int) -> Lines:
    found = not_joined(version, world, odd)
    head = "" if version in ("1.13", "2.1") else f"[rank{odd}]:"
    found[odd] = [
        *steps(odd),
        f"{head}[E ProcessGroupNCCL.cpp:1182] [PG 0 Rank {odd}] NCCL watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
    ]
    return found


CASES = (
    Case("not-joined", not_joined, "rank-not-joined", lambda world, odd: (odd,)),
    Case("mismatch", mismatch, "collective-mismatch", lambda world, odd: (odd,)),
    Case("shapes", shapes, "shape-mismatch", lambda world, odd: (odd,), VERSIONS[1:]),
    Case("stalled", stalled, "network-stalled", lambda world, odd: ()),
    Case("raised", raised, "uncaught-exception", lambda world, odd: (odd,), exits=lambda world, odd: dict.fromkeys(range(world), 1)),
    Case("device-oom", out_of_memory, "device-out-of-memory", lambda world, odd: (odd,), exits=lambda world, odd: dict.fromkeys(range(world), 1)),
    Case("killed", killed, "rank-dead", lambda world, odd: (odd,), exits=lambda world, odd: {rank: -9 if rank == odd else 1 for rank in range(world)}),
    Case("illegal", illegal, "illegal-address", lambda world, odd: (odd,), exits=lambda world, odd: dict.fromkeys(range(world), -6)),
)  # fmt: skip


def table(exits: dict[int, int], first: int) -> list[str]:
    """torchrun's table; `first` is the rank it calls the root cause."""

    def entry(index: int, rank: int) -> list[str]:
        code = exits[rank]
        told = (
            f"Signal {-code} (SIGKILL) received by PID {100 + rank}"
            if code < 0
            else "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
        )
        return [
            f"[{index}]:", "  time      : 2025-05-21_15:43:03", "  host      : gpu-node-1", f"  rank      : {rank} (local_rank: {rank})",
            f"  exitcode  : {code} (pid: {100 + rank})", "  error_file: <N/A>", f"  traceback : {told}",
        ]  # fmt: skip

    others = [line for index, rank in enumerate(r for r in exits if r != first) for line in entry(index + 1, rank)]
    rule = "=" * 60
    return [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", rule, "train.py FAILED", "-" * 60, "Failures:",
        *(others or ["  <NO_OTHER_FAILURES>"]), "-" * 60, "Root Cause (first observed failure):", *entry(0, first), rule,
    ]  # fmt: skip


def write(folder: Path, form: str, lines: Lines, tail: list[str], random: Random) -> list[str]:
    """The logs in one of the `FORMATS`; gives the targets for the command."""
    if form == "files":
        for rank, own in lines.items():
            place = folder / "run_x" / "attempt_0" / str(rank)
            place.mkdir(parents=True)
            (place / "stderr.log").write_text("\n".join(own) + "\n")
        (folder / "launcher.log").write_text("\n".join(tail) + "\n")
        return [str(folder)]
    if form == "slurm":
        for rank, own in lines.items():
            (folder / f"slurm-4711_{rank}.out").write_text("\n".join(own) + "\n")
        return [str(folder)]
    put = {
        "tee": lambda rank, text: f"[default{rank}]:{text}",
        "label": lambda rank, text: f"{rank}: {text}",
        "kubectl": lambda rank, text: f"2026-11-20T12:00:00.123456789Z [default{rank}]:{text}",
    }.get(form, lambda rank, text: text if text.startswith("[rank") else f"[rank{rank}]: {text}")
    queues = {rank: list(own) for rank, own in lines.items()}
    mixed: list[str] = []
    while queues:
        rank = random.choice(sorted(queues))
        take = random.randint(1, 6)
        mixed += [put(rank, text) for text in queues[rank][:take]]
        queues[rank] = queues[rank][take:]
        if not queues[rank]:
            del queues[rank]
    content = "\n".join([*mixed, *tail]) + "\n"
    path = folder / ("job.log.gz" if form == "gz" else "job.log")
    path.write_bytes(gzip.compress(content.encode()) if form == "gz" else content.encode())
    return [str(path)]

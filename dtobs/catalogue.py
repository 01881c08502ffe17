"""The catalogue: every code of a finding that exists, with what is known of it.

Detectors, alerts, runbooks and tests are checked against it.
"""

from __future__ import annotations

from dataclasses import replace
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ

from dtobs import silent_codes
from dtobs.codes import Code, Family, Row, Severity, Trait
from dtobs.expectations import EXPECTATIONS

__all__ = ["CATALOGUE", "CRASHED", "PREFLIGHT", "Code", "Family", "Severity", "Trait", "after_signal"]

CRASHED = "Look at the line shown: native code that it calls crashed; run it with compute-sanitizer or under gdb."
"""What to do about a rank that native code crashed, where it is told from which line."""
AFTER_SIGNAL: dict[int, str] = {
    SIGSEGV: "Native code crashed in it, nobody killed it: start with PYTHONFAULTHANDLER=1 to see from which line.",
    SIGABRT: "Native code in it gave up: what it printed last says why (terminate called, an assertion, a watchdog).",
    SIGFPE: "Native code in it divided by zero: start with PYTHONFAULTHANDLER=1 to see from which line.",
    SIGILL: "Native code in it used an instruction that this processor lacks: install a build made for it.",
    SIGBUS: "Shared memory or a mapped file had no room: look at df /dev/shm (docker run --shm-size) and full disks.",
    SIGXCPU: "It used up its processor time: see ulimit -t, or the scheduler's limit.",
    SIGXFSZ: "It wrote a file larger than it may: see ulimit -f.",
    **dict.fromkeys(
        (SIGUSR1, SIGUSR2),
        "Schedulers send this before a job's time is over (sbatch --signal): have the program handle it, and save.",
    ),
}
"""What to do about a process that a signal ended which says why, by that signal."""


def after_signal(number: int, otherwise: str = "", *, shown: bool = False) -> str:
    """What to do about a process that signal `number` ended; `shown`: the line of Python at which it did is told."""
    return CRASHED if shown and number != SIGBUS else AFTER_SIGNAL.get(number, otherwise)


_LOST_TIME: tuple[tuple[str, str, str], ...] = (
    (
        "straggler",
        "A rank works longer than its peers in every step",
        "Compare this rank's host: CPU or GPU clocks, other processes, its share of the data.",
    ),
    (
        "exposed-communication",
        "All ranks wait for communication that nothing hides",
        "Communicate less often, less, or beside the computation; measure the links with `dtobs preflight`.",
    ),
    (
        "sync-every-microbatch",
        "Gradients are reduced after every micro-batch instead of once a step",
        "Run all but the last micro-batch under no_sync() (DDP) or set_requires_gradient_sync(False) (FSDP2).",
    ),
    (
        "pipeline-bubble",
        "A pipeline idles for longer than its schedule and its stages explain",
        "Look at `dtobs timeline`: late messages or uneven micro-batches; more micro-batches make every gap smaller.",
    ),
    (
        "host-bound",
        "The host keeps the computation waiting",
        "Launch less from Python (torch.compile, CUDA graphs), collect garbage by hand, or give it more cores.",
    ),
    (
        "throughput-drop",
        "The run does less work a second than before",
        "Look at what changed at that time: clocks and temperature, storage, other jobs on the hosts.",
    ),
    (
        "memory-imbalance",
        "A rank holds much more memory than its peers",
        "Look for what only this rank keeps: evaluation, logging, a second process; read a snapshot of it.",
    ),
    (
        "checkpoint-stall",
        "Training stands still while checkpoints are written",
        "Write asynchronously, less often, or to faster storage.",
    ),
    (
        "memory-leak",
        "What a rank holds in memory grows with every step",
        "Look for tensors that outlive their step: losses summed without .item(), lists of outputs, hooks.",
    ),
    (
        "memory-near-limit",
        "A device's memory is nearly full",
        "Use a smaller micro-batch, activation checkpointing or more sharding; read a snapshot with `dtobs memory`.",
    ),
    (
        "stage-imbalance",
        "A pipeline stage computes longer than the others",
        "Move layers from this stage to the others; the last one also has the head and the loss.",
    ),
    (
        "sequence-imbalance",
        "Micro-batches take unequally long because their sequences do",
        "Balance micro-batches by the cost of their sequences (sum of squared lengths), not by their tokens.",
    ),
    (
        "data-starved",
        "Steps wait for data",
        "More loader workers, prefetching, or pre-processed data; check the storage's throughput.",
    ),
)
"""Rows of the family "performance", all of them warnings: name, title, next step."""

_ROWS: tuple[Row, ...] = (
    # hangs and crashes, the nearer to the cause the earlier
    (
        "device-fault",
        "hangs",
        Severity.CRITICAL,
        "A device failed",
        "Take the host out of the job, look at the Xid in its kernel log, reset or replace the device; then restart.",
        Trait.MACHINE,
    ),
    (
        "disk-full",
        "hangs",
        Severity.CRITICAL,
        "A rank found no space left on a disk, in a quota or in /dev/shm",
        "Make room or enlarge it (a container's --shm-size for /dev/shm), then restart from the last checkpoint.",
    ),
    (
        "device-out-of-memory",
        "hangs",
        Severity.CRITICAL,
        "A rank ran out of device memory",
        "Take a smaller batch, shard or recompute more; where another process holds the memory, end that one first.",
    ),
    (
        "illegal-address",
        "hangs",
        Severity.CRITICAL,
        "A kernel accessed memory that is not its own",
        "Run this rank with CUDA_LAUNCH_BLOCKING=1 to see the kernel; look for an index out of range.",
    ),
    (
        "nccl-misuse",
        "hangs",
        Severity.CRITICAL,
        "NCCL refused a call as wrong",
        "Set the device of each rank by its LOCAL_RANK before the first collective; use one NCCL version on all hosts.",
    ),
    (
        "unused-parameters",
        "hangs",
        Severity.CRITICAL,
        "A backward left out parameters that DDP waits for on the other ranks",
        "Let every parameter take part in the loss on every rank and step, or pass find_unused_parameters=True to DDP.",
        Trait.DEADLOCK | Trait.SAYS_WHY,
    ),
    (
        "call-site-mismatch",
        "hangs",
        Severity.CRITICAL,
        "A rank makes a call more or fewer than its peers, and nothing notices",
        "Look at the call site named: it runs on one rank only, or once too often. Results since then are mixed up.",
        Trait.DISAGREEMENT,
    ),
    (
        "collective-mismatch",
        "hangs",
        Severity.CRITICAL,
        "Ranks call different collectives at the same place of a group's sequence",
        "Make the order of collectives equal on all ranks: look for a branch that depends on rank or data.",
        Trait.DISAGREEMENT | Trait.SEEN,
    ),
    (
        "dtype-mismatch",
        "hangs",
        Severity.CRITICAL,
        "Ranks call the same collective with different element types",
        "Cast to one type before this call; look for autocast or a buffer created on some ranks only.",
        Trait.DISAGREEMENT | Trait.SEEN,
    ),
    (
        "shape-mismatch",
        "hangs",
        Severity.CRITICAL,
        "Ranks call the same collective with different shapes",
        "Print the tensor's shape at this line; usually a last batch of another size or a rank-dependent padding.",
        Trait.DISAGREEMENT | Trait.SEEN,
    ),
    (
        "reduce-op-mismatch",
        "hangs",
        Severity.CRITICAL,
        "Ranks reduce with different operations",
        "Nothing raises here and the result is wrong: use one ReduceOp on all ranks.",
        Trait.GOES_ON,
    ),
    (
        "rank-oom-killed",
        "hangs",
        Severity.CRITICAL,
        "The kernel killed a rank for its memory",
        "Lower host memory: fewer loader workers, smaller buffers, or a larger limit for the container.",
        Trait.ENDING | Trait.TRANSIENT,
    ),
    (
        "uncaught-exception",
        "hangs",
        Severity.CRITICAL,
        "An exception ended a rank",
        "Fix the exception at the line shown; what the other ranks report is its consequence.",
        Trait.ENDING,
    ),
    (
        "rank-dead",
        "hangs",
        Severity.CRITICAL,
        "A rank's process is gone without a word",
        "Look at the host's kernel log and at the scheduler for who killed it; restart from the last checkpoint.",
        Trait.ENDING | Trait.AFTERMATH | Trait.TRANSIENT,
    ),
    (
        "rank-exited-early",
        "hangs",
        Severity.CRITICAL,
        "A rank finished while its peers still train",
        "See what ended this rank's loop: a shard shorter than those of others (drop_last, Join), or a condition that"
        " each rank decides by itself (early stop, NaN, time limit), which all must decide together.",
        Trait.ENDING | Trait.AFTERMATH | Trait.DEADLOCK | Trait.SEEN,
    ),
    (
        "rank-stopped",
        "hangs",
        Severity.CRITICAL,
        "A rank's process is suspended",
        "Resume it with `kill -CONT PID`, and find who stopped it (a debugger, a job-control key, a scheduler).",
        Trait.RECOVERABLE | Trait.SEEN | Trait.SAYS_WHY | Trait.TRANSIENT,
    ),
    (
        "gil-held",
        "hangs",
        Severity.CRITICAL,
        "Native code holds a rank's Python lock",
        "The stack names the call into native code: see whether what it waits for answers (storage, a pipe, a server),"
        " and release the GIL there, or move the call to a process of its own.",
        Trait.RECOVERABLE | Trait.SEEN | Trait.SAYS_WHY,
    ),
    (
        "stuck-in-dataloader",
        "hangs",
        Severity.CRITICAL,
        "A rank waits for its data while its peers wait for it",
        "Check the storage and the data-loader workers of this rank's host; give the loader a timeout.",
        Trait.RECOVERABLE | Trait.SAYS_WHY,
    ),
    (
        "stuck-in-checkpoint",
        "hangs",
        Severity.CRITICAL,
        "A rank does not come back from writing or reading a checkpoint",
        "Check the checkpoint storage from this rank's host; write a small file there and time it.",
        Trait.RECOVERABLE | Trait.SAYS_WHY,
    ),
    (
        "rendezvous-incomplete",
        "hangs",
        Severity.CRITICAL,
        "The process group never comes about: ranks are missing at the rendezvous",
        "Look at the ranks that do not come: their hosts' launchers and logs, and the line where they are; check that "
        "MASTER_ADDR and MASTER_PORT are reachable from them.",
        Trait.DEADLOCK | Trait.TRANSIENT,
    ),
    (
        "nccl-init-stuck",
        "hangs",
        Severity.CRITICAL,
        "An NCCL communicator never came about",
        "Look at the ranks that do not begin; check NCCL_SOCKET_IFNAME and the firewall between the hosts; run "
        "`dtobs preflight`.",
        Trait.MACHINE,
    ),
    (
        "p2p-unmatched",
        "hangs",
        Severity.CRITICAL,
        "A send or a receive has no other half",
        "Compare peers, tags and the order of sends and receives on the ranks named (schedule, batch_isend_irecv).",
        Trait.DEADLOCK | Trait.SEEN,
    ),
    (
        "group-deadlock",
        "hangs",
        Severity.CRITICAL,
        "Ranks wait for each other in a circle across process groups",
        "Look for a call that only some of these ranks make (a branch on the rank), and issue the collectives of "
        "different groups in one order on all of them.",
        Trait.DEADLOCK | Trait.SEEN,
    ),
    (
        "rank-not-joined",
        "hangs",
        Severity.CRITICAL,
        "A rank never issued the collective that its peers wait in",
        "Look at the line this rank is at: code that only some ranks run, or that takes very long there.",
        Trait.RECOVERABLE,
    ),
    (
        "device-stopped",
        "hangs",
        Severity.CRITICAL,
        "A rank issued a collective and its device does not get to it",
        "Look at this rank's device (nvidia-smi, Xid lines in the kernel log) and at the kernels queued before.",
        Trait.DEADLOCK | Trait.SAYS_WHY | Trait.MACHINE,
    ),
    (
        "dumps-missing",
        "hangs",
        Severity.WARNING,
        "Ranks wait, and the dumps that would say for what are missing",
        "Collect the dumps of the ranks named, or look at these ranks' own logs: nothing accuses them yet.",
        Trait.TRANSIENT,
    ),
    (
        "network-stalled",
        "hangs",
        Severity.CRITICAL,
        "All ranks issued the collective and none completes it",
        "Check the links between the hosts of this group; run `dtobs preflight`.",
        Trait.RECOVERABLE | Trait.MACHINE,
    ),
    (
        "no-progress",
        "hangs",
        Severity.WARNING,
        "Ranks stand still in the midst of training, and none of them waits for another",
        "Look at the line shown and at what it waits for; where it is meant to wait there: with session.pause().",
        Trait.RECOVERABLE,
    ),
    *silent_codes.ROWS,
    # performance
    *(
        (name, "performance", Severity.WARNING, title, step, Trait.NONE, name if name in EXPECTATIONS else "")
        for name, title, step in _LOST_TIME
    ),
    (
        "slow-link",
        "performance",
        Severity.WARNING,
        "Transfers take longer than others of their kind",
        "Measure the links of the ranks named with `dtobs preflight`; look at their network interfaces and switches.",
        Trait.MACHINE,
    ),
    (
        "transport-fallback",
        "performance",
        Severity.WARNING,
        "NCCL fell back to a slower transport without an error",
        "Look at NCCL_DEBUG=INFO of the hosts named: drivers, libibverbs or the network plugin are missing there.",
        Trait.MACHINE,
    ),
)

CATALOGUE: dict[str, Code] = {row[0]: replace(Code(*row), order=order) for order, row in enumerate(_ROWS)}
"""Every code that a run may be found of, by name."""

_PREFLIGHT: tuple[tuple[str, Family, Severity, str, str], ...] = (
    ("rank-silent", "hangs", Severity.CRITICAL, "A rank has given no sign of life",
     "Look at this host: is it loaded, out of memory, or is the process suspended?"),
    ("rank-died", "hangs", Severity.CRITICAL, "A rank's process ended",
     "Look at the lines it printed, and at the host's kernel log (dmesg) for a kill."),
    ("not-finished", "hangs", Severity.CRITICAL, "A stage of the check did not end",
     "A stage that hangs here hangs the run as well: look at the links and interfaces of the hosts named."),
    ("unreachable", "hangs", Severity.CRITICAL, "Hosts do not reach each other",
     "Let the hosts connect to each other on all ports (firewall, security group), over the interface of the job."),
    ("wrong-values", "silent", Severity.CRITICAL, "Collectives or transfers give wrong values",
     "Take this host out of the job; test its memory and devices (memtest, dcgmi diag -r 3)."),
    ("clock-skew", "silent", Severity.WARNING, "The clock of a host is off",
     "Let chrony or systemd-timesyncd keep the clocks of all hosts: logs and traces are put in order by them."),
    ("environment", "silent", Severity.WARNING, "A variable of the environment is set to what hurts", ""),
    ("environment-differs", "silent", Severity.WARNING, "A variable of the environment is not the same everywhere",
     "Set it in the one place that every rank's environment comes from, or nowhere."),
    ("version-mismatch", "silent", Severity.WARNING, "A package is not of one version everywhere",
     "Install one version on all hosts."),
    ("slow-host", "performance", Severity.WARNING, "A host sends, receives or answers far slower than the others",
     "Look at this host's network card, cable and switch port (ethtool), and at what else uses them."),
    ("disk", "performance", Severity.WARNING, "The folder of the runs is full, slow, or cannot be written",
     "Make room for checkpoints, or name another folder with --run-dir."),
    ("open-files", "hangs", Severity.WARNING, "Too few files may be open at once", ""),
    ("memlock", "hangs", Severity.WARNING, "Too little memory may be locked", ""),
    ("shared-memory", "hangs", Severity.WARNING, "There is too little shared memory", ""),
)  # fmt: skip
PREFLIGHT: dict[str, Code] = {row[0]: Code(*row) for row in _PREFLIGHT}
"""What only the check of the machines before a run finds; it uses codes of the catalogue as well."""

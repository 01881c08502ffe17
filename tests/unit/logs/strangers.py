"""Excerpts as people paste them who ask for help: the forms of many launchers and versions, with figures of our own.

Each row is a name, the text and the answer: a code with its ranks, None where nothing may be found.
"""

from __future__ import annotations

Answer = tuple[str, tuple[int, ...]] | None
ROWS: list[tuple[str, str, Answer]] = []

REST = (
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
    "operations might run on corrupted/incomplete data."
)


def row(name: str, text: str, answer: Answer) -> None:
    """Add one."""
    ROWS.append((name, text.strip("\n") + "\n", answer))


def late(
    rank: int, seq: int, op: str = "ALLREDUCE", nin: int = 512, nout: int = 0, ms: int = 600000, head: str = ""
) -> str:
    head = head or f"[rank{rank}]:[E614 09:12:0{rank % 10}.318 ProcessGroupNCCL.cpp:629] "
    return (
        f"{head}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, "
        f"NumelIn={nin}, NumelOut={nout or nin}, Timeout(ms)={ms}) ran for {ms + 31 + rank} milliseconds before timing out."
    )


def status(rank: int, seq: int, issued: int, done: int, group: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E614 09:12:0{rank % 10}.319 ProcessGroupNCCL.cpp:1785] [{group} Rank {rank}] Exception (either an "
        f"error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: {issued}, last completed NCCL "
        f"work: {done}."
    )


def table(*failed: tuple[int, int, str], host: str = "trainer-3") -> str:
    """torchrun's table: (rank, exit code, what it says of the traceback), the last is the "root cause"."""
    entry = (
        "[{0}]:\n  time      : 2025-06-14_09:12:55\n  host      : {1}\n  rank      : {2} (local_rank: {2})\n"
        "  exitcode  : {3} (pid: {4})\n  error_file: <N/A>\n  traceback : {5}"
    )
    rows = [entry.format(n, host, rank, code, 9000 + rank, text) for n, (rank, code, text) in enumerate(failed)]
    others = "\n".join(rows[:-1]) or "  <NO_OTHER_FAILURES>"
    return "\n".join(
        [
            "Traceback (most recent call last):",
            '  File "/opt/venv/bin/torchrun", line 8, in <module>',
            "    sys.exit(main())",
            '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 892, in main',
            "    run(args)",
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
            "=" * 60, "fit.py FAILED", "-" * 60, "Failures:", others, "-" * 60,
            "Root Cause (first observed failure):", rows[-1], "=" * 60,
        ]
    )  # fmt: skip


NO_TRACE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def trace(site: str, error: str, rank: int | None = None) -> str:
    lead = "" if rank is None else f"[rank{rank}]: "
    lines = [
        "Traceback (most recent call last):",
        f'  File "/data/ana/{site.split(":")[0]}", line {site.split(":")[1]}, in fit',
        "    run()",
        *error.split("\n"),
    ]
    return "\n".join(lead + line for line in lines)


# --- the watchdog of NCCL ---
row(
    "a quoted answer of a mailing list",
    "\n".join(f"> {late(r, 1412)}\n> {status(r, 1412, 1414, 1411, 'PG ID 1 PG GUID 1')}" for r in range(4)),
    ("network-stalled", ()),
)
row(
    "all eight ranks wait in the same reduce-scatter",
    "\n".join(
        late(r, 7753, "_REDUCE_SCATTER_BASE", 544997376, 68124672)
        + "\n"
        + status(r, 7753, 7755, 7752, "PG ID 0 PG GUID 0(default_pg)")
        for r in range(8)
    ),
    ("network-stalled", ()),
)
row(
    "torch 1.9 without sequence numbers",
    f"[E ProcessGroupNCCL.cpp:325] {REST} To avoid this inconsistency, we are taking the entire process down.\n"
    "terminate called after throwing an instance of 'std::runtime_error'\n"
    "  what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1804127 milliseconds before timing out.",
    ("dumps-missing", ()),
)
row(
    "several groups without names, some ranks only",
    "\n".join(
        f"[E ProcessGroupNCCL.cpp:828] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={s}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 60{s % 9}565 milliseconds before timing out."
        for r, s in ((3, 41), (0, 263), (0, 1104), (0, 1801))
    ),
    ("dumps-missing", ()),
)
row(
    "one node of many",
    "\n".join(
        late(r, 1559, "_REDUCE_SCATTER_BASE", 3121908768, 32519883, 1800000, "> [E ProcessGroupNCCL.cpp:481] ")
        for r in range(64, 72)
    ),
    ("dumps-missing", tuple(range(64))),
)
row(
    "the last started work stands between the two",
    "\n".join(
        f"[rank{r}]:[E105 11:00:0{r}.1 ProcessGroupNCCL.cpp:2190] [PG ID 0 PG GUID 0(default_pg) Rank {r}] failure detected by watchdog at work sequence id: {s} PG status: last enqueued work: {q}, last started work: {s}, last completed work: {s - 1}"
        for r, s, q in ((0, 88, 90), (1, 88, 90), (3, 88, 90))
    )
    + "\n[rank2]:[E105 11:00:02.1 ProcessGroupNCCL.cpp:1810] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 87, last started NCCL work: 87, last completed NCCL work: 87.",
    ("rank-not-joined", (2,)),
)
row(
    "a table of desynchronised ranks",
    """
[E ProcessGroupNCCL.cpp:1022]
\t - [Rank 4] timeout at collective: ALLREDUCE, #5121 (count from 1)
\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
\t     [2] finished collective #5120, but didn't join collective #5121 (count from 1)
\t - Snapshot of ranks' latest states:
\t   #5121 started ranks:
\t     [0, 1, 3, 4, 5, 6, 7] started ALLREDUCE
\t   #5120 finished ranks:
\t     [2] finished ALLREDUCE
""",
    ("rank-not-joined", (2,)),
)
row(
    "ranks that never joined",
    "[E ProcessGroupNCCL.cpp:1022]\n\t - To our best knowledge, ranks [5, 6] are the lagging ranks that caused this timeout. They never joined any collectives\n"
    + "\n".join(late(r, 1, "BROADCAST") for r in (0, 1, 2, 3, 4, 7)),
    ("rank-not-joined", (5, 6)),
)
row(
    "a broadcast met an all-reduce",
    "\n".join([late(0, 310, "ALLGATHER", 1, 4), *(late(r, 310, "ALLREDUCE", 4096) for r in (1, 2, 3))]),
    ("collective-mismatch", (0,)),
)
row(
    "an unfinished epoch of one rank",
    "Epoch 3:  99%|#########9| 1238/1240 [21:02<00:02, 1.02s/it]\n"
    + "\n".join(late(r, 24105) + "\n" + status(r, 24105, 24107, 24104) for r in (0, 1, 2))
    + "\n[rank3]:[E614 09:12:01.1 ProcessGroupNCCL.cpp:1430] [PG ID 0 PG GUID 0(default_pg) Rank 3] Received a dump signal due to a collective timeout from rank 1 and we will try our best to dump the debug info. Last enqueued NCCL work: 24104, last completed NCCL work: 24104.",
    ("rank-not-joined", (3,)),
)
row(
    "the watchdog itself hangs",
    "\n".join(
        f"[rank{r}]:[E429 13:55:4{r}.38 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {r}] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, and could be triggered by another thread holding the GIL inside a CUDA api (for example, CudaEventDestroy), or other deadlock-prone behaviors.If you suspect the watchdog is not actually stuck and a longer timeout would help, you can either increase the timeout (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC) to a larger value or disable the heartbeat monitor (TORCH_NCCL_ENABLE_MONITORING=0).If either of aforementioned helps, feel free to file an issue to PyTorch about the short timeout or false positive abort; otherwise, please attempt to debug the hang."
        for r in (2, 4)
    )
    + "\n[rank2]:[F429 14:03:49.38 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) Rank 2] [PG ID 0 PG GUID 0(default_pg) Rank 2] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.\n"
    "[rank: 2] Child process with PID 13117 terminated with code -6. Forcefully terminating all other processes to avoid zombies 🧟\nKilled",
    ("network-stalled", ()),
)
row(
    "one rank raised and the others waited for it",
    trace("data.py:77", "KeyError: 'image_0042'", 2)
    + "\n"
    + "\n".join(late(r, 612) + "\n" + status(r, 612, 614, 611) for r in (0, 1, 3))
    + "\n"
    + table(
        (0, -6, "Signal 6 (SIGABRT) received by PID 9000"),
        (1, -6, "Signal 6 (SIGABRT) received by PID 9001"),
        (2, 1, NO_TRACE),
    ),
    ("uncaught-exception", (2,)),
)
row(
    "Gloo beside NCCL",
    "    work.wait()\nRuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete\n"
    + late(0, 404, "_ALLGATHER_BASE", 513, 2052, 1800000) + "\n" + status(0, 404, 404, 403)
    + "\nW1112 23:34:29.122000 2366719 site-packages/torch/distributed/elastic/multiprocessing/api.py:897] Sending process 2366797 closing signal SIGTERM",
    ("group-deadlock", (0,)),
)  # fmt: skip
# --- Gloo ---
row(
    "Gloo waits, and nobody says who",
    trace(
        "ema.py:40",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:136] Timed out waiting 1800000ms for send operation to complete",
    ),
    ("network-stalled", ()),
)
row(
    "Gloo: a rank has gone",
    trace(
        "train.py:12",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.0.4]:53210",
        0,
    )
    + "\n"
    + table((0, 1, NO_TRACE), (1, -9, "Signal 9 (SIGKILL) received by PID 9001")),
    ("rank-dead", (1,)),
)
row(
    "monitored barrier",
    "[E ProcessGroupGloo.cpp:138] [Rank 0]: Rank 3 failed to pass monitoredBarrier in 30000 ms\n"
    + trace("main.py:9", "RuntimeError: [Rank 0]: Ranks 3 failed to pass monitoredBarrier in 30000 ms", 0),
    ("rank-not-joined", (3,)),
)
# --- launchers ---
row(
    "bus errors",
    table((1, -7, "Signal 7 (SIGBUS) received by PID 9001"), (0, -7, "Signal 7 (SIGBUS) received by PID 9000")),
    ("rank-dead", (0, 1)),
)
row(
    "a table that says nothing of why",
    table((7, 1, NO_TRACE), (6, 1, NO_TRACE), host="localhost.localdomain"),
    ("rank-dead", (6, 7)),
)
row(
    "an argument that is not known",
    "usage: fit.py [-h] [--lr LR]\nfit.py: error: unrecognized arguments: --local-rank=1\nusage: fit.py [-h] [--lr LR]\nfit.py: error: unrecognized arguments: --local-rank=0\n"
    + table((1, 2, NO_TRACE), (0, 2, NO_TRACE)),
    ("uncaught-exception", (0, 1)),
)
row(
    "DeepSpeed was killed",
    "[2025-04-14 13:11:27,879] [INFO] [launch.py:428:sigkill_handler] Killing subprocess 13266\n"
    "[2025-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py', '--local_rank=3', '--deepspeed', 'zero3.json'] exits with return code = -9",
    ("rank-dead", ()),
)
row(
    "DeepSpeed's ranks fail by themselves",
    trace("sft.py:210", "ValueError: Target modules ['q_proj'] not found in the base model") + "\n"
    "[2025-07-20 15:45:13,980] [INFO] [launch.py:315:sigkill_handler] Killing subprocess 3966\n"
    "[2025-07-20 15:45:13,982] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python3', '-u', 'sft.py', '--local_rank=1'] exits with return code = 1",
    ("uncaught-exception", ()),
)
row(
    "Lightning's child is killed",
    "Epoch 3: 69%|######9| 2314/3351 [11:02<04:58, 3.47it/s, v_num=2, train_loss=0.41]\n"
    "INFO: [rank: 1] Child process with PID 9487 terminated with code -9. Forcefully terminating all other processes to avoid zombies 🧟\n"
    "/var/spool/slurmd/job191/slurm_script: line 28:  2504 Killed                  python train.py",
    ("rank-dead", (1,)),
)
row(
    "mpirun noticed",
    "-" * 20
    + "\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction, the job has been aborted.\n"
    + "-" * 20
    + "\nmpirun noticed that process rank 7 with PID 0 on node gpu-b12 exited on signal 9 (Killed).\n"
    + "-" * 20,
    ("rank-dead", (7,)),
)
row(
    "mpirun detected",
    "mpirun detected that one or more processes exited with non-zero status, thus causing\nthe job to be terminated. The first process to do so was:\n\n  Process name: [[29973,1],3]\n  Exit code:    1",
    ("rank-dead", (3,)),
)
row(
    "a hung-up terminal",
    "W1019 02:11:55.1 311 torch/distributed/elastic/agent/server/api.py:704] Received 1 death signal, shutting down workers\n"
    "W1019 02:11:55.1 311 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 377 closing signal SIGHUP\n"
    + trace("x.py:1", "torch.distributed.elastic.multiprocessing.api.SignalException: Process 311 got signal: 1"),
    None,
)
row(
    "a port that is taken",
    "[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n"
    "[W socket.cpp:464] [c10d] The server socket has failed to bind to 0.0.0.0:29500 (errno: 98 - Address already in use).\n"
    "[E socket.cpp:500] [c10d] The server socket has failed to listen on any local network address.\n"
    "Traceback (most recent call last):\n"
    '  File "/usr/local/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
    '  File "/usr/local/lib/python3.11/dist-packages/torch/distributed/run.py", line 879, in main\n    run(args)\n'
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    ("rendezvous-incomplete", ()),
)
row(
    "a master that does not answer",
    "[W socket.cpp:601] [c10d] The client socket has failed to connect to [gpu-001]:29400 (errno: 111 - Connection refused).\n"
    + trace(
        "go.py:3",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60s while trying to connect to (gpu-001, 29400).",
    ),
    ("rendezvous-incomplete", ()),
)
row(
    "more processes than devices",
    trace(
        "fit.py:31",
        "RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        4,
    ),
    ("uncaught-exception", (4,)),
)
row(
    "a module that is not there",
    "\n".join(trace("fit.py:2", "ModuleNotFoundError: No module named 'flash_attn'") for _ in range(2))
    + "\n"
    + table((1, 1, NO_TRACE), (0, 1, NO_TRACE)),
    ("uncaught-exception", (0, 1)),
)
# --- memory ---
row(
    "device memory of one rank, unprefixed, with the table",
    trace(
        "eval.py:88",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.80 GiB is free. Process 4711 has 44.20 GiB memory in use. Including non-PyTorch memory, this process has 33.10 GiB memory in use.",
    )
    + "\n"
    + table((0, -15, "Signal 15 (SIGTERM) received by PID 9000"), (1, 1, NO_TRACE)),
    ("device-out-of-memory", (1,)),
)
row(
    "the cgroup's killer",
    "/var/spool/slurmd/job00377/slurm_script: line 28:  8156 Killed                  python3 main.py --epochs 400\n"
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=377.batch cgroup. Some of your processes may have been killed by the cgroup out-of-memory handler.",
    ("rank-oom-killed", ()),
)
row(
    "srun says which tasks",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks have been OOM Killed.\n"
    "srun: error: nid001277: tasks 1-3: Out Of Memory\nsrun: Terminating StepId=440575.0\n"
    "slurmstepd: error: *** STEP 440575.0 ON nid001277 CANCELLED AT 2025-12-05T07:16:01 ***",
    ("rank-oom-killed", (1, 2, 3)),
)
row(
    "the shared memory of a container",
    trace(
        "loop.py:5",
        "RuntimeError: DataLoader worker (pid 2211) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        0,
    ),
    ("disk-full", (0,)),
)
row(
    "a checkpoint that did not fit",
    trace("save.py:17", "OSError: [Errno 28] No space left on device", 0)
    + "\n"
    + "\n".join(late(r, 900) for r in (1, 2, 3)),
    ("disk-full", (0,)),
)
# --- devices ---
row(
    "off the bus, in three lines",
    "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0\n               NVRM: (PCI ID: 10de:26b5) installed in this system has\n               NVRM: fallen off the bus and is not responding to commands.",
    ("device-fault", ()),
)
row(
    "Xid of the kernel's log beside a hang",
    "Sep 28 23:34:26 gpu-17 kernel: NVRM: Xid (PCI:0000:c1:00): 94, pid=4122, name=python, Contained: SM (0x1). RST: No, D-RST: No\n"
    + "\n".join(late(r, 12) for r in range(4)),
    ("device-fault", ()),
)
row(
    "no fabric manager",
    trace(
        "t.py:20",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 802 'system not yet initialized'",
        2,
    ),
    ("device-fault", (2,)),
)
row(
    "an illegal address, and who met it",
    "[rank3]:[E610 10:00:01.1 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n"
    + trace(
        "fit.py:90",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2006, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        1,
    ),
    ("illegal-address", (3,)),
)
row(
    "an index out of range on the device",
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1255: indexSelectSmallIndex: block: [3,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    + trace(
        "model.py:44",
        "RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        1,
    ),
    ("uncaught-exception", (1,)),
)

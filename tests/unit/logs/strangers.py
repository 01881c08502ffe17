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


def _row(name: str, text: str, answer: Answer) -> None:
    ROWS.append((name, text.strip("\n") + "\n", answer))


def _late(
    rank: int, seq: int, op: str = "ALLREDUCE", nin: int = 512, nout: int = 0, ms: int = 600000, head: str = ""
) -> str:
    head = head or f"[rank{rank}]:[E614 09:12:0{rank % 10}.318 ProcessGroupNCCL.cpp:629] "
    return (
        f"{head}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, "
        f"NumelIn={nin}, NumelOut={nout or nin}, Timeout(ms)={ms}) ran for {ms + 31 + rank} milliseconds before timing out."
    )


def _status(rank: int, seq: int, issued: int, done: int, group: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E614 09:12:0{rank % 10}.319 ProcessGroupNCCL.cpp:1785] [{group} Rank {rank}] Exception (either an "
        f"error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: {issued}, last completed NCCL "
        f"work: {done}."
    )


def _table(*failed: tuple[int, int, str], host: str = "trainer-3") -> str:
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


def _trace(site: str, error: str, rank: int | None = None) -> str:
    lead = "" if rank is None else f"[rank{rank}]: "
    lines = [
        "Traceback (most recent call last):",
        f'  File "/data/ana/{site.split(":")[0]}", line {site.split(":")[1]}, in fit',
        "    run()",
        *error.split("\n"),
    ]
    return "\n".join(lead + line for line in lines)


# --- the watchdog of NCCL ---
_row(
    "a quoted answer of a mailing list",
    "\n".join(f"> {_late(r, 1412)}\n> {_status(r, 1412, 1414, 1411, 'PG ID 1 PG GUID 1')}" for r in range(4)),
    ("network-stalled", ()),
)
_row(
    "all eight ranks wait in the same reduce-scatter",
    "\n".join(
        _late(r, 7753, "_REDUCE_SCATTER_BASE", 544997376, 68124672)
        + "\n"
        + _status(r, 7753, 7755, 7752, "PG ID 0 PG GUID 0(default_pg)")
        for r in range(8)
    ),
    ("network-stalled", ()),
)
_row(
    "torch 1.9 without sequence numbers",
    f"[E ProcessGroupNCCL.cpp:325] {REST} To avoid this inconsistency, we are taking the entire process down.\n"
    "terminate called after throwing an instance of 'std::runtime_error'\n"
    "  what():  [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1804127 milliseconds before timing out.",
    ("dumps-missing", ()),
)
_row(
    "several groups without names, some ranks only",
    "\n".join(
        f"[E ProcessGroupNCCL.cpp:828] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={s}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 60{s % 9}565 milliseconds before timing out."
        for r, s in ((3, 41), (0, 263), (0, 1104), (0, 1801))
    ),
    ("dumps-missing", ()),
)
_row(
    "one node of many",
    "\n".join(
        _late(r, 1559, "_REDUCE_SCATTER_BASE", 3121908768, 32519883, 1800000, "> [E ProcessGroupNCCL.cpp:481] ")
        for r in range(64, 72)
    ),
    ("dumps-missing", tuple(range(64))),
)
_row(
    "the last started work stands between the two",
    "\n".join(
        f"[rank{r}]:[E105 11:00:0{r}.1 ProcessGroupNCCL.cpp:2190] [PG ID 0 PG GUID 0(default_pg) Rank {r}] failure detected by watchdog at work sequence id: {s} PG status: last enqueued work: {q}, last started work: {s}, last completed work: {s - 1}"
        for r, s, q in ((0, 88, 90), (1, 88, 90), (3, 88, 90))
    )
    + "\n[rank2]:[E105 11:00:02.1 ProcessGroupNCCL.cpp:1810] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last enqueued NCCL work: 87, last started NCCL work: 87, last completed NCCL work: 87.",
    ("rank-not-joined", (2,)),
)
_row(
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
_row(
    "ranks that never joined",
    "[E ProcessGroupNCCL.cpp:1022]\n\t - To our best knowledge, ranks [5, 6] are the lagging ranks that caused this timeout. They never joined any collectives\n"
    + "\n".join(_late(r, 1, "BROADCAST") for r in (0, 1, 2, 3, 4, 7)),
    ("rank-not-joined", (5, 6)),
)
_row(
    "a broadcast met an all-reduce",
    "\n".join([_late(0, 310, "ALLGATHER", 1, 4), *(_late(r, 310, "ALLREDUCE", 4096) for r in (1, 2, 3))]),
    ("collective-mismatch", (0,)),
)
_row(
    "an unfinished epoch of one rank",
    "Epoch 3:  99%|#########9| 1238/1240 [21:02<00:02, 1.02s/it]\n"
    + "\n".join(_late(r, 24105) + "\n" + _status(r, 24105, 24107, 24104) for r in (0, 1, 2))
    + "\n[rank3]:[E614 09:12:01.1 ProcessGroupNCCL.cpp:1430] [PG ID 0 PG GUID 0(default_pg) Rank 3] Received a dump signal due to a collective timeout from rank 1 and we will try our best to dump the debug info. Last enqueued NCCL work: 24104, last completed NCCL work: 24104.",
    ("rank-not-joined", (3,)),
)
_row(
    "the watchdog itself hangs",
    "\n".join(
        f"[rank{r}]:[E429 13:55:4{r}.38 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {r}] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, and could be triggered by another thread holding the GIL inside a CUDA api (for example, CudaEventDestroy), or other deadlock-prone behaviors.If you suspect the watchdog is not actually stuck and a longer timeout would help, you can either increase the timeout (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC) to a larger value or disable the heartbeat monitor (TORCH_NCCL_ENABLE_MONITORING=0).If either of aforementioned helps, feel free to file an issue to PyTorch about the short timeout or false positive abort; otherwise, please attempt to debug the hang."
        for r in (2, 4)
    )
    + "\n[rank2]:[F429 14:03:49.38 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) Rank 2] [PG ID 0 PG GUID 0(default_pg) Rank 2] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.\n"
    "[rank: 2] Child process with PID 13117 terminated with code -6. Forcefully terminating all other processes to avoid zombies 🧟\nKilled",
    ("network-stalled", ()),
)
_row(
    "one rank raised and the others waited for it",
    _trace("data.py:77", "KeyError: 'image_0042'", 2)
    + "\n"
    + "\n".join(_late(r, 612) + "\n" + _status(r, 612, 614, 611) for r in (0, 1, 3))
    + "\n"
    + _table(
        (0, -6, "Signal 6 (SIGABRT) received by PID 9000"),
        (1, -6, "Signal 6 (SIGABRT) received by PID 9001"),
        (2, 1, NO_TRACE),
    ),
    ("uncaught-exception", (2,)),
)
_row(
    "Gloo beside NCCL",
    "    work.wait()\nRuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete\n"
    + _late(0, 404, "_ALLGATHER_BASE", 513, 2052, 1800000) + "\n" + _status(0, 404, 404, 403)
    + "\nW1112 23:34:29.122000 2366719 site-packages/torch/distributed/elastic/multiprocessing/api.py:897] Sending process 2366797 closing signal SIGTERM",
    ("group-deadlock", (0,)),
)  # fmt: skip
# --- Gloo ---
_row(
    "Gloo waits, and nobody says who",
    _trace(
        "ema.py:40",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:136] Timed out waiting 1800000ms for send operation to complete",
    ),
    ("network-stalled", ()),
)
_row(
    "Gloo: a rank has gone",
    _trace(
        "train.py:12",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.1.0.4]:53210",
        0,
    )
    + "\n"
    + _table((0, 1, NO_TRACE), (1, -9, "Signal 9 (SIGKILL) received by PID 9001")),
    ("rank-dead", (1,)),
)
_row(
    "monitored barrier",
    "[E ProcessGroupGloo.cpp:138] [Rank 0]: Rank 3 failed to pass monitoredBarrier in 30000 ms\n"
    + _trace("main.py:9", "RuntimeError: [Rank 0]: Ranks 3 failed to pass monitoredBarrier in 30000 ms", 0),
    ("rank-not-joined", (3,)),
)
# --- launchers ---
_row(
    "bus errors",
    _table((1, -7, "Signal 7 (SIGBUS) received by PID 9001"), (0, -7, "Signal 7 (SIGBUS) received by PID 9000")),
    ("rank-dead", (0, 1)),
)
_row(
    "a table that says nothing of why",
    _table((7, 1, NO_TRACE), (6, 1, NO_TRACE), host="localhost.localdomain"),
    ("rank-dead", (6, 7)),
)
_row(
    "an argument that is not known",
    "usage: fit.py [-h] [--lr LR]\nfit.py: error: unrecognized arguments: --local-rank=1\nusage: fit.py [-h] [--lr LR]\nfit.py: error: unrecognized arguments: --local-rank=0\n"
    + _table((1, 2, NO_TRACE), (0, 2, NO_TRACE)),
    ("rank-dead", (0, 1)),
)
_row(
    "DeepSpeed was killed",
    "[2025-04-14 13:11:27,879] [INFO] [launch.py:428:sigkill_handler] Killing subprocess 13266\n"
    "[2025-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', 'main.py', '--local_rank=3', '--deepspeed', 'zero3.json'] exits with return code = -9",
    ("rank-dead", ()),
)
_row(
    "DeepSpeed's ranks fail by themselves",
    _trace("sft.py:210", "ValueError: Target modules ['q_proj'] not found in the base model") + "\n"
    "[2025-07-20 15:45:13,980] [INFO] [launch.py:315:sigkill_handler] Killing subprocess 3966\n"
    "[2025-07-20 15:45:13,982] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python3', '-u', 'sft.py', '--local_rank=1'] exits with return code = 1",
    ("uncaught-exception", ()),
)
_row(
    "Lightning's child is killed",
    "Epoch 3: 69%|######9| 2314/3351 [11:02<04:58, 3.47it/s, v_num=2, train_loss=0.41]\n"
    "INFO: [rank: 1] Child process with PID 9487 terminated with code -9. Forcefully terminating all other processes to avoid zombies 🧟\n"
    "/var/spool/slurmd/job191/slurm_script: line 28:  2504 Killed                  python train.py",
    ("rank-dead", (1,)),
)
_row(
    "mpirun noticed",
    "-" * 20
    + "\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction, the job has been aborted.\n"
    + "-" * 20
    + "\nmpirun noticed that process rank 7 with PID 0 on node gpu-b12 exited on signal 9 (Killed).\n"
    + "-" * 20,
    ("rank-dead", (7,)),
)
_row(
    "mpirun detected",
    "mpirun detected that one or more processes exited with non-zero status, thus causing\nthe job to be terminated. The first process to do so was:\n\n  Process name: [[29973,1],3]\n  Exit code:    1",
    ("rank-dead", (3,)),
)
_row(
    "a hung-up terminal",
    "W1019 02:11:55.1 311 torch/distributed/elastic/agent/server/api.py:704] Received 1 death signal, shutting down workers\n"
    "W1019 02:11:55.1 311 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 377 closing signal SIGHUP\n"
    + _trace("x.py:1", "torch.distributed.elastic.multiprocessing.api.SignalException: Process 311 got signal: 1"),
    None,
)
_row(
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
_row(
    "a master that does not answer",
    "[W socket.cpp:601] [c10d] The client socket has failed to connect to [gpu-001]:29400 (errno: 111 - Connection refused).\n"
    + _trace(
        "go.py:3",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60s while trying to connect to (gpu-001, 29400).",
    ),
    ("rendezvous-incomplete", ()),
)
_row(
    "more processes than devices",
    _trace(
        "fit.py:31",
        "RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        4,
    ),
    ("uncaught-exception", (4,)),
)
_row(
    "a module that is not there",
    "\n".join(_trace("fit.py:2", "ModuleNotFoundError: No module named 'flash_attn'") for _ in range(2))
    + "\n"
    + _table((1, 1, NO_TRACE), (0, 1, NO_TRACE)),
    ("uncaught-exception", (0, 1)),
)
# --- memory ---
_row(
    "device memory of one rank, unprefixed, with the table",
    _trace(
        "eval.py:88",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.80 GiB is free. Process 4711 has 44.20 GiB memory in use. Including non-PyTorch memory, this process has 33.10 GiB memory in use.",
    )
    + "\n"
    + _table((0, -15, "Signal 15 (SIGTERM) received by PID 9000"), (1, 1, NO_TRACE)),
    ("device-out-of-memory", (1,)),
)
_row(
    "the cgroup's killer",
    "/var/spool/slurmd/job00377/slurm_script: line 28:  8156 Killed                  python3 main.py --epochs 400\n"
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=377.batch cgroup. Some of your processes may have been killed by the cgroup out-of-memory handler.",
    ("rank-oom-killed", ()),
)
_row(
    "srun says which tasks",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks have been OOM Killed.\n"
    "srun: error: nid001277: tasks 1-3: Out Of Memory\nsrun: Terminating StepId=440575.0\n"
    "slurmstepd: error: *** STEP 440575.0 ON nid001277 CANCELLED AT 2025-12-05T07:16:01 ***",
    ("rank-oom-killed", (1, 2, 3)),
)
_row(
    "the shared memory of a container",
    _trace(
        "loop.py:5",
        "RuntimeError: DataLoader worker (pid 2211) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
        0,
    ),
    ("disk-full", (0,)),
)
_row(
    "a checkpoint that did not fit",
    _trace("save.py:17", "OSError: [Errno 28] No space left on device", 0)
    + "\n"
    + "\n".join(_late(r, 900) for r in (1, 2, 3)),
    ("disk-full", (0,)),
)
# --- devices ---
_row(
    "off the bus, in three lines",
    "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0\n               NVRM: (PCI ID: 10de:26b5) installed in this system has\n               NVRM: fallen off the bus and is not responding to commands.",
    ("device-fault", ()),
)
_row(
    "Xid of the kernel's log beside a hang",
    "Sep 28 23:34:26 gpu-17 kernel: NVRM: Xid (PCI:0000:c1:00): 94, pid=4122, name=python, Contained: SM (0x1). RST: No, D-RST: No\n"
    + "\n".join(_late(r, 12) for r in range(4)),
    ("device-fault", ()),
)
_row(
    "no fabric manager",
    _trace(
        "t.py:20",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 802 'system not yet initialized'",
        2,
    ),
    ("device-fault", (2,)),
)
_row(
    "an illegal address, and who met it",
    "[rank3]:[E610 10:00:01.1 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n"
    + _trace(
        "fit.py:90",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2006, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        1,
    ),
    ("illegal-address", (3,)),
)
_row(
    "an index out of range on the device",
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1255: indexSelectSmallIndex: block: [3,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.\n"
    + _trace(
        "model.py:44",
        "RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        1,
    ),
    ("uncaught-exception", (1,)),
)
# --- NCCL itself ---
_row(
    "two processes bear one rank",
    "hpc-25-14:18569:18835 [0] bootstrap.cc:131 NCCL WARN Bootstrap Root : rank 1 of 8 ranks has already checked in",
    ("nccl-misuse", (1,)),
)
_row(
    "no way between the hosts",
    "n122:12251:12400 [5] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.3.7.21<17943> failed : Software caused connection abort\n"
    "n122:12251:12400 [5] NCCL INFO misc/socket.cc:564 -> 2\nn122:12251:12400 [5] NCCL INFO bootstrap.cc:270 -> 2\nn122:12251:12400 [5] NCCL INFO init.cc:1350 -> 2\n"
    + _trace(
        "m.py:8",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1251, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.1\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\nsocketStartConnect: Connect to 10.3.7.21<17943> failed : Software caused connection abort",
    ),
    ("nccl-init-stuck", ()),
)
_row(
    "a fabric that drops packets",
    "kp-worker-0:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.216.2.36<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fd00::22 remoteGidsfd00::1f\n"
    "kp-worker-0:3468:3905 [4] NCCL INFO transport/net.cc:1302 -> 6\nkp-worker-0:3468:3905 [4] NCCL INFO proxy.cc:878 -> 6 [Progress Thread]",
    ("network-stalled", ()),
)
_row(
    "locked memory is limited",
    "n7:551:612 [3] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory\n"
    + _trace(
        "m.py:8",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\nCall to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        3,
    ),
    ("network-stalled", (3,)),
)
# --- clusters ---
_row(
    "the time was over",
    "iteration 4100/ 9000 | elapsed time per iteration (ms): 1204.1 | lm loss: 2.101\nslurmstepd: error: *** JOB 881 ON gpu-3 CANCELLED AT 2025-06-14T09:12:55 DUE TO TIME LIMIT ***\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    None,
)
_row(
    "a node went away",
    "srun: error: Node failure on gpu-12\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    ("rank-dead", ()),
)
_row(
    "ray's worker died in a call",
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: 172.26.143.83 Worker PID: 833 Worker exit type: SYSTEM_ERROR\n"
    + "\n".join(f"(WorkerDict pid={800 + r}, ip=172.26.153.33) {_late(r, 41)}" for r in (60, 61, 62, 63)),
    ("dumps-missing", tuple(range(60))),
)
_row(
    "a pod without memory",
    "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n",
    ("rank-oom-killed", ()),
)
# --- more forms ---
_row(
    "vLLM puts its own words before every line of a traceback",
    "\n".join(
        f"ERROR 03-27 22:19:40 [core.py:367] {line}"
        for line in _trace(
            "worker.py:51",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 288.00 MiB. GPU 2 has a total capacity of 23.50 GiB of which 201.00 MiB is free.",
        ).splitlines()
    ),
    ("device-out-of-memory", ()),
)
_row(
    "NCCL names the rank around which calls differ",
    "node-1:39719:39719 [3] init.cc:1197 NCCL WARN Mismatched collective detected, please check your collective calls at and around rank 11. You can use NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL to see the collective logs",
    ("collective-mismatch", (11,)),
)
_row(
    "NCCL thinks that the program may hang",
    "node-1:39719:39719 [0] init.cc:1256 NCCL WARN Your program may be hanging, this may be caused by a collective mismatch around rank 1. Please check your collective calls at and around this rank.",
    ("collective-mismatch", (1,)),
)
_row(
    "fingerprints of other numbers",
    _trace(
        "bug.py:16",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=8OpType=BARRIER), but Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=7OpType=BARRIER).Collectives differ in the following aspects: \t Sequence number: 8vs 7",
        1,
    ),
    ("call-site-mismatch", (1, 2)),
)
_row(
    "an old fingerprint without the other side",
    _trace(
        "bug.py:16",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running inconsistent collective: CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[34112], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))",
        0,
    ),
    ("collective-mismatch", (0,)),
)
_row(
    "an old completion error",
    "n1:71:90 [2] transport/net_ib.cu:788 NCCL WARN NET/IB : Got completion with error 4, opcode 1, len 21938, vendor err 81",
    ("network-stalled", ()),
)
_row(
    "a segmentation fault in the table",
    "Fatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n"
    + _table((0, -11, "Signal 11 (SIGSEGV) received by PID 9000")),
    ("rank-dead", (0,)),
)
_row(
    "a line that a terminal broke",
    "[rank2]:[E1212 17:21:29.139 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 2] Process group watchdog thread terminated with exception: [Rank 2] Watchdog caught collective operation timeout: Work\nNCCL(SeqNum=1890, OpType=ALLGATHER, NumelIn=1, NumelOut=4, Timeout(ms)=1800000) ran for 1800022 milliseconds before timing out.",
    ("dumps-missing", ()),
)
_row(
    "the elder form of DistributedDataParallel's complaint",
    _trace(
        "fit.py:3",
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss. Parameter indices which did not receive grad for rank 1: 2 3",
        1,
    ),
    ("unused-parameters", (1,)),
)
_row(
    "sockets were closed in the first connection",
    "10-2-0-7:312:840 [1] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer 10-2-0-8<41032>\n"
    + _trace(
        "go.py:7",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2006, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer 10-2-0-8<41032>",
        1,
    ),
    None,
)
_row(
    "a pickle of a data loader's worker",
    _trace("data.py:9", "RuntimeError: DataLoader worker (pid(s) 3141, 3142) exited unexpectedly", 0),
    ("rank-oom-killed", (0,)),
)
_row(
    "a checkpoint of another shape on every rank",
    "\n".join(_trace("load.py:6", "RuntimeError: Error(s) in loading state_dict for Net:", r) for r in (0, 1))
    + "\n"
    + _table((1, 1, NO_TRACE), (0, 1, NO_TRACE)),
    ("uncaught-exception", (0, 1)),
)
_row(
    "too many open files",
    _trace("data.py:9", "OSError: [Errno 24] Too many open files: '/data/x.bin'", 3)
    + "\n"
    + "\n".join(_late(r, 77) for r in (0, 1, 2)),
    ("uncaught-exception", (3,)),
)
_row(
    "host memory that could not be had",
    _trace(
        "data.py:9",
        "RuntimeError: unable to mmap 67108864 bytes from file </torch_4711_77>: Cannot allocate memory (12)",
        2,
    ),
    ("uncaught-exception", (2,)),
)
_row(
    "an agent that lost its rendezvous",
    "[W socket.cpp:464] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97 - Address family not supported by protocol).\n"
    + _trace(
        "t.py:1",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.",
    ),
    ("rendezvous-incomplete", ()),
)
_row(
    "two of four nodes came",
    "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 2/4 clients joined.",
    ("rendezvous-incomplete", ()),
)
_row(
    "the store was asked for a key that nobody wrote",
    _trace(
        "t.py:1",
        "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
        3,
    ),
    ("nccl-init-stuck", (0,)),
)
_row(
    "the store's host went away",
    _trace(
        "t.py:1",
        "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer",
        3,
    )
    + "\n"
    + _table((3, 1, NO_TRACE), (0, -9, "Signal 9 (SIGKILL) received by PID 9000")),
    ("rank-dead", (0,)),
)
# --- nothing is wrong ---
for name, text in {
    "loss scaling": "\n".join([*(f"step {n} loss {3 - n / 50:.3f}" for n in range(40)), "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0", "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768", *(f"step {n} loss {3 - n / 50:.3f}" for n in range(40, 80))]),
    "Megatron": "\n".join(f" iteration {n:8d}/    9000 | consumed samples: {n * 64} | elapsed time per iteration (ms): 1204.{n % 10} | learning rate: 1.0E-04 | global batch size: 64 | lm loss: 2.10{n % 7}E+00 | loss scale: 1.0 | grad norm: 0.91 | number of skipped iterations: 0 | number of nan iterations: 0 |" for n in range(40)),
    "advice of torchrun": "WARNING:torch.distributed.run:\n*****************************************\nSetting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded, please further tune the variable for optimal performance in your application as needed. \n*****************************************\nstep 1 loss 2.0",
    "NCCL's start": "\n".join(f"gpu-1:{500 + r}:{700 + r} [{r}] NCCL INFO ncclCommInitRank comm 0x5584 rank {r} nranks 4 cudaDev {r} nvmlDev {r} busId e1000 commId 0xb886029f29f1a815 - Init {word}" for word in ("START", "COMPLETE") for r in range(4)) + "\ngpu-1:500:700 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so), using internal implementation\nstep 1 loss 2.0",
    "a leak of torch's at the end": "{'train_runtime': 812.1, 'train_samples_per_second': 9.8, 'train_loss': 1.02, 'epoch': 3.0}\n[rank0]:[W614 10:01:44.9 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed before we destruct ProcessGroupNCCL. On normal program exit, the application should call destroy_process_group to ensure that any pending NCCL operations have finished in this process. (function operator())",
    "what nvidia-smi prints": "| NVIDIA-SMI 525.105.17   Driver Version: 525.105.17   CUDA Version: 12.0     |\n| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |\n|   0  NVIDIA H800         On   | 00000000:06:00.0 Off |                    0 |\nstep 1 loss 2.0\nstep 2 loss 1.9",
    "settings that name faults": "max_restarts=3 monitor_interval=0.1 error_handling=True\nNCCL_ASYNC_ERROR_HANDLING=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000 timeout=1800\nNamespace(skip_on_oom=True, nan_check='error', retries=5, preempted_exit_code=75)\nstep 1 loss 2.0\nstep 2 loss 1.9",
    "an address family that is not there": "[W socket.cpp:663] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97 - Address family not supported by protocol).\nstep 1 loss 2.0\nstep 2 loss 1.9",
    "retries of a first connection": "[W socket.cpp:601] [c10d] The client socket has failed to connect to [gpu-001]:29400 (errno: 111 - Connection refused).\n[W socket.cpp:601] [c10d] The client socket has failed to connect to [gpu-001]:29400 (errno: 111 - Connection refused).\n" + "\n".join(f"step {n} loss {3 - n / 50:.3f}" for n in range(9)),
    "advice on unused parameters": "UserWarning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the forward pass. This flag results in an extra traversal of the autograd graph every iteration,  which can adversely affect performance.\nstep 1 loss 2.0",
    "a port of a dashboard": "ERROR: TensorBoard could not bind to port 6006, it was already in use\nOSError: [Errno 98] Address already in use; trying another one\nstep 1 loss 2.0\nstep 2 loss 1.9\nstep 3 loss 1.8",
    "an NCCL plugin that is not there": "gpu-1:500:700 [0] NCCL INFO NET/Plugin: Plugin load returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory : when loading libnccl-net.so\ngpu-1:500:700 [0] NCCL INFO NET/IB : No device found.\ngpu-1:500:700 [0] NCCL INFO Using network Socket\nstep 1 loss 2.0",
    "pytest": "tests/test_oom.py::test_cuda_out_of_memory PASSED\ntests/test_nccl.py::test_watchdog_timeout PASSED\n============ 41 passed in 12.10s ============",
}.items():  # fmt: skip
    _row(f"healthy: {name}", text, None)

"""More excerpts as people paste them: NCCL's own lines, clusters, rarer forms, and logs in which nothing is wrong."""

from __future__ import annotations

import json

from tests.unit.logs.strangers import NO_TRACE, late, row, table, trace

# --- NCCL itself ---
row(
    "two processes bear one rank",
    "hpc-25-14:18569:18835 [0] bootstrap.cc:131 NCCL WARN Bootstrap Root : rank 1 of 8 ranks has already checked in",
    ("nccl-misuse", (1,)),
)
row(
    "no way between the hosts",
    "n122:12251:12400 [5] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.3.7.21<17943> failed : Software caused connection abort\n"
    "n122:12251:12400 [5] NCCL INFO misc/socket.cc:564 -> 2\nn122:12251:12400 [5] NCCL INFO bootstrap.cc:270 -> 2\nn122:12251:12400 [5] NCCL INFO init.cc:1350 -> 2\n"
    + trace(
        "m.py:8",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1251, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.1\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\nsocketStartConnect: Connect to 10.3.7.21<17943> failed : Software caused connection abort",
    ),
    ("nccl-init-stuck", ()),
)
row(
    "a fabric that drops packets",
    "kp-worker-0:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.216.2.36<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fd00::22 remoteGidsfd00::1f\n"
    "kp-worker-0:3468:3905 [4] NCCL INFO transport/net.cc:1302 -> 6\nkp-worker-0:3468:3905 [4] NCCL INFO proxy.cc:878 -> 6 [Progress Thread]",
    ("network-stalled", ()),
)
row(
    "locked memory is limited",
    "n7:551:612 [3] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory\n"
    + trace(
        "m.py:8",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\nCall to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        3,
    ),
    ("network-stalled", (3,)),
)
# --- clusters ---
row(
    "the time was over",
    "iteration 4100/ 9000 | elapsed time per iteration (ms): 1204.1 | lm loss: 2.101\nslurmstepd: error: *** JOB 881 ON gpu-3 CANCELLED AT 2025-06-14T09:12:55 DUE TO TIME LIMIT ***\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    None,
)
row(
    "a node went away",
    "srun: error: Node failure on gpu-12\nsrun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    ("rank-dead", ()),
)
row(
    "ray's worker died in a call",
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: 172.26.143.83 Worker PID: 833 Worker exit type: SYSTEM_ERROR\n"
    + "\n".join(f"(WorkerDict pid={800 + r}, ip=172.26.153.33) {late(r, 41)}" for r in (60, 61, 62, 63)),
    ("dumps-missing", tuple(range(60))),
)
row(
    "a pod without memory",
    "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n",
    ("rank-oom-killed", ()),
)
# --- more forms ---
row(
    "vLLM puts its own words before every line of a traceback",
    "\n".join(
        f"ERROR 03-27 22:19:40 [core.py:367] {line}"
        for line in trace(
            "worker.py:51",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 288.00 MiB. GPU 2 has a total capacity of 23.50 GiB of which 201.00 MiB is free.",
        ).splitlines()
    ),
    ("device-out-of-memory", ()),
)
row(
    "NCCL names the rank around which calls differ",
    "node-1:39719:39719 [3] init.cc:1197 NCCL WARN Mismatched collective detected, please check your collective calls at and around rank 11. You can use NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL to see the collective logs",
    ("collective-mismatch", (11,)),
)
row(
    "NCCL thinks that the program may hang",
    "node-1:39719:39719 [0] init.cc:1256 NCCL WARN Your program may be hanging, this may be caused by a collective mismatch around rank 1. Please check your collective calls at and around this rank.",
    ("collective-mismatch", (1,)),
)
row(
    "fingerprints of other numbers",
    trace(
        "bug.py:16",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=8OpType=BARRIER), but Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=7OpType=BARRIER).Collectives differ in the following aspects: \t Sequence number: 8vs 7",
        1,
    ),
    ("call-site-mismatch", (1, 2)),
)
row(
    "an old fingerprint without the other side",
    trace(
        "bug.py:16",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running inconsistent collective: CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[34112], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))",
        0,
    ),
    ("collective-mismatch", (0,)),
)
row(
    "an old completion error",
    "n1:71:90 [2] transport/net_ib.cu:788 NCCL WARN NET/IB : Got completion with error 4, opcode 1, len 21938, vendor err 81",
    ("network-stalled", ()),
)
row(
    "a segmentation fault in the table",
    "Fatal Python error: Segmentation fault\n\nThread 0x00007f (most recent call first):\n"
    + table((0, -11, "Signal 11 (SIGSEGV) received by PID 9000")),
    ("rank-dead", (0,)),
)
row(
    "a line that a terminal broke",
    "[rank2]:[E1212 17:21:29.139 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 2] Process group watchdog thread terminated with exception: [Rank 2] Watchdog caught collective operation timeout: Work\nNCCL(SeqNum=1890, OpType=ALLGATHER, NumelIn=1, NumelOut=4, Timeout(ms)=1800000) ran for 1800022 milliseconds before timing out.",
    ("dumps-missing", ()),
)
row(
    "the elder form of DistributedDataParallel's complaint",
    trace(
        "fit.py:3",
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss. Parameter indices which did not receive grad for rank 1: 2 3",
        1,
    ),
    ("unused-parameters", (1,)),
)
row(
    "sockets were closed in the first connection",
    "10-2-0-7:312:840 [1] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer 10-2-0-8<41032>\n"
    + trace(
        "go.py:7",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2006, remote process exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer 10-2-0-8<41032>",
        1,
    ),
    None,
)
row(
    "a pickle of a data loader's worker",
    trace("data.py:9", "RuntimeError: DataLoader worker (pid(s) 3141, 3142) exited unexpectedly", 0),
    ("rank-oom-killed", (0,)),
)
row(
    "a checkpoint of another shape on every rank",
    "\n".join(trace("load.py:6", "RuntimeError: Error(s) in loading state_dict for Net:", r) for r in (0, 1))
    + "\n"
    + table((1, 1, NO_TRACE), (0, 1, NO_TRACE)),
    ("uncaught-exception", (0, 1)),
)
row(
    "too many open files",
    trace("data.py:9", "OSError: [Errno 24] Too many open files: '/data/x.bin'", 3)
    + "\n"
    + "\n".join(late(r, 77) for r in (0, 1, 2)),
    ("uncaught-exception", (3,)),
)
row(
    "host memory that could not be had",
    trace(
        "data.py:9",
        "RuntimeError: unable to mmap 67108864 bytes from file </torch_4711_77>: Cannot allocate memory (12)",
        2,
    ),
    ("uncaught-exception", (2,)),
)
row(
    "an agent that lost its rendezvous",
    "[W socket.cpp:464] [c10d] The client socket cannot be initialized to connect to [localhost]:29500 (errno: 97 - Address family not supported by protocol).\n"
    + trace(
        "t.py:1",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.",
    ),
    ("rendezvous-incomplete", ()),
)
row(
    "two of four nodes came",
    "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 2/4 clients joined.",
    ("rendezvous-incomplete", ()),
)
row(
    "the store was asked for a key that nobody wrote",
    trace(
        "t.py:1",
        "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0",
        3,
    ),
    ("nccl-init-stuck", (0,)),
)
row(
    "the store's host went away",
    trace(
        "t.py:1",
        "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer",
        3,
    )
    + "\n"
    + table((3, 1, NO_TRACE), (0, -9, "Signal 9 (SIGKILL) received by PID 9000")),
    ("rank-dead", (0,)),
)
row(
    "who gets another size is not who sent it",
    "[rank0]: terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "[rank0]:   what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?",
    ("shape-mismatch", ()),
)


# --- the barrier of init_process_group, which nobody leaves ---
def at_barrier(
    ranks: tuple[int, ...], joined: int, size: int, times: int, key: str = "1", word: str = "worker_count"
) -> str:
    """The line that each rank prints every ten seconds."""
    return "\n".join(
        f"INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize process group for rank: {rank}, key: store_based_barrier_key:{key} (world_size={size}, {word}={joined}, timeout=0:30:00)"
        for _ in range(times)
        for rank in ranks
    )


SEVEN = (0, 1, 2, 3, 5, 6, 7)
PASSED = "\n".join(
    f"INFO:torch.distributed.distributed_c10d:Rank {rank}: Completed store-based barrier for key:store_based_barrier_key:1 with 8 nodes."
    for rank in range(8)
)
row("seven of eight wait and say so", at_barrier(SEVEN, 7, 8, 12), ("rendezvous-incomplete", (4,)))
row("of the seven that came two are pasted", at_barrier((0, 3), 7, 8, 5), ("rendezvous-incomplete", ()))
row("a store counts an earlier attempt", at_barrier((0,), 8, 4, 9), ("rendezvous-incomplete", ()))
row(
    "a group of four among more ranks",
    at_barrier((8, 9, 10), 3, 4, 4, "7", "num_workers_joined"),
    ("rendezvous-incomplete", ()),
)
row(
    "the first inner group of newer torch, whose members no line names",
    at_barrier((0, 1, 2), 3, 4, 4, "1", "num_workers_joined"),
    ("rendezvous-incomplete", ()),
)
row(
    "one came late and raised",
    at_barrier((0,), 1, 2, 3) + "\n" + trace("main.py:3", "ModuleNotFoundError: No module named 'flash_attn'", 1),
    ("uncaught-exception", (1,)),
)
row(
    "waiting was given up by hand",
    at_barrier((0, 1), 2, 3, 4) + "\nslurmstepd: error: *** JOB 77 ON n3 CANCELLED AT 2026-01-01T00:00:00 ***",
    ("rendezvous-incomplete", (2,)),
)
row("healthy: the eighth came late", at_barrier(tuple(range(7)), 7, 8, 2) + "\n" + PASSED, None)
row(
    "healthy: the count grows, then steps",
    "\n".join(at_barrier((0,), n, 64, 1) for n in (8, 16, 40, 63)) + "\nstep 10 loss 2.3",
    None,
)
row(
    "healthy: one line of waiting, then NCCL",
    at_barrier((0,), 1, 2, 1)
    + "\nhost1:10:20 [0] NCCL INFO comm 0x55 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0x1 - Init COMPLETE",
    None,
)
row("healthy: all came with the last line", at_barrier((0, 1), 2, 2, 4), None)
# --- who tells of a death, and of what is none ---
row(
    "a shell says that its process was killed",
    "[pod/train-1/main] step 10 loss 2.0\n[pod/train-1/main] Killed",
    ("rank-dead", ()),
)
row(
    "a shell counts its line",
    "step 10 loss 2.0\nrun.sh: line 12:  4711 Segmentation fault      (core dumped) python fit.py",
    ("rank-dead", ()),
)
row(
    "Python met a bus error",
    "[rank3]: Fatal Python error: Bus error\n[rank3]: \n[rank3]: Current thread 0x00007f (most recent call first):",
    ("rank-dead", (3,)),
)
row(
    "a worker of vLLM is gone",
    "(EngineCore_DP0 pid=77) ERROR 11-02 10:11:12 [multiproc_executor.py:231] Worker proc VllmWorker-3 died unexpectedly, shutting down executor.\n(EngineCore_DP0 pid=77) ERROR 11-02 10:11:12 [core.py:842] EngineCore encountered a fatal error.",
    ("rank-dead", (3,)),
)
row(
    "an NVLink switch failed",
    "kernel: nvidia-nvswitch0: SXid (PCI:0000:c0:00.0): 24007, Fatal, Link 30 sourcetrack timeout error (First)",
    ("device-fault", ()),
)
row(
    "healthy: an NVLink switch tells of a link",
    "kernel: nvidia-nvswitch0: SXid (PCI:0000:c0:00.0): 20034, Non-fatal, Link 30 LTSSM Fault Up\nstep 1 loss 2",
    None,
)
row(
    "healthy: an attempt failed, the next one trains",
    "E1103 1 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 0 (pid: 88) of binary: /usr/bin/python\nI1103 1 torch/distributed/elastic/agent/server/api.py:879] [default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    + "\n".join(f"step {n} loss 2.1" for n in range(9)),
    None,
)
# --- what collectors and launchers put around a line ---
RAISED = trace("heads.py:31", "ValueError: 12 heads for 5 ranks", 3)
TAGGED = trace("heads.py:31", "ValueError: 12 heads for 5 ranks")
for name, collected in {
    "the kubelet's files": "\n".join(f"2026-11-25T03:10:01.123456789Z stderr F {line}" for line in RAISED.splitlines()),
    "Docker's records": "\n".join(json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-11-25T03:10:01.1Z"}) for line in RAISED.splitlines()),
    "records of a cloud's console": "\n".join(json.dumps({"insertId": "a1", "jsonPayload": {"message": line}}) for line in RAISED.splitlines()),
    "one record for a whole traceback": json.dumps({"severity": "ERROR", "message": RAISED}),
    "journald": "\n".join(f"Nov 25 03:10:01 gpu-07 torchrun[4711]: {line}" for line in RAISED.splitlines()),
    "journald with dates of ISO": "\n".join(f"2026-11-25T03:10:01+0000 gpu-07 torchrun[4711]: {line}" for line in RAISED.splitlines()),
    "Hydra's logger": "\n".join(f"[2026-11-25 03:10:01,123][root][ERROR] - {line}" for line in RAISED.splitlines()),
    "MPI of SageMaker": "\n".join(f"[1,mpirank:3,algo-1]<stderr>:{line}" for line in TAGGED.splitlines()),
    "what Composer repeats of a rank (mosaicml/composer, launcher.py)": "ERROR:composer.cli.launcher:Rank 3 crashed with exit code 1.\nGlobal rank 0 (PID 71) exited with code -15\n"
    f"Global rank 3 (PID 74) exited with code 1\n----------Begin global rank 3 STDERR----------\n{TAGGED}\n----------End global rank 3 STDERR----------",
    "an exception of a group": "\n".join(
        f"[rank3]: {line}"
        for line in (
            '  + Exception Group Traceback (most recent call last):\n  |   File "/data/ana/fit.py", line 3, in main\n  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n'
            '  +-+---------------- 1 ----------------\n    | Traceback (most recent call last):\n    |   File "/data/ana/fetch.py", line 9, in fetch\n    | ValueError: shard 7 is corrupt\n    +------------------------------------'
        ).splitlines()
    ),
}.items():  # fmt: skip
    row(name, collected, ("uncaught-exception", (3,)))
row(
    "Composer's rank is killed",
    "ERROR:composer.cli.launcher:Rank 1 crashed with exit code -9.\nGlobal rank 0 (PID 71) exited with code -15\nGlobal rank 1 (PID 72) exited with code -9",
    ("rank-dead", (1,)),
)
row(
    "mpiexec of Open MPI breaks its line",
    "prterun noticed that process rank 3 with PID 12345 on node gpu-b12 exited on\nsignal 11 (Segmentation fault).",
    ("rank-dead", (3,)),
)
row(
    "mpiexec of MPICH",
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 5 PID 3217 RUNNING AT gpu-3\n=   KILLED BY SIGNAL: 9 (Killed)",
    ("rank-dead", (5,)),
)
row(
    "a rank ended all of MPI",
    "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\nwith errorcode 1.",
    ("rank-dead", (3,)),
)
row(
    "an abort without a word of torch",
    "step 3 loss 1.0\nfree(): invalid pointer\nAborted (core dumped)",
    ("rank-dead", ()),
)
row(
    "Habana's word for memory",
    trace(
        "m.py:3",
        "RuntimeError: [Rank:2] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::402653184 (384)MB",
        2,
    ),
    ("device-out-of-memory", (2,)),
)
row(
    "the name of the master is not known",
    trace(
        "m.py:3",
        "torch.distributed.DistNetworkError: The IPv6 network addresses of (pytorch-master-0, 23456) cannot be retrieved (gai error: -2 - Name or service not known).",
        2,
    ),
    ("rendezvous-incomplete", ()),
)
row(
    "torch's report of a desync finds all in one call, not in one operation",
    f"{late(0, 12, nin=6)}\n\t - [0] Timeout at collective: ALLREDUCE, #12\n\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
    "\t   - [0, 1, 2, 3] joined but didn't finish collective #12 (count from 1)\n\t - Snapshot of ranks' latest states:\n\t   #12 started ranks:\n"
    "\t     [0, 1, 2] started ALLREDUCE\n\t     [3] started BROADCAST",
    ("collective-mismatch", (3,)),
)
row(
    "torch 2.7 reports who lags (pytorch/pytorch#152623)",
    f"{late(0, 241, nin=6)}\n\t - [0] Timeout at collective: ALLREDUCE, #315\n\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
    "\t     [7] finished collective #182, but didn't join collective #183 (count from 1)\n\t - Snapshot of ranks' latest states:\n\t   #182 finished ranks:\n"
    "\t     [7] finished ALLREDUCE\n\t   #315 started ranks:\n\t     [0, 1, 2] started ALLREDUCE\n\t   #317 started ranks:\n\t     [3, 4, 5, 6] started _ALLGATHER_BASE",
    ("rank-not-joined", (7,)),
)
row(
    "one rank of eight prints a loss of all, which is no number",
    "\n".join(
        f"[rank0]:[titan] 2026-11-25 03:10:{n:02},001 - root - INFO - step: {n:2}  loss:  {'nan' if n > 20 else 3.1}  grad_norm:  1.2"
        for n in range(1, 40)
    ),
    ("loss-nonfinite", ()),
)
row(
    "a killed task, after which SLURM cancels the rest",
    "srun: error: n3: task 2: Killed\nsrun: Terminating StepId=99.0\nslurmstepd: error: *** STEP 99.0 ON n0 CANCELLED AT 2026-11-25T03:10:00 ***\nsrun: error: n4: tasks 4-7: Killed",
    ("rank-dead", (2,)),
)
row(
    "the host that tells of a node's failure is not the one that failed",
    "step 3 loss 1.0\nslurmstepd: error: *** JOB 77 ON n3 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
    ("rank-dead", ()),
)
row(
    "NCCL finds no room in a container's shared memory",
    trace(
        "t.py:3",
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/x.cpp:94, unhandled system error, NCCL version 2.21.5\nncclSystemError: System call (e.g. "
        "socket, malloc) failed\nLast error:\nError while creating shared memory segment /dev/shm/nccl-kh9UIF (size 7340384)",
        1,
    ),
    ("disk-full", (1,)),
)
row(
    "ray's worker met a fault of memory",
    "(WorkerDict pid=812) [2026-11-25 03:00:01,123 E 812 812] logging.cc:440: *** SIGSEGV received at time=1764040201 on cpu 3 ***",
    ("rank-dead", ()),
)
row(
    "healthy: a step is cancelled, and what does not end is killed",
    "step 3 loss 1.0\nslurmstepd: error: *** STEP 77.0 ON n3 CANCELLED AT 2026-01-01T00:00:00 ***\nsrun: error: n3: tasks 0-3: Terminated\nsrun: error: n4: tasks 4-7: Killed",
    None,
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
    row(f"healthy: {name}", text, None)
LOST_A_PEER = "\n".join(
    f"[rank{rank}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.{rank}]:40619"
    for rank in (0, 2)
)
row(
    "a rank left with an exit code and no traceback, and the others lost it",
    f"loss is too large\n{LOST_A_PEER}\n"
    + table((0, -15, "Signal 15 (SIGTERM) received by PID 7"), (2, 1, NO_TRACE), (1, 1, NO_TRACE)),
    ("rank-dead", (1,)),
)
row(
    "the same, and who lost what is not said",
    f"{LOST_A_PEER.replace('[rank0]: ', '')}\n"
    + table((0, -15, "Signal 15 (SIGTERM) received by PID 7"), (1, 1, NO_TRACE)),
    None,
)

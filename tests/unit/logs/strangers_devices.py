"""Further excerpts as people paste them: servers and trainers on devices of several makers, and their healthy logs."""

from __future__ import annotations

from tests.unit.logs.strangers import NO_TRACE, REST, late, row, status, table, trace

UNSET = 18446744073709551615  # what torch prints for a call without sizes


def newer(rank: int, seq: int, issued: int, done: int, group: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    """The status line of torch 2.7 and later."""
    return (
        f"[rank{rank}]:[E822 16:31:16.13{rank} ProcessGroupNCCL.cpp:2271] [{group} Rank {rank}]  failure detected by watchdog "
        f"at work sequence id: {seq} PG status: last enqueued work: {issued}, last completed work: {done}"
    )


def engine(text: str) -> str:
    """What vLLM's engine puts before each line of a traceback."""
    return "\n".join(f"(EngineCore pid=268) ERROR 09-05 21:10:38 [core.py:702] {line}" for line in text.splitlines())


# --- the watchdog of NCCL ---
row(
    "a service that broadcasts from each rank in turn: nobody is missing, two calls are open",
    "\n".join(
        late(r, s, "BROADCAST", 3612672) + "\n" + newer(r, s, 6464, s - 1, "PG ID 4 PG GUID 67")
        for r, s in ((0, 5730), (3, 5729), (1, 5729), (2, 5729))
    ),
    ("network-stalled", ()),
)
row(
    "a pipeline's receive without sizes: torch prints the largest number there is",
    f"[rank10]:[E1013 03:22:49.68 ProcessGroupNCCL.cpp:1923] [PG ID 6 PG GUID 90(PIPELINE_MODEL_PARALLEL_GROUP) Rank 1] Process "
    "group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, "
    f"OpType=COALESCED, NumelIn={UNSET}, NumelOut={UNSET}, Timeout(ms)=600000) ran for 600096 milliseconds before timing out.",
    ("dumps-missing", ()),
)
row(
    "completed more than was enqueued: the numbers of two lines were torn apart",
    "(TaskRunner pid=152455) step:1 - global_seqlen/min:1309 - perf/throughput:8.49\n"
    f"(WorkerDict pid=97397, ip=33.97.231.144) {late(3, 26, nin=1)}\n(WorkerDict pid=97397, ip=33.97.231.144) {newer(3, 26, 26, 126)}",
    ("dumps-missing", (0, 1, 2)),
)
row(
    "two ranks in a broadcast, its root two calls further, in lines that a terminal broke",
    "\n".join(
        late(r, s, op, n, m, 1800000)[:-60]
        + "\n"
        + late(r, s, op, n, m, 1800000)[-60:]
        + "\n"
        + status(r, s, s + 1, s - 1)
        for r, s, op, n, m in (
            (2, 532339, "BROADCAST", 5164000, 5164000),
            (1, 532339, "BROADCAST", 5164000, 5164000),
            (0, 532341, "_ALLGATHER_BASE", 513, 1539),
        )
    ),
    ("network-stalled", ()),
)
row(
    "torch 1.10 without numbers: two ranks in a broadcast",
    "\n".join(
        f"[E ProcessGroupNCCL.cpp:587] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(OpType=BROADCAST, "
        f"Timeout(ms)=1800000) ran for 180849{r} milliseconds before timing out."
        for r in (1, 0)
    )
    + f"\n[E ProcessGroupNCCL.cpp:341] {REST}",
    ("dumps-missing", ()),
)
row(
    "torch 1.9 without numbers: one rank in an all-reduce, its peers in a broadcast",
    "\n".join(
        f"[E ProcessGroupNCCL.cpp:566] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(OpType={op}, "
        f"Timeout(ms)=1800000) ran for 18011{r}0 milliseconds before timing out."
        for r, op in ((0, "ALLREDUCE"), *((r, "BROADCAST") for r in (1, 3, 7, 2, 4, 5, 6)))
    ),
    ("dumps-missing", ()),
)
row(
    "a scatter that gives nothing out yet",
    late(1, 13, "SCATTER", 384, 0, 1800000).replace("NumelOut=384", "NumelOut=0") + "\n" + newer(1, 13, 13, 12),
    ("dumps-missing", (0,)),
)
row(
    "one worker of ray's two in a gather of logits",
    f"(RayWorkerWrapper pid=4009) {late(1, 158046, 'GATHER', 2867200).replace('NumelOut=2867200', 'NumelOut=0')}\n"
    "(RayWorkerWrapper pid=4009) [rank1]:[E ProcessGroupNCCL.cpp:1537] [PG 1 Rank 1] Timeout at NCCL work: 158046, last enqueued "
    "NCCL work: 158046, last completed NCCL work: 158045.",
    ("dumps-missing", ()),
)
row(
    "two nodes, of which one rank's end is pasted",
    "train-m-0:14057:14823 [6] NCCL INFO comm 0xaf19000 rank 14 nranks 16 cudaDev 6 busId db000 - Abort COMPLETE\n"
    "[rank14]:[E ProcessGroupNCCL.cpp:1537] [PG 1 Rank 14] Timeout at NCCL work: 15734, last enqueued NCCL work: 15735, last "
    f"completed NCCL work: 15733.\n[rank14]:[E ProcessGroupNCCL.cpp:577] [Rank 14] {REST}",
    ("dumps-missing", ()),
)
row(
    "training ended, and the groups of experts hang while they are given back",
    "{'train_runtime': 8123.4, 'train_samples_per_second': 12.1, 'train_loss': 0.81, 'epoch': 3.0}\n"
    "[INFO:swift] End time of running main: 2026-02-05 18:03:05.112\n"
    + "\n".join(
        f"18:11:06.680 [rank{r}]:[E205 18:11:06.37 ProcessGroupNCCL.cpp:1870] [PG ID 12 PG GUID 9{r}(EXPERT_MODEL_PARALLEL_GROUP) "
        f"Rank {r}] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives."
        for r in (4, 0)
    ),
    ("network-stalled", ()),
)
row(
    "a server's workers abort after the watchdog was stuck",
    "ERROR 10-30 11:56:48 multiproc_worker_utils.py:120] Worker VllmWorkerProcess pid 198 died, exit code: -6\n"
    "INFO 10-30 11:56:48 multiproc_worker_utils.py:123] Killing local vLLM worker processes\n"
    "[rank0]:[E ProcessGroupNCCL.cpp:1316] [PG 2 Rank 0] Heartbeat monitor timed out! Process will be terminated after dumping "
    "debug info. workMetaList_.size()=9",
    ("network-stalled", ()),
)
# --- services ---
row(
    "the engine's call to its workers got no answer",
    engine(
        'Traceback (most recent call last):\n  File "/opt/vllm/v1/executor/multiproc_executor.py", line 220, in collective_rpc\n'
        '    result = get_response(w, dequeue_timeout)\n  File "/opt/vllm/distributed/device_communicators/shm_broadcast.py", line 469, '
        "in acquire_read\n    raise TimeoutError\nTimeoutError\n\nThe above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "/opt/vllm/v1/engine/core.py", line 693, in run_engine_core\n'
        "    engine_core.run_busy_loop()\nTimeoutError: RPC call to sample_tokens timed out."
    ),
    ("network-stalled", ()),
)
row(
    "ray's disk is nearly full, and an actor is gone",
    "(raylet) file_system_monitor.cc:116: /tmp/ray/session_1 is over 95% full, available space: 2.03 GB; capacity: 69.93 GB. "
    "Object creation will fail if spilling is required.\nray.exceptions.ActorDiedError: The actor died unexpectedly before finishing "
    "this task.\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is killed "
    "by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due "
    "to SIGSEGV or other unexpected errors.",
    ("rank-dead", ()),
)
row(
    "SGLang's parent finds a scheduler dead",
    "[2025-06-02 10:11:12] Rank 3 scheduler is dead. Please check if there are relevant logs.\n"
    "[2025-06-02 10:11:12] Exit code: -9",
    ("rank-dead", (3,)),
)
# --- Ascend ---
row(
    "HCCL's watchdog in the words of NCCL's",
    "\n".join(
        f"[rank{r}]:[E324 13:00:25.42 compiler_depend.ts:574] [Rank {r}] Watchdog caught collective operation timeout: WorkHCCL("
        f"SeqNum=196, OpType=ALLREDUCE, Timeout(ms)=3600000) ran for 360018{r} milliseconds before timing out.\n"
        f"[rank{r}]:[E324 13:00:25.42 compiler_depend.ts:634] To avoid data inconsistency, we are taking the entire process down."
        for r in (1, 0)
    ),
    ("network-stalled", ()),
)
row(
    "HCCL: ray's worker waits for nobody that it could name",
    "(train pid=8464) RuntimeError: npuSynchronizeDevice:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:479 NPU function error: "
    "AclrtSynchronizeDeviceWithTimeout, error code is 507048\n"
    "(train pid=8464) [ERROR] 2025-06-25-10:45:23 (PID:13075, Device:0, RankID:8) ERR00100 PTA call acl api failed\n"
    "(train pid=8464) EI0002: [PID: 13075] 2025-06-25-10:45:23.586.187 The wait execution of the Notify register times out. Reason: "
    "The Notify register has not received the Notify record from remote rank: [unknown]. base information: [streamID:[1], "
    "tag[AllReduce_group_name_710]",
    ("network-stalled", ()),
)
row(
    "HCCL: a link to the neighbour cannot be made",
    "[rank1]: EI0009: [PID: 2225827] 2025-09-24-20:59:48.119.066 Transport init error. Reason: [Create][DestLink]Create Dest error! "
    "createLink para:rank[1]-localUserrank[1]-localIpAddr[172.16.0.114], dst_rank[0]-remoteUserrank[0]\n"
    "[rank1]:         Solution: Check other NPUs that are not reporting errors, or check if there are any abnormalities on the other end's NPU.",
    ("nccl-init-stuck", ()),
)
row(
    "HCCL refuses a device that is not there",
    trace(
        "serve.py:7",
        "RuntimeError: create_config:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:102 HCCL function error: "
        "hcclCommInitRootInfoConfig(numRanks, &rootInfo, rank, config, &(comm->hcclComm_)), error code is 15",
        1,
    ),
    ("uncaught-exception", (1,)),
)
# --- Intel ---
row(
    "Level Zero lost the device of a worker",
    "\n".join(
        f"(Worker_TP{r} pid={291274 + r}) ERROR 01-12 02:58:31 [multiproc_executor.py:654] {line}"
        for r in (0, 2)
        for line in trace(
            "gpu_model_runner.py:3776",
            "RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        ).splitlines()
    ),
    ("device-fault", ()),
)
row(
    "the kernel resets an engine of an Intel device",
    "[Tue Aug  4 20:51:21 2026] xe 0000:2b:00.0: [drm] Tile0: GT0: Timedout job: seqno=1484958, lrc_seqno=1484958, guc_id=0, "
    "flags=0x73 in no process [-1]\n"
    "[Tue Aug  4 20:51:21 2026] xe 0000:2b:00.0: [drm] Tile0: GT0: trying reset from guc_exec_queue_timedout_job [xe]\n"
    + trace("w.py:8", "RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", 1),
    ("device-fault", (1,)),
)
row(
    "oneCCL cannot open a device's file",
    "2025:03:13-10:36:27:(  636) |CCL_WARN| pidfd is not supported, fallbacks to drmfd exchange mode\n"
    "2025:03:13-10:36:27:(  636) |CCL_ERROR| ze_fd_manager.cpp:214 fill_device_fds: condition fds[dev_idx] > 0 failed\n"
    "open failed: fd: -1, errno: No such file or directory\n"
    + trace(
        "worker_base.py:612", "RuntimeError: oneCCL: ze_fd_manager.cpp:214 fill_device_fds: EXCEPTION: open failed", 0
    ),
    ("uncaught-exception", (0,)),
)
# --- AMD ---
row(
    "a device of AMD hangs",
    "HW Exception by GPU node-3 (Agent handle: 0x55d2c0) reason :GPU Hang\n" + table((0, -15, "Signal 15 (SIGTERM) received by PID 9000"), (3, -6, "Signal 6 (SIGABRT) received by PID 9003")),
    ("device-fault", (3,)),
)  # fmt: skip
row(
    "HIP's word for a kernel that failed",
    trace("moe.py:4", "RuntimeError: HIP error: unspecified launch failure\nHIP kernel errors might be asynchronously reported at some other API call.", 5),
    ("illegal-address", (5,)),
)  # fmt: skip
row(
    "HIP's word for memory that is not its own",
    trace("moe.py:4", "RuntimeError: HIP error: an illegal memory access was encountered", 5),
    ("illegal-address", (5,)),
)
# --- NCCL's own lines ---
row(
    "a driver that is older than the library",
    "c76d92cccb6e:72:457 [1] enqueue.cc:58 NCCL WARN Cuda failure 'named symbol not found'\n"
    "c76d92cccb6e:72:457 [1] NCCL INFO init.cc:1475 -> 1\n"
    + trace(
        "t.py:3",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled cuda error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 'named symbol not found'",
        1,
    ),
    ("uncaught-exception", (1,)),
)
row(
    "two devices that cannot reach one another's memory",
    "(pid=909608) z-pc:909608:910337 [0] transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : 217 peer access is not "
    "supported between these two devices\n(pid=909608) z-pc:909608:910337 [0] NCCL INFO transport.cc:68 -> 1\n"
    "(pid=909608) RuntimeError: NCCL error in: ../torch/lib/c10d/ProcessGroupNCCL.cpp:784, unhandled cuda error, NCCL version 2.7.8",
    ("uncaught-exception", ()),
)
row(
    "a queue pair that finds no way, in the newer words of NCCL",
    "host-01:88:157 [5] ibvwrap.c:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_4:1, curr "
    "state INIT, next state RTR, local GID index 3, local GID ::ffff:10.1.2.3, remote GID ::ffff:10.1.9.4\n"
    "[rank5]: RuntimeError: NCCL Error 2: unhandled system error",
    ("network-stalled", ()),
)
row(
    "cuDNN, without a traceback",
    "step 10 loss 1.0\nRuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    ("uncaught-exception", ()),
)
# --- clusters ---
row(
    "memory of a device in lines of eighty characters, srun tells who failed",
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 2 has a\ntotal capacty of 15.78 GiB of which 27.19 MiB is "
    "free. Process 307065 has 15.75\nGiB memory in use.\nsrun: error: ib12gpu-002: task 4: Exited with exit code 1\n"
    "srun: error: ib12gpu-001: tasks 0-1: Exited with exit code 1",
    ("device-out-of-memory", ()),
)
row(
    "a pod was put out since its node had no disk left",
    "Status:       Failed\nReason:       Evicted\nMessage:      The node was low on resource: ephemeral-storage. Threshold quantity: "
    "10Gi, available: 4Gi. Container pytorch was using 80Gi, request is 0, has larger consumption of ephemeral-storage.",
    ("disk-full", ()),
)
row(
    "a pod was put out since its node had no memory left",
    "Status:       Failed\nReason:       Evicted\nMessage:      The node was low on resource: memory. Threshold quantity: 100Mi, "
    "available: 40Mi. Container pytorch was using 480Gi, request is 0.",
    ("rank-oom-killed", ()),
)
row(
    "an agent came to a rendezvous that was over",
    "I0213 12:07:20.086000 870572 torch/distributed/elastic/agent/server/api.py:677] [default] Rendezvous'ing worker group\n"
    'Traceback (most recent call last):\n  File "/opt/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
    "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
    None,
)


def boxed(site: str, error: str, lead: str = "") -> str:
    """A traceback as `rich` draws it."""
    file, _, line = site.partition(":")
    return "\n".join(
        lead + text
        for text in (
            "╭─────────────────────── Traceback (most recent call last) ────────────────────────╮",
            "│ /opt/venv/lib/python3.11/site-packages/accelerate/accelerator.py:2117 in backward │",
            f"│ /data/ana/{file}:{line} in fit                                                    │",
            "│                                                                                  │",
            f"│ ❱ {line}     run()                                                                  │",
            "╰──────────────────────────────────────────────────────────────────────────────────╯",
            error,
        )
    )


row(
    "a traceback in a box, as rich draws it",
    boxed("fit.py:31", "ValueError: sample 4711 holds no tokens") + "\n" + table((1, 1, NO_TRACE)),
    ("uncaught-exception", (1,)),
)
row(
    "boxes of two ranks, one ran out of memory and the other lost it",
    boxed("fit.py:31", "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, remote process exited or "
          "there was a network error, NCCL version 2.19.3", "[rank0]: ")
    + "\n"
    + boxed("fit.py:31", "OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 1 has a total capacity of 15.78 GiB", "[rank1]: "),
    ("device-out-of-memory", (1,)),
)  # fmt: skip
row(
    "experts' tokens do not come: who waits is not to blame",
    trace("buffer.py:376", "RuntimeError: DeepEP error: timeout (dispatch CPU)", 428),
    ("dumps-missing", tuple(range(428))),
)
row(
    "a kernel of DeepEP counts the threads that wait",
    "\n".join(f"DeepEP timeout check failed: rank = {r}, thread = {t}, value = {1024 * (t == 5)})" for r in (6, 2) for t in range(8))
    + "\n(Worker_DP7_EP7 pid=4757) RuntimeError: DeepEP error: timeout (dispatch CPU)",
    ("network-stalled", ()),
)  # fmt: skip
row(
    "Megatron's exception names the rank whose gradient is NaN",
    trace(
        "schedules.py:535",
        "RuntimeError: Rank 2, node dc-xe9680-01, device 2, iteration 205: Unexpected result nan (message='found NaN in local grad "
        "norm for bucket #0 in backward pass before data-parallel communication collective')",
    ),
    ("gradient-nonfinite", (2,)),
)
row(
    "the same in the words of older Megatron",
    trace(
        "distributed.py:8",
        "AssertionError: Rank 11: found NaN in local grad norm in backward pass before data-parallel communication collective. "
        "Device: 3, node: n4",
    ),
    ("gradient-nonfinite", (11,)),
)
row(
    "Megatron's exception names the rank whose loss is NaN",
    trace(
        "rerun_state_machine.py:331",
        "ValueError: Rank 5, node n2, device 1, iteration 81: Unexpected result nan (message='found NaN in local forward loss "
        "calculation')",
    ),
    ("loss-nonfinite", (5,)),
)
row(
    "the loss in the words of older Megatron",
    trace(
        "pretrain_gpt.py:77", "AssertionError: Rank 3: found NaN in local forward loss calculation. Device: 3, node: n1"
    ),
    ("loss-nonfinite", (3,)),
)
row(
    "an assertion within a kernel, as NCCL meets it",
    "678c7278cb2d:26024:27098 [1] include/alloc.h:125 NCCL WARN Cuda failure 710 'device-side assert triggered'\n"
    "678c7278cb2d:26024:27098 [1] NCCL INFO include/alloc.h:246 -> 1\n"
    + trace("fit.py:9", "RuntimeError: CUDA error: device-side assert triggered", 1),
    ("uncaught-exception", (1,)),
)
row(
    "two communicators connect to one another's sockets",
    "user:16899:16961 [0] misc/socket.cc:441 NCCL WARN socketFinalizeAccept: wrong type 4 != 3\n"
    "user:16899:16961 [0] NCCL INFO misc/socket.cc:561 -> 3\nuser:16899:16961 [0] NCCL INFO transport/net_socket.cc:378 -> 3",
    ("nccl-init-stuck", ()),
)
row(
    "sockets tell of sizes that differ, in the words of older NCCL",
    "train-5:40:91 [3] transport/net_socket.cc:493 NCCL WARN NET/Socket : message truncated : receiving 1048576 bytes instead of 32768. "
    "If you believe your socket network is in healthy state, there may be a mismatch in collective sizes or environment settings.",
    ("shape-mismatch", ()),
)
row(
    "a watchdog tells of sizes that differ, as seen on an H100 with torch 2.11",
    "[rank1]:[E1126 14:45:38.166 ProcessGroupNCCL.cpp:2119] [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated"
    " with exception: [Rank 1] Collective WorkNCCL(SeqNum=22, OpType=ALLREDUCE, NumelIn=182976, NumelOut=182976, Timeout(ms)=6000) raised"
    " the following async exception: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "NET/Socket : peer 127.0.0.1<37312> message truncated : receiving 1001472 bytes instead of 65536. If you believe your socket network is"
    " in a healthy state, there may be a mismatch in collective sizes or environment settings (e.g. NCCL_PROTO, NCCL_ALGO) between ranks\n"
    "E1126 14:45:40.910000 1530 torch/distributed/elastic/multiprocessing/api.py:986] failed (exitcode: -6) local_rank: 1 (pid: 1559) of"
    " binary: /opt/venv/bin/python3",
    ("shape-mismatch", ()),
)
row(
    "a rank that the communicator does not have",
    "n2:91:91 [0] init.cc:1725 NCCL WARN Invalid rank requested : 8/8\n"
    + trace(
        "m.py:3",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid argument (run "
        "with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\nncclInvalidArgument: Invalid value for an argument.\n"
        "Last error:\nInvalid rank requested : 8/8",
    ),
    ("nccl-misuse", ()),
)
row(
    "one peer of a socket is gone, on both sides of it",
    "worker0:15:91 [3] include/socket.h 398 NCCL WARN Call to write failed : Connection reset by peer.\n"
    "worker0:15:91 [3] transport.cu:153 NCCL WARN transport.cu:153 ->2 [Proxy thread error]",
    None,
)
row(
    "torchrun's table, one entry a line, as a service of logs keeps it",
    "\n".join(
        f"  | 2024-08-23T22:22:58.879Z | [{r}]: time : 2024-08-23_22:22:58 host : algo-2 rank : {r} (local_rank: {r}) exitcode : -6 "
        f"(pid: {180 + r}) error_file: <N/A> traceback : Signal 6 (SIGABRT) received by PID {180 + r}"
        for r in range(2, 8)
    )
    + "\n"
    + "\n".join(f"  | 2024-08-23T22:12:58.879Z | {late(r, 1141, nin=1)}" for r in (1, 2, 3, 4, 5, 6, 7)),
    ("rank-not-joined", (0,)),
)
row(
    "the first all-gather of an inner group: half of its ranks are pasted",
    "\n".join(
        f"[rank{r}]:[E916 08:53:53.79 ProcessGroupNCCL.cpp:633] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL("
        "SeqNum=1, OpType=ALLGATHER, NumelIn=1, NumelOut=16, Timeout(ms)=600000) ran for 600023 milliseconds before timing out.\n"
        + newer(r, 1, 1, -1, "PG ID 1 PG GUID 1")
        for r in range(8)
    ),
    ("dumps-missing", ()),
)
row(
    "a watchdog that finds CUDA broken by what a kernel of its rank did",
    "[rank3]:[E101 10:00:01.1 ProcessGroupNCCL.cpp:2068] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread "
    "terminated with exception: CUDA error: device-side assert triggered\n"
    + "\n".join(late(r, 77) for r in (0, 1, 2)),
    ("uncaught-exception", (3,)),
)  # fmt: skip
# --- nothing is wrong ---
_STEPS = "\n".join(f"step {n} loss 2.{99 - n}" for n in range(1, 30))
for name, text in {
    "a speculator's lines": "\n".join(f"iter:  {n}/3000   4% | loss: 16.{5469 - n} | iter time: 1.038s | iter tflops: 909.8 | lr: 8.667E-04 | seqlen: 16.38K | step time: 0.996s | epoch: 0 | MA 2.84 GB | Max_MA 28.95 GB" for n in range(130, 160)),
    "verl's lines with clipped and timed out rollouts": "\n".join(f"(TaskRunner pid=152455) step:{n} - global_seqlen/min:1309 - actor/pg_loss:0.00{n} - actor/grad_norm:0.4 - response/aborted_ratio:0.0 - rollout/timeout_ratio:0.01 - timing_s/step:37.1 - critic/score/nan_count:0" for n in range(1, 20)),
    "torchtitan's lines": "\n".join(f"[rank0]:[titan] 2025-03-04 10:11:{n:02},001 - root - INFO - step: {n:4}  loss:  2.{99 - n}  grad_norm:  1.2  memory: 28.10GiB(71.03%)  tps: 1,204  tflops: 71.1  mfu: 22.8%" for n in range(1, 40)) + "\n[rank0]:[titan] 2025-03-04 10:12:00,001 - root - INFO - Synchronizing and adjusting timeout for all ProcessGroups to 0:01:40\n[rank0]:[titan] 2025-03-04 10:12:01,001 - root - INFO - Training completed",
    "NeMo's lines": "\n".join(f"Epoch 0:   6%|##        | {32000 + n}/500150 [6:28:43<94:39:17,  1.37it/s, loss=2.6, v_num=95nc, reduced_train_loss=2.590, global_step={32000 + n}, consumed_samples=2.56e+7]" for n in range(20)),
    "HCCL emulates a gather": f"UserWarning: HCCL doesn't support gather at the moment. Implemented with allgather instead.\n{_STEPS}",
    "oneCCL sets what nobody set": f"2025:03:13-10:36:27:(  636) |CCL_WARN| value of CCL_PROCESS_LAUNCHER changed to be none (default:hydra)\n2025:03:13-10:36:27:( 1542) |CCL_WARN| no membind support for NUMA node 0, skip thread membind\n2025:03:13-10:36:27:(  636) |CCL_WARN| device_family is unknown, topology discovery could be incorrect\n{_STEPS}",
    "ZeRO-3 with experts": "\n".join(f"Invalidate trace cache @ step {n}: expected module 2476, but got module 2510\nstep {n} loss 2.5" for n in range(20)),
    "ray's disk is nearly full and training goes on": f"(raylet) file_system_monitor.cc:116: /tmp/ray/session_1 is over 95% full, available space: 2.03 GB; capacity: 69.93 GB. Object creation will fail if spilling is required.\n{_STEPS}",
    "SGLang's batches": "\n".join(f"[2025-06-02 10:11:{n:02} TP0] Decode batch. #running-req: 12, #token: 4{n}, token usage: 0.04, gen throughput (token/s): 812.1, #queue-req: 0, #retracted-req: 0" for n in range(40)) + "\nINFO: 127.0.0.1:1 - \"GET /health_generate HTTP/1.1\" 200 OK",
    "a server refuses a request": "INFO:     10.2.0.1:1 - \"POST /v1/chat/completions HTTP/1.1\" 400 Bad Request\nERROR 06-01 10:11:12 [serving_chat.py:239] Error in preprocessing prompt inputs\nINFO 06-01 10:11:22 [loggers.py:116] Engine 000: Avg prompt throughput: 10.1 tokens/s, Avg generation throughput: 91.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 2.1%",
    "settings of timeouts": f"HCCL_EXEC_TIMEOUT=17340 HCCL_CONNECT_TIMEOUT=900 NCCL_IB_TIMEOUT=23 TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800 TORCH_NCCL_DUMP_ON_TIMEOUT=1\n--nccl-timeout 30 --distributed-timeout-minutes 60 --error-on-nan false --exit-signal-handler\n{_STEPS}",
    "a Kubernetes pod that goes on": f"Status:       Running\nReason:\n    Last State:     Terminated\n      Reason:       Completed\n      Exit Code:    0\n{_STEPS}",
    "an evaluation of memory": f"INFO: memory profiling takes 12.1 seconds; the current vLLM instance can use total_gpu_memory (79.10GiB)\nINFO: peak memory 71.2GiB, no out-of-memory risk; est. OOM margin 7.9GiB\n{_STEPS}",
    "AMD's advice": f"[W] Warning: expandable_segments not supported on this platform (function operator())\nMIOpen(HIP): Warning [IsEnoughWorkspace] Solver <GemmFwdRest>, workspace required: 100, provided ptr: 0 size: 0\n{_STEPS}",
}.items():  # fmt: skip
    row(f"healthy: {name}", text, None)

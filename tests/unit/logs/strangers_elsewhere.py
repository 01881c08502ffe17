"""Excerpts as people paste them: HCCL, RCCL, oneCCL and EFA, ray and servers of models, and logs without a fault."""

from __future__ import annotations

from tests.unit.logs.strangers import row, table, trace

# --- other libraries than NCCL ---
HCCL = (
    "EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send the data in time. "
    "Please check the reason for the rank being stuck\n"
    "        Solution: 1. Check the rank service processes with other errors or no errors in the cluster.2. If this error is "
    "reported for all NPUs, check whether the time difference between the earliest and latest errors is greater than the connect "
    "timeout interval (120s by default)."
)
row(
    "HCCL: a rank does not come to the first all-reduce",
    trace(
        "worker.py:51",
        "RuntimeError: InnerRunOpApi:torch_npu/csrc/framework/OpParamMaker.cpp:281 OPS function error: HcclAllreduce, error code is 6",
        1,
    )
    + "\n"
    + "\n".join(
        f"[rank1]: {line}"
        for line in (
            "[ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call acl api failed.\n" + HCCL
        ).splitlines()
    ),
    ("nccl-init-stuck", ()),
)
row(
    "HCCL: a notify that does not come, of a rank of ray",
    "\n".join(
        f"(train pid=8464) {line}"
        for line in (
            trace(
                "attention.py:856",
                "RuntimeError: npuSynchronizeDevice:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:479 NPU function error: "
                "AclrtSynchronizeDeviceWithTimeout, error code is 507048",
            )
            + "\n[ERROR] 2025-06-25-10:45:23 (PID:13075, Device:0, RankID:8) ERR00100 PTA call acl api failed\n"
            "[Error]: The execution of the internal task times out. \n"
            "        Rectify the fault based on the error information in the ascend log.\n"
            "EI0002: [PID: 13075] 2025-06-25-10:45:23.586.187 The wait execution of the Notify register times out. Reason: The "
            "Notify register has not received the Notify record from remote rank: [unknown]. base information: [streamID:[1], "
            "taskID[8318285], tag[AllReduce_group_name_710], AlgType(level 0-1-2):[fullmesh-ring-ring].]"
        ).splitlines()
    ),
    ("network-stalled", ()),
)
row(
    "HCCL of 2023: another error number, no exception",
    "npuSynchronizeDevice:/usr1/02/workspace/j_vqN6BFvg/pytorch/torch_npu/csrc/core/npu/NPUStream.cpp:370 NPU error, error code is 107020.\n"
    "EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received the Notify record "
    "from remote rank [4294967295].base information: [streamID:[1], taskID[39], taskType[Notify Wait], "
    "tag[AllReduce_192.168.0.116%enp69s0_60000_0_1694500287022627].]",
    ("network-stalled", ()),
)
row(
    "HCCL: the stream of a device does not end in time",
    "W NPUStream.cpp:409] Warning: NPU warning, error code is 507046[Error]: \n"
    "[Error]: In the specified timeout waiting event, all tasks in the specified stream are not completed. \n"
    "EE1002: 2024-09-03-16:50:00.041.231 Stream synchronize timeout. rtDeviceSynchronize execute failed, reason=[stream sync timeout]",
    ("network-stalled", ()),
)
row(
    "oneCCL cannot pin its worker",
    "2023:11:28-16:35:45:(35980) |CCL_WARN| did not find MPI-launcher specific variables, switch to ATL/OFI, to force enable ATL/MPI set CCL_ATL_TRANSPORT=mpi\n"
    "2023:11:28-16:35:45:(35980) |CCL_ERROR| base_thread.cpp:36 start: error while creating worker thread #0 pthread_create returns 22\n"
    + trace("ft.py:9", "RuntimeError: oneCCL: exec.cpp:134 start_workers: EXCEPTION: failed to start worker # 0"),
    ("uncaught-exception", ()),
)
row(
    "RCCL: a kernel reaches into memory that is not its own",
    "Memory access fault by GPU node-9 (Agent handle: 0x55a8f0) on address 0x7f10a2400000. Reason: Unknown.\n"
    + table((6, -6, "Signal 6 (SIGABRT) received by PID 9006")),
    ("illegal-address", (6,)),
)
row(
    "EFA: a request ends with an error and everybody waits",
    "algo-1:94:345 [3] ofi_process_cq:1033 NCCL WARN NET/OFI Request 0x7f0e4c completed with error. RC: 21. Error: unknown error. Completed length: 0\n"
    "algo-1:94:345 [3] NCCL INFO include/net.h:32 -> 2\nalgo-1:94:345 [3] NCCL INFO transport/net.cc:996 -> 2",
    ("network-stalled", ()),
)
row(
    "EFA: no address vector at the start, under mpirun",
    "\n".join(
        f"[1,{r}]<stdout>:ip-172-32-45-165:{72500 + r}:{72600 + r} [7] create_nccl_ofi_component:459 NCCL WARN NET/OFI Couldn't open AV. RC: -22, ERROR: Invalid argument\n"
        f"[1,{r}]<stdout>:ip-172-32-45-165:{72500 + r}:{72600 + r} [7] NCCL INFO include/net.h:24 -> 2"
        for r in (23, 31)
    ),
    ("nccl-init-stuck", ()),
)
row(
    "NVLink SHARP is refused by the fabric manager",
    trace(
        "sym.py:7",
        "torch.distributed.DistBackendError: NCCL error in: /var/lib/x/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.3 \n"
        "ncclUnhandledCudaError: Call to CUDA function failed. \nLast error: \n"
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be performed in the present state'. ",
        5,
    ),
    ("device-fault", (5,)),
)
row(
    "an argument that CUDA refuses within NCCL",
    trace(
        "ddp.py:7",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 1 'invalid argument'",
        7,
    ),
    ("uncaught-exception", (7,)),
)
# --- launchers and services ---
ACTOR = (
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict\n"
    "\tactor_id: d5f5dc65c97621b50717c23b01000000\n\tpid: 278219\n\tname: YGp0dwWorkerDict_0:6\n\tip: 10.2.0.7\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high "
    "memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV or other unexpected errors."
)
row(
    "ray says only that an actor is gone",
    trace("main_ppo.py:31", ACTOR),
    ("rank-dead", ()),
)
row(
    "ray's driver repeats what a worker raised",
    "(WorkerDict pid=830) "
    + "\n(WorkerDict pid=830) ".join(trace("actor.py:77", "ValueError: chunk of 3 rows for 4 ranks").splitlines())
    + '\nTraceback (most recent call last):\n  File "/data/ana/main_ppo.py", line 31, in main\n    ray.get(runner.run.remote(config))\n'
    "ray.exceptions.RayTaskError(ValueError): ray::WorkerDict.update_actor() (pid=830, ip=10.2.0.7, actor_id=ab12)\n"
    '  File "/data/ana/actor.py", line 77, in update\n    run()\nValueError: chunk of 3 rows for 4 ranks',
    ("uncaught-exception", ()),
)
row(
    "ray's monitor of memory chose a worker",
    "(raylet) [2025-06-02 10:00:01] 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node "
    "(ID: 9f2, IP: 10.2.0.7) over the last time period.\n"
    + trace(
        "main_ppo.py:31", "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    ),
    ("rank-oom-killed", ()),
)
row(
    "vLLM's engine waits for workers that are silent",
    "(EngineCore_DP1 pid=1455) INFO 05-28 14:44:01 [core.py:77] Initializing a V1 LLM engine\n"
    + "\n".join(
        f"(EngineCore_DP1 pid=1455) INFO 05-28 14:{44 + n}:28 [shm_broadcast.py:681] No available shared memory broadcast block found in 60 seconds. "
        "This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization)."
        for n in range(12)
    ),
    None,
)
row(
    "a worker of vLLM met an illegal address, the server only tells of it",
    "\n".join(
        f"(Worker_PP1_TP0 pid=2114) ERROR 09-25 00:17:20 [multiproc_executor.py:671] {line}"
        for line in trace(
            "runner.py:12", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
        ).splitlines()
    )
    + '\n[rank2]:[W925 00:17:24.68 ProcessGroupNCCL.cpp:1783] [PG ID 0 PG GUID 0 Rank 2] Failed to check the "should dump" flag on TCPStore, '
    "(maybe TCPStore server has shut down too early), with error: Broken pipe\n"
    + "\n".join(
        f"(APIServer pid=1801) {line}"
        for line in trace(
            "api.py:3",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}",
        ).splitlines()
    ),
    ("illegal-address", ()),
)
row(
    "only the server's last words",
    trace("api.py:3", "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
    None,
)
row(
    "SGLang's own watchdog",
    "[2025-03-05 07:12:43 TP3] Watchdog timeout (self.watchdog_timeout=300)\n[2025-03-05 07:12:43 TP1] Watchdog timeout (self.watchdog_timeout=300)\n"
    "[2025-03-05 07:12:48] Received sigquit from a child process. It usually means the child failed.",
    ("network-stalled", ()),
)
row(
    "DeepSpeed's process with the store was killed while it read data",
    "\n".join(
        f"[rank{r}]:[W729 10:15:18.58 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=67, addr=[h]:36214, remote=[h]:43145): Broken pipe\n"
        f'[rank{r}]:[W729 10:15:18.58 ProcessGroupNCCL.cpp:1662] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Failed to check the "should dump" flag on '
        "TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe"
        for r in range(1, 8)
    )
    + "\n[2025-07-29 10:15:18,275] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 3301\n"
    "[2025-07-29 10:15:19,011] [ERROR] [launch.py:325:sigkill_handler] ['/opt/wan/bin/python', '-u', 'train.py', '--local_rank=7', '--deepspeed'] "
    "exits with return code = -9",
    ("rank-dead", ()),
)
row(
    "a server's second rank lost the store and nothing says why",
    '[rank1]:[W1229 22:06:38.48 ProcessGroupNCCL.cpp:1662] [PG ID 0 PG GUID 0 Rank 1] Failed to check the "should dump" flag on TCPStore, (maybe '
    "TCPStore server has shut down too early), with error: Broken pipe\n"
    "[rank1]:[W1229 22:06:38.55 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=67, addr=[bogon]:36214, remote=[bogon]:43145): Broken pipe",
    None,
)
row(
    "a checkpoint failed on the one rank that the exception names",
    "\n".join(
        f"2025-10-31 03:11:02,47{r} - SimpleTuner - INFO - [rank{r}]: {line}"
        for r in range(4)
        for line in (
            'Traceback (most recent call last):\n  File "/data/ana/save.py", line 219, in save\n    raise result\n'
            "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3])\n"
            'Traceback (most recent call last): (RANK 3)\n  File "/data/ana/writer.py", line 192, in write\n    local_data = map_fun()\n'
            "OSError: [Errno 28] No space left on device"
        ).splitlines()
    ),
    ("disk-full", (3,)),
)
row(
    "a checkpoint failed on two ranks, for a reason of their own",
    "\n".join(
        f"[rank{r}]: {line}"
        for r in range(8)
        for line in (
            'Traceback (most recent call last):\n  File "/data/ana/save.py", line 219, in save\n    raise result\n'
            "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([2, 5])\n"
            'Traceback (most recent call last): (RANK 2)\n  File "/data/ana/planner.py", line 40, in plan\n    check()\n'
            "ValueError: Size mismatch between saved torch.Size([8]) and current: torch.Size([4]) for model.bias\n"
            'Traceback (most recent call last): (RANK 5)\n  File "/data/ana/planner.py", line 40, in plan\n    check()\n'
            "ValueError: Size mismatch between saved torch.Size([8]) and current: torch.Size([4]) for model.bias"
        ).splitlines()
    ),
    ("uncaught-exception", (2, 5)),
)
row(
    "a job of XPU nodes: a segmentation fault among warnings of the provider",
    "2025:05:23-19:04:20:(168955) |CCL_ERROR| atl_ofi_helper.cpp:1635 atl_ofi_open_nw_provs: can not open network providers\n"
    "[hedp017:168955:0:168955] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)\n"
    "srun: error: hedp017: task 7: Segmentation fault",
    ("rank-dead", (7,)),
)
row(
    "ray folds what every worker raised into one line",
    "(RayWorkerWrapper pid=4009) " + "\n(RayWorkerWrapper pid=4009) ".join(
        trace("worker.py:9", "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)").splitlines()
    ) + " [repeated 6x across cluster]",
    ("uncaught-exception", ()),
)  # fmt: skip
row(
    "rendezvous closed by others after training had run",
    "For gpu:3. Running epoch: 2\n"
    + trace("ddp.py:4", "torch.distributed.elastic.rendezvous.api.RendezvousClosedError"),
    None,
)
row(
    "a person stopped it while rank 0 made the cache of the data",
    'Traceback (most recent call last):\n  File "/data/ana/trainer.py", line 199, in train\n    with torch_distributed_zero_first(rank):\n'
    '  File "/opt/lib/python3.9/contextlib.py", line 119, in __enter__\n    return next(self.gen)\nKeyboardInterrupt',
    None,
)
# --- nothing is wrong ---
STEPS = "\n".join(f"step {n} loss {3 - n / 50:.3f}" for n in range(9))
TEST_OF_CHILD = (
    "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f62eb6ed630>\nTraceback (most recent call last):\n"
    '  File "/opt/lib/python3.10/site-packages/torch/utils/data/dataloader.py", line 1466, in __del__\n    self._shutdown_workers()\n'
    '  File "/opt/lib/python3.10/multiprocessing/process.py", line 160, in is_alive\n'
    "    assert self._parent_pid == os.getpid(), 'can only test a child process'\nAssertionError: can only test a child process"
)
for name, text in {
    "the end of a job whose store left first": f"{STEPS}\nTraining finished successfully\n[rank1]:[W1229 22:06:38.48 ProcessGroupNCCL.cpp:1662] [PG ID 0 PG GUID 0 Rank 1] Failed to check the \"should dump\" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe\n[rank1]:[W1229 22:06:38.55 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=67, addr=[h]:36214, remote=[h]:43145): failed to recv, got 0 bytes",
    "the group was not destroyed": f"{STEPS}\n[rank0]:[W510 09:16:33.39 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources. For more info, please see https://pytorch.org/docs/stable/distributed.html#shutdown (function operator())",
    "RCCL advises on the kernel's command line": 'g1064:11143:11143 [0] src/init.cpp:120 NCCL WARN Missing "amd_iommu=on" from kernel command line which can lead to system instablity or hang!\ng1064:11143:11143 [0] src/init.cpp:126 NCCL WARN Missing "HSA_FORCE_FINE_GRAIN_PCIE=1" from environment which can lead to low RCCL performance, system instablity or hang!',
    "EFA is not for this machine": "ip-10:61:61 [0] find_ofi_provider:543 NCCL WARN NET/OFI Couldn't find any optimal provider\nip-10:61:61 [0] nccl_net_ofi_init:1444 NCCL WARN NET/OFI Only EFA provider is supported\nip-10:61:61 [0] NCCL INFO NET/Plugin: Failed to find ncclCollNetPlugin_v6 symbol.\nip-10:61:61 [0] NCCL INFO Using network Socket\nstep 1 loss 2.0",
    "no InfiniBand library on one host": "ai:480850:480850 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]\nai:480850:480850 [0] NCCL INFO NET/Socket : Using [0]eth0:162.30.2.40<0>\nai:480850:480850 [0] NCCL INFO Using network Socket\nai:480850:480850 [0] NCCL INFO Channel 00 : 0[1000] -> 1[2000] via P2P/IPC\nstep 1 loss 2.0",
    "the allocator tried again": f"{STEPS}\n[2024-02-02 10:00:01,5] [WARNING] [stage3.py:1846:step] 2 pytorch allocator cache flushes since last step. this happens when there is high memory pressure and is detrimental to performance. if this is happening frequently consider adjusting settings to reduce memory consumption.\nmemory stats: num_alloc_retries=3 num_ooms=0",
    "vLLM compiles": "(EngineCore_DP0 pid=31) INFO 10-22 09:43:49 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation).\n" * 2 + "(EngineCore_DP0 pid=31) INFO 10-22 09:46:02 [core.py:170] init engine (profile, create kv cache, warmup model) took 251.77 seconds",
    "a loader was torn down in a child": f"{STEPS}\n{TEST_OF_CHILD}\nstep 10 loss 2.8",
    "a loader was torn down at the very end": f"{STEPS}\n{TEST_OF_CHILD}",
    "a handler of the log failed": f"{STEPS}\n--- Logging error ---\nTraceback (most recent call last):\n  File \"/opt/lib/python3.10/logging/__init__.py\", line 1100, in emit\n    msg = self.format(record)\nTypeError: not all arguments converted during string formatting\nCall stack:\n  File \"/data/ana/fit.py\", line 3, in <module>\n    main()\nMessage: 'loss'\nArguments: (2.0,)\nstep 10 loss 2.8",
    "an autotuner leaves a kernel out": f"{STEPS}\nE0101 10:00:01.1 41 torch/_inductor/select_algorithm.py:2100] [0/0] Runtime error during autotuning: \nE0101 10:00:01.1 41 torch/_inductor/select_algorithm.py:2100] [0/0] No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 114688 Hardware limit:101376 Reducing block sizes or `num_stages` may help.. \nE0101 10:00:01.1 41 torch/_inductor/select_algorithm.py:2100] [0/0] Ignoring this choice.\nstep 10 loss 2.8",
    "a hostname is not known": f"[W socket.cpp:697] [c10d] The hostname of the client socket cannot be retrieved. err=-3\n{STEPS}",
    "a node joined and all began anew": f"{STEPS}\n[INFO] [default] Detected 1 new nodes from group_rank=0; will restart worker group\n" + "\n".join(f"step {n} loss 2.5" for n in range(6, 16)),
    "wandb lost its server for a while": f"{STEPS}\nwandb: Network error (ConnectionError), entering retry loop.\nwandb: ERROR Error while calling W&B API: context deadline exceeded (<Response [500]>)\n" + "\n".join(f"step {n} loss 2.5" for n in range(9, 13)),
    "a keep-alive was late": f"{STEPS}\n[W dynamic_rendezvous.py:1139] The node 'w-1_17_0' has failed to send a keep-alive heartbeat to the rendezvous 'none' due to an error of type RendezvousTimeoutError.\n" + "\n".join(f"step {n} loss 2.5" for n in range(9, 13)),
    "Megatron begins without a checkpoint": "WARNING: could not find the metadata file /ckpt/latest_checkpointed_iteration.txt\n    will not load any checkpoints and will start from random\n(min, max) time across ranks (ms):\n    load-checkpoint ................................: (0.21, 0.34)\n iteration        1/     100 | consumed samples: 16 | elapsed time per iteration (ms): 9044.2 | lm loss: 1.1E+01 | number of skipped iterations: 1 | number of nan iterations: 0 |",
    "Lightning and SLURM": "SLURM auto-requeueing enabled. Setting signal handlers.\nInitializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2\ndistributed_backend=nccl\nAll distributed processes registered. Starting with 2 processes\nThe 'train_dataloader' does not have many workers which may be a bottleneck.\nEpoch 0: 100%|##| 10/10 [00:01<00:00, 9.5it/s, v_num=0, train_loss=2.30]",
    "workers of a loader are many": "UserWarning: This DataLoader will create 16 worker processes in total. Our suggested max number of worker in current system is 8, which is smaller than what this DataLoader is going to create. Please be aware that excessive worker creation might get DataLoader running slow or even freeze, lower the worker number to avoid potential slowness/freeze if necessary.\nhuggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...\nstep 1 loss 2.0",
    "DETR's lines": "\n".join(f"Epoch: [27]  [ {n}/1352]  eta: 0:13:43  lr: 0.000013  loss: 29.{90 - n % 9} (28.6905)  loss_bbox: 0.1857 (0.1679)  time: 0.9458  data: 0.0071  max mem: 16861" for n in range(100, 900, 50)),
    "options of NCCL's group": "[rank0]:[I304 10:06:12.001 ProcessGroupNCCL.cpp:995] [PG ID 0 PG GUID 0 Rank 0] ProcessGroupNCCL initialization options: size: 8, global rank: 0, TIMEOUT(ms): 600000, USE_HIGH_PRIORITY_STREAM: 0\n[rank0]:[I304 10:06:12.001 ProcessGroupNCCL.cpp:1004] [PG ID 0 PG GUID 0 Rank 0] ProcessGroupNCCL environments: NCCL version: 2.21.5, TORCH_NCCL_ASYNC_ERROR_HANDLING: 3, TORCH_NCCL_DUMP_ON_TIMEOUT: 1, TORCH_NCCL_DESYNC_DEBUG: 0, TORCH_NCCL_NAN_CHECK: 0\nstep 1 loss 2.0",
}.items():  # fmt: skip
    row(f"healthy: {name}", text, None)

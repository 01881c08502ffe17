"""Further excerpts as people paste them, of public pleas: launchers and libraries that the other rows have not.

The lines that tell a fact keep the form in which they were printed; names, paths and the words around them are ours.
"""

from __future__ import annotations

import json

from tests.unit.logs.strangers import REST, late, row, status, trace


def signal(rank: int, issued: int, done: int, source: str = " rank 2") -> str:
    """The words of a rank that another one asks for its dump."""
    return (
        f"[rank{rank}]:[E723 01:58:45.66{rank} ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
        f"Received a dump signal due to a collective timeout from {source} and we will try our best to dump the debug "
        f"info. Last enqueued NCCL work: {issued}, last completed NCCL work: {done}.This is most likely caused by "
        "incorrect usages of collectives, e.g., wrong sizes used across ranks, the order of collectives is not same "
        "for all ranks or the scheduled collective, for some reason, didn't run. Additionally, this can be caused by "
        "GIL deadlock or other reasons such as network errors or bugs in the communications library (e.g. NCCL), etc. "
    )


# --- the watchdog of NCCL ---
row(
    "a web console numbers the lines; all eight wait in one all-reduce",
    "\n".join(
        f"[{80746 + 2 * r}] {late(r, 1580, nin=466119168)}\n[{80747 + 2 * r}] {status(r, 1580, 1582, 1579, 'PG 1')}"
        for r in (0, 4, 3, 2, 1, 7, 6, 5)
    ),
    ("network-stalled", ()),
)
row(
    "one line of one rank, in front of a request to skip a stage",
    "iteration        1/     100 | consumed samples: 16 | elapsed time per iteration (ms): 9044.2 | lm loss: 1.1E+01 |\n"
    + late(12, 5, nin=1),
    ("dumps-missing", tuple(range(12))),
)
row(
    "a torchtune job saves: rank 0 alone is silent",
    "1|101|Loss: 0.13964782655239105: 100%|##########| 101/101 [1:54:39<00:00, 69.96s/it]"
    "INFO:torchtune.utils._logging:Saving checkpoint. This may take some time. Retrieving full model state dict...\n"
    "INFO:torchtune.utils._logging:Getting full model state dict took 114.73 secs\n"
    + "\n".join(late(r, 28956, nin=1) for r in (4, 7, 1, 2, 3, 5, 6)),
    ("rank-not-joined", (0,)),
)
row(
    "data are prepared by rank 0 while the others time out",
    "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/3\n"
    "Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/3\nInitializing distributed: GLOBAL_RANK: 2, MEMBER: 3/3\n"
    "Preparing test set...:  37%|###      | 25/67 [24:03<30:15, 43.23s/it]\n"
    "Preparing test set...:  39%|####     | 26/67 [24:51<30:30, 44.65s/it]\nP"
    + "\n".join(
        f"[E ProcessGroupNCCL.cpp:475] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800008 milliseconds before timing out.\n"
        f"[E ProcessGroupNCCL.cpp:541] [Rank {r}] Work WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
        "Timeout(ms)=1800000) timed out in blocking wait (NCCL_BLOCKING_WAIT=1)."
        for r in (1, 2)
    )
    + f"\n[E ProcessGroupNCCL.cpp:489] {REST}",
    ("rank-not-joined", (0,)),
)
row(
    "validation on rank 0 only: it observes the dump signal and counts nothing",
    "\n".join(late(r, 22) + "\n" + signal(r, 22, 21, "this local rank") for r in (1, 2, 3))
    + "\n[rank0]:[E1128 21:11:49.041 ProcessGroupNCCL.cpp:1806] [PG ID 0 PG GUID 0(default_pg) Rank 0] Observed flight "
    "recorder dump signal from another rank via TCPStore.",
    ("rank-not-joined", (0,)),
)
row(
    "one of eight is idle and says so twice",
    "\n".join(late(r, 137, nin=233373696) + "\n" + status(r, 137, 137, 136) for r in (2, 0, 1, 3, 4, 6, 7))
    + "\n" + signal(5, 136, 136) + "\n" + signal(5, 136, 136),
    ("rank-not-joined", (5,)),
)  # fmt: skip
row(
    "a sample is skipped on one rank, which is a call behind",
    "\n".join(
        late(r, 21937, "_ALLGATHER_BASE", 176556032, 706224128) + "\n" + status(r, 21937, 21938, 21936)
        for r in (0, 2, 3)
    )
    + "\n" + signal(1, 21936, 21936, " rank 0"),
    ("rank-not-joined", (1,)),
)  # fmt: skip
row(
    "rank 0 has a smaller gradient bucket than its peers",
    "\n".join(
        late(r, 3942, nin=127634432 if r == 0 else 128226432) + "\n" + status(r, 3942, 3943, 3941) for r in range(8)
    ),
    ("shape-mismatch", (0,)),
)
row(
    "two ranks broadcast different sizes while the third is further",
    f"{late(3, 7219, 'BROADCAST', 64, ms=3000000)}\n"
    "[rank3]:[E918 19:29:24.44 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank 3]  failure detected by "
    "watchdog at work sequence id: 7219 PG status: last enqueued work: 7220, last completed work: 7218\n"
    f"{late(2, 7219, 'BROADCAST', 24084544, ms=3000000)}\n"
    "[rank2]:[E918 19:29:25.95 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank 2]  failure detected by "
    "watchdog at work sequence id: 7219 PG status: last enqueued work: 7219, last completed work: 7218\n"
    f"{late(0, 7221, 'ALLREDUCE', 593920, ms=3000000)}",
    ("shape-mismatch", (2, 3)),
)
row(
    "an all-gather of several tensors, cut unevenly across the sequence",
    "\n".join(
        late(r, 610, "COALESCED", n, 8 * n) + "\n" + status(r, 610, 616, 609, "PG ID 2 PG GUID 9")
        for r, n in ((2, 81920), (6, 76800))
    ),
    ("shape-mismatch", (2, 6)),
)
row(
    "a job of 64 ranks of which one speaks, its communicator tells the rest",
    "[E ProcessGroupNCCL.cpp:475] [Rank 15] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=96383, "
    "OpType=_ALLGATHER_BASE, NumelIn=88200, NumelOut=5644800, Timeout(ms)=7200000) ran for 7200520 milliseconds before timing out.\n"
    + "\n".join(
        f"t-20240517230118-grg2t-worker-1:{5123 + n}:{5271 + n} [{n}] NCCL INFO [Service thread] Connection closed by localRank 7"
        for n in (0, 2, 4, 6, 7)
    )
    + "\nt-20240517230118-grg2t-worker-1:5130:5206 [0] NCCL INFO comm 0x738ea950 rank 15 nranks 64 cudaDev 7 busId e4000 - Abort COMPLETE\n"
    f"[E ProcessGroupNCCL.cpp:489] {REST}",
    ("dumps-missing", tuple(r for r in range(64) if r != 15)),
)
row(
    "torchtitan's [rank0]: is a local rank, the group tells which",
    "[rank0]:[titan] 2025-03-04 10:11:12,001 - root - INFO - step: 4910  loss:  2.9131  memory: 28.10GiB(71.03%)  tps: 1,204\n"
    "[rank0]:terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "[rank0]:  what():  [PG ID 0 PG GUID 0(default_pg) Rank 4] Process group watchdog thread terminated with exception: [Rank 4] "
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=49120, OpType=_ALLGATHER_BASE, NumelIn=16416832, "
    "NumelOut=1050677248, Timeout(ms)=300000) ran for 300015 milliseconds before timing out.",
    ("dumps-missing", tuple(range(4))),
)
row(
    "torchtitan's second node: a traceback after a local rank",
    "\n".join(
        f"[rank{r}]:[rank{r + 4}]:[E304 10:16:12.00{r} ProcessGroupNCCL.cpp:632] [Rank {r + 4}] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=812, OpType=_ALLGATHER_BASE, NumelIn=131072, NumelOut=1048576, Timeout(ms)=300000) "
        "ran for 300015 milliseconds before timing out."
        for r in (0, 1, 3)
    )
    + "\n" + trace("loader.py:88", "ValueError: sample 4711 holds no tokens", 2),
    ("uncaught-exception", (6,)),
)  # fmt: skip
row(
    "two nodes of torchtitan in one file: a local rank is nobody's name",
    "\n".join(
        f"[rank{r % 4}]:[rank{r}]:[I304 10:06:12.00{r} ProcessGroupNCCL.cpp:995] [PG ID 0 PG GUID 0 Rank {r}] ProcessGroupNCCL "
        "initialization options: size: 8, global rank: 0, TIMEOUT(ms): 300000"
        for r in range(8)
    )
    + "\n" + trace("loader.py:88", "ValueError: sample 4711 holds no tokens", 2),
    ("uncaught-exception", ()),
)  # fmt: skip
row(
    "three ranks abort in one breath",
    "  what():    what():    what():  "
    + "\n  what():  ".join(
        f"[PG ID 0 PG GUID 0(default_pg) Rank {r}] Process group watchdog thread terminated with exception: [Rank {r}] Watchdog "
        "caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, NumelOut=112, Timeout(ms)=1800000) "
        "ran for 1800010 milliseconds before timing out."
        for r in (2, 1, 3)
    ),
    ("rank-not-joined", (0,)),
)
row(
    "a service of sixteen ranks, of which one is pasted",
    "distributed-sglang-0:206:10697 [1] NCCL INFO Connected all trees\n"
    "[rank1]:[E909 08:45:30.12 ProcessGroupNCCL.cpp:2252] [PG ID 2 PG GUID 3 Rank 1]  failure detected by watchdog at work "
    "sequence id: 40231 PG status: last enqueued work: 40267, last completed work: 40230\n"
    "[rank1]:[E909 08:45:30.12 ProcessGroupNCCL.cpp:732] Stack trace of the failed collective not found, potentially because "
    "FlightRecorder is disabled. You can enable it by setting TORCH_NCCL_TRACE_BUFFER_SIZE to a non-zero value.\n"
    "distributed-sglang-0:206:10697 [1] NCCL INFO ncclCommInitRankConfig comm 0x7f6d407d2450 rank 1 nranks 16 cudaDev 1 nvmlDev 1 "
    "busId 2a000 commId 0xb7dbcefd01419470 - Init COMPLETE",
    ("dumps-missing", ()),
)
row(
    "two calls of the debug mode, one of them without tensors",
    trace(
        "bug1.py:121",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running collective: CollectiveFingerPrint("
        "SequenceNumber=32, OpType=ALLREDUCE, TensorShape=[], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float "
        "(default), device=cuda, layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), "
        "memory_format=(nullopt))), but Rank 3 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=GATHER)."
        "Collectives differ in the following aspects: \t Sequence number: 32vs 0  Op type: ALLREDUCEvs GATHER  Tensor Tensor "
        "dtypes: Floatvs   Tensor Tensor devices: TensorOptions(dtype=float (default), device=cuda)vs ",
        2,
    ),
    ("collective-mismatch", (2, 3)),
)
row(
    "MMDetection's lines, then one rank of four is silent",
    "\n".join(
        f"2024/05/06 11:12:{n:02} - mmengine - INFO - Epoch(train)  [3][{50 * n:4}/7330]  lr: 2.0e-02  eta: 1 day, 2:03:04  "
        f"time: 0.4531  data_time: 0.0121  memory: 6022  loss: 1.{200 - n}  loss_cls: 0.51  loss_bbox: 0.40"
        for n in range(1, 20)
    )
    + "\n" + "\n".join(late(r, 9911, nin=18878976) for r in (0, 1, 3)),
    ("rank-not-joined", (2,)),
)  # fmt: skip
# --- stores and rendezvous ---
row(
    "the tokenizer runs on rank 0 (old spelling of the wait for an id)",
    "Running tokenizer on dataset:  88%|########8 | 383700/433643 [29:55<03:25, 2432.70 examples/s]"
    + trace(
        "preprocess.py:160",
        "RuntimeError: [1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d key-value store by key "
        "'0', but store->get('0') got error: Socket Timeout",
    ),
    ("nccl-init-stuck", (0,)),
)
row(
    "the same with the name of the key",
    trace(
        "run_clm.py:31",
        "RuntimeError: [1] is setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d key-value store by key "
        "'0', but store->get('0') got error: Timeout waiting for key: default_pg/0/0 after 1800000 ms",
        1,
    ),
    ("nccl-init-stuck", (0,)),
)
row(
    "a trainer maps its data, a warning of the socket before the exception",
    "Map:  17%|####      | 281398/1652614 [09:56<53:07, 430.16 examples/s]"
    "[rank1]:[W socket.cpp:432] [c10d] While waitForInput, poolFD failed with (errno: 0 - Success).\n"
    + trace(
        "dpo.py:245",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
        "key-value store by key '0', but store->get('0') got error: Socket Timeout",
    ),
    ("nccl-init-stuck", (0,)),
)
row(
    "a trainer waits for its inference server",
    "[rank0]:[W326 22:36:28.88 socket.cpp:464] [c10d] waitForInput: poll for socket SocketImpl(fd=60, addr=[::ffff:127.0.0.1]:52894, "
    "remote=[9082:494f::6545]:2490) returned 0, likely a timeout\n"
    "[rank0]:[W326 22:36:28.88 socket.cpp:489] [c10d] waitForInput: socket SocketImpl(fd=60, addr=[::ffff:127.0.0.1]:52894, "
    "remote=[9082:494f::6545]:2490) timed out after 300000ms\n"
    + trace(
        "run_grpo.py:219", "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /broadcast_from/1/0", 0
    ),
    ("rendezvous-incomplete", ()),
)
row(
    "a receive that nobody served, in the words of old stores",
    "\n".join(trace(f"pt2pt.py:{n}", "RuntimeError: Socket Timeout") for n in (28, 32)),
    ("rendezvous-incomplete", ()),
)
row(
    "an agent cannot reach the store, without parentheses",
    "[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to 192.0.0.1:1234\n"
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner "
    "exception for details.",
    ("rendezvous-incomplete", ()),
)
row(
    "an agent of torch 1.10 cannot reach the store",
    'Traceback (most recent call last):\n  File "/opt/py39/lib/python3.9/site-packages/torch/distributed/elastic/rendezvous/'
    'c10d_rendezvous_backend.py", line 155, in _create_tcp_store\n    store = TCPStore(\n'
    "RuntimeError: connect() timed out. Original timeout was 60000 ms.\n\nThe above exception was the direct cause of the "
    "following exception:\n\nTraceback (most recent call last):\n"
    '  File "/opt/py39/lib/python3.9/site-packages/torch/distributed/run.py", line 719, in main\n    run(args)\n'
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner "
    "exception for details.",
    ("rendezvous-incomplete", ()),
)
row(
    "Gloo's first connection between two hosts",
    trace(
        "serve.py:4",
        "RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        1,
    ),
    ("rendezvous-incomplete", ()),
)
row(
    "NCCL 2.4 is refused at an address of no node",
    "tj1-asr-13:941227:943077 [0] NCCL INFO Call to connect returned Connection refused, retrying\n"
    "tj1-asr-13:941227:943077 [0] NCCL INFO Call to connect returned Connection refused, retrying\n\n"
    "tj1-asr-13:941227:943077 [0] include/socket.h:390 NCCL WARN Connect to 10.38.10.112<21724> failed : Connection refused\n"
    "tj1-asr-13:941227:943077 [0] NCCL INFO bootstrap.cc:100 -> 2\n"
    + trace(
        "asr.py:6",
        "RuntimeError: NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:410, unhandled system error, NCCL version 2.4.8",
    ),
    ("nccl-init-stuck", ()),
)
row(
    "SLURM's tasks give NCCL 2.4 an argument that it refuses",
    trace(
        "parlai.py:3",
        "RuntimeError: NCCL error in: /pytorch/torch/lib/c10d/../c10d/NCCLUtils.hpp:82, invalid argument, NCCL version 2.4.8",
    )
    + "\nsrun: error: slurm-job-compute-0-0: tasks 2-7: Exited with exit code 1\n"
    "srun: error: slurm-job-compute-0-1: tasks 8-13,15: Exited with exit code 1\n"
    "srun: error: slurm-job-compute-0-1: task 14: Exited with exit code 1",
    ("nccl-misuse", ()),
)
# --- jobs that run or ended well, and what is around them ---
RUNS = "\n".join(f"step {n} loss {3 - n / 50:.3f}" for n in range(9))
ON = "\n".join(f"step {n} loss 2.1" for n in range(9, 14))
for name, text in {
    "Megatron evaluates and saves": "\n".join(f" [2026-11-25 03:{n:02}:00] iteration {n:8d}/    9000 | consumed samples: {n * 64} | elapsed time per iteration (ms): 1204.{n % 10} | lm loss: 2.10{n % 7}E+00 | number of nan iterations: 0 |" for n in range(40)) + "\nvalidation loss at iteration 1000 | lm loss value: 2.0E+00 | lm loss PPL: 7.4E+00 |\nsaving checkpoint at iteration 1000 to /ckpt in torch_dist format\n  successfully saved checkpoint from iteration 1000 to /ckpt [ t 1/1, p 1/1 ]",
    "DeepSpeed's processes end by themselves": "\n".join(f"[2026-11-25 03:10:{n:02},1] [INFO] [logging.py:107:log_dist] [Rank 0] step={n}, skipped=0, lr=[1e-05], mom=[(0.9, 0.999)]" for n in range(1, 30)) + "\n[2026-11-25 03:11:01,1] [INFO] [launch.py:351:main] Process 4711 exits successfully.",
    "words of the data": f"{RUNS}\nvalidation error rate 0.12\nthe killed process pattern test: Killed in action\nsample: 'Segmentation fault' is a common error in C\nTimeout set to 600 s",
    "a model writes a traceback": f'{RUNS}\n=== sample ===\nTraceback (most recent call last):\n  File "foo.py", line 3, in bar\nZeroDivisionError: division by zero\n=== end ===\n{ON}',
    "the store was late": "[W1125 03:00:00.1 socket.cpp:755] [c10d] The client socket has failed to connect to [master-0]:29500 (errno: 111 - Connection refused).\nstep 1 loss 3.0\nstep 2 loss 2.9",
    "NCCL begins": "\n".join(f"n0:{100 + r}:{200 + r} [{r}] NCCL INFO ncclCommInitRank comm 0x1{r} rank {r} nranks 8 cudaDev {r} nvmlDev {r} busId {r}000 commId 0xabc1 - Init START" for r in range(8)),
    "NCCL's topology (NVIDIA-NeMo/Run#266)": f"n0:1:2 [0] graph/search.cc:1135 NCCL WARN Could not find a path for pattern 1, falling back to simple order\nn0:1:2 [0] graph/topo.h:230 NCCL WARN Could not find NET with id 0\n{RUNS}",
    "stacks after a while": f'{RUNS}\nTimeout (0:05:00)!\nThread 0x00007f1d3c7fe740 (most recent call first):\n  File "/data/ana/t.py", line 3 in load\n{ON}',
    "fairseq skips a batch": f"{RUNS}\n2026-11-25 03:00:01 | WARNING | fairseq.trainer | OOM: Ran out of memory with exception: CUDA out of memory. Tried to allocate 1.10 GiB\n{ON}",
    "a smaller batch is tried": f"[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.10 GiB. GPU 0 has a total capacity of 79.10 GiB\nDecreasing batch size to: 32.\n{RUNS}",
    "verl's lines": "\n".join(f"(TaskRunner pid=152455) step:{n} - global_seqlen/min:1309 - actor/pg_loss:-0.0{n} - actor/grad_norm:0.1{n} - timing_s/step:80.1" for n in range(1, 30)),
    "calls of the debug mode": f"[rank0]:[I1125 03:00:00.1 ProcessGroupWrapper.cpp:587] [Rank 0] Running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[10], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu))\n{RUNS}",
    "a reader connects again": f"{RUNS}\nWARNING:urllib3.connectionpool:Retrying (Retry(total=4)) after connection broken by 'ConnectionResetError(104, 'Connection reset by peer')': /data/shard-3",
    "torchft skips a step": f"[rank0]:2026-11-25 03:10:00 ERROR [torchft.manager:300] [train_0/0 - step 12] got exception in all reduce -- skipping remaining: Timed out waiting 10000ms for recv operation to complete\n{ON}",
    "half of a traceback": '[rank3]: Traceback (most recent call last):\n[rank3]:   File "/data/ana/proj/t.py", line 9, in main\n[rank3]:     x = y',
    "a test run": "tests/test_gloo.py::test_words[RuntimeError: Timed out waiting 30000ms for recv operation to complete] PASSED\n===== 358 passed, 2 skipped in 41.79s =====",
    "metrics as JSON": "\n".join(json.dumps({"step": n, "loss": 2.1, "message": f"step {n} loss 2.1"}) for n in range(9)),
}.items():  # fmt: skip
    row(f"healthy: {name}", text, None)

# --- pastes that lost a part ---
row(
    "only the last line of a traceback, before the launcher's own",
    "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by attn.so)\n"
    "E0101 11:11:12.1 100 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0 "
    "(pid: 102) of binary: /usr/bin/python",
    ("uncaught-exception", (0,)),
)
row(
    "two ranks, each with the last line of its traceback",
    "[rank0]: RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    "[rank0]: For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "[rank1]: RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ("uncaught-exception", (0, 1)),
)
row(
    "healthy: an exception that a rank tells of and gets over",
    "[rank0]: ValueError: sample 4 has no text, skipped\nstep 1 loss 2.0\nstep 2 loss 1.9\nstep 3 loss 1.8",
    None,
)
row(
    "healthy: an exception that is told early in a log without steps",
    "[rank0]: ImportError: no module flash, take the slow way\n"
    + "\n".join(f"[rank0]: loaded shard {n} of the training set, iteration over it" for n in range(40)),
    None,
)
row(
    "frames without their first line",
    '  File "/home/me/loop.py", line 44, in fit\n    loss = self.step(batch)\n'
    '  File "/env/lib/python3.10/site-packages/torch/nn/functional.py", line 2293, in embedding\n'
    "    return torch.embedding(weight, input)\n"
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices",
    ("uncaught-exception", ()),
)
row(
    "healthy: a stack that is printed, and an exception that somebody else tells of later",
    '  File "/home/me/loop.py", line 44, in fit\n    loss = self.step(batch)\nstack printed\n'
    "ValueError: a sample was skipped\nstep 3 loss 1.0",
    None,
)
row(
    "a heap that is corrupted",
    "step 100 loss 3.1\ndouble free or corruption (!prev)\n"
    "E0101 11:11:12.1 100 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -6) local_rank: 1 "
    "(pid: 102) of binary: /usr/bin/python",
    ("rank-dead", (1,)),
)
row(
    "Lightning's words for parameters without a gradient",
    trace(
        "lit.py:77",
        "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss "
        "returned by training_step.",
        0,
    ),
    ("unused-parameters", (0,)),
)

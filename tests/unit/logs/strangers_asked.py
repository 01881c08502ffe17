"""What people show when they ask: tails without a head, quoted blocks, launchers that were ended, other launchers' words."""

from __future__ import annotations

from tests.unit.logs.strangers import late, row, trace

SYSTEM = "RuntimeError: NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:911, unhandled system error, NCCL version 2.7.8"
OUT_OF_ONE = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 62, in main\n    mp.spawn(worker, nprocs=4)\n'
    '  File "/opt/py/site-packages/torch/multiprocessing/spawn.py", line 118, in join\n    raise Exception(msg)\n'
    "Exception: \n\n-- Process 2 terminated with the following error:\n"
)
WORKER = (
    "Traceback (most recent call last):\n"
    '  File "/opt/py/site-packages/torch/multiprocessing/spawn.py", line 19, in _wrap\n    fn(i, *args)\n'
    '  File "train.py", line 20, in worker\n    step()\n'
)
STALLED = (
    "WARNING: One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting"
    " for remainder of ranks for more than 60 seconds. Stalled ops: "
)
WARNED = (
    "[W socket.cpp:601] [c10d] The IPv6 network addresses of (w-0-0.w, 3389) cannot be retrieved (gai error: -2 - Name or"
    " service not known).\n"
)
ENTRY = "[{0}]: time : 2024-08-23_22:22:58 host : algo-2 rank : {0} (local_rank: {0}) exitcode : -6 (pid: {1}) error_file: <N/A>"
BIND = "[W socket.cpp:401] [c10d] The server socket has failed to bind to [::]:80 (errno: 13 - Permission denied).\n"

# --- errors of one's own host ---
row("NCCL's system error with a traceback", trace("train.py:48", SYSTEM, 0), ("uncaught-exception", (0,)))
row("NCCL's system error and nothing else", SYSTEM, ("uncaught-exception", ()))
row(
    "a system error while another rank was killed",
    trace("train.py:48", SYSTEM, 1) + "\nProcess 0 terminated with signal SIGKILL",
    ("rank-dead", (0,)),
)
row(
    "no memory left for what NCCL needs itself",
    "n3:9:9 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
    "n3:9:9 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
    ("device-out-of-memory", ()),
)
row(
    "a proxy that cannot connect",
    "n1:922:1158 [3] proxy.cc:1485 NCCL WARN [Service thread] Error encountered progressing operation=Connect, res=2, closing"
    " connection\nn1:922:1158 [3] proxy.cc:1519 NCCL WARN [Proxy Service 11] Failed to execute operation Connect from rank 11,"
    " retcode 2",
    ("nccl-init-stuck", ()),
)
row(
    "what libmlx5 prints",
    "mlx5: host-1: got completion with error:\n00000000 00008914 10018d9b",
    ("network-stalled", ()),
)
row("Gaudi's driver", "[   72.9] habanalabs hl2: failed to initialize the H/W", ("device-fault", ()))
row(
    "too many open files, without a traceback",
    "RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the limit",
    ("uncaught-exception", ()),
)
# --- launchers ---
row("spawn of old releases", OUT_OF_ONE + WORKER + "ValueError: bad", ("uncaught-exception", (2,)))
row(
    "DeepSpeed's launcher is interrupted",
    "Traceback (most recent call last):\n"
    '  File "/opt/py/site-packages/deepspeed/launcher/runner.py", line 548, in sigkill_handler\n    kill(kill_cmd)\n'
    "NameError: free variable 'kill_cmd' referenced before assignment in enclosing scope",
    None,
)
row(
    "XLA's launcher sees its command end",
    "172.16.80.8 [14] Terminated\nTraceback (most recent call last):\n"
    '  File "/opt/py/dist-packages/torch_xla/distributed/xla_dist.py", line 317, in _run_cmd\n    raise RuntimeError(\n'
    "RuntimeError: Remote command exited with code: 143",
    None,
)
row(
    "an agent waits for those of other nodes to end",
    "ERROR:torch.distributed.elastic.agent.server.api:Error waiting on exit barrier. Elapsed: 315.77 seconds\n"
    "Traceback (most recent call last):\n"
    '  File "/opt/py/torch/distributed/elastic/agent/server/api.py", line 906, in _exit_barrier\n    store_util.barrier(\n'
    "RuntimeError: Socket Timeout",
    None,
)
row(
    "an agent loses the store after hours",
    "step 9000 loss 2.1\nWARNING:torch.distributed.elastic.rendezvous.dynamic_rendezvous:The node 'n3_187281_0' has failed to send"
    " a keep-alive heartbeat to the rendezvous 'none' due to an error of type RendezvousConnectionError.",
    None,
)
row(
    "torchrun's table without its head",
    "  rank      : 0 (local_rank: 0)\n  exitcode  : -11 (pid: 6421)\n  error_file: <N/A>\n"
    "  traceback : Signal 11 (SIGSEGV) received by PID 6421\n======",
    ("rank-dead", (0,)),
)
row(
    "torchrun's table, one entry a line, nothing beside it",
    "Failures:\n" + "\n".join(ENTRY.format(r, 180 + r) for r in (2, 3)),
    ("rank-dead", (2, 3)),
)
row(
    "a paste that lost its line ends",
    "[ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: /usr/bin/python"
    " Traceback (most recent call last): File runpy.py, line 194, in _run_module_as_main",
    ("rank-dead", (0,)),
)
row(
    "a local rank of a later node",
    "[rank144]:[E ProcessGroupNCCL.cpp:1153] [PG 0 Rank 144] ProcessGroupNCCL preparing to dump debug info.\n"
    "torch/distributed/elastic/multiprocessing/api.py:833] failed (exitcode: -6) local_rank: 0 (pid: 99) of binary: /usr/bin/python",
    ("rank-dead", ()),
)
row(
    "a number that was blacked out",
    "mpirun noticed that process rank 1 with PID xxxxxx on node xxxxxxxx exited on signal 9 (Killed).",
    ("rank-dead", (1,)),
)
row(
    "a step that SLURM could not start",
    "srun: error: Task launch for 36.0 failed on node cn131: Job credential expired",
    ("rank-dead", ()),
)
row(
    "Lightning names who ended, ray does not",
    "[rank: 1] Child process with PID 23026 terminated with code 1.\n"
    "(raylet) A worker died or was killed while executing a task by an unexpected system error.",
    ("rank-dead", (1,)),
)
row(
    "a process that ended with a code of its own",
    "RuntimeError: Connection closed by peer\nProcess 2 terminated with exit code 10, terminating remaining processes.",
    ("rank-dead", (2,)),
)
# --- calls and starts ---
row("Horovod misses a rank", STALLED + "broadcast.w_0 [missing ranks: 1]", ("rank-not-joined", (1,)))
row(
    "Horovod lists those that came",
    STALLED + "allreduce.w [ready ranks: 5, 1], allreduce.b [ready ranks: 5, 1]",
    ("rank-not-joined", ()),
)
row("Horovod's ranks differ", STALLED + "loss [ready ranks: 3], w [ready ranks: 2, 0, 1]", ("collective-mismatch", ()))
row(
    "two calls of different kinds, far past each other",
    "\n".join(
        f"[rank{r}]:[E1122 06:40:00.5 ProcessGroupNCCL.cpp:616] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
        f"{seq}, OpType={op}, NumelIn={n}, NumelOut=2, Timeout(ms)=600000) ran for 600080 milliseconds before timing out.\n"
        f"[rank{r}]:[E1122 06:40:00.5 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {r}] Exception (either an error or"
        f" timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: 128, last completed NCCL work: {seq - 1}."
        for r, seq, op, n in ((0, 122, "_REDUCE_SCATTER_BASE", 4), (1, 126, "_ALLGATHER_BASE", 1))
    ),
    ("collective-mismatch", (0, 1)),
)
row(
    "numbers of two groups that no line names",
    "\n".join(
        f"[E ProcessGroupNCCL.cpp:458] [Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, "
        "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800593 milliseconds before timing out."
        for r, seq in ((0, 96125), (7, 64088))
    ),
    ("dumps-missing", ()),
)
row(
    "a number that a terminal broke",
    "[E ProcessGroupNCCL.cpp:475] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=385\n"
    "6, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800268 milliseconds before timing out.",
    ("dumps-missing", ()),
)
row(
    "a port that needs rights",
    BIND + "[E socket.cpp:435] [c10d] The server socket has failed to listen on any local network address.",
    ("rendezvous-incomplete", ()),
)
# --- DDP and kernels ---
row(
    "a parameter that is ready twice",
    "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a"
    " module parameter outside the `forward` function.\nParameter at index 387 with name encoder.weight has been marked as ready"
    " twice.",
    ("uncaught-exception", ()),
)
row(
    "an assertion in a paste without quotation marks",
    "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:142: operator(): block: [0,0,0], thread: [114,0,0] Assertion index >= -sizes[i]"
    ' && index < sizes[i] && "index out of bounds" failed.',
    ("uncaught-exception", ()),
)
# --- blocks and prefixes ---
row(
    "a tail in a quoted block",
    '    File "unet.py", line 257, in embed\n      exponent = exponent / half\n'
    "    RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ("device-fault", ()),
)
row(
    "a traceback in a quoted block",
    '    Traceback (most recent call last):\n      File "unet.py", line 257, in embed\n        exponent = exponent / half\n'
    "    RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ("device-fault", ()),
)
row(
    "torchrun's table by way of pdsh",
    "\n".join(
        f"10.0.0.2: {line}"
        for line in (
            "Root Cause (first observed failure):", "[0]:", "  time      : 2024-01-01_00:00:00", "  host      : n2",
            "  rank      : 9 (local_rank: 1)", "  exitcode  : -11 (pid: 77)", "  error_file: <N/A>", "====",
        )
    ),
    ("rank-dead", (9,)),
)  # fmt: skip
row(
    "a watchdog behind a bar that was not ended",
    " 12%|# | 3/25 [00:04<00:31, 1.4s/it, consumed=2.5e+7]" + late(7, 64088).partition(":")[2],
    ("dumps-missing", tuple(range(7))),
)
# --- no failures ---
row(
    "a repair that the driver books",
    "NVRM: Xid (PCI:0000:9c:00): 63, pid=7, Row Remapper: New row (0x12) marked for remapping",
    None,
)
row("a fault that the driver got over", "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13", None)
for name, line in {
    "PyTorch's first example": "Train Epoch: 1 [{0}/60000 (1%)]\tLoss: 2.213",
    "DETR": "Epoch: [0]  [  {0}/50108]  eta: 10:54:44  lr: 0.000000  loss: 61.1246 (62.1246)",
    "timm": "Train: 0 [  {0}/1251 (  4%)]  Loss:  6.93 (6.94)  Time: 0.412s",
    "fairseq": "epoch 001:    {0} / 1500 loss=9.81, ppl=898.5, num_updates={0}, lr=1e-05",
    "fairseq's JSON": '{{"epoch": 1, "update": 0.1, "loss": "9.81", "num_updates": "{0}"}}',
    "ESPnet": "1epoch:train:1-{0}batch: iter_time=0.1, loss=150.3",
    "Composer": "[epoch=1][batch={0}/3200]:",
    "OLMo": "[step={0}/739328,epoch=0]",
    "an epoch a line": "Epoch {0}/100, Loss: 0.312",
    "PyTorch's tutorial": "[GPU0] Epoch {0} | Batchsize: 32 | Steps: 32",
    "kohya": "steps:   1%|          | {0}/1600 [00:30<39:12,  1.49s/it, avr_loss=0.1]",
}.items():
    row(f"a warning that {name} got over", WARNED + "\n".join(line.format(n) for n in range(50, 90, 10)), None)

"""Excerpts in which a consequence, a warning or an interruption stood before the cause, and healthy ones beside them."""

from __future__ import annotations

from tests.unit.logs.strangers import row, trace

STEPS = "".join(f"step {step} loss 2.{9 - step}\n" for step in range(1, 6))
EXIT = "E0813 06:19:49.809000 161210 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 2 (pid: 161617) of binary: python\n"
CLOSING = "W0813 06:19:48.1 161210 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 161615 closing signal SIGTERM\n"
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:110, {}, NCCL version 2.26.2\n"
    "{}\nLast error:\n{}"
)
INTERNAL = (
    "internal error - please report this issue to the NCCL developers",
    "ncclInternalError: Internal check failed.",
)
SYSTEM = (
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
)

# --- what NCCL itself says is the cause, when it speaks of nobody else ---
for name, kind, reason in (
    ("a topology that NCCL does not understand", INTERNAL, "Attribute arch of node cpu not found"),
    ("RCCL finds no way back", INTERNAL, "Failed to find reverse path from remNode 0/200000 nlinks 3 to node 0/700000"),
    ("a network plugin that is not there", INTERNAL, "Error: network AWS Libfabric not found."),
    ("a port that NCCL cannot have", SYSTEM, "Call to bind failed: Address already in use"),
):
    row(name, trace("train.py:410", NCCL.format(*kind, reason), 3), ("uncaught-exception", (3,)))

# --- an interruption that follows a failure ---
row(
    "Lightning's handlers of a signal, after a rank has failed",
    STEPS + CLOSING + "[rank: 0] Received SIGTERM: 15\n[rank: 1] Received SIGTERM: 15\n" + EXIT,
    ("rank-dead", (2,)),
)
row(
    "srun ends the others of a task that failed",
    STEPS + "srun: error: node1: task 3: Exited with exit code 1\nsrun: Terminating StepId=1.0\n"
    "slurmstepd: error: *** STEP 1.0 ON node1 CANCELLED AT 2025-01-10T15:27:25 ***\nsrun: error: node1: tasks 0-2: Terminated\n",
    ("rank-dead", (3,)),
)
row(
    "a link fails, then srun ends all",
    STEPS
    + "node1:1:1 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<4> with status=12 opcode=0 len=0 vendor err 129\n"
    "srun: error: node1: task 3: Exited with exit code 1\nslurmstepd: error: *** STEP 1.0 ON node1 CANCELLED AT 2025-01-10T15:27:25 ***\n",
    ("network-stalled", ()),
)
PREEMPTED = (
    "(WorkerDict pid=131) WARNING 02-10 12:00:01 scheduler.py:1057] Sequence group 0 is preempted by PreemptionMode.RECOMPUTE "
    "mode because there is not enough KV cache space.\n"
)
row("vLLM preempts sequences of a rollout, and later a rank fails", PREEMPTED + STEPS + EXIT, ("rank-dead", (2,)))
row("vLLM preempts sequences of a rollout", PREEMPTED + STEPS, None)

# --- an exception that was handled, in logs whose steps are told in other ways ---
HANDLED = "Traceback (most recent call last):\n  File \"/app/reward.py\", line 3, in score\n    x = float(a)\nValueError: could not convert string to float: 'abc'\n"
row(
    "verl's steps go on",
    "".join(f"(WorkerDict pid=13) {line}\n" for line in HANDLED.splitlines())
    + "".join(
        f"(TaskRunner pid=5) step:{i} - actor/pg_loss:-0.01 - actor/grad_norm:0.4 - critic/score/mean:0.1\n"
        for i in range(1, 9)
    ),
    None,
)
row(
    "MMEngine's steps go on",
    HANDLED
    + "".join(
        f"03/12 06:57:59 - mmengine - INFO - Epoch(train)  [1][ {i}/1172]  lr: 1e-3  time: 0.5  loss: 2.31\n"
        for i in range(50, 400, 50)
    ),
    None,
)
row(
    "the steps of PyTorch's ImageNet example go on",
    HANDLED
    + "".join(
        f"Epoch: [0][ {i}/5005]\tTime  0.3 ( 0.5)\tData 0.01 ( 0.2)\tLoss 6.9e+00 (7.0e+00)\n"
        for i in range(50, 400, 50)
    ),
    None,
)

# --- native ends ---
row(
    "torch_xla's handler of a signal",
    "*** SIGSEGV (@(nil)), see go/stacktraces#s15 received by PID 160 (TID 3418) on cpu 100; stack trace: ***\n"
    "PC: @     0x7f1c7e14b584  (unknown)  torch_xla::tensor_methods::all_reduce()\n",
    ("rank-dead", ()),
)
row(
    "UCX's handler of a signal",
    "[worker-0:2121 :0:7025] Caught signal 7 (Bus error: nonexistent physical address)\n==== backtrace (tid: 7025) ====\n",
    ("rank-dead", ()),
)
row("torch's handler of a signal", "SIGABRT(6), PID: 4119976, Thread 4119976: \n", ("rank-dead", ()))
row(
    "a worker of a loader aborts",
    trace("dataloader.py:1132", "RuntimeError: DataLoader worker (pid 801) is killed by signal: Aborted. ")
    + "\n\nThe above exception was the direct cause of the following exception:\n\n"
    + trace("fit.py:544", "RuntimeError: DataLoader worker (pid(s) 801) exited unexpectedly"),
    ("uncaught-exception", ()),
)
row(
    "an address of a kernel, alone on its line",
    "[CUDA ERROR] at file train_gpt2.cu:961:\nan illegal memory access was encountered\n",
    ("illegal-address", ()),
)

# --- numbers ---
NORM = "{{'loss': {}, 'grad_norm': {}, 'learning_rate': 4.55e-06, 'epoch': 0.66}}\n"
row(
    "a norm is not finite before the loss is 0",
    NORM.format(1.4626, 5.21) + NORM.format(1.4596, "nan") + NORM.format(0.0, "nan") * 3,
    ("gradient-nonfinite", ()),
)
MEGATRON = " iteration {}/ 250000 | elapsed time per iteration (ms): 4247.9 | loss scale: {} | grad norm: nan | number of skipped iterations:   0 |\n"
row(
    "Megatron's norm is not finite without a scaler",
    "".join(MEGATRON.format(step, 1.0) for step in (5426, 5427, 5428)),
    ("gradient-nonfinite", ()),
)
row("Megatron's scaler settles", "".join(MEGATRON.format(step, 65536.0) for step in (1, 2, 3)), None)

# --- lines of healthy jobs ---
WARNINGS = (
    "node1:1:1 NCCL WARN NET/IB : mlx5_0:1 Got async event : client reregistration",
    "node1:1:1 [0] NCCL WARN Call to ibv_query_ece failed with error Operation not supported errno 95",
    "node1:1:1 [0] NCCL INFO Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory, trying dmabuf",
    "WARNING: a batch of 64 may lead to Out Of Memory (OOM) errors on this device",
    "health: uncorrectable ECC error count = 0 on all devices",
    "preflight: 0 devices have fallen off the bus",
)
for number, warning in enumerate(WARNINGS):
    row(f"a warning of a healthy job, {number}", f"{warning}\n", None)

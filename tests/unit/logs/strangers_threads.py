"""What threads of projects show: watchdogs quoted or half cut off, other vendors' devices, launchers' last words."""

from __future__ import annotations

from tests.unit.logs.strangers import late, row, status, trace

DUMPED = (
    "[rank1]:[E801 01:01:39.2 ProcessGroupNCCL.cpp:1914] [PG ID 0 PG GUID 0(default_pg) Rank 1] Received a dump signal"
    " due to a collective timeout from this local rank and we will try our best to dump the debug info. Last enqueued"
    " NCCL work: 355, last completed NCCL work: 349.This is most likely caused by incorrect usages of collectives"
)
HANDLER = """[ERROR] 2025-03-04 14:03:12,880 error_handler: {
  "message": {
    "message": "MemoryError: std::bad_alloc",
    "extraInfo": {
      "py_callstack": "Traceback (most recent call last):\\n  File \\"fit.py\\", line 24, in fit\\n    step()\\n"
"""
BARS = "\n".join(
    f" {n}%|# | {n}/90 [04:45<9:14:11, 31.84s/it][2025-06-07 22:2{n % 10}:34,914] [INFO] [logging.py:96:log_dist] lr=0.1"
    for n in range(3, 20)
)

# --- watchdogs ---
row(
    "times without seconds before two groups that each have a Rank 1",
    "\n".join(
        f" 2025-02-18 12:54 {line}"
        for line in (
            late(13, 216, "ALLTOALL_BASE", 1379328, 1572864).replace("[Rank 13]", "[Rank 1]"),
            status(13, 216, 220, 215, "PG ID 11 PG GUID 119").replace("Rank 13]", "Rank 1]"),
            late(15, 57, nin=32).replace("[Rank 15]", "[Rank 1]"),
            status(15, 57, 57, 56, "PG ID 11 PG GUID 112").replace("Rank 15]", "Rank 0]"),
        )
    ),
    ("dumps-missing", ()),
)
row(
    "a watchdog quoted in a reply",
    f"> {late(13, 216)}\n> {status(13, 216, 220, 215)}",
    ("dumps-missing", tuple(range(13))),
)
row("a time-out that only the signal to dump tells", DUMPED, ("dumps-missing", (0,)))
row(
    "an old watchdog that names its rank behind its head",
    "[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC"
    " error encountered",
    ("device-fault", (1,)),
)
# --- starts ---
row(
    "a barrier that counts an earlier attempt",
    trace("t.py:4", "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1 (world_size=4, worker_count=16, timeout=0:30:00)", 0),
    ("rendezvous-incomplete", ()),
)  # fmt: skip
row(
    "the store's time-out since torch 2.1",
    trace("t.py:4", "torch.distributed.DistStoreError: Socket Timeout"),
    ("rendezvous-incomplete", ()),
)
row(
    "a line that rich broke",
    "DistStoreError: Timed out after 1801 seconds waiting for clients. 1/4 clients\njoined.",
    ("rendezvous-incomplete", ()),
)
row(
    "HCCL waits for rank 0",
    trace("t.py:4", "RuntimeError: create:build/compiler_depend.ts:102 HCCL function error: hcclCommInitRootInfoConfig(numRanks, &rootInfo, rank, config, &(comm->hcclComm_)), error code is 7", 8)
    + "\n[rank8]: EI0015: [PID: 9233] 2025-06-06-10:21:17.444 The ranktable or root info collection times out. Reason: the remote rank 0 is not ready.",
    ("nccl-init-stuck", ()),
)  # fmt: skip
row(
    "HCCL finds an earlier training",
    "EJ0001: 2025-05-21-11:57:54.167.645 Failed to initialize the HCCP process. Reason: Maybe the last training process is running.",
    ("nccl-init-stuck", ()),
)
row(
    "a call of HCCL that timed out is no exception of its rank",
    "[ERROR] 2025-05-21 hccl fftsplus task timeout. task information: 30min\n"
    + trace("engine.py:40", "RuntimeError: ACL stream synchronize failed, error code:507048"),
    ("network-stalled", ()),
)
# --- endings ---
row(
    "a shell that pads its words",
    "/srv/fit.sh: line 184: 2324239 Aborted                 (core dumped) python fit.py --resume",
    ("rank-dead", ()),
)
row(
    "a launcher's child died with a signal",
    trace("deepspeed.py:8", "subprocess.CalledProcessError: Command '['python', '-u', 'fit.py', '--local_rank=7']' died with <Signals.SIGSEGV: 11>."),
    ("rank-dead", ()),
)  # fmt: skip
row("torch's record of an exception", HANDLER, ("uncaught-exception", ()))
row(
    "a kernel's assertion and nothing else",
    "/pytorch/aten/src/ATen/native/cuda/ScatterGatherKernel.cu:144: operator(): block: [7,0,0], thread: [63,0,0] Assertion `idx_dim >= 0 && idx_dim < index_size` failed.",
    ("uncaught-exception", ()),
)
row(
    "NCCL and a call of CUDA",
    "n4:185:188 [0] transport.cc:154 NCCL WARN Cuda failure 'invalid argument'",
    ("uncaught-exception", ()),
)
row(
    "amdgpu tells of its hardware",
    "[13850.9] amdgpu 0000:1c:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
    ("device-fault", ()),
)
row(
    "a TPU's memory",
    trace("t.py:9", "RuntimeError: Bad StatusOr access: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 196.00M."),
    ("device-out-of-memory", ()),
)  # fmt: skip
row(
    "what DDP lists of two ranks",
    trace("t.py:9", "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.")
    + "\nParameter indices which did not receive grad for rank 2: 362 363\n"
    + "Parameter indices which did not receive grad for rank 0: 362 363",
    ("unused-parameters", (0, 2)),
)  # fmt: skip
# --- nothing wrong ---
row(
    "a device that NCCL could not use, and did without",
    "n4:185:188 [0] transport.cc:154 NCCL WARN Cuda failure 'peer access'\n" + "\n".join(f"step {n} loss 2.5" for n in range(5)),
    None,
)  # fmt: skip
row(
    "a kernel's assertion in an attempt before the last",
    "step 3 loss 2.0\na.cu:9: nll_loss_kernel: block: [0,0,0], thread: [5,0,0] Assertion `t < n_classes` failed.\n"
    "INFO will restart worker group. 2/3 attempts left\n" + "\n".join(f"step {n} loss 2.5" for n in range(3, 9)) + "\nTraining complete",
    None,
)  # fmt: skip
row(
    "a failed save between bars with a record glued to them",
    BARS.replace("\n", "\n" + trace("t.py:91", "OSError: [Errno 28] No space left on device") + "\n", 1),
    None,
)

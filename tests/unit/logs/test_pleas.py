"""Public pleas for help, rebuilt from the lines they printed: what the judge answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.diagnose import diagnose_logs
from dtobs.diagnose.model import Diagnosis


def told(tmp_path: Path, text: str) -> Diagnosis:
    """The diagnosis of one log."""
    path = tmp_path / "job.log"
    path.write_text(text)
    return diagnose_logs([str(path)])


def verdict(tmp_path: Path, text: str) -> tuple[str, tuple[int, ...]] | None:
    found = told(tmp_path, text).verdict
    return None if found is None else (found.code, found.ranks)


MISMATCH = """
    [rank7]:[E816 01:45:40.183009389 ProcessGroupNCCL.cpp:607] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=BROADCAST, NumelIn=5056, NumelOut=5056, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.
    [rank7]:[E816 01:45:40.184373931 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank 7] Exception (either an error or timeout) detected by watchdog at work: 80078, last enqueued NCCL work: 80078, last completed NCCL work: 80077.
    [rank3]:[E816 01:45:40.212150935 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=ALLREDUCE, NumelIn=2106881, NumelOut=2106881, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.
    [rank9]:[E816 01:45:40.212150935 ProcessGroupNCCL.cpp:607] [Rank 9] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=80078, OpType=ALLREDUCE, NumelIn=2106881, NumelOut=2106881, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.
"""  # an accelerate job of NVIDIA/nccl#1409
PIPELINE = """
[rank0]:[E ProcessGroupNCCL.cpp:1316] [PG 5 Rank 0] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=3
[rank4]:[E ProcessGroupNCCL.cpp:1316] [PG 5 Rank 0] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=2
[rank0]:[F ProcessGroupNCCL.cpp:1169] [PG 5 Rank 0] [PG 5 Rank 0] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives.
"""  # xdit-project/xDiT#147
OLD = "\n".join(
    f"[E ProcessGroupNCCL.cpp:737] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out."
    for rank in (1, 3, 2, 6, 7, 5, 4)
)  # OFA-Sys/OFA#271, torch 1.12: rank 0 alone is silent
KILLED = """
W0801 13:23:17.366000 32974 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 33051 closing signal SIGTERM
E0325 20:57:27.620000 2606 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 5 (pid: 2630) of binary: /opt/conda/bin/python
Traceback (most recent call last):
  File "/opt/conda/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
  File "/opt/conda/lib/python3.12/site-packages/torch/distributed/run.py", line 919, in main
    run(args)
  File "/opt/conda/lib/python3.12/site-packages/torch/distributed/launcher/api.py", line 269, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
=====================================================
test.py FAILED
-----------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
-----------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-03-25_20:57:27
  host      : autodl-container
  rank      : 5 (local_rank: 5)
  exitcode  : -9 (pid: 2630)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 2630
=====================================================
"""
DUPLICATE = """
torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.19.3
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000
"""
FINGERPRINT = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 225, in <module>
[rank1]:     trainer.train()
[rank1]: RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, TensorShape=[195812480], TensorDtypes=BFloat16, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=3104, OpType=ALLREDUCE, TensorShape=[51123456], TensorDtypes=BFloat16, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))).Collectives differ in the following aspects:   Tensor Tensor shapes: 195812480vs 51123456
"""
ECC = """
    exponent = exponent / (half_dim - downscale_freq_shift)
RuntimeError: CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.

[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered
"""
JOINED = "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients. 1/3 clients joined."
OFFLOAD = """
[rank0]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.
[rank1]:[E1218 20:27:21.433063423 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, NumelOut=131072000, Timeout(ms)=600000) ran for 600088 milliseconds before timing out.
[rank1]:[E1218 20:27:21.484903450 ProcessGroupNCCL.cpp:2168] [PG ID 1 PG GUID 1 Rank 1]  failure detected by watchdog at work sequence id: 1 PG status: last enqueued work: 547, last completed work: -1
[rank0]:[E1218 20:27:21.484910731 ProcessGroupNCCL.cpp:2168] [PG ID 1 PG GUID 1 Rank 0]  failure detected by watchdog at work sequence id: 1 PG status: last enqueued work: 547, last completed work: -1
"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (MISMATCH, ("collective-mismatch", (7,))),
        (PIPELINE, ("network-stalled", ())),
        (OLD, ("rank-not-joined", (0,))),
        (KILLED, ("rank-dead", (5,))),
        (DUPLICATE, ("nccl-misuse", (0, 1))),
        (FINGERPRINT, ("shape-mismatch", (0, 1))),
        (ECC, ("device-fault", (1,))),
        (JOINED, ("rendezvous-incomplete", ())),
        (OFFLOAD, ("network-stalled", ())),
    ],
    ids=["mismatch", "heartbeat", "old", "killed", "duplicate", "fingerprint", "ecc", "joined", "offload"],
)
def test_plea(tmp_path: Path, text: str, wanted: tuple[str, tuple[int, ...]]):
    assert verdict(tmp_path, text) == wanted


HEALTHY = {
    "words": "\n".join(
        [
            "INFO: error rate 0.01, no NaN found, out of memory errors are retried",
            "WARNING: NaN values in column 3 were dropped; see the error log for details",
            *(f"step {n} loss {3 - n / 100:.3f} grad_norm 1.0 lr 1e-4" for n in range(60)),
            "UserWarning: torch.distributed timeout is 600 seconds; NCCL error handling is on",
            "Training completed",
        ]
    ),
    "retry": "\n".join(
        [
            "step 1 loss 3.0", "Traceback (most recent call last):", '  File "/a/data.py", line 3, in fetch', "    raise e",
            "ConnectionError: HTTPSConnectionPool(host='data'): Read timed out. Retrying in 1 s",
            *(f"step {n} loss 2.{n}" for n in range(2, 9)),
        ]
    ),
    "skipped batch": "\n".join(
        [
            *(f"step {n} loss 2.0" for n in range(5)),
            "WARNING: ran out of memory, skipping batch: CUDA out of memory. Tried to allocate 2.00 GiB",
            *(f"step {n} loss 2.0" for n in range(5, 12)),
        ]
    ),
    "lightning": "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/4\nEpoch 0: 100%|##| 10/10 [00:01<00:00, 9.5it/s, v_num=0, train_loss=2.30]\n`Trainer.fit` stopped: `max_epochs=1` reached.",
    "one nan": "\n".join(f"step {n} loss {'nan' if n == 4 else 2.5}" for n in range(12)),
    "overflow": "\n".join(
        f"[2024-05-01 12:00:00,123] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\nstep={n}, skipped=1, loss: 3.1"
        for n in range(4)
    ),
    "validation": "\n".join(f"step {n} train_loss: 2.1 val_loss: nan" for n in range(12)),
    "megatron": "\n".join(
        f" iteration {n:8}/ 1000 | consumed samples: 160 | elapsed time per iteration (ms): 812.3 | learning rate: 1e-4 | global batch size: 16 | lm loss: 9.1E+00 | loss scale: 1.0 | grad norm: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        for n in range(9)
    ),
    "restarted": "step 1 loss 3\nTraceback (most recent call last):\n  File \"/a/t.py\", line 3, in f\nValueError: bad\n[default] Worker group FAILED. 3/3 attempts left; will restart worker group\nstep 2 loss 3\nstep 3 loss 3\n[default] worker group successfully finished. Waiting 300 seconds for other agents to finish.",
    "cancelled": "step 1 loss 3\nslurmstepd: error: *** JOB 77 ON gpu3 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\nsrun: error: gpu3: task 0: Terminated",
    "scancel": "step 1 loss 3\nW0227 17:39:41.936000 293817 site-packages/torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down workers\nW0227 17:39:41.936000 293814 api.py:766] Sending process 293866 closing signal SIGTERM\ntorch.distributed.elastic.multiprocessing.api.SignalException: Process 293817 got signal: 15",
    "empty lines": "\n\n\n",
    "network": "a:1:2 [0] NCCL INFO NET/IB : No device found.\na:1:2 [0] NCCL INFO Using network Socket\na:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\nstep 1 loss 2",
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_log_has_no_finding(tmp_path: Path, name: str):
    diagnosis = told(tmp_path, HEALTHY[name])
    assert diagnosis.findings == ()


def test_interruption_is_a_note(tmp_path: Path):
    assert any("interrupted from outside" in note for note in told(tmp_path, HEALTHY["cancelled"]).notes)
    assert any("interrupted from outside" in note for note in told(tmp_path, HEALTHY["scancel"]).notes)


def test_loss_that_stays_nan(tmp_path: Path):
    text = "\n".join(f"step {n} loss {2.5 if n < 6 else 'nan'}" for n in range(12))
    found = told(tmp_path, text).verdict
    assert found is not None
    assert (found.code, found.step) == ("loss-nonfinite", 6)


STALLED = "\n".join(
    f"[rank{rank}]:[E ProcessGroupNCCL.cpp:607] [PG 0 (default_pg) Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=60, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600011 milliseconds before timing out."
    for rank in range(3)
)


@pytest.mark.parametrize(("head", "confidence"), [("", "possible"), ("world_size=3\n", "likely")])
def test_a_network_is_blamed_with_more_confidence_where_a_line_tells_that_there_are_no_more_ranks(
    tmp_path: Path, head: str, confidence: str
):
    found = told(tmp_path, head + STALLED).verdict
    assert found is not None
    assert (found.code, found.confidence.value) == ("network-stalled", confidence)

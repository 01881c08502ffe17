"""What is told beside the code and the ranks of logs as threads show them: words, notes and next steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.diagnose import diagnose_logs, diagnose_target
from dtobs.findings import Confidence
from dtobs.reports import html, text
from tests.unit.logs.strangers import ROWS, late, trace
from tests.unit.logs.strangers_asked import SYSTEM
from tests.unit.logs.strangers_threads import BARS

CALL = "CollectiveFingerPrint(SequenceNumber={}, OpType={}, TensorShape=[{}], TensorDtypes=BFloat16, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda))"
DIFFER = "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: {}, but Rank 0 is running collective: {}.Collectives differ in the following aspects: {}"
SHAPES = DIFFER.format(
    CALL.format(3104, "ALLREDUCE", 1958), CALL.format(3104, "ALLREDUCE", 511), "Tensor shapes: 1958vs 511"
)
UNFILLED = DIFFER.format(
    CALL.format(101, "ALLGATHER", 1),
    "CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)",
    "Op type: ALLGATHERvs REDUCE",
)
PARAMETERS = "RuntimeError: DDP expects same model across all ranks, but Rank 5 has 128 params, while rank 0 has inconsistent {} params."
EXCERPTS = {name: text for name, text, _ in ROWS}
QUOTED = "\n".join(f"> {late(13, 7).replace('[Rank 13]', '[Rank 1]')}" for _ in range(2))
BUSY = (
    "[W socket.cpp:401] [c10d] The server socket has failed to bind to [::]:47531 (errno: 98 - Address already in use).\n"
    "[E socket.cpp:435] [c10d] The server socket has failed to listen on any local network address."
)
STATUS = "n1:19:20 [1] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.9<53249> with error {}, opcode 32564"


def diagnosed(folder: Path, said: str):
    path = folder / "pasted.log"
    path.write_text(said + "\n")
    return diagnose_logs([str(path)])


@pytest.mark.parametrize(
    ("text", "told", "step", "confidence"),
    [
        (trace("t.py:9", SHAPES, 1), "rank 1 calls ALLREDUCE of shape [1958] in BFloat16 (#3104) where rank 0 calls ALLREDUCE of shape [511]", "shape", "certain"),
        (trace("t.py:9", UNFILLED, 1), "where rank 0 calls REDUCE at", "", "likely"),
        (trace("t.py:9", PARAMETERS.format(1506656875), 0), "DDP got 1506656875 as the number of parameters of rank 0, and 128 of rank 5", "another call", "likely"),
        (EXCERPTS["times without seconds before two groups that each have a Rank 1"], "rank 13 waits in ALLTOALL_BASE of 1,379,328 elements (#216 of group PG 119)", "", "possible"),
        (EXCERPTS["a barrier that counts an earlier attempt"], "16 ranks are counted at a barrier of 4", "", "likely"),
        (QUOTED, "rank 13 waits in", "", "possible"),
        (trace("t.py:9", SYSTEM, 0), "a system call of NCCL failed on rank 0 at /data/ana/t.py:9", "memlock", "possible"),
        (f"n1:7:7 [0] include/socket.h:333 NCCL WARN Call to bind failed : Address already in use\n{SYSTEM}", "failed on a rank (Call to bind failed : Address already in use)", "NCCL_DEBUG", "likely"),
        (f"n1:7:7 [0] transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : 217 peer access is not supported\n{trace('t.py:9', SYSTEM.replace('system', 'cuda'), 0)}", "(failed to open CUDA IPC handle : 217 peer access is not supported)", "", "certain"),
        (EXCERPTS["a parameter that is ready twice"], "ready only once (encoder.weight)", "use_reentrant=False", "likely"),
        (EXCERPTS["an assertion in a paste without quotation marks"], "IndexKernel.cu:142 asserts `index >=", "CUDA_LAUNCH_BLOCKING", "likely"),
        (EXCERPTS["too many open files, without a traceback"], "Too many open files", "ulimit -n", "likely"),
        (EXCERPTS["a port that needs rights"], "port 80: it is not allowed to", "above 1023", "likely"),
        (EXCERPTS["a step that SLURM could not start"], "could not start step 36.0 on cn131: Job credential expired", "slurmd", "certain"),
        ("n1:7:7 [0] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_create_qp failed", "ibv_create_qp failed", "memlock", "likely"),
        ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN\n" + late(3, 9), "the port of mlx5_5 went down", "cable", "possible"),
        ("[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to connect to 192.0.0.1:1234", "at 192.0.0.1:1234 did not answer", "MASTER_ADDR", "likely"),
        ("(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker IP address: 100.96.31.18 Worker port: 10003 Worker PID: 909447 Worker exit type: NODE_DIED", "the node of a rank is gone (process 909447 on 100.96.31.18)", "", "possible"),
        (BUSY, "could not listen on port 47531", "ss -ltnp", "likely"),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:98 (errno: 13 - Permission denied).", "port 98: it is not allowed to", "above 1023", "likely"),
        ("fit.py: error: unrecognized arguments: --local_rank=0\n[ERROR] [launch.py:321:sigkill_handler] ['fit.py', '--local_rank=3'] exits with return code = 2", "refused the arguments of fit.py: unrecognized arguments: --local_rank=0", "command line", "possible"),
        (trace("t.py:9", "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=1OpType=BARRIER), but Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=BARRIER).Collectives differ in the following aspects: \t Sequence number: 1vs 0", 1), "rank 1 calls BARRIER (#1) where rank 2 calls BARRIER (#0)", "", "certain"),
        (STATUS.format(12), "with status 12 (nothing came back from the peer", "", "likely"),
        (STATUS.format(4), "with status 4 (its memory is not registered", "", "likely"),
        ("srun: error: nid1: task 3: Segmentation fault\nsrun: error: nid2: task 9: Segmentation fault", "ranks 3 and 9 ended by signal 11 (SIGSEGV) on nid1 and nid2", "", "possible"),
        ("step 3 loss 2.0\n[E ProcessGroupNCCL.cpp:1296] [PG 0 Rank 2] Heartbeat monitor timed out! watchdog got stuck for 600 seconds", "watchdog of rank 2 made no progress", "py-spy", "possible"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed. srun: error: node6156: task 0: Out Of Memory", "rank 0 was killed", "", "likely"),
    ],
)  # fmt: skip
def test_what_a_person_reads(tmp_path: Path, text: str, told: str, step: str, confidence: str):
    verdict = diagnosed(tmp_path, text).verdict
    assert verdict is not None
    assert told in verdict.summary
    assert step in verdict.next_step
    assert verdict.confidence is Confidence(confidence)


LONG = "x" * 400


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (BARS, "the last progress line tells step 19"),
        ('[rank7]:[W804 01:02:03.4 TCPStore.cpp:125] [PG ID 0 PG GUID 0 Rank 7] Failed to check the "should dump" flag on TCPStore, with error: Broken pipe', "rank 7 lost the store, which rank 0 or its launcher holds as a rule"),
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [10.0.0.2]:2526: Connection reset by peer", "a rank lost a peer"),
        ("step 3 loss 2.0\nWARNING:torch.distributed.elastic.multiprocessing.api:Sending process 10224 closing signal SIGHUP", "the job was interrupted from outside"),
        (trace("t.py:9", "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGTERM"), "the job was interrupted from outside: rank 0 ended by signal 15 (SIGTERM)"),
        (f"bar {LONG} Received 1 death signal, shutting down workers", "Received 1 death signal, shutting down workers"),
        (trace("t.py:9", "torch.distributed.elastic.rendezvous.api.RendezvousClosedError"), "a launcher found the rendezvous closed"),
        (EXCERPTS["an agent waits for those of other nodes to end"], "a launcher waited in vain for those of other nodes to end"),
        (EXCERPTS["an agent loses the store after hours"], "a rank lost the store"),
        ("ray: Horovod has been shut down. This was caused by an exception on one of the ranks", "a rank lost a peer"),
        ("CRITICAL [core_client.py:359] Got fatal signal from worker processes, shutting down.", "vLLM's engine could not start or lost a worker"),
        ("steps:  12%|#         | 250/1600 [00:30<39:12,  1.49s/it, avr_loss=0.1]", "the last progress line tells step 250"),
    ],
)  # fmt: skip
def test_what_ends_a_job_without_a_cause_is_a_note(tmp_path: Path, text: str, note: str):
    found = diagnosed(tmp_path, text)
    assert found.verdict is None
    assert any(note in told for told in found.notes), found.notes


def test_a_job_that_the_scheduler_ended_is_headed_so(tmp_path: Path):
    found = diagnosed(
        tmp_path,
        "step 3 loss 2.0\nslurmstepd: error: *** JOB 8 ON gpu-3 CANCELLED AT 2025-06-14T09:12:55 DUE TO TIME LIMIT ***",
    )
    assert text.render(found).startswith("interrupted from outside, nothing else found in ")
    assert '<h1 class="warning">Interrupted from outside, nothing else found</h1>' in html.render(found)
    assert text.render(diagnosed(tmp_path, "step 3 loss 2.0")).startswith("nothing found in ")


def test_lines_of_nccl_alone_are_known(tmp_path: Path):
    found = diagnosed(
        tmp_path, "n7:551:612 [3] NCCL INFO Channel 00/02 : 0 1\nn7:551:612 [3] NCCL INFO comm 0x5 destroyed"
    )
    assert not any("dtobs knows" in note for note in found.notes)


def test_what_torch_prints_of_an_exception_is_no_stack_of_python(tmp_path: Path):
    path = tmp_path / "job.log"
    path.write_text("Exception raised from recvBytes at /pytorch/Utils.hpp:680 (most recent call first):\n")
    assert diagnose_target([str(path)]).verdict is None


def test_sockets_without_a_library_of_infiniband_are_supposed_only(tmp_path: Path):
    found = diagnosed(
        tmp_path,
        "n7:551:612 [0] NCCL INFO Failed to open libibverbs.so[.1]\n"
        "n7:551:612 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
    )
    (finding,) = found.findings
    assert (finding.code, finding.confidence) == ("transport-fallback", Confidence.POSSIBLE)

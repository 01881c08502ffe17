"""Small scenes of one fault each, as folders of logs: which ranks are named, and who is only a consequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.diagnose import diagnose_logs
from dtobs.diagnose.target import diagnose_target
from tests.unit.logs.strangers import trace

WORK = "[rank{r}]:[E1206 18:44:12.7 ProcessGroupNCCL.cpp:607] [Rank {g}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={s}, OpType={op}, NumelIn={n}, NumelOut={n}, Timeout(ms)=600000) ran for 600061 milliseconds before timing out.\n"
STATUS = "[rank{r}]:[E1206 18:44:12.8 ProcessGroupNCCL.cpp:2168] [PG ID {i} PG GUID {p} Rank {g}]  failure detected by watchdog at work sequence id: {s} PG status: last enqueued work: {e}, last completed work: {c}\n"


def w(r, g, s, p="0(default_pg)", op="ALLREDUCE", n=8, e=None, c=None, i=0):
    """A watchdog's two lines."""
    return WORK.format(r=r, g=g, s=s, op=op, n=n) + STATUS.format(
        r=r, g=g, s=s, p=p, e=e or s, c=s - 1 if c is None else c, i=i
    )


CLOSING = "W0514 11:40:15.0 140 torch/distributed/elastic/multiprocessing/api.py:897] Sending process {pid} closing signal SIGTERM\n"
TABLE = (
    "Failures:\n[1]:\n  time      : 2024-05-14_11:40:15\n  host      : node-a\n  rank      : {rank} (local_rank: {rank})\n"
    "  exitcode  : -6 (pid: {pid})\n  error_file: <N/A>\n  traceback : Signal 6 (SIGABRT) received by PID {pid}\n======\n"
)
LOST_SERVER = (
    'Traceback (most recent call last):\n  File "/w/train.py", line 9, in <module>\n    for batch in loader:\n'
    '  File "/w/data.py", line 44, in __iter__\n    yield self.client.get(key)\n'
    '  File "/usr/lib/python3.11/site-packages/urllib3/connectionpool.py", line 715, in urlopen\n    self._make_request(\n'
    "ConnectionResetError: [Errno 104] Connection reset by peer\n"
)
CRASH = (
    "Fatal Python error: Segmentation fault\n\nThread 0x00007f1d3c7fe741 (most recent call first):\n"
    '  File "/usr/lib/python3.11/threading.py", line 324 in wait\n\nCurrent thread 0x00007f1d3c7fe740 (most recent call first):\n'
    '  File "/opt/lib/python3.11/site-packages/torch/_ops.py", line 9 in __call__\n  File "/w/ops.py", line 31 in fused\n'
    '  File "/w/train.py", line 12 in <module>\nSegmentation fault (core dumped)\n'
)

SCENES = {
    "deadlock": (
        {
            "a.log": w(0, 0, 5, "2(a)", i=2)
            + w(1, 1, 5, "2(a)", i=2)
            + w(2, 2, 7, "3(b)", i=3)
            + w(3, 3, 7, "3(b)", i=3)
        },
        ("group-deadlock", (0, 1, 2, 3)),
    ),
    "deadlock default+sub": (
        {
            "a.log": w(0, 0, 50)
            + w(1, 1, 50)
            + w(2, 0, 7, "3(b)", i=3)
            + "[rank3]: hello error\n"
            + w(3, 1, 7, "3(b)", i=3)
        },
        ("network-stalled", ()),
    ),
    "a console without prefixes: torchrun ends four processes, and three of them timed out": (
        {
            "a.log": w(0, 0, 5)
            + w(1, 1, 5)
            + w(2, 2, 5)
            + CLOSING.format(pid=221)
            + CLOSING.format(pid=224)
            + "E0514 11:40:16.1 140 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -6) local_rank: 1 "
            + "(pid: 222) of binary: /usr/bin/python3\n"
            + TABLE.format(rank=2, pid=223)
        },
        ("rank-not-joined", (3,)),
    ),
    "the same where torchrun had begun again: its processes have other numbers": (
        {
            "a.log": "I0514 11:30:16.1 140 api.py:900] [default] Worker group FAILED. 1/3 attempts left; will restart worker group\n"
            + w(0, 0, 5)
            + w(1, 1, 5)
            + w(2, 2, 5)
            + "".join(CLOSING.format(pid=pid) for pid in (221, 222, 223, 321, 322))
        },
        ("network-stalled", ()),
    ),
    "a rank's reader lost its server, and its peers wait": (
        {"rank0.log": w(0, 0, 5), "rank2.log": w(2, 2, 5), "rank1.log": LOST_SERVER},
        ("uncaught-exception", (1,)),
    ),
    "a broadcast that three have left and one has not": (
        {"a.log": w(0, 0, 11) + w(1, 1, 11) + w(3, 3, 11) + w(2, 2, 10, op="BROADCAST")},
        ("device-stopped", (2,)),
    ),
    "a broadcast that its root has left": (
        {"a.log": w(0, 0, 11) + w(1, 1, 10, op="BROADCAST")},
        ("network-stalled", ()),
    ),
    "a pod whose shell says that its process was killed": (
        {
            "a.log": "".join(f"[pod/trainer-0/pytorch] {line}\n" for line in w(0, 0, 5).splitlines())
            + "[pod/trainer-1/pytorch] step 5 loss 2\n[pod/trainer-1/pytorch] Killed\n"
        },
        ("rank-dead", ()),
    ),
    "one of two completed what the other waits in": (
        {"a.log": w(0, 0, 5) + w(1, 1, 6)},
        ("device-stopped", (0,)),
    ),
    "rank 3 waits in a group whose first member nobody names; all others wait for rank 3": (
        {"a.log": w(0, 0, 50) + w(1, 1, 50) + w(2, 2, 50) + w(4, 4, 50) + w(3, 1, 7, "3(b)", i=3)},
        ("group-deadlock", (0, 1, 2, 3)),
    ),
    "tp+dp: rank 3 absent of dp; its tp peer waits": (
        {
            "a.log": w(0, 0, 5, "2(dp)", i=2)
            + w(2, 1, 9, "4(tp)", i=3)
            + w(1, 0, 5, "3(dp)", i=2)
            + "[rank3]: some warning error\n"
        },
        ("rank-not-joined", (3,)),
    ),
    "gloo": (
        {
            f"rank_{r}.log": 'Traceback (most recent call last):\n  File "/h/train.py", line 3, in step\n    dist.barrier(group=cpu)\n  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 4, in barrier\n    work.wait()\nRuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete\n'
            if r != 2
            else "step 4 loss 2.0\n[INFO] error rate\n"
            for r in range(4)
        },
        ("rank-not-joined", (2,)),
    ),
    "gloo with closed": (
        {
            f"rank_{r}.log": 'Traceback (most recent call last):\n  File "/h/train.py", line 3, in step\n    dist.barrier(group=cpu)\nRuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete\n'
            if r == 1
            else 'Traceback (most recent call last):\n  File "/h/train.py", line 3, in step\nRuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2332\n'
            for r in range(4)
        },
        ("network-stalled", ()),
    ),
    "gloo/nccl": (
        {
            "a.log": w(0, 0, 50)
            + w(1, 1, 50)
            + "".join(
                f'[rank{r}]: Traceback (most recent call last):\n[rank{r}]:   File "/h/train.py", line 9, in ev\n[rank{r}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:2332\n'
                for r in (2, 3)
            )
        },
        ("group-deadlock", (0, 1, 2, 3)),
    ),
    "monitored": (
        {
            "a.log": "[rank0]: RuntimeError: Rank 2 failed to pass monitoredBarrier in 30000 ms\n[rank1]: RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.\n"
        },
        ("rank-not-joined", (2,)),
    ),
    "dead peer sigsegv": (
        {
            "a.log": '[rank0]: Traceback (most recent call last):\n[rank0]:   File "t.py", line 3, in <module>\n[rank0]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/x.cpp:1970, remote process exited or there was a network error, NCCL version 2.20.5\nW0801 13:23:17.366000 32974 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 33051 closing signal SIGTERM\nE0325 20:57:27.62 2606 site-packages/torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -11) local_rank: 1 (pid: 2630) of binary: /opt/conda/bin/python\n'
        },
        ("rank-dead", (1,)),
    ),
    "slurm oom": (
        {
            "slurm-1.out": "step 3 loss 2\nslurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM Killed.\nsrun: error: gpu07: task 3: Out Of Memory\nsrun: error: gpu06: tasks 0-2: Exited with exit code 1\n"
        },
        ("rank-oom-killed", (3,)),
    ),
    "k8s oom": (
        {
            "pod.log": "step 3 loss 2\n    State:          Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n"
        },
        ("rank-oom-killed", ()),
    ),
    "import error all": (
        {
            "a.log": "".join(
                f"[rank{r}]: Traceback (most recent call last):\n[rank{r}]:   File \"/h/train.py\", line 1, in <module>\n[rank{r}]: ModuleNotFoundError: No module named 'flash_attn'\n"
                for r in range(4)
            )
        },
        ("uncaught-exception", (0, 1, 2, 3)),
    ),
    "disk": (
        {
            "a.log": "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"/h/train.py\", line 1, in save\n[rank0]: OSError: [Errno 28] No space left on device: '/ckpt/step_100'\n"
            + w(1, 1, 50)
            + w(2, 2, 50)
        },
        ("disk-full", (0,)),
    ),
    "shm": (
        {
            "a.log": "node1:12:34 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-XYZ to 9637892 bytes: No space left on device\n"
        },
        ("disk-full", ()),
    ),
    "xid": (
        {
            "a.log": "[Mon Jan  1 00:00:00 2024] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
            + w(0, 0, 5)
            + w(1, 1, 5)
        },
        ("device-fault", ()),
    ),
    "unused": (
        {
            "a.log": '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/h/t.py", line 1, in f\n[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.\n'
        },
        ("unused-parameters", (1,)),
    ),
    "ncclid": (
        {
            "a.log": "".join(
                f"[rank{r}]: torch.distributed.DistBackendError: [{r}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout\n"
                for r in (1, 2, 3)
            )
        },
        ("nccl-init-stuck", (0,)),
    ),
    "ib": (
        {
            "a.log": "h1:984:1357 [4] NCCL INFO comm 0x1 rank 4 nranks 16 cudaDev 4 busId 1a000 - Init COMPLETE\nh1:984:1357 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 172.36.143.59<44206> with status=12 opcode=129 len=65536 vendor err 129 (Recv) localGid ::ffff:29.87.88.182 remoteGids::ffff:29.87.4.221 hca mlx5_2\n"
        },
        ("network-stalled", (4,)),
    ),
    "mpspawn": (
        {
            "a.log": 'torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File "/x/site-packages/torch/multiprocessing/spawn.py", line 69, in _wrap\n    fn(i, *args)\n  File "/h/t.py", line 9, in worker\n    raise ValueError(\'bad batch\')\nValueError: bad batch\n'
        },
        ("uncaught-exception", (1,)),
    ),
    "deepspeed": (
        {
            "a.log": "[2024-05-01 12:00:00,123] [INFO] [launch.py:316:sigkill_handler] Killing subprocess 77\n[2024-05-01 12:00:00,123] [ERROR] [launch.py:322:sigkill_handler] ['/usr/bin/python', '-u', 'train.py', '--local_rank=3'] exits with return code = -9\n"
        },
        ("rank-dead", ()),
    ),
    "one rank log only": ({"rank0.log": w(0, 0, 5)}, ("dumps-missing", ())),
    "some ranks": (
        {f"rank{r}.log": "world_size=8\n" + w(r, r, 5) for r in range(3)},
        ("dumps-missing", (3, 4, 5, 6, 7)),
    ),
    "silent rank's log": (
        {**{f"rank{r}.log": w(r, r, 5) for r in (0, 1, 3)}, "rank2.log": "step 9 loss 3.1\n"},
        ("rank-not-joined", (2,)),
    ),
    "nodes torchrun": (
        {
            f"node{n}/run_a/attempt_0/{l}/stderr.log": (
                w(n * 2 + l, n * 2 + l, 5) if (n, l) != (1, 0) else "step 1 loss 2\n"
            )
            for n in range(2)
            for l in range(2)
        },
        ("rank-not-joined", (2,)),
    ),
    "nodes 1.13": (
        {
            f"node{n}/run_a/attempt_0/{l}/stderr.log": (
                f"[E ProcessGroupNCCL.cpp:737] [Rank {n * 2 + l}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.\n"
                if (n, l) != (1, 0)
                else "step 1 loss 2\n"
            )
            for n in range(2)
            for l in range(2)
        },
        ("rank-not-joined", (2,)),
    ),
    "hang then cancel": (
        {
            "a.log": 'step 9 loss 2\nslurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***\nTraceback (most recent call last):\n  File "/h/t.py", line 3, in step\n    loss.item()\nKeyboardInterrupt\n'
        },
        None,
    ),
    "SLURM's %t: task 3 wrote progress only": (
        {f"slurm-9-{t}.out": w(t, t, 31) if t < 3 else "step 30 loss 2.31\n" for t in range(4)},
        ("rank-not-joined", (3,)),
    ),
    "SLURM's %t with a task a node: task 1 is no rank": (
        {f"slurm-9-{t}.out": "".join(w(r, r, 31) for r in range(4 * t, 4 * t + 4)) for t in range(2)},
        ("network-stalled", ()),
    ),
    "rank 2's file says nothing of the barrier in which the others wait": (
        {
            f"rank_{r}.log": f"Waiting in store based barrier to initialize process group for rank: {r}, key: store_based_barrier_key:1 (world_size=4, worker_count=3, timeout=0:30:00)\n"
            * 4
            if r != 2
            else "loading shards\n"
            for r in range(4)
        },
        ("rendezvous-incomplete", (2,)),
    ),
    "nan json": (
        {
            "a.log": "".join(
                "{'loss': %s, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.%d}\n" % ("nan" if n > 3 else 2.0, n)
                for n in range(9)
            )
        },
        ("loss-nonfinite", ()),
    ),
    "megatron nan": (
        {
            "a.log": "".join(
                f" iteration {n:8}/ 1000 | elapsed time per iteration (ms): 812.3 | lm loss: {'nan' if n > 4 else '9.1E+00'} | loss scale: 1.0 |\n"
                for n in range(9)
            )
        },
        ("loss-nonfinite", ()),
    ),
    "two ranks' lines without an end between them, and rank 3 prints steps only": (
        {
            "a.log": "".join(f"[rank{r}]: step 4 loss 2.0\n" for r in range(4))
            + w(0, 0, 5).replace("\n", "")
            + w(1, 1, 5)
            + w(2, 2, 5)
        },
        ("rank-not-joined", (3,)),
    ),
    "an attempt failed in its folder, and the next one trains": (
        {
            **{f"run/attempt_0/{r}/stderr.log": trace("m.py:3", "ValueError: x") + "\n" for r in range(2)},
            **{f"run/attempt_1/{r}/stdout.log": "step 1 loss 2.0\nstep 2 loss 2.0\n" for r in range(2)},
        },
        None,
    ),
    "two attempts in folders that failed otherwise": (
        {
            "run/attempt_0/0/stderr.log": trace("m.py:3", "ValueError: x") + "\n",
            "run/attempt_1/0/stderr.log": "step 3 loss 2.0\n",
            "run/attempt_1/1/stderr.log": trace("m.py:9", "KeyError: 'y'") + "\n",
        },
        ("uncaught-exception", (1,)),
    ),
    "three stages receive, and the fourth is silent": (
        {
            "a.log": "".join(f"[rank{r}]: step 4 loss 2.0\n" for r in range(4))
            + "".join(w(r, r, 7, "4(PIPELINE_MODEL_PARALLEL_GROUP)", i=4, op="RECV") for r in range(3))
        },
        ("rank-not-joined", (3,)),
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_scene(tmp_path: Path, name: str):
    files, wanted = SCENES[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    verdict = diagnose_logs([str(tmp_path)]).verdict
    assert (None if verdict is None else (verdict.code, verdict.ranks)) == wanted


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_a_crash_in_native_code_is_told_with_the_users_line(tmp_path: Path, prefix: str):
    crash = "".join(prefix + line for line in CRASH.splitlines(keepends=True))
    path = tmp_path / "a.log"
    path.write_text(
        f"step 10 loss 1.0\n{crash}" + CLOSING.format(pid=221) + TABLE.format(rank=1, pid=222).replace("6", "11")
    )
    found = diagnose_target([str(path)])
    assert found.verdict is not None
    assert found.verdict.code == "rank-dead"
    assert found.verdict.ranks == (1,)
    assert "at /w/ops.py:31 in fused" in found.verdict.summary
    assert 0 not in found.ranks or not found.ranks[0].stack


MEMBER = "Initializing distributed: GLOBAL_RANK: {}, MEMBER: {}/8\n"


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("", True),
        ("All distributed processes registered. Starting with 8 processes\n", False),
        ("step 1 loss 2.0\n", False),
    ],
)
def test_a_rank_that_lightning_waits_for(tmp_path: Path, after: str, said: bool):
    (tmp_path / "a.log").write_text("".join(MEMBER.format(r, r + 1) for r in (0, 1, 2, 3, 4, 6, 7)) + after)
    found = diagnose_logs([str(tmp_path / "a.log")])
    assert found.findings == ()
    assert (
        any(note.startswith("rank 5 did not say to initialise, as ranks 0-4, 6 and 7 did") for note in found.notes)
        == said
    )


@pytest.mark.parametrize(
    ("first", "later", "ranks", "confidence"),
    [(1, "40:46", (1,), "possible"), (1, "40:16", (0,), "likely"), (-9, "40:46", (0, 1), "possible")],
)
def test_who_is_killed_half_a_minute_after_another_failed_was_killed_for_it(
    tmp_path: Path, first: int, later: str, ranks: tuple[int, ...], confidence: str
):
    entry = "[{}]:\n  time      : 2024-05-14_11:{}\n  host      : a\n  rank      : {} (local_rank: {})\n  exitcode  : {} (pid: {})\n"
    (tmp_path / "a.log").write_text(
        "Failures:\n"
        + entry.format(1, later, 0, 0, -9, 70)
        + "Root Cause (first observed failure):\n"
        + entry.format(0, "40:15", 1, 1, first, 71)
        + "======\n"
    )
    verdict = diagnose_logs([str(tmp_path / "a.log")]).verdict
    assert verdict is not None
    assert (verdict.ranks, verdict.confidence) == (ranks, confidence)


@pytest.mark.parametrize("last_rule", ["======\n", ""])
def test_a_table_that_the_file_ends_in_counts_and_shared_memory_is_looked_at(tmp_path: Path, last_rule: str):
    table = TABLE.format(rank=1, pid=71).replace("-6", "-7").replace("6 (SIGABRT)", "7 (SIGBUS)")
    (tmp_path / "a.log").write_text(table.replace("======\n", last_rule))
    verdict = diagnose_logs([str(tmp_path / "a.log")]).verdict
    assert verdict is not None
    assert (verdict.code, verdict.ranks) == ("rank-dead", (1,))
    assert "df /dev/shm" in verdict.next_step

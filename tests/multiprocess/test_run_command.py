"""``dtobs run -- CMD``: scripts that have never heard of dtobs are observed, and end as they would have."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import dtobs
from dtobs.diagnose import diagnose, gather
from dtobs.errors import TargetError
from tests.harness import Launched, launch, wait_until_gone
from tests.harness.launch import REPOSITORY
from tests.harness.terminal import readable

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
LOOP = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(12, 4)), batch_size=4, num_workers={workers})
for step, (x,) in enumerate(loader):
    {strike}
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def observed(*words: str | Path, env: dict[str, str] | None = None, cwd: Path) -> Launched:
    return launch([sys.executable, "-m", "dtobs", "run", *words], env=env, cwd=cwd)


def script(folder: Path, strike: str = "pass", workers: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(LOOP.format(strike=strike, workers=workers))
    return path


def without_dtobs(folder: Path) -> Path:
    """The example of a DDP loop with its three lines taken out."""
    text = (REPOSITORY / "examples" / "plain_loop" / "train.py").read_text()
    text = re.sub(r"^import dtobs.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"with dtobs\.attach.*", "if True:", text)
    text = re.sub(r"        if dist\.get_rank\(\) == 0:\n.*# line 3\n", "", text)
    assert "session" not in text
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_torchrun_on_a_plain_loop(tmp_path: Path):
    train = without_dtobs(tmp_path)
    command = [sys.executable, *TORCHRUN, "--nproc-per-node", "2", train, "--epochs", "1"]
    with observed("--name", "plain", "--", *command, cwd=tmp_path) as job:
        assert job.check().startswith("epoch 0 loss")
        assert wait_until_gone(job.pids(), 30) == []  # the monitor leaves too
    (run,) = (tmp_path / "runs").glob("*-plain")
    assert f"dtobs: recording to {run}" in job.stderr
    assert "read more with" not in job.stderr
    view = dtobs.load_run(run)
    assert view.ranks == [0, 1]  # and neither the agent nor anything else
    assert [len(view.rank_steps(rank)) for rank in view.ranks] == [32, 32]
    assert (view.rank_steps(0)["local_norm"] > 0).all()
    assert view.meta(0).layout["kind"] == "ddp"
    assert "all_reduce" in {op.op for op in view.meta(1).ops.values()}


@pytest.mark.exhaustive(one_in=4)
def test_a_torch_that_is_too_old_costs_each_rank_one_line(tmp_path: Path):
    program = tmp_path / "train.py"
    loop = script(tmp_path / "loop").read_text()
    program.write_text(
        "import torch\ntorch.__version__ = '2.4.1+cu121'\n"
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n" + loop + "dist.barrier()\n"
    )
    command = [sys.executable, *TORCHRUN, "--nproc-per-node", "2", program]
    with observed("--run-dir", tmp_path / "run", "--", *command, cwd=tmp_path) as job:
        job.check()
    line = "dtobs: not recording this run: this is torch 2.4.1+cu121; dtobs records with torch 2.6 or newer"
    assert job.stderr.count(line) == 2
    assert "dtobs: nothing was recorded: its ranks say above why" in job.stderr


def test_a_script_that_fails(tmp_path: Path):
    train = script(tmp_path, strike="assert step < 2, 'bad sample'")
    with observed("--run-dir", "here", "--", sys.executable, train, cwd=tmp_path) as job:
        assert job.wait() == 1
    said = job.stderr
    assert "AssertionError: bad sample" in said
    assert "dtobs: uncaught-exception: " in said
    assert said.endswith(f"dtobs: read more with: dtobs diagnose {tmp_path / 'here'}\n")


def test_standard_output_is_json_alone_where_it_is_asked_for(tmp_path: Path):
    train = script(tmp_path, strike="print('step', step); assert step < 2, 'bad sample'")
    with observed("--json", "--run-dir", "here", "--", sys.executable, train, cwd=tmp_path) as job:
        assert job.wait() == 1
    said = json.loads(job.stdout)
    assert (said["schema"], said["run_dir"], said["exit_code"]) == ("dtobs.run/1", str(tmp_path / "here"), 1)
    assert said["diagnosis"]["schema"] == "dtobs.diagnosis/1"
    assert said["diagnosis"]["verdict"]["code"] == "uncaught-exception"
    assert "step 1\n" in job.stderr
    with observed("--json", "--", "true", cwd=tmp_path) as job:
        assert json.loads(job.check()) == {"schema": "dtobs.run/1", "run_dir": None, "exit_code": 0, "diagnosis": None}


def test_the_exit_code_is_the_commands(tmp_path: Path):
    train = script(tmp_path, strike="sys.exit(7)")
    with observed("--", sys.executable, train, cwd=tmp_path) as job:
        assert job.wait() == 7
    with observed("--", "sh", "-c", "kill -9 $$", cwd=tmp_path) as job:
        assert job.wait() == 128 + 9


def test_a_command_that_is_no_python(tmp_path: Path):
    with observed("--", "echo", "--name", "x", cwd=tmp_path) as job:
        assert job.check() == "--name x\n"
    assert "dtobs: nothing was recorded: no process built a torch optimizer" in job.stderr
    assert not (tmp_path / "runs").exists()


def test_data_loader_workers_and_children_do_not_attach(tmp_path: Path):
    child = script(tmp_path).rename(tmp_path / "child.py")
    start = f"import subprocess; subprocess.run([sys.executable, {str(child)!r}], check=True)"
    train = script(tmp_path, strike=start, workers=1)
    with observed("--run-dir", "here", "--", sys.executable, train, cwd=tmp_path) as job:
        job.check()
    view = dtobs.load_run(tmp_path / "here")
    assert (view.ranks, view.attempt, len(view.rank_steps(0))) == ([0], 0, 3)


@pytest.mark.exhaustive(one_in=4)
def test_processes_that_train_without_a_group_are_counted(tmp_path: Path):
    child = script(tmp_path).rename(tmp_path / "child.py")
    train = tmp_path / "train.py"
    train.write_text(
        "import multiprocessing, runpy\n"
        "if __name__ == '__main__':\n"
        f"    for _ in range(2):\n        p = multiprocessing.Process(target=runpy.run_path, args=({str(child)!r},))\n"
        "        p.start()\n        p.join()\n"
    )
    with observed("--run-dir", "here", "--", sys.executable, train, cwd=tmp_path) as job:
        job.check()
    assert "not recorded: 2 processes that the program started" in job.stderr
    assert "nothing was recorded: no rank built a torch optimizer" in job.stderr


@pytest.mark.exhaustive(one_in=4)
def test_a_program_that_attaches_for_itself_is_left_to_it(tmp_path: Path):
    train = tmp_path / "train.py"
    train.write_text("import dtobs\ndtobs.attach(run_dir='own')\n" + LOOP.format(strike="pass", workers=0))
    with observed("--run-dir", "here", "--", sys.executable, train, cwd=tmp_path) as job:
        job.check()
    assert dtobs.load_run(tmp_path / "own").ranks == [0]
    assert not (tmp_path / "here").exists()


def test_a_sitecustomize_that_is_there_already_runs(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = 'by the site'\n")
    code = "import sitecustomize; print(customized, sitecustomize.__file__)"
    paths = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    with observed("--", sys.executable, "-c", code, env={"PYTHONPATH": paths}, cwd=tmp_path) as job:
        assert job.check() == f"by the site {tmp_path / 'sitecustomize.py'}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to run: dtobs run -- torchrun"),
        (["--", "no-such-command"], "cannot run 'no-such-command': No such file or directory"),
        (["--hang-timeout", "-1", "--", "true"], "give a positive number of seconds"),
        (["--tui", "--", "true"], "--tui needs a terminal"),
    ],
)
def test_what_cannot_be_run(tmp_path: Path, words: list[str], message: str):
    with observed(*words, cwd=tmp_path) as job:
        assert job.wait() == 2
    assert message in job.stderr


@pytest.mark.exhaustive(one_in=4)
def test_the_screen_ends_with_the_command(tmp_path: Path):
    """On a terminal of its own: the screen shows the run, the output goes to a file, the exit code comes through."""
    train = script(tmp_path, strike="print('step', step); step == 2 and sys.exit(5)")
    master, terminal = os.openpty()
    environment = os.environ | {
        "TERM": "xterm-256color",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    words = ["run", "--tui", "--run-dir", str(tmp_path / "here"), "--", sys.executable, str(train)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dtobs", *words],
        stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    seen, deadline = b"", time.monotonic() + 100
    while time.monotonic() < deadline:
        if readable(master, 0.1):
            try:
                seen += os.read(master, 65536)
            except OSError:  # every process that had the terminal has ended
                break
        elif process.poll() is not None:
            break
    try:
        assert process.wait(20) == 5, seen[-3000:]
    finally:
        process.kill()
        os.close(master)
    assert "step 2" in (tmp_path / "here" / "output.log").read_text()
    assert json.loads((tmp_path / "here" / "run.json").read_text())["world_size"] == 1


@pytest.mark.exhaustive(one_in=4)
def test_who_is_missing_at_the_rendezvous_is_said(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text(
        "from datetime import timedelta\n"
        "import torch.distributed as dist\n"
        f"dist.init_process_group('gloo', 'file://{tmp_path}/store', timedelta(seconds=8), 2, 0)\n"
    )
    rank_0 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    words = ("--run-dir", tmp_path / "run", "--hang-timeout", "0.5", "--", sys.executable, program)
    with observed(*words, cwd=tmp_path, env=rank_0) as job:
        assert job.wait() == 1, job.stderr
    assert "rendezvous-incomplete: rank 1 of 2 is missing at the rendezvous: never started on" in job.stderr
    assert "while rank 0 has waited " in job.stderr
    assert f"in init_process_group at {program}:3 in <module>" in job.stderr


@pytest.mark.parametrize("asks", [False, True], ids=["before it asks", "in init_process_group"])
def test_an_error_before_there_is_a_process_group_is_told(asks: bool, tmp_path: Path):
    program = tmp_path / "train.py"
    raising = "os.environ['GLOO_SOCKET_IFNAME'] = 'no card'" if asks else "raise ValueError('no configuration')"
    program.write_text(
        "import os\n"
        "import torch.distributed as dist\n"
        f"{raising}\n"
        f"dist.init_process_group('gloo', 'file://{tmp_path}/store', rank=1, world_size=2)\n"
    )
    words = ("--run-dir", tmp_path / "run", "--", sys.executable, program)
    with observed(*words, cwd=tmp_path, env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}) as job:
        assert job.wait() == 1, job.stderr
    where = f"in init_process_group at {program}:4 in <module>: " if asks else "before init_process_group was called: "
    assert f"uncaught-exception: rank 1 failed {where}" in job.stderr
    assert ("no card" if asks else f"ValueError: no configuration ({program}:3 in <module>)") in job.stderr
    verdict = diagnose(gather(tmp_path / "run")).verdict
    assert verdict is not None and (verdict.ranks, verdict.confidence.value) == ((1,), "certain")


@pytest.mark.exhaustive(one_in=4)
def test_an_error_that_a_launcher_of_processes_handles_is_told(tmp_path: Path):
    """``torch.multiprocessing.spawn`` handles what a rank raises, and has it leave with exit code 1."""
    program = tmp_path / "train.py"
    program.write_text(
        "import torch, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def work(rank):\n"
        f"    dist.init_process_group('gloo', 'file://{tmp_path}/store', rank=rank, world_size=2)\n"
        "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "    for step in range(20):\n"
        "        if rank == 1 and step == 9:\n"
        "            raise ValueError('bad batch')\n"
        "        model(torch.ones(2, 4)).sum().backward()\n"
        "        optimizer.step()\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, nprocs=2)\n"
    )
    with observed("--run-dir", tmp_path / "run", "--", sys.executable, program, cwd=tmp_path) as job:
        assert job.wait() == 1, job.stderr
    assert f"uncaught-exception: rank 1 raised ValueError: bad batch at {program}:8 in work" in job.stderr
    assert "needs a launcher" not in job.stderr


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("another_asks", [False, True])
def test_an_error_of_a_spawned_rank_before_its_process_group_is_told(another_asks: bool, tmp_path: Path):
    program = tmp_path / "train.py"
    asks = f"dist.init_process_group('gloo', 'file://{tmp_path}/store', rank=rank, world_size=2)"
    program.write_text(
        "import glob, time, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def work(rank):\n"
        f"    while rank == 1 and {another_asks} and not glob.glob('{tmp_path}/run/rendezvous/0/00000.json'):\n"
        "        time.sleep(0.01)\n"
        "    if rank == 1:\n"
        "        {}['learning_rate']\n"
        f"    {asks if another_asks else 'time.sleep(99)'}\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, nprocs=2)\n"
    )
    with observed("--run-dir", tmp_path / "run", "--", sys.executable, program, cwd=tmp_path) as job:
        assert job.wait() == 1, job.stderr
    said = f"rank 1 failed before init_process_group was called: KeyError: 'learning_rate' ({program}:6 in work)"
    assert f"uncaught-exception: {said}" in job.stderr
    assert "ProcessRaisedException" in job.stderr
    verdict = diagnose(gather(tmp_path / "run")).verdict
    assert verdict is not None and (verdict.ranks, verdict.confidence.value) == ((1,), "certain")


@pytest.mark.exhaustive(one_in=4)
def test_a_rank_that_does_not_come_out_of_its_download_is_named(tmp_path: Path):
    """Nobody has built a model or an optimizer yet."""
    program = tmp_path / "train.py"
    program.write_text(
        "import time\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    time.sleep(600)  # downloads\n"
        "dist.barrier()\n"
    )
    words = ("--run-dir", tmp_path / "run", "--hang-timeout", "4", "--", sys.executable, *TORCHRUN)
    with observed(*words, "--nproc-per-node", "2", program, cwd=tmp_path):
        deadline = time.monotonic() + 60
        verdict = None
        # On a loaded machine one of them may come to its process group seconds after the other, which is told as well.
        while (verdict is None or verdict.code == "rendezvous-incomplete") and time.monotonic() < deadline:
            with suppress(TargetError):  # no rank is there yet
                verdict = diagnose(gather(tmp_path / "run")).verdict
            time.sleep(1)
    assert verdict is not None
    assert (verdict.code, verdict.ranks, verdict.confidence.value) == ("rank-not-joined", (1,), "possible")
    assert f"{program}:5 in <module>" in verdict.summary

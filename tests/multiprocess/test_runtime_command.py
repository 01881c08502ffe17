"""The command itself, under torchrun: what it leaves, what it prints, how it fails, how it restarts."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.harness import Launched, torchrun
from tests.multiprocess.runtime_curves import command_on_ranks

DEBUG = (
    "--preset",
    "debug",
    "--steps",
    "6",
    "--data.sequence",
    "32",
    "--run.log_every",
    "2",
    "--device",
    "cpu",
)

# Trains, but something happens to one rank at a step. The name is what a user's own file would be.
PROGRAM = """
import os, signal, sys
from runtime import loop, train, world

forward_and_backward = loop.forward_and_backward

def happening(trainer):
    loss = forward_and_backward(trainer)
    what, rank, step, attempt = os.environ["HAPPENS"].split()
    here = (os.environ["RANK"], str(trainer.step + 1), os.environ["TORCHELASTIC_RESTART_COUNT"])
    if here == (rank, step, attempt):
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("a bug in the user's code")
    return loss

loop.forward_and_backward = happening
if __name__ == "__main__":
    world.exit_now(train.main(sys.argv[1:]))
"""


def folders(tmp_path: Path) -> tuple[str, ...]:
    return ("--run.root", str(tmp_path / "runs"), "--data.cache", str(tmp_path / "corpora"))


def run(
    tmp_path: Path, *arguments: str, program: tuple[str, ...] = ("-m", "runtime.train"), **options: object
) -> Launched:
    environment = {"DTOBS_DISABLE": "1", **options.pop("env", {})}  # type: ignore[dict-item]
    options = {"timeout": 280.0, **options}
    return torchrun([*program, *DEBUG, *folders(tmp_path), *arguments], 2, env=environment, **options)  # type: ignore[arg-type]


def test_it_trains_and_leaves_a_run_directory(tmp_path: Path) -> None:
    with run(tmp_path, "--checkpoint.every", "3", "--parallel.shard", "2") as command:
        out = command.check()
        assert command.pids() == []
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"run directory {run_dir}" in out
    assert "0.9M parameters, shard 2 on cpu, fp32, 256 tokens a step; Python's standard library" in out
    assert "step      6/6  loss " in out
    assert "finished: 6 steps, 1,536 tokens" in out
    assert f"dtobs diagnose {run_dir}" in out
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000006",
    ]
    assert json.loads((run_dir / "config.json").read_text())["parallel"]["shard"] == 2
    assert (run_dir / "ranks" / "00000" / "stdout.log").read_text() == out
    assert (run_dir / "ranks" / "00001" / "stdout.log").read_text() == ""
    modes = {path.stat().st_mode & 0o077 for path in (run_dir, *run_dir.rglob("ranks/**/*"))}
    assert modes == {0}


def test_a_wrong_request_ends_before_anything_starts(tmp_path: Path) -> None:
    with run(tmp_path, "--stps", "3") as command:
        assert command.wait() != 0
        assert command.stderr.count("error: unknown setting --stps (did you mean --steps?)") == 1
        assert "exitcode  : 2" in command.stderr
    assert not (tmp_path / "runs").exists()


def test_a_layout_that_these_ranks_cannot_have_is_a_wrong_request(tmp_path: Path) -> None:
    ranks = command_on_ranks(2, *DEBUG, *folders(tmp_path), "--parallel.shard", "3")
    assert [rank.value for rank in ranks] == [2, 2]
    said, nothing = (rank.stderr.read_text() for rank in ranks)
    assert said.startswith("error: shard 3 needs a multiple of 3 ranks and there are 2; ")
    assert (said.count("\n"), nothing) == (1, "")
    assert not (tmp_path / "runs").exists()


def test_a_training_error_is_one_line_with_its_traceback_in_the_log(tmp_path: Path) -> None:
    ranks = command_on_ranks(2, *DEBUG, *folders(tmp_path), "--data.path", str(tmp_path / "absent"))
    assert [rank.value for rank in ranks] == [1, 1]
    said = sorted(rank.stderr.read_text() for rank in ranks)  # the rank that comes to it first says it for all
    assert said == ["", f"error: --data.path {tmp_path / 'absent'} does not exist\n"]
    (log,) = (tmp_path / "runs").glob("*/ranks/00000/stderr.log")
    assert "Traceback" in log.read_text()


def test_a_failing_rank_shows_its_traceback_and_ends_the_job(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with run(tmp_path, program=(str(program),), env={"HAPPENS": "raise 1 3 0"}) as command:
        assert command.wait() != 0
        assert "ZeroDivisionError: a bug in the user's code" in command.stderr
        assert "terminate called" not in command.stderr
    (log,) = (tmp_path / "runs").glob("*/ranks/00001/stderr.log")
    assert "ZeroDivisionError: a bug in the user's code" in log.read_text()


@pytest.mark.slow
def test_a_killed_rank_restarts_from_the_last_checkpoint_in_the_same_directory(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with run(
        *(tmp_path, "--checkpoint.every", "2"),
        program=(str(program),),
        options=["--max-restarts", "1"],
        env={"HAPPENS": "kill 1 6 0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ) as command:
        out = command.check()
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"resumed from {run_dir}/checkpoints/step-00000004 after step 4" in out
    assert "step      6/6  loss " in out


@pytest.mark.slow
def test_sigterm_ends_every_process(tmp_path: Path) -> None:
    with run(tmp_path, "--steps", "100000") as command:
        while "step      2/" not in command.stdout:
            assert command.process.poll() is None, command.stderr
            time.sleep(0.05)
        command.signal(signal.SIGTERM)
        assert command.wait() != 0
        assert command.pids() == []

"""A save that cannot be written is a warning of one line, leaves nothing behind, and changes no number."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime import manifests, phases
from tests.harness import Launched, RankFailure, launch, run_ranks
from tests.multiprocess import runtime_curves
from tests.multiprocess.runtime_curves import command_on_ranks, curves
from tests.multiprocess.test_runtime_checkpoints import tail

BACKGROUND = [
    pytest.param((), id="foreground", marks=pytest.mark.exhaustive(one_in=4)),
    pytest.param(("--checkpoint.background",), id="background"),
]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system in memory at `folder`; skips the test where mounting is not permitted."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "dtobs-test", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True) if os.geteuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr if done else 'not root'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Ballast:
    """A listener that fills a file system in step 4, whose save then fails, and empties it in step 5."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, name: str) -> None: ...

    def end(self, name: str) -> None: ...

    def batch(self, **_: Any) -> None: ...

    def report(self, **_: float) -> None: ...

    def step(self, step: int) -> None:
        if step not in (4, 5):
            return
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(60)
        if step == 4:
            space = os.statvfs(self._path.parent)
            # All but enough for the folder and the first kilobytes: the disk is full in the middle of a shard.
            self._path.write_bytes(bytes(space.f_bavail * space.f_frsize - 300_000))
        else:
            assert not list(self._path.parent.glob(".saving-*"))
            self._path.unlink()


def train_collecting_warnings(
    rank: int, world: int, folder: str, arguments: tuple[str, ...], ballast: bool
) -> tuple[dict[str, Any], list[str]]:
    """As `runtime_curves.train`; what it returns, and the warnings."""
    if ballast and rank == 0:
        phases.listen(Ballast(Path(folder) / "checkpoints" / "ballast"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        result = runtime_curves.train(rank, world, folder, arguments)
    return result, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("mode", BACKGROUND)
def test_a_full_disk_costs_one_checkpoint(mode: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ("--parallel.shard", "2", "--model.dropout", "0.1", "--data.cache", str(tmp_path / "corpora"))
    saves = ("--checkpoint.every", "2", *mode)
    run = tmp_path / "run"
    with mounted(run / "checkpoints", "size=64m"):
        results = run_ranks(train_collecting_warnings, 2, str(run), (*arguments, *saves), True, timeout=120)
        kept = [manifests.verify(path).step for path in manifests.complete(run / "checkpoints")]
        assert not list((run / "checkpoints").glob(".*"))
    (first, (said,)), (_, nothing) = (result.value for result in results)
    assert nothing == []  # one rank says it for all
    assert kept == [8, 6, 2]
    full = f"No space left on device: {run}/checkpoints"
    assert said == f"checkpoint of step 4 was not saved: rank 0: {full}; training goes on"
    unharmed, _ = curves(2, tmp_path / "unharmed", *arguments)
    assert tail(first, 8) == tail(unharmed, 8)


def test_a_read_only_folder_is_a_warning_a_save(tmp_path: Path) -> None:
    run, cache = tmp_path / "run", ("--data.cache", str(tmp_path / "corpora"))
    with mounted(run / "checkpoints", "size=1m,ro"):
        results = run_ranks(
            train_collecting_warnings, 2, str(run), (*cache, "--checkpoint.every", "4"), False, timeout=120
        )
    first, said = results[0].value
    assert first["step"][-1] == 8
    folder = run / "checkpoints" / ".saving-step-0000000"
    assert said == [
        f"checkpoint of step {step} was not saved: rank 0: Read-only file system: {folder}{step}; training goes on"
        for step in (4, 8)
    ]


@pytest.mark.parametrize("mode", BACKGROUND)
def test_what_cannot_be_removed_is_told_once_and_costs_no_checkpoint(mode: tuple[str, ...], tmp_path: Path) -> None:
    run, cache = tmp_path / "run", ("--data.cache", str(tmp_path / "corpora"))
    saves = ("--checkpoint.every", "2", "--checkpoint.keep", "2", "--checkpoint.strict", *mode)
    left = run / "checkpoints" / ".removing-step-00000001"
    with mounted(left / "pin", "size=1m"):
        (result,) = run_ranks(train_collecting_warnings, 1, str(run), (*cache, *saves), False, timeout=120)
    _, said = result.value
    pin = left / "pin" if sys.version_info >= (3, 13) else "pin"  # as shutil says it
    assert said == [
        f"{left} is not needed any more and could not be removed: Device or resource busy: {pin}; remove it by hand"
    ]
    assert [manifests.verify(path).step for path in manifests.complete(run / "checkpoints")] == [8, 6]


@pytest.mark.parametrize("mode", BACKGROUND)
def test_strict_stops_at_the_first_failed_save(mode: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    with pytest.raises(RankFailure) as caught:
        curves(1, run, "--checkpoint.every", "2", "--checkpoint.strict", *mode)
    assert f"CheckpointError: checkpoint of step 2 was not saved: rank 0: File exists: {run}/checkpoints" in str(
        caught.value
    )


# Trains on a disk that is full from the end of step 3 on; with FREED_IN, room is made in that step.
FULL_DISK = """
import os, sys
from pathlib import Path
from runtime import loop, train, world

update, ballast = loop.update, Path(os.environ["BALLAST"])

def happening(trainer, step, mean_loss):
    if step == 3:
        with ballast.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    pass
    if step == int(os.environ["FREED_IN"]):
        ballast.unlink()
    return update(trainer, step, mean_loss)

loop.update = happening
world.exit_now(train.main(sys.argv[1:]))
"""
DEBUG = ("--preset", "debug", "--data.sequence", "32", "--run.log_every", "1", "--device", "cpu")


def train_on_a_full_disk(tmp_path: Path, *arguments: str, freed_in: int = 0) -> Launched:
    program = tmp_path / "program.py"
    program.write_text(FULL_DISK)
    run = tmp_path / "small" / "run"
    folders = ("--run-dir", str(run), "--data.cache", str(tmp_path / "corpora"))
    env = {"DTOBS_DISABLE": "1", "BALLAST": str(tmp_path / "small" / "ballast"), "FREED_IN": str(freed_in)}
    return launch([sys.executable, str(program), *DEBUG, *folders, *arguments], env=env, timeout=200)


LOGS_LOST = "warning: cannot write the logs in {run}/ranks/00000: No space left on device; "
NOT_SAVED = "warning: checkpoint of step {step} was not saved: rank 0: No space left on device: {run}/checkpoints"


def test_a_full_run_directory_does_not_stop_the_training(tmp_path: Path) -> None:
    run = tmp_path / "small" / "run"
    with mounted(tmp_path / "small", "size=24m"):
        # Long enough for more text than what is left of the log's last page.
        arguments = ("--steps", "60", "--checkpoint.every", "20")
        with train_on_a_full_disk(tmp_path, *arguments) as command:
            out = command.check()
            assert command.stderr.count(LOGS_LOST.format(run=run)) == 1
            assert command.stderr.count(NOT_SAVED.format(step=20, run=run)) == 1
            assert command.stderr.count("was not saved") == 3
            # From Python 3.13 on the streams that torch forgets say when they are collected what befell them.
            assert "Traceback" not in command.stderr.partition("Exception ignored in: <torch.")[0]
    assert "step     60/60  loss " in out
    assert "finished: 60 steps" in out


@pytest.mark.exhaustive(one_in=4)
def test_the_log_goes_on_once_there_is_room(tmp_path: Path) -> None:
    run = tmp_path / "small" / "run"
    with mounted(tmp_path / "small", "size=24m"):
        with train_on_a_full_disk(tmp_path, "--steps", "9", "--checkpoint.every", "5", freed_in=6) as command:
            out = command.check()
            assert command.stderr.count(NOT_SAVED.format(step=5, run=run)) == 1
        log = (run / "ranks" / "00000" / "stdout.log").read_text()
    assert "step      9/9  loss " in out
    assert "step      9/9  loss " in log


@pytest.mark.exhaustive(one_in=4)
def test_a_full_run_directory_stops_a_strict_training_with_its_one_line(tmp_path: Path) -> None:
    run = tmp_path / "small" / "run"
    with mounted(tmp_path / "small", "size=24m"):
        arguments = ("--steps", "9", "--checkpoint.every", "5", "--checkpoint.strict")
        with train_on_a_full_disk(tmp_path, *arguments) as command:
            assert command.wait() == 1
            told = command.stderr.splitlines()
    *logs_lost, error = told  # the last page of a log may have room for the traceback
    assert all(line.startswith(LOGS_LOST.format(run=run)) for line in logs_lost)
    assert error == f"error: checkpoint of step 5 was not saved: rank 0: No space left on device: {run}/checkpoints"


def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    run = tmp_path / "small" / "run"
    with mounted(tmp_path / "small", "size=1m,ro"):
        told = refused(run)
    assert told == [f"error: cannot make the run directory {run}: Read-only file system; choose another with --run-dir"]


def test_a_folder_of_one_rank_in_the_way_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "ranks" / "00001"
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    assert refused(tmp_path / "run") == [
        f"error: cannot make the run directory {folder}: File exists; choose another with --run-dir"
    ]


def refused(run: Path) -> list[str]:
    """The errors that two ranks of the command say, which fails on both."""
    ranks = command_on_ranks(2, *DEBUG, "--steps", "3", "--run-dir", str(run))
    assert [rank.value for rank in ranks] == [2, 2]
    said = "".join(rank.stderr.read_text() for rank in ranks)
    assert "runtime/" not in said, said  # no frame of a traceback of ours
    return [line for line in said.splitlines() if line.startswith("error: ")]

"""A save that cannot be written is a warning of one line, leaves nothing behind, and changes no number."""

from __future__ import annotations

import os
import subprocess
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime import manifest, phases
from tests.harness import RankFailure, run_ranks
from tests.multiprocess import runtime_curves
from tests.multiprocess.runtime_curves import curves
from tests.multiprocess.test_runtime_checkpoints import tail

BACKGROUND = {"foreground": (), "background": ("--checkpoint.background",)}


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


@pytest.mark.parametrize("mode", BACKGROUND.values(), ids=BACKGROUND)
def test_a_full_disk_costs_one_checkpoint(mode: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ("--parallel.shard", "2", "--model.dropout", "0.1", "--data.cache", str(tmp_path / "corpora"))
    saves = ("--checkpoint.every", "2", *mode)
    run = tmp_path / "run"
    with mounted(run / "checkpoints", "size=64m"):
        results = run_ranks(train_collecting_warnings, 2, str(run), (*arguments, *saves), True, timeout=120)
        kept = [manifest.verify(path).step for path in manifest.complete(run / "checkpoints")]
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


@pytest.mark.parametrize("mode", BACKGROUND.values(), ids=BACKGROUND)
def test_what_cannot_be_removed_is_told_once_and_costs_no_checkpoint(
    mode: tuple[str, ...], tmp_path: Path
) -> None:
    run, cache = tmp_path / "run", ("--data.cache", str(tmp_path / "corpora"))
    saves = ("--checkpoint.every", "2", "--checkpoint.keep", "2", "--checkpoint.strict", *mode)
    left = run / "checkpoints" / ".removing-step-00000001"
    with mounted(left / "pin", "size=1m"):
        (result,) = run_ranks(train_collecting_warnings, 1, str(run), (*cache, *saves), False, timeout=120)
    _, said = result.value
    assert said == [
        f"{left} is not needed any more and could not be removed: Device or resource busy: pin; remove it by hand"
    ]
    assert [manifest.verify(path).step for path in manifest.complete(run / "checkpoints")] == [8, 6]


@pytest.mark.parametrize("mode", BACKGROUND.values(), ids=BACKGROUND)
def test_strict_stops_at_the_first_failed_save(mode: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    with pytest.raises(RankFailure) as caught:
        curves(1, run, "--checkpoint.every", "2", "--checkpoint.strict", *mode)
    assert (
        f"CheckpointError: checkpoint of step 2 was not saved: rank 0: File exists: {run}/checkpoints"
        in str(caught.value)
    )

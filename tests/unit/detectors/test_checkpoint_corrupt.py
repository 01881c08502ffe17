"""checkpoint-corrupt: a file that is cut, empty or rotten is found when it is loaded; other failed loads are not."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import dtobs
from dtobs.detectors.silent.checkpoint_corrupt import checkpoint_corrupt
from dtobs.findings import Finding
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun

STATE = {"weight": torch.arange(90_000.0).reshape(300, 300), "bias": torch.ones(300)}


def rotten(path: Path) -> None:
    saved = bytearray(path.read_bytes())
    saved[saved.index(STATE["weight"].numpy().tobytes()) + 1000] ^= 4
    path.write_bytes(saved)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def load(path: Path, folder: Path) -> list[Finding]:
    with dtobs.attach(run_dir=folder / "run", monitor=False) as session:
        session.step(3)
        with contextlib.suppress(Exception):
            safetensors.torch.load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    view = load_run(folder / "run")
    assert view.page(0)["probe_failures"] == 0
    return checkpoint_corrupt(view)


@pytest.mark.parametrize(
    ("harm", "loaded", "why"),
    [
        (rotten, True, "data/0 is not what its checksum says"),
        (cut, False, "central directory"),
        (empty, False, "empty"),
    ],
)
def test_a_file_of_torch_that_is_not_what_was_saved(
    harm: Callable[[Path], None], loaded: bool, why: str, tmp_path: Path
):
    torch.save(STATE, path := tmp_path / "step-3.pt")
    harm(path)
    (finding,) = load(path, tmp_path)
    assert (finding.ranks, finding.step) == ((0,), 3)
    said = "rank 0 has loaded" if loaded else "rank 0 could not load"
    assert finding.summary.startswith(f"{said} {path} at {__file__}:")
    assert why in finding.summary


def test_an_old_file_and_one_of_safetensors_that_are_cut(tmp_path: Path):
    torch.save(STATE, old := tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    cut(old)
    assert "unexpected EOF" in load(old, tmp_path)[0].summary
    safetensors.torch.save_file(STATE, other := tmp_path / "model.safetensors")
    cut(other)
    assert "not fully covered" in load(other, tmp_path / "other")[0].summary


def whole(path: Path) -> None:
    torch.save(STATE, path)


def without_checksums(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, path)
    finally:
        torch.serialization.set_crc32_options(True)


def refused(path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), path)


def a_page_of_the_web(path: Path) -> None:
    path.write_bytes(b"<html>")


def of_numpy(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, **{name: value.numpy() for name, value in STATE.items()})


def of_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}))


def of_safetensors(path: Path) -> None:
    safetensors.torch.save_file(STATE, path)


@pytest.mark.parametrize(
    "write", [whole, without_checksums, refused, a_page_of_the_web, of_numpy, of_pickle, of_safetensors]
)
def test_what_was_never_such_a_file_or_is_whole_is_not_corrupt(write: Callable[[Path], None], tmp_path: Path):
    write(path := tmp_path / "step-3.pt")
    assert load(path, tmp_path) == []


def test_a_file_that_is_not_there(tmp_path: Path):
    assert load(tmp_path / "absent.pt", tmp_path) == []


def test_what_the_loop_found_for_itself(tmp_path: Path):
    with dtobs.attach(run_dir=tmp_path / "run", monitor=False) as session:
        session.corrupt("checkpoints/step-8", "shard 2 is missing")
    (finding,) = checkpoint_corrupt(load_run(tmp_path / "run"))
    assert finding.summary.startswith(f"rank 0 could not load checkpoints/step-8 at {__file__}:")
    assert finding.summary.endswith("which is not what was saved: shard 2 is missing")


def test_one_finding_for_a_file_of_several_ranks(tmp_path: Path):
    run = FakeRun(tmp_path, 4).steps(3)
    for rank in (1, 2):
        said = {"path": "a.pt", "why": "it is empty", "site": 0, "loaded": False}
        run.rank(rank).meta("corrupt", **said, step=0, t_ns=1)
    (finding,) = checkpoint_corrupt(run.view())
    assert (finding.ranks, finding.step) == ((1, 2), None)
    assert finding.summary == "ranks 1 and 2 could not load a.pt, which is not what was saved: it is empty"

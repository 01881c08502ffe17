"""What the system or an argument refuses is one line, whatever command it stops, and never a traceback."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dtobs.cli import commands, main
from dtobs.diagnose import gather, holds_logs
from dtobs.errors import TargetError
from dtobs.recording.rundir import RunDirectory
from dtobs.testing.fake_run import FakeRun
from dtobs.testing.layout import JobLayout
from dtobs.testing.synthetic_dumps import SimulatedJob, write_dumps
from tests.harness import launch

LONG = "x" * 5000
LOOKS = (["diagnose"], ["top", "--once"], ["timeline"])


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with `code` and one line, which it returns."""

    def run(code: int, *arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        return said.err

    return run


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Path]:
    """A run directory of another user."""
    folder = tmp_path / "runs" / "theirs"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    folder.chmod(0)
    for command in ("diagnose", "top", "timeline"):
        import_module(f"dtobs.cli.{command}")  # nobody may not be able to read it
    me = os.geteuid()
    if me == 0:
        tmp_path.chmod(0)  # root may look behind mode 0, nobody may not
        os.seteuid(65534)
    yield folder
    if me == 0:
        os.seteuid(me)
        tmp_path.chmod(0o700)
    folder.chmod(0o700)


@pytest.mark.parametrize("command", LOOKS)
def test_what_is_another_users(command: list[str], private: Path, refused: Any):
    assert refused(1, *command, private) == (
        f"dtobs: {private}: Permission denied. Run this as its owner, or ask them to let you read it\n"
    )


def test_runs_of_others_are_not_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Any):
    (tmp_path / "runs" / "theirs").mkdir(parents=True)

    def exists(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.chdir(tmp_path)
    assert "there is no run below" in refused(1, "diagnose")


@pytest.mark.parametrize("command", LOOKS)
def test_a_path_longer_than_any(command: list[str], refused: Any):
    said = refused(1, *command, LONG)
    assert said.endswith("x…: File name too long. Give a path that can exist\n")
    assert len(said) < 300


@pytest.mark.parametrize("address", ["http://[::1", "http://[zz]:80"])
@pytest.mark.parametrize("command", [["diagnose"], ["top", "--once"]])
def test_addresses_in_brackets_that_are_none(command: list[str], address: str, refused: Any):
    assert refused(2, *command, address) == (
        f"dtobs: '{address}' is no address: give http://HOST:PORT, as in the run's monitor.json\n"
    )


@pytest.mark.parametrize("port", [99_999_999, 65_536, -1])
def test_ports_that_are_none(port: int, refused: Any):
    pytest.importorskip("torch")
    words = ("--nnodes", 2, "--master-addr", "127.0.0.2", f"--master-port={port}")
    assert refused(2, "preflight", *words) == f"dtobs: --master-port {port}: give a port between 1 and 65535\n"


def test_keep_below_a_file(tmp_path: Path, refused: Any):
    pytest.importorskip("torch")
    (tmp_path / "file").touch()
    assert "file is a file: give a new folder" in refused(2, "drill", "stopped", "--keep", tmp_path / "file")


@pytest.mark.parametrize(
    ("names", "holds"),
    [
        ([], "it is empty"),
        (["rank0.pt", "rank1.pt"], "it holds rank0.pt, rank1.pt;"),
        (["rank_0.host1", "rank_1.host2"], "it holds rank_0.host1, rank_1.host2;"),
        (["a/", "b/", "c.txt", "d.txt"], "it holds a/, b/, c.txt …;"),
    ],
)
def test_folders_of_something_else(names: list[str], holds: str, tmp_path: Path, refused: Any):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        if name.endswith("/"):
            (folder / name).mkdir()
        else:
            (folder / name).touch()
    said = refused(1, "diagnose", folder)
    assert "neither a run directory of dtobs (with run.json or nodes/) nor a folder of Flight Recorder" in said
    assert holds in said
    assert "dumps lie in one folder, and the name of each ends in its rank, as nccl_trace_rank_3" in said


def as_json(dump: bytes) -> bytes:
    """The same dump as PyTorch writes JSON: keys in order, so that the entries come first."""
    return json.dumps(pickle.loads(dump), sort_keys=True, default=str).encode()


def newest_pickle(dump: bytes) -> bytes:
    return pickle.dumps(pickle.loads(dump), protocol=5)


@pytest.mark.parametrize("log", [b'{"version": "1.1", "entries": 3}\n', b"rank 0 started\n", b""])
def test_a_log_is_taken_for_no_dump(log: bytes, tmp_path: Path):
    (tmp_path / "rank_0").write_bytes(log)
    assert holds_logs(str(tmp_path / "rank_0"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("write", [bytes, as_json, newest_pickle], ids=["pickle", "json", "newest-pickle"])
def test_one_dump_is_answered_with_its_folder(write: Any, pack: Any, tmp_path: Path, refused: Any):
    write_dumps(SimulatedJob(JobLayout(dp=2, tp=1, pp=1), None, entries=12, steps=4), tmp_path)
    dump = tmp_path / "nccl_trace_rank_0"
    dump.write_bytes(pack(write(dump.read_bytes())))
    said = refused(1, "diagnose", dump)
    assert said.endswith(f"give the run directory or the folder of dumps that it is in, such as {tmp_path}\n")


def test_gather_raises_a_target_error(tmp_path: Path):
    with pytest.raises(TargetError, match="it is empty"):
        gather(tmp_path)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("what", [["--json-schema"], ["--json"]])
def test_a_full_disk(what: list[str], unbuffered: str, tmp_path: Path):
    write_dumps(SimulatedJob(JobLayout(dp=2, tp=1, pp=1), None, entries=12, steps=4), tmp_path)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dtobs", "diagnose", str(tmp_path), *what],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr.endswith("output: No space left on device. Make room there and try again\n")
    assert done.stderr.count("\n") == 1


def test_an_output_that_is_closed(tmp_path: Path):
    write_dumps(SimulatedJob(JobLayout(dp=2, tp=1, pp=1), None, entries=12, steps=4), tmp_path)
    script = f"exec '{sys.executable}' -m dtobs diagnose '{tmp_path}' >&-"
    done = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_folder_that_is_no_run_is_not_watched(tmp_path: Path, refused: Any):
    (tmp_path / "picture.png").touch()
    assert "is no run directory" in refused(2, "monitor", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["picture.png"]


def test_a_monitor_says_as_json_where_it_serves(tmp_path: Path):
    FakeRun(tmp_path / "run", 1).steps(2)
    with launch([sys.executable, "-m", "dtobs", "monitor", tmp_path / "run", "--json"], cwd=tmp_path) as monitor:
        deadline = time.monotonic() + 30
        while not monitor.stdout.endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.02)
        said = json.loads(monitor.stdout)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", said.pop("address"))
    assert said == {"schema": "dtobs.monitor/1", "run_dir": str(tmp_path / "run"), "node": 0}


def test_every_command_has_json():
    for command in commands():
        parser = argparse.ArgumentParser(allow_abbrev=False)
        import_module(f"dtobs.cli.{command}").configure(parser)
        parsers = [parser]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers = list(action.choices.values())
        assert all("--json" in each.format_help() for each in parsers), command


def test_two_live_jobs_are_refused_one_directory(tmp_path: Path, refused: Any):
    FakeRun(tmp_path / "run", 2).steps(2)
    said = refused(2, "run", "--run-dir", tmp_path / "run", "--", "true")
    assert "belongs to a job that still runs (rank 0 is process" in said


def test_a_command_that_records_nothing_is_not_told_what_another_job_recorded(tmp_path: Path, capfd: Any):
    root = tmp_path / "old"
    for rank in FakeRun(root, 2, live=False).steps(3).ranks:
        rank.close()
    assert main(["run", "--run-dir", str(root), "--", "true"]) == 0
    said = capfd.readouterr().err
    assert "dtobs: nothing was recorded: no process built a torch optimizer" in said
    assert "nothing found" not in said


@pytest.mark.parametrize(("code", "noted"), [(3, True), (0, False)])
def test_a_command_that_fails_without_a_reason_on_record_is_told(tmp_path: Path, capfd: Any, code: int, noted: bool):
    root = tmp_path / "run"
    recorded = FakeRun(tmp_path / "made", 2, live=False).steps(3)
    for rank in recorded.ranks:
        rank.close()
    script = f"cp -r '{recorded.view().root}/.' '{root}'; exit {code}"
    assert main(["run", "--run-dir", str(root), "--", "sh", "-c", script]) == code
    text = f"the command ended with exit code {code}, and nothing that was recorded says why"
    assert (text in capfd.readouterr().err) == noted
    assert main(["diagnose", str(root)]) == 0
    assert (text in " ".join(capfd.readouterr().out.split())) == noted
    assert main(["run", "--run-dir", str(root), "--", "false"]) == 1  # records nothing, and says nothing of that run
    assert RunDirectory(root).read_run().get("exit_code", 0) == code

"""The socket folders of dead ranks go, and nothing else does, whatever a recording says."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dtobs.monitor.leftovers import remove_socket_folder
from dtobs.monitor.loop import Monitor
from dtobs.testing.fake_run import FakeRun
from tests.unit.monitor.children import WAIT, child


@pytest.fixture
def folder() -> Iterator[Path]:
    """What the probe makes, in the real folder for temporary files: with the socket of a server that is gone."""
    made = Path(tempfile.mkdtemp(prefix="dtobs-"))
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(made / "worker"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_it_goes_with_its_socket(folder: Path):
    assert remove_socket_folder(str(folder / "worker"))
    assert not folder.exists()
    assert not remove_socket_folder(str(folder / "worker"))


def test_a_folder_with_anything_else_stays(folder: Path):
    (folder / "notes.txt").touch()
    assert not remove_socket_folder(str(folder / "worker"))
    assert sorted(p.name for p in folder.iterdir()) == ["notes.txt", "worker"]


def test_a_file_of_that_name_is_no_socket(folder: Path):
    (folder / "worker").unlink()
    (folder / "worker").touch()
    assert not remove_socket_folder(str(folder / "worker"))


def test_elsewhere_nothing_is_touched(tmp_path: Path, folder: Path):
    elsewhere = tmp_path / "dtobs-x"
    elsewhere.mkdir()
    link = Path(f"{folder}-link")
    link.symlink_to(elsewhere)
    try:
        for server in (elsewhere / "worker", link / "worker", folder / "other", folder / ".." / "worker", ""):
            assert not remove_socket_folder(str(server))
    finally:
        link.unlink()
    assert elsewhere.exists()
    assert folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_stays(folder: Path):
    os.chown(folder, 65534, 65534)
    assert not remove_socket_folder(str(folder / "worker"))


def test_the_monitor_waits_for_the_process(tmp_path: Path, folder: Path):
    run = FakeRun(tmp_path / "run", 1)
    with child(WAIT) as rank:
        run.pid_of = lambda _: rank.pid  # type: ignore[method-assign]
        run.rank(0).meta("process", worker_server=str(folder / "worker")).step()
        for alive in (True, False):
            monitor = Monitor(run.directory, 0, detect=lambda _: [])
            monitor.tick()
            if not alive:
                rank.kill()
                monitor.watch.wait(20)
            monitor.finish()
            assert folder.exists() == alive

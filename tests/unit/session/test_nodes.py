"""How a rank leaves its node's monitor what it needs to find the others."""

from __future__ import annotations

import http.client
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from dtobs.nodes.token import read_token
from dtobs.recording.rundir import RunDirectory, read_json, write_json
from dtobs.session import nodes
from dtobs.session.identity import Identity
from dtobs.session.monitor_process import MonitorProcess
from dtobs.session.nodes import arrange, bind_address, nodes_of

FIRST = Identity(rank=0, world_size=4, local_rank=0, node=0, attempt=0)
SECOND = Identity(rank=2, world_size=4, local_rank=0, node=1, attempt=0)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What rank 0 told, by topic; each rank here is asked in turn."""
    told: dict[str, Any] = {}

    def told_by_first(who: Identity, topic: str, make: Any) -> Any:
        if who.rank == 0:
            told["said"] = make()
        return told["said"]

    monkeypatch.setattr(nodes, "told_by_first", told_by_first)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.delenv("DTOBS_TOKEN", raising=False)
    return told


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"GROUP_WORLD_SIZE": "3"}, 3),
        ({"SLURM_JOB_NUM_NODES": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "3"}, 2),
        ({"LOCAL_WORLD_SIZE": "4"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({}, 1),
    ],
)
def test_how_many_nodes(environment: dict[str, str], expected: int):
    assert nodes_of(FIRST, environment) == expected


@pytest.mark.parametrize(
    ("asked", "master", "said"),
    [
        ("eth0", "", "'eth0' is no address: give one of this host's, or 'auto'"),
        ("auto", "127.0.0.1", "MASTER_ADDR='127.0.0.1' leads to no address of this host that others reach"),
        ("auto", "no.such.host.invalid", "leads to no address"),
    ],
)
def test_an_address_that_cannot_be_meant(asked: str, master: str, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        bind_address(asked, {"MASTER_ADDR": master})


def test_an_address_is_taken_as_it_is():
    assert bind_address("10.0.0.7", {}) == "10.0.0.7"
    assert bind_address("fd00::7", {}) == "fd00::7"


def test_rank_0_tells_the_others_where_its_monitor_listens(tmp_path: Path, store: dict[str, Any]):
    here, there = RunDirectory(tmp_path / "a"), RunDirectory(tmp_path / "b")
    said: list[str] = []
    first = arrange(here, FIRST, "127.0.0.1", said.append)
    second = arrange(there, SECOND, "127.0.0.2", said.append)
    assert said == []
    assert first is not None
    assert first.socket is not None
    assert second is not None
    port = first.socket.getsockname()[1]
    assert first.argument == f"127.0.0.1:{port}"
    assert (second.argument, second.socket) == ("127.0.0.2:0", None)
    assert read_json(here.lead(0)) == read_json(there.lead(1)) == {"node": 0, "address": f"http://127.0.0.1:{port}"}
    assert read_token(here.token) == read_token(there.token) != ""
    assert stat.S_IMODE(there.token.stat().st_mode) == stat.S_IMODE(there.lead(1).stat().st_mode) == 0o600
    first.socket.close()


def test_the_monitor_answers_on_the_socket_that_the_rank_made(tmp_path: Path, store: dict[str, Any]):
    run = RunDirectory(tmp_path / "run")
    run.create()
    listening = arrange(run, FIRST, "127.0.0.1", pytest.fail)
    assert listening is not None
    assert listening.socket is not None
    port = listening.socket.getsockname()[1]
    monitor = MonitorProcess(run, 0, listening)
    try:
        assert listening.socket.fileno() == -1  # the monitor's alone
        # The kernel holds the question until the monitor is there to answer it.
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", "/healthz", headers={"Authorization": f"Bearer {read_token(run.token)}"})
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        monitor._process.terminate()
        monitor._process.wait()


def test_a_monitor_that_still_watches_keeps_its_place(tmp_path: Path, store: dict[str, Any]):
    run = RunDirectory(tmp_path / "run")
    write_json(run.monitor_json, {"0": {"address": "http://127.0.0.1:9400", "pid": os.getpid()}})
    listening = arrange(run, FIRST, "127.0.0.1", pytest.fail)
    assert listening is not None
    assert (listening.argument, listening.socket) == ("127.0.0.1:9400", None)
    assert read_json(run.lead(0))["address"] == "http://127.0.0.1:9400"


class TestLoopbackOnly:
    """Without an address the monitors stay apart, and the user is told what that means."""

    def test_rank_0_says_what_is_not_covered_and_what_to_set(self, tmp_path: Path, store: dict[str, Any]):
        said: list[str] = []
        assert arrange(RunDirectory(tmp_path), FIRST, "", said.append) is None
        assert said == [
            "this job runs on 2 nodes, whose monitors listen on loopback only. Unless the run directory is on a disk "
            "that they share, no finding compares ranks of different nodes. To connect them, set "
            "DTOBS_MONITOR_BIND=auto (or an address of each node)"
        ]
        assert store["said"] == {}  # who waits for an answer gets one
        assert not RunDirectory(tmp_path).lead(0).exists()

    def test_the_others_say_nothing_and_wait_for_nothing(self, tmp_path: Path, store: dict[str, Any]):
        assert arrange(RunDirectory(tmp_path), SECOND, "", pytest.fail) is None

    def test_an_address_of_another_host(self, tmp_path: Path, store: dict[str, Any]):
        said: list[str] = []
        assert arrange(RunDirectory(tmp_path), FIRST, "203.0.113.7", said.append) is not None
        assert len(said) == 1
        assert "the monitors of the other nodes will not find this one" in said[0]
        assert store["said"] == {}


def test_one_node_needs_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setattr(nodes, "told_by_first", lambda *_: pytest.fail("asked"))
    assert arrange(RunDirectory(tmp_path), FIRST, "", pytest.fail) is None
    listening = arrange(RunDirectory(tmp_path), FIRST, "127.0.0.1", pytest.fail)
    assert listening is not None
    assert listening.argument == "127.0.0.1:0"

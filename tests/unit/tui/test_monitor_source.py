"""A monitor's address as the target, on a real server of the monitor's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtobs.cli import main
from dtobs.errors import ServiceError, UsageError
from dtobs.monitor.http import MonitorServer
from dtobs.nodes.bundle import encode_bundle
from dtobs.nodes.remote import RunCopy
from dtobs.tui.source import MonitorSource, open_source
from tests.unit.served import served
from tests.unit.tui.scene import STUCK, FakeSource, stalled_run, write_findings


@pytest.fixture
def scene(tmp_path: Path) -> FakeSource:
    """A run with findings."""
    source = FakeSource(stalled_run(tmp_path / "run", steps=12))
    write_findings(source.run)
    return source


@pytest.fixture
def monitor(scene: FakeSource) -> Iterator[MonitorServer]:
    """A monitor's HTTP server over the scene."""
    with served(scene.view) as server:
        yield server


def test_the_frame_is_that_of_the_directory(monitor: MonitorServer, scene: FakeSource) -> None:
    source = open_source(monitor.address, Path())
    assert isinstance(source, MonitorSource)
    frame = source.look()
    assert (frame.world_size, frame.hosts, frame.step, frame.layout) == (8, 2, 1132, "replicate 4 × shard 2")
    assert frame.rows[STUCK].state == "loading"
    assert frame.rows[0].doing == "waits in all_reduce"
    assert frame.rows[STUCK].accused == "critical"
    assert len(frame.loss_history) == 12
    detail = source.detail(0)
    assert detail is not None
    assert dict(detail.facts)["call site"] == "train.py:20 in train_step"
    assert detail.events
    assert frame.to_json() == {**scene.look().to_json(), "target": monitor.address}


def test_top(monitor: MonitorServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", monitor.address, "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["target"] == monitor.address


def test_a_monitor_that_leaves(monitor: MonitorServer) -> None:
    source = MonitorSource(monitor.address)
    source.look()
    monitor.close()
    frame = source.look()
    assert (frame.status, frame.status_text) == ("gone", "the monitor no longer answers")
    assert len(frame.rows) == 8
    with pytest.raises(
        ServiceError, match=r"^no monitor answers at http://127.0.0.1:\d+: .*refused\. Has the run ended\?$"
    ):
        MonitorSource(monitor.address).look()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b"DTOBSND1\xff\xff\xff\xff",
        encode_bundle({}, []),
        encode_bundle({"schema": "other/9"}, []),
        encode_bundle({"root": 5}, []),
    ],
)
def test_an_answer_that_is_no_run(answer: bytes) -> None:
    with served(lambda: answer) as server, pytest.raises(ServiceError, match=r"Is that a dtobs monitor\?$"):
        RunCopy([server.address]).look()


def test_no_address() -> None:
    with pytest.raises(UsageError, match="is no address"):
        RunCopy(["http://"])

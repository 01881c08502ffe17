"""A monitor's address as the target, on a real server of the monitor's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtobs.cli import main
from dtobs.errors import ServiceError, UsageError
from dtobs.monitor.http import MonitorServer, Pages
from dtobs.nodes.remote import fetch_view
from dtobs.nodes.wire import encode_view
from dtobs.tui.source import MonitorSource, open_source
from tests.unit.tui.scene import STUCK, FakeSource, findings, stalled_run


class Monitor:
    """A monitor's HTTP server over the scene."""

    def __init__(self, root: Path) -> None:
        source = FakeSource(stalled_run(root, steps=12))
        self.answer = lambda: encode_view(source.view(), findings(source.run))
        pages = Pages(lambda: b"", lambda: self.answer(), dict, lambda text: None)
        self.server = MonitorServer("127.0.0.1", 0, pages)
        self.address = self.server.address


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    served = Monitor(tmp_path / "run")
    yield served
    served.server.close()


def test_the_frame_is_that_of_the_directory(monitor: Monitor) -> None:
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


def test_top(monitor: Monitor, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", monitor.address, "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["target"] == monitor.address


def test_a_monitor_that_leaves(monitor: Monitor) -> None:
    source = MonitorSource(monitor.address)
    source.look()
    monitor.server.close()
    frame = source.look()
    assert (frame.status, frame.status_text) == ("gone", "the monitor no longer answers")
    assert len(frame.rows) == 8
    with pytest.raises(
        ServiceError, match=r"^no monitor answers at http://127.0.0.1:\d+: .*refused\. Has the run ended\?$"
    ):
        MonitorSource(monitor.address).look()


@pytest.mark.parametrize("answer", [{}, {"schema": "other/9"}, {"schema": "dtobs.view/1", "pages": 7}])
def test_an_answer_that_is_no_view(monitor: Monitor, answer: dict[str, object]) -> None:
    monitor.answer = lambda: answer
    with pytest.raises(ServiceError, match=r"not a view of a run|use one version"):
        fetch_view(monitor.address)


def test_no_address() -> None:
    with pytest.raises(UsageError, match="is no address"):
        fetch_view("http://")

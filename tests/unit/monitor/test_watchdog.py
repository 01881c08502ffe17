"""When captures are taken: once a stall, again when the picture changes, never without end or lost to a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtobs.host.process import ProcessState
from dtobs.monitor.watchdog import Watchdog
from dtobs.recording.capture import Capture, latest_capture
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun


class Camera:
    """Takes captures that show nothing."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, view: RunView, reason: str, *, previous: Capture | None = None) -> Capture:
        self.reasons.append(reason)
        return Capture(view.now_ns, f"2026010{len(self.reasons)}", reason)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    made = FakeRun(tmp_path / "run", world=2)
    made.steps(5)
    for rank in made.ranks:
        rank.page(hang_timeout_ns=2_000_000_000)
    return made


def looked(run: FakeRun, later: float, **arguments: Any) -> RunView:
    """The run as it looks when nothing has been heard of it for `later` seconds."""
    view = run.view(later=later, **arguments)
    view.pages["heartbeat_ns"] = view.pages["step_begin_ns"]
    view.pages["attach_ns"] = view.pages["step_begin_ns"]
    return view


@pytest.fixture
def camera() -> Camera:
    return Camera()


@pytest.fixture
def watchdog(tmp_path: Path, camera: Camera) -> Watchdog:
    return Watchdog(tmp_path / "captures", camera)


def test_one_capture_a_stall(run: FakeRun, watchdog: Watchdog, camera: Camera, tmp_path: Path):
    assert watchdog.look(looked(run, 0.5)) < 0.5
    assert 0.5 < watchdog.look(looked(run, 1.5)) < 1
    assert camera.reasons == []
    for later in (3.0, 4.0, 50.0):
        assert watchdog.look(looked(run, later)) > 1
    assert len(camera.reasons) == 1
    assert camera.reasons[0] == "nothing has moved for 3 s; the limit is 2 s: the hang timeout"
    assert latest_capture(tmp_path / "captures") == watchdog.capture
    assert watchdog.stalled is not None


def test_the_next_stall_is_captured_again(run: FakeRun, watchdog: Watchdog, camera: Camera):
    watchdog.look(looked(run, 3.0))
    run.steps(1)
    watchdog.look(looked(run, 0.5))
    assert (watchdog.stalled, watchdog.capture) == (None, None)
    watchdog.look(looked(run, 3.0))
    assert len(camera.reasons) == 2


def test_again_when_the_picture_changes_but_not_at_once(run: FakeRun, watchdog: Watchdog, camera: Camera):
    watchdog.look(looked(run, 3.0))
    dead = {1: ProcessState(1, alive=False, exit_code=-9)}
    watchdog.look(looked(run, 4.0, processes=dead))
    assert len(camera.reasons) == 1  # the last one was a moment ago
    watchdog._taken_s -= 60
    watchdog.look(looked(run, 5.0, processes=dead))
    watchdog._taken_s -= 60
    watchdog.look(looked(run, 6.0, processes=dead))
    assert len(camera.reasons) == 2


def test_a_picture_that_never_rests_does_not_fill_the_disk(run: FakeRun, watchdog: Watchdog, camera: Camera):
    for number in range(20):
        watchdog._taken_s -= 60
        stopped = {1: ProcessState(1, alive=True, state="T" if number % 2 else "S")}
        watchdog.look(looked(run, 3.0 + number, processes=stopped))
    assert len(camera.reasons) == 4


def test_a_capture_that_cannot_be_saved_is_kept_in_memory(run: FakeRun, tmp_path: Path, camera: Camera):
    (tmp_path / "file").write_text("")
    watchdog = Watchdog(tmp_path / "file", camera)
    watchdog.look(looked(run, 3.0))
    assert watchdog.capture is not None
    assert "kept in memory only" in watchdog.problems[0]

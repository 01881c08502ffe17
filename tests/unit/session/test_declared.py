"""What a program declares: that it stands still on purpose, and what is to be done about a hang."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dtobs.events import Phase, RankState
from dtobs.recording.view import load_run
from dtobs.session import Session, session, start
from tests.unit.session.conftest import make_model

Attach = Callable[..., Session]
YEAR_NS = 365 * 24 * 3600 * 10**9


def page(observed: Session) -> np.void:
    return load_run(observed.run_dir).page(0)


def test_a_pause_lasts_as_long_as_it_likes_and_not_longer(attach: Attach):
    observed = attach(make_model())
    observed.allow("checkpoint", 5.0)
    with observed.pause("debugging"):
        assert int(page(observed)["phase_allowance_ns"]) > YEAR_NS
        with observed.phase("checkpoint"):  # what is called by hand in a debugger ends no pause
            assert int(page(observed)["phase_allowance_ns"]) > YEAR_NS
        assert load_run(observed.run_dir).meta(0).phases[int(page(observed)["phase"])] == "debugging"
    assert int(page(observed)["phase_allowance_ns"]) == 0
    with observed.phase("checkpoint"):
        assert int(page(observed)["phase_allowance_ns"]) == 5 * 10**9


@pytest.mark.parametrize(
    ("said", "data", "generators"),
    [
        ("same-data", "same", None),
        ("own-data", "own", None),
        ("same-seed", None, "equal"),
        ("same-data,same-seed", "same", "equal"),
        ("nothing", None, None),
    ],
)
def test_what_the_command_expects_is_declared(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, said: str, data: str | None, generators: str | None
):
    monkeypatch.setenv("DTOBS_EXPECT", said)
    observed = attach(make_model())
    policy = load_run(observed.run_dir).meta(0).policy
    assert (policy.get("data"), policy.get("generators")) == (data, generators)


def test_a_pause_inside_a_phase_that_hides_others(attach: Attach):
    observed = attach(make_model())
    with observed.phase("validation"), observed.pause():
        assert int(page(observed)["phase"]) == Phase.VALIDATION
        assert int(page(observed)["phase_allowance_ns"]) > YEAR_NS


def test_a_pause_of_a_closed_session_is_nothing(attach: Attach):
    observed = attach(make_model())
    with observed.pause():
        observed.close()
    closed = page(observed)
    assert int(closed["state"]) == RankState.CLOSED
    with observed.pause():
        assert page(observed).tobytes() == closed.tobytes()


@pytest.mark.parametrize(
    ("given", "variable", "passed", "said"),
    [
        (None, "", "", ""),
        ("abort", "command:x", "abort", ""),
        (None, "command:x", "command:x", ""),
        (
            "kill",
            "",
            "report",
            "dtobs: --on-hang 'kill': use report, abort or command:PROGRAM ARGUMENTS;"
            " hangs are reported and nothing more\n",
        ),
    ],
)
def test_the_policy_reaches_the_monitor(
    given: str | None,
    variable: str,
    passed: str,
    said: str,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    started: list[str] = []

    class Monitor:
        def __init__(self, run: object, node: int, listening: object, on_hang: str) -> None:
            started.append(on_hang)

        def let_go(self) -> None: ...

        def wake(self) -> bool:
            return False

    monkeypatch.setattr(session, "MonitorProcess", Monitor)
    monkeypatch.setenv(start.ON_HANG, variable)
    attach(make_model(), monitor=True, on_hang=given)
    assert started == [passed]
    assert capsys.readouterr().err == said

"""Programs that handle what ended their training, and leave with an exit code: the error is on record."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from dtobs.events import RankState
from dtobs.probes.exceptions import without_frames
from dtobs.recording.view import RunView, load_run
from dtobs.session import Session
from tests.unit.session.conftest import make_model, train

Attach = Callable[..., Session]


def fail(leave: Callable[[], object], error: BaseException | None = None) -> None:
    """Handle an error, and leave by `leave`."""
    with contextlib.suppress(SystemExit):
        try:
            raise error or ValueError("bad batch")
        except BaseException:
            leave()


def test_of_tracebacks_that_a_message_quotes_what_was_raised_stays():
    """torch's errors of checkpoints, of spawned processes and of workers of a loader quote whole tracebacks."""
    failures = {rank: _wrap_exception(KeyError(f"part {rank}")) for rank in (0, 3)}
    assert without_frames(str(CheckpointException("no", failures))) == (
        "CheckpointException ranks:dict_keys([0, 3])\nrank 0: KeyError: 'part 0'\nrank 3: KeyError: 'part 3'"
    )
    try:
        raise ValueError("torn file")
    except ValueError:
        loader = str(ExceptionWrapper(where="in DataLoader worker process 0").exc_msg)
    assert without_frames(loader) == "ValueError: torn file"
    assert without_frames("two\n  lines") == "two\n  lines"


def told_to_end() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.kill(os.getpid(), signal.SIGTERM)


def swallowed(more: Callable[[], object]) -> None:
    fail(lambda: sys.exit(1))
    more()


FAILED, CLOSED = RankState.FAILED, RankState.CLOSED
ENDS: dict[str, tuple[Callable[[Callable[[], object]], object], list[str], RankState]] = {
    "sys.exit(1)": (lambda _: fail(lambda: sys.exit(1)), ["ValueError"], FAILED),
    "sys.exit(text)": (lambda _: fail(lambda: sys.exit("no data")), ["ValueError"], FAILED),
    "sys.exit(85), as for a job to be queued again": (lambda _: fail(lambda: sys.exit(85)), ["SystemExit"], CLOSED),
    "os._exit(1)": (lambda _: fail(lambda: os._exit(1)), ["ValueError"], FAILED),
    "sys.exit(0), as at an early stop": (lambda _: fail(lambda: sys.exit(0)), [], CLOSED),
    "os._exit(0)": (lambda _: fail(lambda: os._exit(0)), [], CLOSED),
    "sys.exit(130)": (lambda _: fail(lambda: sys.exit(130), KeyboardInterrupt()), ["KeyboardInterrupt"], CLOSED),
    "by itself": (lambda _: fail_by_itself(), ["SystemExit"], CLOSED),
    "at its end": (lambda _: None, [], CLOSED),
    "after it went on": (swallowed, [], CLOSED),
    "because it was told": (lambda _: fail(told_to_end), [], CLOSED),
}


def fail_by_itself() -> None:
    with contextlib.suppress(SystemExit):
        sys.exit(3)


def recorded(session: Session) -> tuple[list[str], RankState]:
    view: RunView = load_run(session.run_dir)
    return [str(e["type"]) for e in view.meta(0).exceptions], RankState(int(view.page(0)["state"]))


@pytest.mark.parametrize("name", ENDS)
def test_the_error_that_made_a_program_leave(name: str, attach: Attach, monkeypatch: pytest.MonkeyPatch):
    leave, types, state = ENDS[name]
    monkeypatch.setattr(os, "_exit", lambda code: None)
    before = signal.getsignal(signal.SIGTERM)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = attach(model, optimizer)
    train(model, optimizer, 2)
    try:
        leave(lambda: train(model, optimizer, 2))
    finally:
        signal.signal(signal.SIGTERM, before)
    session.close_at_exit()
    assert recorded(session) == (types, state)
    left_at = load_run(session.run_dir).meta(0).process.get("left_at") or {}
    assert left_at.get("file") == (__file__ if "exit(0)" in name else None)
    assert left_at.get("by") == ("os._exit" if name == "os._exit(0)" else None)
    for said in load_run(session.run_dir).meta(0).exceptions:
        assert said["frame"]["file"] == __file__ and said["frame"]["function"] in ("fail", "fail_by_itself")


@pytest.mark.parametrize(
    ("error", "types", "state"),
    [
        (ValueError("x"), ["ValueError"], FAILED),
        (SystemExit(0), [], CLOSED),
        (KeyboardInterrupt(), ["KeyboardInterrupt"], CLOSED),
    ],
)
def test_what_a_child_of_multiprocessing_raises(
    error: BaseException, types: list[str], state: RankState, attach: Attach
):
    session = attach(make_model())

    def run() -> None:
        try:
            raise error
        finally:  # as multiprocessing calls its finalizers
            session.close_at_exit()

    with pytest.raises(type(error)):
        run()
    assert recorded(session) == (types, state)


def test_what_an_error_was_raised_from_and_what_was_handled_then(attach: Attach, capsys: pytest.CaptureFixture[str]):
    session = attach(make_model())
    try:
        try:
            try:
                raise KeyError("x")
            except KeyError:
                raise OSError("\x1b[31mno\x1b[0m disk")  # noqa: B904 - without a cause of its own
        except OSError as why:
            raise ValueError("\x1b[1mno\x1b[0m sample") from why
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    session.close_at_exit()
    (said,) = load_run(session.run_dir).meta(0).exceptions
    assert [(link["type"], link["how"]) for link in said["chain"]] == [("OSError", "cause"), ("KeyError", "context")]
    assert (said["message"], said["chain"][0]["message"]) == ("no sample", "no disk")
    assert "ValueError: no sample" in said["traceback"]
    assert "ValueError: \x1b[1mno" in capsys.readouterr().err, "the program's own output is as it was"

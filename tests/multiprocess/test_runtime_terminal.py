"""`--tui` on a real pseudo-terminal: the child gets the terminal, training goes on, and it is given back."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

# What stands in for `dtobs top`: says that it has the terminal, then ends when it reads a q, or never.
VIEWER = "import sys; print('VIEWER HAS THE TERMINAL', flush=True); sys.stdin.readline()"

PROGRAM = """
import sys
from runtime import process, terminal, train, world
terminal.viewer = process.viewer = lambda run_dir: [sys.executable, "-c", {viewer!r}]
world.exit_now(train.main(sys.argv[1:]))
"""


def run_on_a_terminal(tmp_path: Path, viewer: str, steps: str, *, press_q: bool) -> tuple[int, str]:
    """Train with --tui on a new terminal; exit code and all that was shown on it."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(viewer=viewer))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            *(
                sys.executable,
                str(program),
                "--preset",
                "debug",
                "--steps",
                steps,
                "--tui",
                "--device",
                "cpu",
            ),
            *(
                "--data.sequence",
                "16",
                "--data.batch",
                "1",
                "--run.log_every",
                "1",
                "--data.validate_every",
                "0",
            ),
            *("--run.root", str(tmp_path / "runs"), "--data.cache", str(tmp_path / "corpora")),
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "DTOBS_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    pressed = not press_q
    try:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # EIO: nobody has the other end any more
                break
            shown += piece
            if not pressed and b"VIEWER HAS" in shown:
                os.write(ours, b"q\n")
                pressed = True
        return process.wait(60), shown.decode()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.timeout(120)
def test_the_viewer_ends_with_the_training(tmp_path: Path) -> None:
    code, shown = run_on_a_terminal(tmp_path, VIEWER, "5", press_q=False)
    assert code == 0
    assert "VIEWER HAS THE TERMINAL" in shown
    assert "step      3/5" not in shown
    assert "finished: 5 steps" in shown
    (log,) = (tmp_path / "runs").glob("*/ranks/00000/stdout.log")
    assert "step      3/5" in log.read_text()


@pytest.mark.timeout(120)
def test_q_leaves_training_running_and_gives_the_terminal_back(tmp_path: Path) -> None:
    code, shown = run_on_a_terminal(tmp_path, VIEWER, "200", press_q=True)
    assert code == 0
    after = shown.partition("VIEWER HAS THE TERMINAL")[2]
    assert "step    200/200" in after
    assert "finished: 200 steps" in after


def test_without_a_terminal_it_trains_without_the_viewer(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "runtime.train",
                "--preset",
                "debug",
                "--steps",
                "2",
                "--tui",
                "--device",
                "cpu",
            ),
            *("--run.root", str(tmp_path / "runs"), "--data.cache", str(tmp_path / "corpora")),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "DTOBS_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        timeout=100,
        check=True,
    )
    assert "warning: --tui needs a terminal; training without it" in result.stderr
    assert "finished: 2 steps" in result.stdout

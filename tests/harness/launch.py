"""Command lines under test: started in their own session, output in a file, ended by id with all they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness import processes, server
from tests.harness.evidence import tail

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Launched:
    """A running command. A context manager: leaving it kills the command and everything that carries its token."""

    process: subprocess.Popen[bytes]
    token: str
    stdout_path: Path
    stderr_path: Path
    timeout: float

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(errors="replace")

    def pids(self) -> list[int]:
        """Every living process it started, itself included, whatever their session."""
        return processes.processes_with_token(self.token)

    def signal(self, number: int) -> None:
        """Sends the command (not its children) a signal."""
        self.process.send_signal(number)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code (negative for a signal); `TimeoutError` with the end of its output when time is up."""
        limit = self.timeout if timeout is None else timeout
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            text = f"{self.process.args!r} still runs after {limit} s\n--- stdout\n{tail(self.stdout_path)}"
            raise TimeoutError(f"{text}\n--- stderr\n{tail(self.stderr_path)}") from None

    def check(self, timeout: float | None = None) -> str:
        """Waits, raises `AssertionError` with the output unless it exits 0, returns its stdout."""
        code = self.wait(timeout)
        if code != 0:
            out, err = tail(self.stdout_path), tail(self.stderr_path, 80)
            raise AssertionError(f"{self.process.args!r} exited {code}\n--- stdout\n{out}\n--- stderr\n{err}")
        return self.stdout

    def close(self) -> None:
        """Kills what is left, by id."""
        if self.process.poll() is None:
            processes.kill_all([self.process.pid])
        self.process.wait()
        processes.kill_token(self.token)


def launch(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout: float = 120.0,
) -> Launched:
    """Starts a command from the repository root (or `cwd`), with the repository importable and one thread.

    `env` changes the inherited environment (None unsets). `timeout` (seconds) is the default of `wait`.
    """
    token = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="launch-", dir=server.scratch()))
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    values: dict[str, str | None] = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        processes.TOKEN_VARIABLE: token,
        **(env or {}),
    }
    with (folder / "stdout.log").open("wb") as out, (folder / "stderr.log").open("wb") as err:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd or REPOSITORY,
            env={name: value for name, value in values.items() if value is not None},
            start_new_session=True,
        )
    return Launched(process, token, folder / "stdout.log", folder / "stderr.log", timeout)


def torchrun(
    arguments: Sequence[str | Path],
    nproc: int = 2,
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout: float = 120.0,
    options: Sequence[str] = (),
) -> Launched:
    """`torchrun --standalone --nproc-per-node NPROC [options] ARGUMENTS` (a script or `-m module`, then its flags).

    --standalone takes a free port. torchrun gives every worker a session of its own: `Launched.close` still finds them.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return launch([*launcher, "--nproc-per-node", str(nproc), *options, *arguments], env=env, cwd=cwd, timeout=timeout)


def terminate(command: Launched, timeout: float) -> int:
    """SIGTERM as a job scheduler sends it, then the exit code."""
    command.signal(signal.SIGTERM)
    return command.wait(timeout)

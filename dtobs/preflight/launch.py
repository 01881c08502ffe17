"""Starts the ranks of one node and stands by them; on node 0 it keeps the board and reports.

This is what torchrun does, with one difference: torchrun starts nothing until all nodes are there, and this is for the
case that they are not.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

import dtobs
from dtobs.errors import ServiceError
from dtobs.findings import exit_code
from dtobs.host.process import with_path
from dtobs.preflight.board import GONE, Meeting, join, keep
from dtobs.preflight.judge import judge
from dtobs.preflight.model import PreflightEvidence, Report
from dtobs.preflight.rank import Options, choose_backend
from dtobs.preflight.reporter import Reporter

_LEAVE_SECONDS = 5.0
_MARGIN_SECONDS = 30.0
"""How much longer than the reporter the other nodes wait for its verdict."""


@dataclass(frozen=True)
class Launch:
    """One node's part of the job."""

    nodes: int
    node: int
    local_world: int
    address: str
    port: int
    expected: Mapping[int, str]  #: node → name it should have, "" unknown

    @property
    def world(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.local_world

    def environment(self, inherited: Mapping[str, str], local_rank: int) -> dict[str, str]:
        """What torchrun would set for this rank, so that the job itself would find the same."""
        values = with_path(inherited, Path(dtobs.__file__).resolve().parents[1]) | {
            "RANK": str(self.node * self.local_world + local_rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if self.local_world > 1:
            values.setdefault("OMP_NUM_THREADS", "1")
        return values


class Children:
    """The ranks of this node; a context manager that leaves none of them behind."""

    def __init__(self, launch: Launch, words: Sequence[str]) -> None:
        self._launch, self._words = launch, words
        self._folder = tempfile.TemporaryDirectory(prefix="dtobs-preflight-")
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        first = self._launch.node * self._launch.local_world
        for local in range(self._launch.local_world):
            with self._log(first + local).open("wb") as log:
                self.processes[first + local] = subprocess.Popen(
                    [sys.executable, "-m", "dtobs.preflight", *self._words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._launch.environment(os.environ, local),
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + (_LEAVE_SECONDS if kind is None else 0.0)
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # also one that is suspended
                process.wait()
        self._folder.cleanup()

    def died(self) -> dict[int, str]:
        """Ranks that have ended, and how, with the last line they wrote."""
        found = {}
        for rank, process in self.processes.items():
            code = process.poll()
            if code is not None:
                lines = self._log(rank).read_text(errors="replace").strip().splitlines()
                how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
                found[rank] = how + (f": {lines[-1][:200]}" if lines else "")
        return found

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"


def lead(launch: Launch, options: Options, words: Sequence[str]) -> Report:
    """Node 0: keep the board, start the ranks, wait and judge. Raises ServiceError."""
    began = time.monotonic()
    store = keep(launch.address, launch.port)
    launch = Launch(
        launch.nodes, 0, launch.local_world, launch.address, store.port, launch.expected
    )  # port 0 has become a port
    board = Meeting(store)
    board.post("node", 0, socket.gethostname())
    evidence = PreflightEvidence(launch.world, dict(launch.expected), launch.local_world)
    with Children(launch, words) as children:
        Reporter(board, evidence, options, children.died).wait()
        report = finish(evidence, options, time.monotonic() - began)
        board.post("verdict", 0, verdict(report))
        await_readers(board, launch.nodes)
    return report


def await_readers(board: Meeting, nodes: int, seconds: float = _LEAVE_SECONDS) -> None:
    """Wait until the nodes that came have read the verdict: the board ends with node 0's process."""
    deadline = time.monotonic() + seconds
    for node in range(1, nodes):
        if board.read("node", node) is not None:
            board.wait("heard", node, deadline - time.monotonic())


def follow(launch: Launch, options: Options, words: Sequence[str]) -> tuple[int, list[str]]:
    """Another node: start the ranks and wait for node 0's verdict: (exit code, its lines). Raises ServiceError."""
    board = Meeting(join(launch.address, launch.port, options.join_seconds))
    try:
        board.post("node", launch.node, socket.gethostname())
        deadline = time.monotonic() + options.join_seconds + options.seconds + _MARGIN_SECONDS
        with Children(launch, words) as children:
            while time.monotonic() < deadline:
                note = board.wait("verdict", 0, 0.5)
                if note is not None:
                    with contextlib.suppress(*GONE):  # node 0 did not wait for us, and we have what it said
                        board.post("heard", launch.node, True)
                    return int(note["exit_code"]), [str(line) for line in note["lines"]]
                for rank, how in children.died().items():
                    if board.read("done", rank) is None and board.read("error", rank) is None:
                        board.post("error", rank, f"start: the process {how}")
    except GONE as error:
        raise ServiceError("node 0 has gone without a verdict; look there") from error
    raise ServiceError("node 0 has given no verdict in time; look there")


def finish(evidence: PreflightEvidence, options: Options, seconds: float) -> Report:
    """Judge what is there."""
    backend = choose_backend(options.backend, max(1, evidence.local_world))
    return Report(evidence, judge(evidence, backend), seconds)


def verdict(report: Report) -> dict[str, object]:
    """What the other nodes are told."""
    lines = [f"{problem.severity}: {problem.code}: {problem.summary}" for problem in report.problems]
    return {"exit_code": exit_code(report.problems), "lines": lines}


def ranks_here() -> int:
    """How many ranks to start where nobody says: one a device, without devices two."""
    return (torch.cuda.device_count() if torch.cuda.is_available() else 0) or 2

"""What somebody asks a rank that trains: a profile of some steps by torch.profiler, or at which lines it spends time.

Private torch: ``torch.autograd.profiler._is_profiler_enabled``, tried with 2.13: whether the training profiles itself.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dtobs.errors import DtobsError
from dtobs.probes.base import Probe
from dtobs.probes.deferred import keep_for_good
from dtobs.probes.lines import StackLooks
from dtobs.recording.lines import lines_path, read_lines_request
from dtobs.recording.profiling import LOOK_SECONDS, Request, read_request, request_path
from dtobs.recording.rundir import private_folder


class Profiler(Probe):
    """Looks for requests between two steps, twice a second. Costs nothing more until there is one."""

    name = "profiler"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._next, self._seen = 0.0, 0
        self._request: Request | None = None
        self._running: Any = None
        self._step: Any = None  # the mark of the step in progress in the trace
        self._looks: StackLooks | None = None

    def install(self) -> None:
        """Say that this rank can be asked."""
        recorder = self.context.recorder
        self._run, self._path = recorder.run_dir, request_path(recorder.run_dir)
        self._lines = lines_path(recorder.run_dir)
        self._seen = _changed(self._path)  # what was asked of an attempt before is over
        self._seen_lines = _changed(self._lines)
        recorder.meta.add("process", profiler=True)

    def remove(self) -> None:
        """A profile in progress is thrown away, and so are looks at the stack."""
        self._leave()
        if self._looks is not None:
            self._looks.stop()
        super().remove()

    def abandon(self) -> None:
        super().abandon()
        keep_for_good(self._running)
        self._running = self._step = self._request = self._looks = None

    def step_begin(self) -> None:
        """Begin, go on, or end."""
        step = self.context.step
        if self._running is not None:
            self._mark(None)
            assert self._request is not None
            if step > self._request.last:
                self._write(self._request)
            else:
                self._mark(step)
            return
        now = time.monotonic()
        if now >= self._next:
            self._next = now + LOOK_SECONDS
            self._look()
            self._look_for_lines()
        if self._request is not None and step >= self._request.first:
            self._start(self._request, step)

    def _look(self) -> None:
        changed = _changed(self._path)
        if changed in (0, self._seen):
            return
        self._seen = changed
        try:
            request = read_request(self._run)
        except DtobsError:  # said by the command that wrote it
            return
        self._request = request if request is not None and self.context.rank in request.ranks else None

    def _look_for_lines(self) -> None:
        if self._looks is not None:
            if self._looks.is_alive():
                return
            looks, self._looks = self._looks, None
            if looks.found is not None:
                self.context.recorder.meta.add("lines", **asdict(looks.found))
        changed = _changed(self._lines)
        if changed in (0, self._seen_lines):
            return
        self._seen_lines = changed
        request = read_lines_request(self._run)
        if request is not None and self.context.rank in request.ranks:
            recorder = self.context.recorder
            stacks = recorder.run_dir.stacks(recorder.rank, recorder.attempt)
            self._looks = StackLooks(request, self.context.step, self.context.waits_for_data, stacks)
            self._looks.start()

    def _start(self, request: Request, step: int) -> None:
        if step > request.last:
            self._refuse(request, f"step {request.last} was over when the request was seen")
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        if torch.autograd.profiler._is_profiler_enabled:
            self._refuse(request, "the training profiles itself already")
            return
        try:
            profiler = torch.profiler.profile(activities=activities)
            profiler.__enter__()  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who asked is told, and training goes on
            self._refuse(request, f"torch.profiler does not start: {error}")
            return
        self._running = profiler
        self._mark(step)

    def _mark(self, step: int | None) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
        self._step = None
        if step is not None:
            self._step = torch.profiler.record_function(f"ProfilerStep#{step}")
            self._step.__enter__()

    def _leave(self) -> Any:
        profiler, self._running = self._running, None
        if profiler is not None:
            self._mark(None)
            profiler.__exit__(None, None, None)
        return profiler

    def _write(self, request: Request) -> None:
        path = request.trace(self._run, self.context.rank)
        partial = path.with_name(f".{path.name.removesuffix('.gz')}.part.gz")
        try:
            profiler = self._leave()
            private_folder(path.parent)
            profiler.export_chrome_trace(str(partial))
            partial.chmod(0o600)
            partial.rename(path)
            self._request = None
        except Exception as error:  # noqa: BLE001 - as above
            self._refuse(request, f"the trace cannot be written: {error}")

    def _refuse(self, request: Request, why: str) -> None:
        self._request = None
        with contextlib.suppress(OSError):
            path = request.refusal(self._run, self.context.rank)
            private_folder(path.parent)
            path.write_text(f"{why}\n", encoding="utf-8")


def _changed(path: Path) -> int:
    """A number that another request changes; 0 without one."""
    try:
        seen = path.stat()
    except OSError:
        return 0
    return seen.st_mtime_ns ^ seen.st_ino << 1 or 1

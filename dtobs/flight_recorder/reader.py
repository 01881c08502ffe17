"""Dump files read by child processes with limits: one for a few files, one a core for many."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from dtobs.errors import DumpError
from dtobs.flight_recorder.columns import RankColumns
from dtobs.flight_recorder.decode import MAX_BYTES
from dtobs.flight_recorder.wire import Receiver
from dtobs.words import duration_text

SECONDS_PER_FILE = 180.0
"""Wall-clock bound for one file; the child's own CPU limit ends it long before on an idle machine."""
CPU_SECONDS_PER_FILE = 20
"""CPU time a file may take. A dump of 2,000 entries takes a hundredth of one."""
_FILES_PER_CHILD = 48
_SINGLE_THREADED = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}


@dataclass
class DumpReader:
    """One child, started at the first file and again after it died. A context manager."""

    max_bytes: int = MAX_BYTES
    texts: dict[str, str] = field(default_factory=dict)  #: memberships seen, shared by readers of one load
    cpu_seconds: int = CPU_SECONDS_PER_FILE
    _child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> DumpReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, path: Path) -> RankColumns:
        """Columns of one file. Raises DumpError, its message without the path."""
        child = self._child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        request = json.dumps(
            {"path": os.fspath(path.absolute()), "max_bytes": self.max_bytes, "cpu_seconds": self.cpu_seconds}
        )
        try:
            child.stdin.write(request.encode() + b"\n")
            child.stdin.flush()
            waiting = select.poll()  # select() refuses descriptors past 1023
            waiting.register(child.stdout, select.POLLIN)
            if not waiting.poll(SECONDS_PER_FILE * 1e3):
                self.close()
                raise DumpError(f"it could not be read within {duration_text(SECONDS_PER_FILE)}")
            return Receiver(child.stdout, self.texts).receive()
        except (EOFError, BrokenPipeError) as error:
            code = child.wait()  # it has closed its end: it is ending or gone
            self.close()
            raise DumpError(_ending(code)) from error

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # an unsent request to a dead child
                    continue

    def _start(self) -> subprocess.Popen[bytes]:
        # The child finds dtobs where this process found it, installed or not.
        environment = {
            **os.environ,
            **_SINGLE_THREADED,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        try:
            return subprocess.Popen(
                [sys.executable, "-c", "from dtobs.flight_recorder.child import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent; the child ends when its input closes
            )
        except OSError as error:
            raise DumpError(f"no process could be started to read it ({error.strerror})") from error


def read_all(
    paths: Sequence[Path], children: int | None = None, max_bytes: int = MAX_BYTES
) -> Iterator[tuple[int, RankColumns | DumpError]]:
    """Read files with several children; yields (index into `paths`, result) as they come, in no order."""
    if children is None:
        children = min(len(os.sched_getaffinity(0)), 8, 1 + len(paths) // _FILES_PER_CHILD)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, RankColumns | Exception]] = queue.SimpleQueue()
    texts: dict[str, str] = {}
    for index in range(len(paths)):
        todo.put(index)

    def serve() -> None:
        with DumpReader(max_bytes, texts) as reader:
            while True:
                try:
                    index = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((index, reader.read(paths[index])))
                except Exception as error:  # noqa: BLE001 - raised again by whoever waits for the result
                    done.put((index, error))

    threads = [threading.Thread(target=serve, name="dump-reader", daemon=True) for _ in range(children)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(len(paths)):
            index, result = done.get()
            if isinstance(result, Exception) and not isinstance(result, DumpError):
                raise result
            yield index, result
    finally:
        while not todo.empty():  # whoever reads the results stopped early
            try:
                todo.get_nowait()
            except queue.Empty:
                break
        for thread in threads:
            thread.join()


def _ending(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "reading it takes more CPU time than a dump can: refused"
    if code == -signal.SIGKILL:
        return "the process that read it was killed (out of memory?)"
    return f"the process that read it ended with {code}: refused"

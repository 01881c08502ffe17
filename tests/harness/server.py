"""The forkserver every rank is forked from: one a pytest process, with torch already imported.

Importing torch takes seconds; forking a process that has it takes milliseconds. The server runs no tensor
operation and starts no thread, so that forking it is safe, and its environment has one OpenMP thread because
OpenMP reads that variable once, when it is loaded.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path


@functools.cache
def context() -> ForkServerContext:
    """The multiprocessing context of the one server; starts it on the first call."""
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(["tests.harness.preloaded"])
    with _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    return ctx


@functools.cache
def scratch() -> Path:
    """A folder for the files of this pytest process's ranks, removed when it ends."""
    path = Path(tempfile.mkdtemp(prefix="dtobs-ranks-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

"""Reads ahead: while the caller computes on one micro-batch, a thread prepares the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """`take(position)` is `read(position)`; the `depth` positions after it, `stride` apart, are prepared meanwhile.

    `read` must depend on its position only, and is called on one thread only. What was prepared for positions that
    nobody comes for, as after a rewind, is dropped. An error of `read` is raised by the `take` of its position.
    """

    def __init__(self, read: Callable[[int], T], stride: int, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        self._read = read
        self._stride = stride
        self._depth = depth
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._ahead: deque[tuple[int, Future[T]]] = deque()

    def take(self, position: int) -> T:
        """What `read(position)` returns."""
        if not self._ahead or self._ahead[0][0] != position:
            for _, dropped in self._ahead:
                dropped.cancel()
            self._ahead.clear()
            self._prepare(position)
        _, wanted = self._ahead.popleft()
        last = self._ahead[-1][0] if self._ahead else position
        while len(self._ahead) < self._depth:
            last += self._stride
            self._prepare(last)
        return wanted.result()

    def _prepare(self, position: int) -> None:
        self._ahead.append((position, self._thread.submit(self._read, position)))

"""Names the parts of a training step for whoever listens; costs one truth test when nobody does.

The loop says where it is (`with phase("forward"):`) and what came out (`report(loss=...)`). Listeners such as the
console's progress line or an observability tool subscribe with `listen`. The loop knows none of them.

Phase names: startup, data, forward, backward, pipeline (forward and backward interleaved by a pipeline schedule),
optimizer (clipping and the step), checkpoint, validation, compile. Phases nest.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from torch import Tensor


class Listener(Protocol):
    """What a subscriber implements; one that inherits from it leaves out what it has no use for.

    Calls arrive on the training thread, in program order.
    """

    def begin(self, name: str) -> None:
        """A phase begins."""

    def end(self, name: str) -> None:
        """The innermost open phase of that name ends, also when it ends by an exception."""

    def step(self, step: int) -> None:
        """A training step begins; the first is 1, or the resumed step + 1."""

    def batch(self, **tensors: Tensor) -> None:
        """The input of one micro-batch: `inputs` LongTensor [B, T] and `sample_ids` LongTensor [B]."""

    def report(self, **values: float) -> None:
        """Numbers of the current step; see `loop.py` for their names and units."""


_listeners: list[Listener] = []


def listen(listener: Listener) -> Callable[[], None]:
    """Subscribe `listener`; the returned function undoes it and may be called more than once."""
    _listeners.append(listener)

    def undo() -> None:
        # By identity: two listeners may compare equal.
        _listeners[:] = [other for other in _listeners if other is not listener]

    return undo


class _Silence:
    """The phase nobody listens to: shared, stateless, reusable."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Phase:
    """One announced phase. The listeners are those present when it began, so begin and end always pair."""

    __slots__ = ("_heard_by", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._heard_by: tuple[Listener, ...] = ()

    def __enter__(self) -> None:
        self._heard_by = tuple(_listeners)
        for listener in self._heard_by:
            listener.begin(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in reversed(self._heard_by):
            listener.end(self._name)


_SILENCE = _Silence()


def phase(name: str) -> _Phase | _Silence:
    """A context manager that announces the phase `name`."""
    return _Phase(name) if _listeners else _SILENCE


def step(number: int) -> None:
    """Announce that training step `number` begins."""
    if _listeners:
        for listener in tuple(_listeners):
            listener.step(number)


def batch(**tensors: Tensor) -> None:
    """Announce the input tensors of one micro-batch, as they go into the model."""
    if _listeners:
        for listener in tuple(_listeners):
            listener.batch(**tensors)


def report(**values: float) -> None:
    """Announce numbers of the current step."""
    if _listeners:
        for listener in tuple(_listeners):
            listener.report(**values)

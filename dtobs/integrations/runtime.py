"""The reference runtime says where it is through phases; this listens and passes it on to a session.

::

    session = dtobs.attach(run_dir=..., mesh=...)
    undo = dtobs.integrations.runtime.observe(session, runtime.phases)

`phases` is any object with ``listen(listener) -> undo``; dtobs never imports the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from dtobs.session.restart import describe_setback
from dtobs.session.session import LiveSession, Session

if TYPE_CHECKING:
    import torch


class Phases(Protocol):
    """What announces phases."""

    def listen(self, listener: Any) -> Callable[[], None]:
        """Subscribe; returns the undo."""


class Bridge:
    """A listener of the runtime's phases."""

    def __init__(self, session: LiveSession) -> None:
        self._session = session

    def begin(self, name: str) -> None:
        """A phase begins."""
        self._session.begin_phase(name)

    def end(self, name: str) -> None:
        """The innermost open phase of that name ends."""
        self._session.end_phase(name)

    def step(self, step: int) -> None:
        """A training step begins."""
        self._session.step(step)

    def batch(self, **tensors: torch.Tensor) -> None:
        """The input of one micro-batch."""
        self._session.batch(**tensors)

    def report(self, **values: float) -> None:
        """Numbers of the current step."""
        self._session.report(**values)


def observe(session: Session, phases: Phases) -> Callable[[], None]:
    """Let `session` hear `phases`, until it closes or the returned function is called.

    From then on the runtime says where steps begin; the optimizer no longer ends them.
    """
    if not isinstance(session, LiveSession) or not session.active:
        return _nothing
    session.explicit_steps()
    undo = phases.listen(Bridge(session))
    session.on_close(undo)
    return undo


def restart_cost(session: Session, step: int) -> str:
    """A line about what it costs to go on after `step`; "" in a first attempt, or where nothing was recorded."""
    if not isinstance(session, LiveSession) or not session.active or not session.attempt:
        return ""
    return describe_setback(session.run_dir, session.attempt, step)


def _nothing() -> None:
    """The undo of an observation that never began."""

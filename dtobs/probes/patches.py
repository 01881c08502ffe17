"""Replace an attribute of torch, and put exactly the old one back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

_ABSENT = object()
"""The owner had no attribute of its own: it used its class's."""
Undo = Callable[[], None]


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Set ``owner.name`` to ``make(what it was)``; the undo puts that back, unless somebody has replaced it since.

    The undo keeps neither the owner nor what was made alive. Raises AttributeError when there is no such attribute.
    """
    before = vars(owner).get(name, _ABSENT)
    after = make(_inherited(owner, name) if before is _ABSENT and isinstance(owner, type) else getattr(owner, name))
    setattr(owner, name, after)
    its_owner, ours = weakref.ref(owner), weakref.ref(after)

    def undo() -> None:
        living, mine = its_owner(), ours()
        if living is None or mine is None or vars(living).get(name) is not mine:
            return
        if before is _ABSENT:
            delattr(living, name)
        else:
            setattr(living, name, before)

    return undo


def _inherited(owner: type, name: str) -> Callable[..., Any]:
    """What a class has of its bases, looked up at each call: ``torch.fx`` replaces some of it while it traces."""
    its_owner = weakref.ref(owner)

    @functools.wraps(getattr(owner, name), assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def inherited(*args: Any, **kwargs: Any) -> Any:
        living: Any = its_owner()
        return getattr(super(living, living), name)(*args, **kwargs)

    return inherited


def around(
    owner: Any,
    name: str,
    begin: Callable[..., Any],
    end: Callable[..., object],
    when: Callable[..., bool] | None = None,
) -> Undo:
    """Call `begin` with the arguments before each call of ``owner.name`` and `end` with what `begin` returned after it.

    A `begin` that returns None has nothing to end. Calls for which `when` says no are left alone. Where somebody has
    wrapped ours since, the undo leaves it in place, and it does nothing from then on.
    """
    on = True

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"), updated=())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if when is not None and not when(*args):
                return original(*args, **kwargs)
            token = begin(*args, **kwargs) if on else None
            try:
                return original(*args, **kwargs)
            finally:
                if token is not None:
                    end(token)

        return wrapper

    restore = replace(owner, name, make)

    def undo() -> None:
        nonlocal on
        on = False
        restore()

    return undo

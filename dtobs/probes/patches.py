"""Replace an attribute of torch, and put exactly the old one back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()
"""The instance had no attribute of its own: it used its class's."""


class Patches:
    """Attributes replaced, undone in the opposite order."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``make(what it was)``.

        Raises AttributeError when `owner` has no such attribute of its own.
        """
        try:
            before = vars(owner)[name]
        except KeyError:
            raise AttributeError(f"{owner!r} defines no {name}") from None
        after = make(getattr(owner, name))
        setattr(owner, name, after)
        self._done.append((owner, name, before, after))

    def shadow(self, instance: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set ``instance.name``, on the instance alone, to ``make(what it was)``.

        Raises AttributeError when there is no such attribute.
        """
        before = vars(instance).get(name, _ABSENT)
        after = make(getattr(instance, name))
        setattr(instance, name, after)
        self._done.append((instance, name, before, after))

    def undo(self) -> None:
        """Put back what was there, unless somebody else has replaced it since: then theirs stays, calling ours."""
        while self._done:
            owner, name, before, after = self._done.pop()
            if vars(owner).get(name) is not after:
                continue
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

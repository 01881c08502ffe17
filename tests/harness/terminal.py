"""Waiting for what a program writes to a terminal."""

from __future__ import annotations

import select


def readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read within `seconds`; unlike select(), of descriptors past 1023 too."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))

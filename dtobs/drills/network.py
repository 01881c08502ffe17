"""Two networks of our own with one link between them, which can be made a slow one.

Nothing of the machine's own network is touched. Needs root, and the programs ``ip`` and ``tc`` of iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

INTERFACE = "link0"
"""The interface that leads from each of the two networks into the other."""
THROTTLED_TO = "40mbit"
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_SECONDS = 30


@contextlib.contextmanager
def linked_networks(*, throttled: bool) -> Iterator[tuple[str, str]]:
    """Make two network namespaces and the link between them; yields their names, and removes them at the end.

    A throttled link carries `THROTTLED_TO` in each direction. Raises OSError where it cannot be made, with the reason.
    """
    prefix = f"dtobs{uuid.uuid4().hex[:6]}"
    near, far = f"{prefix}a", f"{prefix}b"
    try:
        _run("ip", "netns", "add", near)
        _run("ip", "netns", "add", far)
        other_end = ("peer", "name", INTERFACE, "netns", far)
        _run("ip", "-n", near, "link", "add", INTERFACE, "type", "veth", *other_end)
        for number, space in enumerate((near, far), start=1):
            _run("ip", "-n", space, "address", "add", f"10.77.0.{number}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _run("ip", "-n", space, "link", "set", device, "up")
            if throttled:
                bucket = ("rate", THROTTLED_TO, "burst", "64kb", "latency", "2s")
                _run("tc", "-n", space, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket)
        yield near, far
    finally:
        for space in (near, far):
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", space)


def enter_network(name: str) -> None:
    """Move the calling thread, and those it starts from then on, into a namespace; Gloo uses its `INTERFACE`.

    Raises OSError where that is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / name).open() as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace {name}: {os.strerror(number)}")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _run(program: str, *arguments: str) -> None:
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise FileNotFoundError(2, f"there is no program {program}: install iproute2")
    try:
        subprocess.run([found, *arguments], check=True, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.CalledProcessError as error:
        raise PermissionError(1, f"{program}: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(110, f"{program} did not end within {_SECONDS} s") from error

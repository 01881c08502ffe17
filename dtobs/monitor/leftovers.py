"""What a rank that was killed leaves outside of the run directory: the folder with its worker server's socket."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

_SOCKET = "worker"
_PREFIX = "dtobs-"


def socket_folder(server: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of the socket `server` when it is one of ours to remove, else None.

    A recording is only a file: what it names is removed only where it is a real folder named ``dtobs-…`` directly in
    the folder for temporary or runtime files, is owned by this user, and holds nothing but the socket.
    """
    path = Path(server)
    folder = path.parent
    places = {Path(tempfile.gettempdir()), Path("/tmp"), Path(environment.get("XDG_RUNTIME_DIR") or "/tmp")}
    if path.name != _SOCKET or not folder.name.startswith(_PREFIX) or folder.parent not in places:
        return None
    try:
        seen = folder.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
            return None
        inside = list(folder.iterdir())
    except OSError:  # gone, as it should be
        return None
    return folder if all(p.name == _SOCKET and stat.S_ISSOCK(p.lstat().st_mode) for p in inside) else None


def remove_socket_folder(server: str) -> bool:
    """Remove the folder of the socket `server` of a process that is gone; whether there was one to remove.

    Raises OSError when it is ours and cannot be removed.
    """
    folder = socket_folder(server)
    if folder is None:
        return False
    (folder / _SOCKET).unlink(missing_ok=True)
    folder.rmdir()
    return True

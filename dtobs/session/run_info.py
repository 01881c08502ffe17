"""What ``run.json`` says: who ran, on what, with which settings. Secrets are left out."""

from __future__ import annotations

import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dtobs
from dtobs.session.identity import Identity

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SECRET = re.compile(r"token|secret|passw|credential|api[_-]?key|access[_-]?key|private[_-]?key", re.IGNORECASE)
_NOT_SECRET = re.compile(r"tokens|tokenizer|tokenize", re.IGNORECASE)
HIDDEN = "(hidden)"


def describe_run(name: str, who: Identity, mesh: DeviceMesh | None, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The content of run.json but for its schema."""
    import torch

    return {
        "name": name,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": who.world_size,
        "attempt": who.attempt,
        "launch": who.launch,
        "hosts": [socket.gethostname()],
        "mesh": describe_mesh(mesh),
        "config": without_secrets(dict(config or {})),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "dtobs": dtobs.__version__,
        },
        "git": git_revision(Path.cwd()),
        "argv": hide_arguments(sys.argv),
    }


def describe_mesh(mesh: DeviceMesh | None) -> dict[str, Any] | None:
    """``{"dim_names": […], "shape": […], "groups": {dim: [[ranks], …]}}``; None without a mesh."""
    if mesh is None:
        return None
    ranks = mesh.mesh
    names = list(mesh.mesh_dim_names or [f"dim{i}" for i in range(ranks.ndim)])
    groups = {dim: ranks.movedim(i, -1).reshape(-1, ranks.shape[i]).tolist() for i, dim in enumerate(names)}
    return {"dim_names": names, "shape": list(ranks.shape), "groups": groups}


def without_secrets(value: Any) -> Any:
    """`value` with each text under a name like "password" or "api_key" replaced; numbers are no secrets."""
    if isinstance(value, Mapping):
        return {
            str(k): HIDDEN if isinstance(v, str) and _is_secret(str(k)) else without_secrets(v)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(v) for v in value]
    return value


def hide_arguments(argv: Sequence[str]) -> list[str]:
    """A command line with the values of secret flags replaced."""
    shown: list[str] = []
    hide_next = False
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        secret = argument.startswith("-") and _is_secret(flag)
        if hide_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{flag}={HIDDEN}" if secret and equals else argument)
        hide_next = secret and not equals
    return shown


def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(name)) and not _NOT_SECRET.search(name)


def git_revision(folder: Path) -> str | None:
    """The commit checked out where the job runs, read without git; None outside a repository."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if git.is_dir():
            return _head(git)
    return None


def _head(git: Path) -> str | None:
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head or None
        reference = head.removeprefix("ref: ")
        loose = git / reference
        if loose.is_file():
            return loose.read_text().strip()
        for line in (git / "packed-refs").read_text().splitlines():
            if line.endswith(" " + reference):
                return line.split(" ")[0]
    except (OSError, UnicodeDecodeError):
        return None
    return None

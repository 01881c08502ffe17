"""Dashboards, alert rules and runbooks as files: where this installation has them, and copies for others."""

from __future__ import annotations

import shutil
from pathlib import Path

from dtobs.errors import DtobsError, TargetError

_PACKAGE = Path(__file__).resolve().parents[1]
PARTS = ("dashboards", "alerts")


def share() -> Path:
    """The folder that holds ``dashboards`` and ``alerts``: inside an installed wheel, else the checkout.

    Raises TargetError when neither has them.
    """
    for folder in (_PACKAGE / "_share", _PACKAGE.parent):
        if (folder / "dashboards" / "run-overview.json").is_file():
            return folder
    raise TargetError(f"this installation of dtobs has no dashboards (looked beside {_PACKAGE}): install it again")


def export(folder: Path) -> list[Path]:
    """Copy everything below `folder`, replacing older copies; returns the files. Raises DtobsError."""
    source = share()
    written: list[Path] = []
    try:
        for part in PARTS:
            for path in sorted((source / part).rglob("*")):
                if path.is_file():
                    target = folder / path.relative_to(source)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
                    written.append(target)
    except OSError as error:
        raise DtobsError(f"cannot write to {folder}: {error.strerror}. Give a folder that you may write to") from error
    return written

"""dtobs: see which rank, which operation, which line of code a distributed PyTorch job hangs, diverges or crawls at.

::

    import dtobs
    with dtobs.attach(model, optimizer) as session:
        train()

Importing this package imports neither torch nor any optional dependency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtobs.findings import Finding
    from dtobs.recording.view import RunView, load_run
    from dtobs.session import Session, attach

__version__ = "0.1.0"
__all__ = ["Finding", "RunView", "Session", "attach", "load_run"]

_HOME = {
    "Finding": "dtobs.findings",
    "RunView": "dtobs.recording.view",
    "load_run": "dtobs.recording.view",
    "Session": "dtobs.session",
    "attach": "dtobs.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dtobs' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)

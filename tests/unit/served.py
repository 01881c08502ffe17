"""A monitor's HTTP server over a look at a run, for whoever looks from afar."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from dtobs.codec import decode
from dtobs.findings import Finding
from dtobs.monitor.http import MonitorServer, Pages
from dtobs.nodes import sharing
from dtobs.nodes.remote import RunCopy
from dtobs.nodes.sharing import Question, answer_viewer
from dtobs.recording.journal import Entry
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView


def found(view: RunView, *findings: Finding) -> RunView:
    """The same look, with `findings` in the journal of its run."""
    lines = [json.dumps(Entry("found", "", f.since_ns, view.attempt, f).to_json()) + "\n" for f in findings]
    RunDirectory(view.root).findings.write_text("".join(lines))
    return view


@contextmanager
def served(look: Callable[[], RunView | bytes]) -> Iterator[MonitorServer]:
    """A server that answers a viewer with what `look` sees, or just these bytes."""

    def view(question: dict[str, Any]) -> bytes:
        seen = look()
        if isinstance(seen, bytes):
            return seen
        boot = seen.meta(seen.ranks[0]).process["boot_id"]
        pages = patch.object(sharing, "_pages", lambda run, node: _published(seen, node))
        with pages, patch.object(sharing, "boot_id", lambda: boot):
            return answer_viewer(seen, decode(Question, question))

    server = MonitorServer("127.0.0.1", 0, Pages(lambda: b"", view, dict, lambda text: None))
    try:
        yield server
    finally:
        server.close()


def _published(view: RunView, node: int) -> npt.NDArray[np.void]:
    """The pages of `node` as `view` has them: a test may have moved their clocks after they were written."""
    pages = view.pages[view.pages["node"] == node].copy()
    for n in range(len(pages)):
        pages["crc"][n] = zlib.crc32(pages[n : n + 1].tobytes()[8:])
    return pages


def from_afar(view: RunView) -> RunView:
    """`view` as a viewer of its monitor sees it."""
    with served(lambda: view) as server:
        return RunCopy([server.address]).look()[0]

"""A run as its monitors see it, on this or another machine: ``http://HOST:PORT`` of each."""

from __future__ import annotations

import math
import os
import shutil
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Sequence
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import SplitResult, urlsplit

from dtobs.codec import DecodeError, decode, encode, parse
from dtobs.errors import ServiceError, UsageError
from dtobs.nodes.bundle import MAX_BYTES, Part, decode_bundle
from dtobs.nodes.mirror import NodeMirror, append, node_of
from dtobs.nodes.sharing import Question, RunHead
from dtobs.nodes.token import VARIABLE
from dtobs.recording.capture import Capture
from dtobs.recording.journal import MAX_BYTES as MAX_JOURNAL_BYTES
from dtobs.recording.journal import Entry, read_journal
from dtobs.recording.rundir import RunDirectory, private_folder
from dtobs.recording.view import RunView, load_run

TIMEOUT_SECONDS = 10.0
_PAGE = "/api/view"
_MOST_ANSWERS = 256
"""To one look: each brings some 16 MB."""
_RANKS_PER_SECOND = 256
"""Whose rings are asked for; of more ranks, less often."""


def is_address(target: str) -> bool:
    """Whether `target` is meant as the address of a monitor."""
    return target.startswith(("http://", "https://"))


class RunCopy:
    """A copy of the run that the monitors at `addresses` watch, in a temporary folder: its newest records and findings.

    Raises UsageError for no address.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._urls = [_url(address) for address in dict.fromkeys(addresses)]
        folder = Path(mkdtemp(prefix="dtobs-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._run = RunDirectory(folder / "run")
        self._mirrors: dict[int, NodeMirror] = {}
        self._journals = [0] * len(self._urls)  # bytes
        self._capture: Capture | None = None
        self._view: RunView | None = None
        self._detailed_s = -math.inf
        self.place = ""  #: where the run is: its directory, and on which host

    def look(self) -> tuple[RunView, list[list[Entry]]]:
        """The run as its monitors see it now, and the journal of each.

        Raises ServiceError when one does not answer as it should, UsageError when they watch different runs.
        """
        ranks = sum(len(mirror.pages) for mirror in self._mirrors.values())
        detail = time.monotonic() - self._detailed_s >= ranks / _RANKS_PER_SECOND
        heads = [self._bring_up_to_date(number, detail) for number in range(len(self._urls))]
        self._detailed_s = time.monotonic() if detail else self._detailed_s
        names = list(dict.fromkeys(Path(head.root).name for head in heads))
        if len(names) > 1:
            raise UsageError(f"these are monitors of different runs: {', '.join(names)}; give those of one run")
        first = heads[0]
        self.place = f"{first.root} on {first.host}"
        self._run.write_run(next((head.info for head in heads if head.info), {}))
        view = load_run(
            self._run.root,
            processes={rank: state for head in reversed(heads) for rank, state in head.processes.items()},
            previous=self._view,
            with_capture=False,
            host=(first.boot_id, first.now_ns),
        )
        view.contacts = first.contacts if len(heads) == 1 else {}
        view.excused, view.paused, view.capture = first.excused, first.paused, self._capture
        view.damaged[:0] = dict.fromkeys(line for head in heads for line in head.damaged)
        view.files, self._view = self, view
        return view, [read_journal(self._journal(number)) for number in range(len(heads))]

    def _bring_up_to_date(self, number: int, detail: bool) -> RunHead:
        url = self._urls[number]
        for _ in range(_MOST_ANSWERS):
            question = Question(
                detail=detail,
                journal=self._journals[number],
                capture_ns=self._capture.taken_ns if self._capture is not None else 0,
                have={rank: had for mirror in self._mirrors.values() for rank, had in mirror.have.items()},
            )
            head, parts = read_answer(url, _ask(url, question))
            self._apply(number, parts)
            if not head.more:
                return head
        raise ServiceError(f"{url} has too much to say: look at the run directory itself")

    def _apply(self, number: int, parts: list[Part]) -> None:
        nodes: list[list[Part]] = []
        for part in parts:
            if part.kind == "journal":
                private_folder(self._run.root)
                self._journals[number] = append(self._journal(number), part, MAX_JOURNAL_BYTES)
            elif part.kind == "capture":
                self._capture = _capture_of(part)
            elif part.kind == "pages":
                nodes.append([part])
            elif nodes:
                nodes[-1].append(part)
        for told in nodes:
            node = node_of(told[0])
            mirror = self._mirrors.setdefault(node, NodeMirror(self._run, node))
            others = (m.pages["rank"].tolist() for m in self._mirrors.values() if m is not mirror)
            mirror.apply(told, frozenset(rank for ranks in others for rank in ranks))

    def _journal(self, number: int) -> Path:
        return self._run.root / f"findings-{number}.jsonl"


def _ask(url: str, question: Question) -> bytes:
    """The answer to `question`, with the token in `DTOBS_TOKEN` if there is one. Raises ServiceError."""
    # The monitor is on this host or behind the user's own tunnel: a proxy has no business in between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    token = os.environ.get(VARIABLE, "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, encode(question).encode(), headers)
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            return bytes(answer.read(MAX_BYTES + 1))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == HTTPStatus.UNAUTHORIZED:
            said = "refuses that token" if token else "wants the run's token"
            raise ServiceError(
                f"{url} {said}: set {VARIABLE} to the content of the file 'token' in the run directory"
            ) from error
        raise ServiceError(f"{url} answers {error.code} {error.reason}: is that a dtobs monitor?") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ServiceError(f"no monitor answers at {url.removesuffix(_PAGE)}: {reason}. Has the run ended?") from error


def _url(address: str) -> str:
    try:
        parts = urlsplit(address)
    except ValueError:  # brackets that hold no IPv6 address
        parts = SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{address!r} is no address: give http://HOST:PORT, as in the run's monitor.json")
    return f"{parts.scheme}://{parts.netloc}{_PAGE}"


def read_answer(url: str, body: bytes) -> tuple[RunHead, list[Part]]:
    """What `url` answered. Raises ServiceError when it is something else than a run."""
    try:
        head, parts = decode_bundle(body)
        return decode(RunHead, head), parts
    except (ServiceError, DecodeError) as error:
        raise ServiceError(f"{url} answers something that is not a run: {error}. Is that a dtobs monitor?") from error


def _capture_of(part: Part) -> Capture:
    try:
        return decode(Capture, parse(part.data))
    except DecodeError as error:
        raise ServiceError(f"that monitor's capture is damaged: {error}") from error

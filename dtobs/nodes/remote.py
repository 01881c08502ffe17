"""A run as its monitor sees it: the view behind ``http://HOST:PORT`` of a monitor on this or another machine."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from urllib.parse import SplitResult, urlsplit

from dtobs.errors import ServiceError, UsageError
from dtobs.findings import Finding
from dtobs.nodes.token import VARIABLE
from dtobs.nodes.wire import decode_view
from dtobs.recording.view import RunView

MAX_BYTES = 256 << 20
TIMEOUT_SECONDS = 10.0


def is_address(target: str) -> bool:
    """Whether `target` is meant as the address of a monitor."""
    return target.startswith(("http://", "https://"))


def fetch_view(address: str) -> tuple[RunView, list[Finding]]:
    """Ask the monitor at `address` for its view and its open findings, with the token in `DTOBS_TOKEN` if there is one.

    Raises UsageError when that is no address, ServiceError when nobody or somebody else answers there.
    """
    parts = _split(address)
    url = f"{parts.scheme}://{parts.netloc}/api/view"
    # The monitor is on this host or behind the user's own tunnel: a proxy has no business in between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    token = os.environ.get(VARIABLE, "")
    question = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with opener.open(question, timeout=TIMEOUT_SECONDS) as answer:
            body = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.UNAUTHORIZED:
            said = "refuses that token" if token else "wants the run's token"
            raise ServiceError(
                f"{url} {said}: set {VARIABLE} to the content of the file 'token' in the run directory"
            ) from error
        raise ServiceError(f"{url} answers {error.code} {error.reason}: is that a dtobs monitor?") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ServiceError(f"no monitor answers at {address}: {reason}. Has the run ended?") from error
    return read_answer(url, body)


def _split(address: str) -> SplitResult:
    try:
        parts = urlsplit(address)
    except ValueError:  # brackets that hold no IPv6 address
        parts = SplitResult("", "", "", "", "")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{address!r} is no address: give http://HOST:PORT, as in the run's monitor.json")
    return parts


def read_answer(url: str, body: bytes) -> tuple[RunView, list[Finding]]:
    """The view and the findings in what `url` answered. Raises ServiceError when it is something else."""
    if len(body) > MAX_BYTES:
        raise ServiceError(f"{url} answers with more than {MAX_BYTES >> 20} MiB: that is no dtobs monitor")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ServiceError(f"{url} answers something that is not JSON: is that a dtobs monitor?") from error
    if not isinstance(value, dict):
        raise ServiceError(f"{url} answers something that is not a view of a run")
    return decode_view(value)

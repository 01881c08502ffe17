"""Questions of one monitor to another: HTTP with the run's token, bounded in time and size."""

from __future__ import annotations

import http.client
import time
from typing import Literal
from urllib.parse import urlsplit

from dtobs.codec import encode
from dtobs.errors import brief
from dtobs.nodes.bundle import MAX_BYTES
from dtobs.words import duration_text

CONNECT_SECONDS = 2.0
_CHUNK = 1 << 20

Kind = Literal["silent", "refused", "mute"]


class Unanswered(Exception):
    """`kind`: nothing came back ("silent"), the machine refused ("refused"), or it connected and no more ("mute")."""

    def __init__(self, kind: Kind, why: str) -> None:
        super().__init__(why)
        self.kind: Kind = kind


def ask(address: str, path: str, question: object, token: str, seconds: float, max_bytes: int = MAX_BYTES) -> bytes:
    """POST `question` to the monitor at `address`; its whole answer within `seconds`. Raises Unanswered."""
    deadline = time.monotonic() + seconds
    try:
        parts = urlsplit(address)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=min(seconds, CONNECT_SECONDS))
    except ValueError as error:
        raise Unanswered("mute", f"{address!r} is no address") from error
    try:
        _connect(connection)
        return _converse(connection, path, question, token, deadline, max_bytes)
    finally:
        connection.close()


def _connect(connection: http.client.HTTPConnection) -> None:
    try:
        connection.connect()
    except (ConnectionRefusedError, ConnectionResetError) as error:
        raise Unanswered("refused", "connection refused") from error
    except TimeoutError as error:
        raise Unanswered("silent", f"no answer within {duration_text(CONNECT_SECONDS)}") from error
    except OSError as error:
        raise Unanswered("silent", (error.strerror or str(error)).lower()) from error


def _converse(
    connection: http.client.HTTPConnection, path: str, question: object, token: str, deadline: float, max_bytes: int
) -> bytes:
    try:
        connection.sock.settimeout(max(0.1, deadline - time.monotonic()))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request("POST", path, encode(question).encode(), headers)
        response = connection.getresponse()
        if response.status == 401:
            raise Unanswered("mute", "it refuses our token")
        if response.status != 200:
            raise Unanswered("mute", f"it answers {response.status}")
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            left = deadline - time.monotonic()
            if len(body) > max_bytes:
                raise Unanswered("mute", f"it answers with more than {max_bytes >> 20} MiB")
            if left <= 0:
                raise Unanswered("mute", "its answer takes too long")
            if connection.sock is not None:
                connection.sock.settimeout(left)
    except (OSError, http.client.HTTPException) as error:
        slow = isinstance(error, TimeoutError)
        raise Unanswered("mute", "it accepts and does not answer" if slow else brief(error)) from error
    return bytes(body)

"""Asks the RAS thread of a running job; reads only. The protocol is lines of text; JSON since NCCL 2.28.7."""

from __future__ import annotations

import re
import socket

from dtobs.errors import ServiceError
from dtobs.ras.read import MAX_BYTES, Sample, samples_of

_ADDRESS = re.compile(r"([\w.\-]{1,200}|\[[0-9a-fA-F:]{2,60}\]):(\d{1,5})$")
_SECONDS = 20.0


def is_ras_address(target: str) -> bool:
    """Whether it is ``HOST:PORT``."""
    return _ADDRESS.match(target) is not None


def ask(address: str) -> Sample:
    """One sample of the job at ``HOST:PORT``. Raises ServiceError when nothing answers as RAS does."""
    found = _ADDRESS.match(address)
    if found is None or int(found[2]) > 65535:
        raise ServiceError(f"{address} is no address of NCCL RAS (HOST:PORT, usually port 28028)")
    for request in (b"set format json\nverbose status\n", b"verbose status\n"):
        samples = list(samples_of(_answer(found[1].strip("[]"), int(found[2]), request), address))
        if samples:
            return samples[-1]
    raise ServiceError(f"{address} answers, but not as NCCL RAS does")


def _answer(host: str, port: int, request: bytes) -> str:
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=_SECONDS) as connection:
            connection.sendall(request)
            while len(answer) < MAX_BYTES and (piece := connection.recv(65536)):
                answer += piece
    except OSError as error:
        raise ServiceError(f"NCCL RAS at {host}:{port} does not answer: {error.strerror or error}") from error
    return answer.decode("utf-8", "replace")

"""Who may ask a monitor: whoever has the run's token, and the user it runs as (or root) from this very machine.

The pages of a run hold command lines, paths and host names. A loopback address alone protects none of it on a machine
with several users, so the monitor looks up in the kernel's table of connections which user owns the other end: that
needs no secret, and the commands of the run's own user work without a token. Other machines, other users and scrapers
elsewhere give the token, as ``Authorization: Bearer TOKEN``. ``/metrics`` and ``/healthz`` on a loopback address stay
open to this machine: a Prometheus runs as a user of its own, and these pages hold only numbers.

The token is in RUN_DIR/token, mode 0600. `DTOBS_TOKEN` sets one that outlives a run, for scrape configurations.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import sys
from pathlib import Path

from dtobs.nodes.token import read_token

_OPEN_ON_LOOPBACK = frozenset({"/metrics", "/healthz"})
_TABLES = ("tcp", "tcp6")
_ESTABLISHED = "01"


class Access:
    """Decides for one monitor. `token_file` is read at each use: a restart of the job may bring another token."""

    def __init__(self, token_file: Path, *, loopback: bool, proc: Path = Path("/proc")) -> None:
        self._token_file, self._loopback, self._net = token_file, loopback, proc / "self/net"

    def allows(self, path: str, authorization: str, client: tuple[str, int], server: tuple[str, int]) -> bool:
        """Whether the request for `path` from `client` to our end `server` of the connection is answered.

        `authorization` is the header as sent, "" without one. A token that is given and wrong is refused whoever asks.
        """
        if authorization:
            return self._is_token(authorization)
        if self._loopback and path in _OPEN_ON_LOOPBACK:
            return True
        return self._owner(client, server) in (os.getuid(), 0)

    def _is_token(self, authorization: str) -> bool:
        kind, _, given = authorization.partition(" ")
        expected = read_token(self._token_file)
        same = hmac.compare_digest(given.strip().encode(), expected.encode())
        return bool(expected) and kind.lower() == "bearer" and same

    def _owner(self, client: tuple[str, int], server: tuple[str, int]) -> int | None:
        """The user id of the client's end of a connection within this machine; None when it is not here."""
        wanted = (_parsed(client[0]), client[1], _parsed(server[0]), server[1])
        for table in _TABLES:
            try:
                lines = (self._net / table).read_text().splitlines()[1:]
            except OSError:
                continue
            for line in lines:
                fields = line.split()
                if len(fields) < 8 or fields[3] != _ESTABLISHED:
                    continue
                ends = (*_end(fields[1]), *_end(fields[2]))
                if ends == wanted:
                    return int(fields[7])
        return None


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _end(text: str) -> tuple[Address, int]:
    """One end of a line of /proc/net/tcp: 32-bit words in the byte order of the machine, in hexadecimal."""
    address, _, port = text.partition(":")
    words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
    return _plain(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _parsed(text: str) -> Address:
    return _plain(ipaddress.ip_address(text.partition("%")[0]))


def _plain(address: Address) -> Address:
    """An IPv4 address that travels as IPv6 as what it is."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address

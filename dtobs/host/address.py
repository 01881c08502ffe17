"""Which address of this host packets to another one carry, as the routing table says; nothing is sent."""

from __future__ import annotations

import socket


def address_towards(host: str, port: int = 9) -> str:
    """The address of this host that packets to `host` leave from. Raises OSError where there is no way there."""
    family, _, _, _, target = socket.getaddrinfo(host or None, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # a datagram socket: asks the routing table and sends nothing
        return str(probe.getsockname()[0])

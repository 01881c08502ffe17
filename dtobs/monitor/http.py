"""``/metrics``, ``/api/view`` and ``/healthz`` over HTTP: read-only, bounded, on the loopback interface unless asked.

Requests must name this host in their Host header (an address, localhost, or the host's own name): a web page in the
user's browser cannot reach the monitor under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dtobs.errors import DependencyMissing, DtobsError, UsageError

_TIMEOUT_SECONDS = 10.0
_MAX_CONNECTIONS = 16
log = logging.getLogger("dtobs.monitor")


@dataclass(frozen=True)
class Pages:
    """What is served. Each may raise DtobsError."""

    metrics: Callable[[], bytes]
    view: Callable[[], dict[str, Any]]
    health: Callable[[], dict[str, Any]]
    failed: Callable[[str], None]  #: told of every request that failed inside


def parse_address(text: str) -> tuple[str, int]:
    """ "127.0.0.1:9400", "[::1]:0", ":9400" (loopback). Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


class MonitorServer:
    """Serves `pages` from threads of its own. Raises OSError when the address cannot be had."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET

        class Server(_BoundedServer):
            address_family = family

        self._server = Server((host, port), _Handler)
        self._server.pages = pages
        self._server.names = _names_of(host)
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """``http://HOST:PORT`` as others reach it."""
        host, port = self._server.server_address[:2]
        name = str(host)
        if ipaddress.ip_address(name).is_unspecified:
            name = socket.gethostname()
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def close(self) -> None:
        """Stop serving; requests in progress are cut off at their timeout."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_TIMEOUT_SECONDS)


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = _MAX_CONNECTIONS
    pages: Pages
    names: frozenset[str]

    def __init__(self, *arguments: Any) -> None:
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or never spoke is not worth a traceback."""
        log.debug("a request from %s ended badly", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _BoundedServer
    timeout = _TIMEOUT_SECONDS
    protocol_version = "HTTP/1.0"  # one request a connection: nothing to keep track of
    server_version = "dtobs"
    sys_version = ""

    def do_GET(self) -> None:
        if not self._host_is_ours():
            self._text(HTTPStatus.FORBIDDEN, "this name is not one of this host's\n")
            return
        path = self.path.partition("?")[0]
        pages = self.server.pages
        try:
            match path:
                case "/metrics":
                    self._reply(HTTPStatus.OK, pages.metrics(), "text/plain; version=0.0.4; charset=utf-8")
                case "/api/view":
                    self._json(pages.view())
                case "/healthz":
                    self._json(pages.health())
                case "/":
                    self._text(HTTPStatus.OK, "dtobs monitor: /metrics /api/view /healthz\n")
                case _:
                    self._text(
                        HTTPStatus.NOT_FOUND, "no such page: there are /metrics, /api/view and /healthz\n"
                    )
        except DependencyMissing as error:
            self._text(HTTPStatus.NOT_IMPLEMENTED, f"{error}\n")
        except DtobsError as error:
            pages.failed(str(error))
            self._text(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
        except OSError:  # the client went away
            self.close_connection = True
        except Exception as error:  # noqa: BLE001 - counted and said; the next request may work
            pages.failed(f"{path}: {type(error).__name__}: {error}")
            self._text(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _host_is_ours(self) -> bool:
        host = (self.headers.get("Host") or "").strip().lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
        if name in self.server.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _json(self, value: dict[str, Any]) -> None:
        body = json.dumps(value, separators=(",", ":"), allow_nan=False, default=str).encode()
        self._reply(HTTPStatus.OK, body, "application/json")

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._reply(status, text.encode(), "text/plain; charset=utf-8")

    def _reply(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


def _names_of(host: str) -> frozenset[str]:
    """Names under which a request may ask: on loopback only localhost, else also what this host is called."""
    names = {"localhost", host.lower()}
    if not _is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

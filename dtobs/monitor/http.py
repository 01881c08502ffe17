"""``/metrics``, ``/api/view`` and ``/healthz`` over HTTP: read-only, bounded, on the loopback interface unless asked.

``POST /api/node`` and ``/api/capture`` are for the monitors of the job's other nodes. `access` says who may ask; to
everybody else nothing is told. Requests must name this host in their Host header (an address, localhost, or the host's
own name): a web page in the user's browser cannot reach the monitor under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dtobs.codec import DecodeError, decode, encode, parse
from dtobs.errors import DependencyMissing, DtobsError, UsageError
from dtobs.monitor.access import Access

_TIMEOUT_SECONDS = 10.0
_BUNDLE = "application/octet-stream"
_MAX_CONNECTIONS = 64
_MAX_QUESTION_BYTES = 8 << 20
log = logging.getLogger("dtobs.monitor")


@dataclass(frozen=True)
class Pages:
    """What is served. Each may raise DtobsError."""

    metrics: Callable[[], bytes]
    view: Callable[[dict[str, Any]], bytes]  #: a question of a viewer
    health: Callable[[], dict[str, Any]]
    failed: Callable[[str], None]  #: told of every request that failed inside
    node: Callable[[dict[str, Any], str], bytes] | None = None  #: a question of the monitor at an address
    capture: Callable[[dict[str, Any]], bytes] | None = None


def parse_address(text: str) -> tuple[str, int]:
    """ "127.0.0.1:9400", "[::1]:0", ":9400" (loopback). Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is not HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


class MonitorServer:
    """Serves `pages` from threads of its own, to everybody without `access`.

    `socket_fd` is a socket that listens already, -1 to make one. Raises OSError when the address cannot be had.
    """

    def __init__(self, host: str, port: int, pages: Pages, access: Access | None = None, socket_fd: int = -1) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET

        class Server(_BoundedServer):
            address_family = family

        self._server = Server((host, port), _Handler, bind_and_activate=socket_fd < 0)
        if socket_fd >= 0:
            self._server.adopt_socket(socket_fd)
        self._server.pages, self._server.access = pages, access
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
    access: Access | None
    names: frozenset[str]

    def __init__(self, address: tuple[str, int], handler: Any, bind_and_activate: bool) -> None:
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler, bind_and_activate)

    def adopt_socket(self, fd: int) -> None:
        """Serve on a socket that somebody else made and that listens."""
        self.socket.close()
        self.socket = socket.socket(fileno=fd)
        self.server_address = self.socket.getsockname()

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
        if self._allowed():
            self._guarded(self._get)

    def do_POST(self) -> None:
        # Monitors have the token. A page in the user's own browser can send a question too, but no such header;
        # what it may ask to see, it cannot read.
        if self._allowed(needs_token=self._page != "/api/view"):
            self._guarded(self._post)

    def _allowed(self, *, needs_token: bool = False) -> bool:
        if not self._host_is_ours():
            self._text(HTTPStatus.FORBIDDEN, "this name is not one of this host's\n")
            return False
        access, given = self.server.access, self.headers.get("Authorization") or ""
        client, own = self.client_address[:2], self.connection.getsockname()[:2]
        if access is None or (access.allows(self._page, given, client, own) and (given or not needs_token)):
            return True
        self._text(
            HTTPStatus.UNAUTHORIZED,
            "give the run's token: Authorization: Bearer TOKEN\n",
            **{"WWW-Authenticate": "Bearer"},
        )
        return False

    @property
    def _page(self) -> str:
        return self.path.partition("?")[0]

    def _get(self) -> None:
        pages = self.server.pages
        match self._page:
            case "/metrics":
                self._reply(HTTPStatus.OK, pages.metrics(), "text/plain; version=0.0.4; charset=utf-8")
            case "/api/view":
                self._reply(HTTPStatus.OK, pages.view({}), _BUNDLE)
            case "/healthz":
                self._json(pages.health())
            case "/":
                self._text(HTTPStatus.OK, "dtobs monitor: /metrics /api/view /healthz\n")
            case _:
                self._text(HTTPStatus.NOT_FOUND, "no such page: there are /metrics, /api/view and /healthz\n")

    def _post(self) -> None:
        pages = self.server.pages
        if self._page == "/api/view":
            self._reply(HTTPStatus.OK, pages.view(self._question()), _BUNDLE)
        elif self._page == "/api/node" and pages.node is not None:
            answer = pages.node(self._question(), self.client_address[0])
            self._reply(HTTPStatus.OK, answer, _BUNDLE)
        elif self._page == "/api/capture" and pages.capture is not None:
            self._reply(HTTPStatus.OK, pages.capture(self._question()), "application/json")
        else:
            self._text(HTTPStatus.NOT_IMPLEMENTED, "this page is only read\n")

    def _question(self) -> dict[str, Any]:
        """What was sent, a JSON object. Raises UsageError."""
        length = self.headers.get("Content-Length") or ""
        if not length.isdecimal() or int(length) > _MAX_QUESTION_BYTES:
            raise UsageError("a question says how long it is, and is short")
        try:
            return decode(dict[str, Any], parse(self.rfile.read(int(length))))
        except DecodeError as error:
            raise UsageError("a question is a JSON object") from error

    def _guarded(self, serve: Callable[[], None]) -> None:
        """Answer; whatever fails is an answer too."""
        pages, path = self.server.pages, self._page
        try:
            serve()
        except UsageError as error:
            self._text(HTTPStatus.BAD_REQUEST, f"{error}\n")
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
        body = encode(value, allow_nan=False).encode()
        self._reply(HTTPStatus.OK, body, "application/json")

    def _text(self, status: HTTPStatus, text: str, **headers: str) -> None:
        self._reply(status, text.encode(), "text/plain; charset=utf-8", **headers)

    def _reply(self, status: HTTPStatus, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


def _names_of(host: str) -> frozenset[str]:
    """Names under which a request may ask: on loopback only localhost, else also what this host is called."""
    names = {"localhost", host.lower()}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The monitors of a job's nodes together: who leads, what the others said, and who no longer says anything.

The lead is the lowest node whose monitor answers. It asks all others for their pages and keeps them in its own run
directory, so that its detectors, and whoever reads that directory, see every rank. The others ask the lead alone:
where the rest are, what has been found, and whether it is still there. When it is not, the next takes over.
Monitors find each other through node 0, whose address the ranks got from the rendezvous store (`lead.json`).
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from dtobs.codec import DecodeError, decode
from dtobs.errors import DtobsError, UsageError
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.nodes.bundle import encode_bundle
from dtobs.nodes.peer import Peer
from dtobs.nodes.peer_client import ask
from dtobs.nodes.sharing import Question, collect
from dtobs.nodes.token import read_token
from dtobs.recording.contact import Contact, write_contact
from dtobs.recording.rundir import RunDirectory, read_json

INTERVAL_SECONDS = 1.0
DETAIL_SECONDS = 2.0
"""Between two looks at a node's rings; its pages and entries come with every answer."""
NODES_AT_FULL_PACE = 16
"""With more, each is asked less often, so that the lead's share of a core stays about the same."""
RETRY_SECONDS = 5.0
"""Between two questions to a node that is lost."""
MAX_NODES = 4096
_UNCERTAIN_INTERVALS = 2.5
_AFTER_NEWS_SECONDS = 1.0
_GOODBYE_SECONDS = 6.0
_LAST_SECONDS = 15.0
_ASKED_AT_ONCE = 64

log = logging.getLogger("dtobs.monitor")


@dataclass(frozen=True)
class LocalNode:
    """What this monitor tells of itself."""

    processes: Callable[[], dict[int, ProcessState]]
    findings: Callable[[], list[Finding]]
    attempt: Callable[[], int]
    failed: Callable[[str], None]


class Cluster:
    """One monitor's view of the cluster. A background thread polls the peers; HTTP threads serve their requests."""

    def __init__(self, run: RunDirectory, node: int, address: str, local: LocalNode) -> None:
        self.run_dir, self.node, self.address, self._local = run, node, address, local
        self.ending = False
        self._said_goodbye = False
        self._peers: dict[int, Peer] = {}
        self._written: dict[int, Contact] = {}
        self._retried: dict[int, float] = {}
        self._news_seconds = 0.0
        self._stalled = False
        self._failure_signature: object = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="peers")
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._find_lead()
        self._thread.start()

    def close(self) -> None:
        """Stop asking."""
        self._stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def interval(self) -> float:
        """Seconds between two questions to one node."""
        return INTERVAL_SECONDS * max(1.0, len(self._peers) / NODES_AT_FULL_PACE)

    @property
    def leads(self) -> bool:
        """Whether no lower node's monitor is there."""
        return not any(p.node < self.node and p.state == "answers" for p in self._all())

    @property
    def followed(self) -> Peer | None:
        """The monitor that leads, None when it is this one."""
        lower = [p for p in self._all() if p.node < self.node and p.state == "answers"]
        return lower[0] if lower else None

    def processes(self) -> dict[int, ProcessState]:
        """The processes of the other nodes' ranks as their monitors saw them last; none of nodes that are lost."""
        attempt = self._local.attempt()
        return {rank: state for p in self._all() if p.contact.attempt == attempt for rank, state in p.processes.items()}

    def contacts(self) -> dict[int, Contact]:
        """The other nodes as they are known now, but for those that never said a word."""
        others = self._all()
        alone = bool(others) and all(p.contact.lost for p in others)
        return {
            p.node: replace(p.contact, asked_by=self.node, alone=alone and p.contact.lost) for p in others if p.heard_at
        }

    def told_findings(self) -> list[Finding]:
        """What the monitor that led last had found."""
        led = [p for p in self._all() if p.node < self.node and p.head is not None]
        for peer in sorted(led, key=lambda p: -p.heard_at):
            with suppress(DecodeError):  # a newer version's
                return [_on_our_clock(f, peer) for f in decode(list[Finding], peer.head.findings if peer.head else [])]
        return []

    def settled(self, failures: object, *, stalled: bool) -> bool:
        """Whether every node has been heard since something happened, so that its part in it is known.

        `failures` is whatever differs when a rank of this node has ended or failed. A node that does not answer
        becomes lost within seconds, and counts as heard then.
        """
        if failures != self._failure_signature:
            self._failure_signature, self._news_seconds = failures, time.monotonic()
        if not self.leads:
            return True
        there = [p for p in self._all() if p.state == "answers"]
        self._stalled = stalled
        if stalled and any(p.fresh_seconds > _UNCERTAIN_INTERVALS * self.interval for p in there):
            return False
        news = max([self._news_seconds, *(p.news_at for p in self._all())])
        return not news or all(p.answered_at >= news + _AFTER_NEWS_SECONDS for p in there)

    def may_end(self, idle_seconds: float) -> bool:
        """Asked when nothing is left to watch here: whether the others know, or have had the time to."""
        if self.leads:
            self.ending = idle_seconds > _LAST_SECONDS  # others go on: the next of them leads from now
            gone = all(p.state != "answers" for p in self._all())
            return gone or idle_seconds > _LAST_SECONDS + _GOODBYE_SECONDS
        self.ending = True
        return idle_seconds > _GOODBYE_SECONDS or self._said_goodbye

    def answer(self, question: dict[str, Any], client: str) -> bytes:
        """This node as another monitor asked for it. Raises UsageError when that is no question."""
        try:
            asked = decode(Question, question)
        except DecodeError as error:
            raise UsageError(f"this is no question of a dtobs monitor: {error}") from error
        self._met(asked.node, asked.address, client)
        head = {
            "node": self.node,
            "run": self.run_dir.root.name,
            "attempt": self._local.attempt(),
            "host": socket.gethostname(),
            "monotonic_ns": time.monotonic_ns(),
            "clock_offset_ns": time.time_ns() - time.monotonic_ns(),
            "processes": self._local.processes(),
            "ending": self.ending,
            "nodes": {p.node: p.address for p in self._all()},
            "findings": self._local.findings(),
        }
        parts = collect(self.run_dir, self.node, asked.have, exits=asked.exits, detail=asked.detail)
        # Only the lead asks the nodes above it: that is who has to know.
        self._said_goodbye |= self.ending and asked.node < self.node
        return encode_bundle(head, parts)

    def ask_captures(self, reason: str, seconds: float) -> list[Future[bytes]]:
        """Have all other nodes gather their evidence now; the answers are for `cluster_capture.decode_ranks`."""
        token = read_token(self.run_dir.token)
        return [
            self._pool.submit(ask, p.address, "/api/capture", {"reason": reason}, token, seconds)
            for p in self._all()
            if p.state == "answers"
        ]

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self._find_lead()
                self._ask_all()
                self._note()
            except Exception as error:  # noqa: BLE001 - counted and said; the monitor goes on with what it has
                self._local.failed(f"the other nodes: {type(error).__name__}: {error}")

    def _ask_all(self) -> None:
        leads, now = self.leads, time.monotonic()
        followed = self.followed
        for peer in self._all():
            lost = peer.contact.lost
            if peer.asking or peer.state == "ended" or (lost and now < self._retried.get(peer.node, 0.0)):
                continue
            if leads or peer is followed or (lost and peer.node < self.node):
                self._retried[peer.node] = now + RETRY_SECONDS
                peer.asking = True
                self._pool.submit(self._ask, peer, leads)

    def _ask(self, peer: Peer, leads: bool) -> None:
        try:
            before = peer.state
            question = Question(self.node, self.address)
            attempt = self._local.attempt()
            ours = frozenset(self._local.processes()) if peer.contact.attempt == attempt else frozenset()
            slowly = math.inf if not leads else 0.0 if self._stalled else DETAIL_SECONDS * self.interval
            peer.ask(question, ours, slowly)
            if peer.state == "answers" and not leads:
                for node, address in peer.head.nodes.items() if peer.head else ():
                    self._met(node, address, "")
            if peer.state != before:
                log.info("node %d at %s: %s %s", peer.node, peer.address, peer.state, peer.contact.why)
        except DtobsError as error:
            self._local.failed(str(error))
        except Exception as error:  # noqa: BLE001 - what another machine says must not end this one's monitor
            self._local.failed(f"node {peer.node}: {type(error).__name__}: {error}")
        finally:
            peer.asking = False

    def _note(self) -> None:
        """Leave what is known of the others where a diagnosis finds it, when it has changed."""
        for node, contact in self.contacts().items():
            # Of one that answers, only what it is; when it last did is written once it no longer does.
            told = replace(contact, answered_ns=0) if contact.state == "answers" else contact
            if told != self._written.get(node):
                write_contact(self.run_dir, contact)
                self._written[node] = told

    def _find_lead(self) -> None:
        """Node 0 and its address, as the ranks of this node left it."""
        said = read_json(self.run_dir.lead(self.node))
        node, address = said.get("node"), said.get("address")
        if isinstance(node, int) and isinstance(address, str) and node != self.node:
            with self._lock:
                known = self._peers.get(node)
                if known is None:
                    self._peers[node] = Peer(self.run_dir, node, address, self.run_dir.token)
                elif address != known.address:
                    known.moved(address)

    def _met(self, node: int, address: str, client: str) -> None:
        """A monitor that asked, or that the lead told of."""
        if node == self.node or not 0 <= node < MAX_NODES or not address.startswith("http://"):
            return
        try:
            address = _reachable(address, client)
        except ValueError:  # no address at all: whoever sent it is not asked
            return
        with self._lock:
            known = self._peers.get(node)
            if known is None and len(self._peers) < MAX_NODES:
                self._peers[node] = Peer(self.run_dir, node, address, self.run_dir.token)
            elif known is not None and client:
                known.moved(address)

    def _all(self) -> list[Peer]:
        with self._lock:
            return [self._peers[node] for node in sorted(self._peers)]


def _on_our_clock(finding: Finding, peer: Peer) -> Finding:
    return replace(finding, since_ns=finding.since_ns + peer.ahead_ns) if finding.since_ns else finding


def _reachable(address: str, client: str) -> str:
    """A monitor that listens on all addresses knows only its host's name; whoever it asked saw a better one.

    Raises ValueError.
    """
    parts = urlsplit(address)
    try:
        ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        host = f"[{client}]" if ":" in client else client
        return f"http://{host}:{parts.port}" if client else address
    return address

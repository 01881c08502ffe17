"""One other node as this monitor knows it: where its monitor is, what it said last, and since when it says nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dtobs.codec import DecodeError, decode
from dtobs.errors import ServiceError, TargetError
from dtobs.events import RankState
from dtobs.host.process import ProcessState
from dtobs.nodes.bundle import decode_bundle
from dtobs.nodes.mirror import NodeMirror
from dtobs.nodes.peer_client import Unanswered, ask
from dtobs.nodes.sharing import Question
from dtobs.nodes.token import read_token
from dtobs.recording.clocks import ONE_CLOCK_NS
from dtobs.recording.contact import Contact, State, read_contacts, write_contact
from dtobs.recording.rundir import RunDirectory

LOST_SECONDS = 5.0
"""Without an answer for so long, and after two questions, a node counts as lost."""
FIRST_SECONDS = 30.0
"""The same for a monitor that never answered: it may be starting."""
ANSWER_SECONDS = 4.0


@dataclass(frozen=True)
class NodeHead:
    """What a monitor says of itself and its node, beside the pieces of files. `findings` may be a newer version's."""

    node: int
    attempt: int
    host: str
    monotonic_ns: int
    clock_offset_ns: int
    processes: dict[int, ProcessState]
    ending: bool = False
    nodes: dict[int, str] = field(default_factory=dict)  #: where the others' monitors are
    findings: list[Any] = field(default_factory=list)


class Peer:
    """Asked by one thread at a time; read by others."""

    def __init__(self, run: RunDirectory, node: int, address: str, token_file: Path) -> None:
        self.node, self.address = node, address
        self.contact = Contact(node, address, "answers")
        self.processes: dict[int, ProcessState] = {}
        self.answered_at = 0.0  #: monotonic; when the question was asked that its last answer is for; 0: never
        self.heard_at = 0.0  #: monotonic; when that answer came
        self.news_at = 0.0  #: when a rank there was last seen to have ended or failed
        self.head: NodeHead | None = None
        self.ahead_ns = 0  #: what to add to times in `head`
        self.asking = False
        self._run, self._token_file = run, token_file
        self._since_s = time.monotonic()
        self._misses = 0
        self._failure_signature: tuple[int, int] = (0, 0)
        self._detailed_s = 0.0
        self._skew_ns = 0
        self.mirror = None if _shares_our_disk(run, node) else NodeMirror(run, node)

    @property
    def state(self) -> State:
        return self.contact.state

    @property
    def fresh_seconds(self) -> float:
        """Age of what it said last."""
        return time.monotonic() - (self.answered_at or self._since_s)

    def moved(self, address: str) -> None:
        """Its monitor is at `address` from now on, or has begun again at the old one."""
        if address != self.address or self.contact.state == "ended":
            self.address, self._since_s, self._misses = address, time.monotonic(), 0
            self.contact = replace(self.contact, address=address, state="answers", why="")

    def ask(self, question: Question, local_ranks: frozenset[int], detail_seconds: float) -> None:
        """Ask it and take its answer over; its rings only when they are `detail_seconds` old.

        Raises RecordingDisabled when the disk refuses.
        """
        asked_s = time.monotonic()
        due = asked_s - self._detailed_s >= detail_seconds
        if self.mirror is not None:
            question = replace(question, detail=due, exits=self.mirror.exits, have=self.mirror.have)
        try:
            body = ask(self.address, "/api/node", question, read_token(self._token_file), ANSWER_SECONDS)
            self.hear(body, local_ranks, asked_s)
        except Unanswered as error:
            self._missed(error.kind, str(error))
        except ServiceError as error:
            self._missed("mute", str(error))
        else:
            self._detailed_s = asked_s if due else self._detailed_s

    def hear(self, body: bytes, local_ranks: frozenset[int], asked_s: float) -> None:
        """Apply the peer's answer. Raises ServiceError when it cannot be one, RecordingDisabled as `ask` does."""
        try:
            said, parts = decode_bundle(body)
            head = decode(NodeHead, said)
        except DecodeError as error:
            raise ServiceError(f"the answer of the monitor at {self.address} is damaged: {error}") from error
        if head.node != self.node:
            raise ServiceError(f"the monitor at {self.address} is that of another node")
        by_ns = self._clocks(head, asked_s)
        if self.mirror is not None:
            if not self.heard_at:  # write the marker before the first copied byte
                write_contact(self._run, replace(self.contact, mirrored=True))
            self.mirror.apply(parts, local_ranks, self._skew_ns)
        self._understood(head, asked_s, by_ns)

    def _clocks(self, head: NodeHead, asked_s: float) -> int:
        """What to add to a time of that node's clock; 0 where it is ours.

        The answer was made at some moment between our question and now: that is nearer than many a pair of hosts keeps
        UTC, by which recordings of several hosts are compared. A larger difference is remembered as their skew.
        """
        by_ns = round((asked_s + time.monotonic()) * 5e8) - head.monotonic_ns
        ours_ns = time.time_ns() - time.monotonic_ns()
        skew_ns = ours_ns + by_ns - head.clock_offset_ns
        if abs(skew_ns - self._skew_ns) >= ONE_CLOCK_NS:  # not at each trembling of the network
            self._skew_ns = skew_ns if abs(skew_ns) >= ONE_CLOCK_NS else 0
        return by_ns if abs(by_ns) >= ONE_CLOCK_NS else 0

    def _understood(self, head: NodeHead, asked_s: float, by: int) -> None:
        processes = {}
        for rank, process in head.processes.items():
            processes[rank] = process.shifted(by)
        contact = Contact(
            self.node,
            self.address,
            "ended" if head.ending else "answers",
            head.attempt,
            tuple(sorted(processes)),
            head.host,
            answered_ns=time.time_ns(),
            mirrored=self.mirror is not None,
        )
        failed = 0
        if self.mirror is not None:
            failed = int(np.count_nonzero(self.mirror.pages["state"] == RankState.FAILED))
        failures = (sum(not p.alive for p in processes.values()), failed)
        self.head, self.processes, self.contact, self.ahead_ns = head, processes, contact, by
        self.answered_at, self.heard_at, self._misses = asked_s, time.monotonic(), 0
        if failures != self._failure_signature:
            self._failure_signature, self.news_at = failures, time.monotonic()

    def _missed(self, kind: State, why: str) -> None:
        self._misses += 1
        silent_s = time.monotonic() - (self.heard_at or self._since_s)
        if silent_s >= (LOST_SECONDS if self.heard_at else FIRST_SECONDS) and self._misses >= 2:
            self.contact = replace(self.contact, state=kind, why=why)
            self.processes = {}


def _shares_our_disk(run: RunDirectory, node: int) -> bool:
    """Whether the folder of that node is one that its own ranks fill."""
    try:
        known = read_contacts(run).get(node)
    except TargetError:
        known = None
    return run.pages(node).exists() and not (known is not None and known.mirrored)

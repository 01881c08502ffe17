"""What is known, and what is not, when another node's monitor no longer answers.

From here a network that is down, a machine that is off and a monitor that died alone look alike but for two things:
whether the machine still answers on the network at all, and whether the ranks' own connections to it broke.

* Nothing comes back and the run stands still: ``network-stalled``. Its network or the machine itself.
* The machine refuses, and its peers' connections were closed: its kernel lives and its processes do not: ``rank-dead``.
* Its monitor alone is gone: what its ranks do is not known, and ``rank-not-joined`` says so, as a possibility.

What is known of the ranks there ends with its last answer, so no other rule may judge them. Where a rule finds a cause
among the ranks that can be seen, the silence of a node explains nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime

from dtobs.detectors.hangs.describe import collective
from dtobs.detectors.hangs.endings import End
from dtobs.detectors.hangs.situation import Situation
from dtobs.detectors.hangs.stall import last_movement_ns
from dtobs.events import RankState
from dtobs.findings import Confidence, Finding
from dtobs.recording.contact import Contact
from dtobs.recording.view import RunView
from dtobs.words import duration_text, ranks_do, ranks_text

_HEARD_AFTER_NS = 1_000_000_000
_LINK = (
    "From another host, ping {host} and look at its console: if it runs, its network or a switch is the cause; "
    "if not, its power or its kernel."
)
_MACHINE = "Look at the uptime and the kernel log of {host}, and at the scheduler for who ended its processes."
_MONITOR = "Look at {host}: run `dtobs diagnose` on its run directory, and see why its monitor ended."


def lost_nodes(view: RunView) -> dict[int, Contact]:
    """Nodes of this attempt whose ranks' part in what happens is not known.

    Not those whose ranks had all ended before, and not those that were heard after the last movement of any rank:
    what they said holds as long as nothing moves.
    """
    found = {}
    moved_ns = last_movement_ns(view)
    for node, contact in view.contacts.items():
        pages = view.pages[view.pages["node"] == node]
        over = len(pages) and (pages["state"] == RankState.CLOSED).all()
        heard = _since_ns(view, contact) > moved_ns + _HEARD_AFTER_NS
        if contact.lost and contact.attempt == view.attempt and contact.ranks and not over and not heard:
            found[node] = contact
    return found


def find(situation: Situation, lost: dict[int, Contact], whole: RunView) -> list[Finding]:
    """One finding a lost node that the run suffers from. `situation` is of the other ranks, `whole` has them all."""
    return [f for contact in lost.values() if (f := _judge(situation, contact, whole)) is not None]


def _judge(situation: Situation, contact: Contact, whole: RunView) -> Finding | None:
    broke = [e.rank for e in situation.endings.values() if e.kind is End.PEER_LOST]
    gave_up = [e.rank for e in situation.endings.values() if e.kind is End.TIMED_OUT]
    who, last = f"node {contact.node}{_host(contact)} with {ranks_text(contact.ranks)}", _last(whole, contact)
    if contact.state == "refused" and broke:
        return _finding(
            whole,
            contact,
            "rank-dead",
            f"{ranks_do(contact.ranks, 'are')} dead: every process of node {contact.node}{_host(contact)} is gone "
            f"since {_clock(contact)}: the machine answers, its monitor's port is closed, and {ranks_text(broke)} lost "
            f"the connection to a peer. Whether it was restarted or its processes were killed cannot be told from "
            f"here{last}",
            Confidence.LIKELY,
            _MACHINE,
        )
    if situation.stall is None and not gave_up and not (broke and contact.state == "silent"):
        return None
    if contact.state == "silent":
        other = "; no other node answers either, so it may as well be this node's own network" if contact.alone else ""
        return _finding(
            whole,
            contact,
            "network-stalled",
            f"{who} cannot be reached since {_clock(contact)} ({contact.why}), and {_effect(situation, broke)}. "
            f"Its network is down or the machine is off: from here they look the same{other}{last}",
            Confidence.LIKELY,
            _LINK,
        )
    return _finding(
        whole,
        contact,
        "rank-not-joined",
        f"{ranks_text(contact.ranks)} may not have joined: {_effect(situation, broke)}, and what "
        f"{ranks_do(contact.ranks, 'do')} is not known since {_clock(contact)}, when the monitor of "
        f"node {contact.node}{_host(contact)} ceased to answer ({contact.why}){last}",
        Confidence.POSSIBLE,
        _MONITOR,
    )


def _finding(
    whole: RunView, contact: Contact, code: str, summary: str, confidence: Confidence, next_step: str
) -> Finding:
    pages = whole.pages[whole.pages["node"] == contact.node]
    return Finding(
        code,
        summary,
        contact.ranks,
        confidence,
        step=int(pages["step"].max()) if len(pages) else None,
        evidence=(
            {
                "what": "node",
                "node": contact.node,
                "host": contact.host,
                "monitor": contact.address,
                "state": contact.state,
                "why": contact.why,
                "last answer": _clock(contact),
                "asked by node": contact.asked_by,
            },
        ),
        next_step=next_step.format(host=contact.host or f"node {contact.node}"),
        since_ns=_since_ns(whole, contact),
    )


def _effect(situation: Situation, broke: list[int]) -> str:
    """What the others suffer: "rank 0 has waited 30 s in …", "ranks 0 and 1 lost the connection to a peer"."""
    if broke:
        return f"{ranks_text(broke)} lost the connection to a peer"
    for rank, at in sorted(situation.blocked.items()):
        place = f" in {collective(situation, rank, at.group, at.seq)}" if at.group else " for its peers"
        return f"rank {rank} has waited {duration_text(situation.waited_seconds(rank))}{place}"
    silent = situation.stall.seconds if situation.stall is not None else 0.0
    return f"nothing has moved for {duration_text(silent)}" if silent else "its peers gave up waiting"


def _last(whole: RunView, contact: Contact) -> str:
    pages = whole.pages[whole.pages["node"] == contact.node]
    return f"; last seen in step {int(pages['step'].max())}" if len(pages) else ""


def _host(contact: Contact) -> str:
    return f" ({contact.host})" if contact.host else ""


def _clock(contact: Contact) -> str:
    at = datetime.fromtimestamp(contact.answered_ns / 1e9, UTC)
    return at.strftime("%H:%M:%S UTC")


def _since_ns(whole: RunView, contact: Contact) -> int:
    """The last answer on the axis of the view."""
    if not len(whole.pages):
        return 0
    here = whole.pages[whole.pages["node"] == contact.asked_by]
    offset = int((here if len(here) else whole.pages)["clock_offset_ns"][0])
    return max(0, contact.answered_ns - offset)

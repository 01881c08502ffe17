"""Whether another node's monitor answers, as the monitor that leads knew it last: ``nodes/<node>/contact.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtobs.codec import DecodeError, decode
from dtobs.errors import TargetError
from dtobs.recording.rundir import RunDirectory, read_json, write_json

State = Literal["answers", "ended", "silent", "refused", "mute"]
SCHEMA = "dtobs.contact/1"


@dataclass(frozen=True)
class Contact:
    """The last that is known of one node. Times are UTC in ns, by the clock of the node that asked.

    `state`: "answers"; "ended" after its ranks did; "silent" when nothing comes back from its address, not even a
    refusal; "refused" when its machine answers and nobody listens there any more; "mute" when the connection stands
    and its monitor says nothing that makes sense.
    """

    node: int
    address: str
    state: State
    attempt: int = 0  #: of the job, when it last answered
    ranks: tuple[int, ...] = ()
    host: str = ""
    why: str = ""  #: what the network said, "" while it answers
    answered_ns: int = 0  #: 0: never
    asked_by: int = 0  #: node
    alone: bool = False  #: no other node answers that one either: it may be its own network
    mirrored: bool = False  #: its files here are copies

    @property
    def lost(self) -> bool:
        """Whether nothing is known of its ranks since `answered_ns`."""
        return self.state in ("silent", "refused", "mute")


def write_contact(run: RunDirectory, contact: Contact) -> None:
    """Raises RecordingDisabled."""
    write_json(run.contact(contact.node), {"schema": SCHEMA, **vars(contact)})


def read_contacts(run: RunDirectory) -> dict[int, Contact]:
    """All of them by node. Raises TargetError when one is damaged."""
    found = {}
    for node in run.nodes():
        value = read_json(run.contact(node))
        if value:
            try:
                found[node] = decode(Contact, value | {"node": node})
            except DecodeError as error:
                raise TargetError(f"the contact.json of node {node} is damaged: {error}. Remove it") from error
    return found

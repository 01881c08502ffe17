"""What is known of a code of a finding; the codes themselves are rows of `dtobs.catalogue`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, StrEnum, auto
from typing import Literal

Family = Literal["hangs", "silent", "performance"]


class Severity(StrEnum):
    """`critical`: the run is lost or its result is wrong. `warning`: it wastes time or looks suspicious. `note`: a fact
    that may be meant, with the word that declares it (`dtobs.expectations`).
    """

    NOTE = "note"
    WARNING = "warning"
    CRITICAL = "critical"


class Trait(Flag):
    """What a code implies, for whoever ranks findings or decides whether one is over."""

    NONE = 0
    ENDING = auto()  #: it says how a rank ended: no standstill is needed to see it
    AFTERMATH = auto()  #: an ending that a hang, or who ends a hung job, brings about as well
    RECOVERABLE = auto()  #: a hang that the run may recover from
    DEADLOCK = auto()  #: a hang that it does not recover from
    DISAGREEMENT = auto()  #: calls that do not fit together, where the run stops
    GOES_ON = auto()  #: a code of the hang family that stops no run
    SEEN = auto()  #: it rests on what the kernel says or the ranks recorded, and not on how long it took
    SAYS_WHY = auto()  #: it says why a rank did not join its peers
    RAISES = auto()  #: programs check for it and raise an exception about it
    MACHINE = auto()  #: a host or a link is to blame, not the program
    PARTS = auto()  #: it makes copies of a model part: their divergence is its consequence
    TRANSIENT = auto()  #: nobody can say whether the same program fails again
    LASTS = auto()  #: the model keeps what it did, also when the steps since are right
    HANG = RECOVERABLE | DEADLOCK | DISAGREEMENT  #: it is over only when the run moves on


@dataclass(frozen=True)
class Code:
    """A row of the catalogue. Of two causes of one end the one with the lower `order` came first.

    `severity` is that of a finding which cannot be meant. Where `expect` is a word of `dtobs.expectations`, a job may
    do it on purpose: the word declares it, and where it is only possible a warning becomes a note (`Finding.fault`).
    """

    name: str
    family: Family
    severity: Severity
    title: str
    next_step: str
    traits: Trait = Trait.NONE
    expect: str = ""
    order: int = 0


Row = (
    tuple[str, Family, Severity, str, str]
    | tuple[str, Family, Severity, str, str, Trait]
    | tuple[str, Family, Severity, str, str, Trait, str]
)
"""How a code is written down: the fields of Code, in their order."""

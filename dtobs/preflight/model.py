"""What preflight measures and what it concludes, as plain records that travel as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dtobs.findings import Confidence, Finding, Severity

SCHEMA = "dtobs.preflight/1"


@dataclass(frozen=True)
class Hello:
    """A rank that has arrived. `address` and `port` are where it listens for its peers, "" and 0 where it does not."""

    rank: int
    local_rank: int
    node: int
    host: str
    pid: int
    address: str = ""
    port: int = 0


@dataclass(frozen=True)
class Disk:
    """The folder that runs are written to, as one rank of a host measured it. Speeds are 0 where it failed."""

    path: str
    filesystem: str
    free_bytes: int
    total_bytes: int
    write_bytes_per_second: float = 0.0
    sync_seconds: float = 0.0  #: median of writing 4 KiB and fsync
    error: str = ""  #: "" when it could be written


@dataclass(frozen=True)
class Facts:
    """What one rank says of its process and its machine."""

    environment: dict[str, str]  #: only variables that concern communication, threads and devices
    versions: dict[str, str]
    cores: int
    local_world: int
    interfaces: tuple[str, ...]
    devices: int
    name_is_loopback: bool  #: the host's own name resolves to 127.…
    open_files: int  #: soft limit; -1 unlimited
    locked_bytes: int  #: RLIMIT_MEMLOCK; -1 unlimited
    infiniband: bool
    shm_bytes: int
    shm_free_bytes: int
    disk: Disk | None = None  #: measured once a host


@dataclass(frozen=True)
class Reached:
    """One host's connection to another: round trip, and how far its wall clock is ahead of ours, in seconds."""

    source: int  #: rank
    target: int
    round_trip_seconds: float = 0.0
    clock_ahead_seconds: float = 0.0  #: uncertain by half the round trip
    error: str = ""


@dataclass(frozen=True)
class Link:
    """One direction between two ranks, measured by send and receive.

    Each figure is there twice: by the clock, and in the best case, where all the time in which a thread of either end
    could have run and got no core is taken off. The truth lies between the two.
    """

    source: int
    target: int
    bytes_per_second: float
    latency_seconds: float  #: half of the fastest round trip
    most_bytes_per_second: float
    least_latency_seconds: float
    wrong_bytes: int = 0

    def best(self, other: Link) -> Link:
        """The better of two measurements; what arrived wrong once stays wrong."""
        return Link(
            self.source,
            self.target,
            max(self.bytes_per_second, other.bytes_per_second),
            min(self.latency_seconds, other.latency_seconds),
            max(self.most_bytes_per_second, other.most_bytes_per_second),
            min(self.least_latency_seconds, other.least_latency_seconds),
            max(self.wrong_bytes, other.wrong_bytes),
        )


@dataclass(frozen=True)
class Wrong:
    """A rank got values out of a collective that cannot be. `sources` are the ranks the wrong part came from."""

    rank: int
    operation: str
    dtype: str
    elements: int
    wrong: int  #: how many elements
    sources: tuple[int, ...] = ()  #: () where every rank contributes to every element
    members: tuple[int, ...] = ()  #: of the group; () is everybody


@dataclass(frozen=True)
class Speed:
    """A collective over all ranks. `bus` is the algorithm's bytes a second times the operation's factor."""

    operation: str
    size_bytes: int
    seconds: float
    bus_bytes_per_second: float


@dataclass(frozen=True)
class Problem(Finding):
    """One thing that would hurt the run. `grave`: it is critical, whatever its code is elsewhere."""

    hosts: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    why: str = ""
    grave: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grave:
            object.__setattr__(self, "severity", Severity.CRITICAL)

    def to_json(self) -> dict[str, Any]:
        """The finding with what only preflight knows of it."""
        own = {"check": self.code, "hosts": self.hosts, "links": self.links, "why": self.why}
        return super().to_json() | own


@dataclass
class PreflightEvidence:
    """Everything that arrived until the judgement. Lists hold what came; ranks that said nothing are not in them."""

    world: int
    expected: dict[int, str] = field(default_factory=dict)  #: node → the name it was announced under
    local_world: int = 0
    nodes: dict[int, str] = field(default_factory=dict)  #: nodes whose launcher arrived → host
    hellos: dict[int, Hello] = field(default_factory=dict)
    facts: dict[int, Facts] = field(default_factory=dict)
    reached: list[Reached] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    checked: int = 0  #: results of collectives whose values were compared, over all ranks
    pairs_checked: list[tuple[int, int]] = field(default_factory=list)  #: after a wrong value: groups of two that ran
    speeds: list[Speed] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)  #: by rank: why it could not go on
    stages: dict[int, str] = field(default_factory=dict)  #: by rank: the stage it was last in
    silent: dict[int, float] = field(default_factory=dict)  #: by rank: seconds without a sign of life
    done: set[int] = field(default_factory=set)

    def label(self, rank: int) -> str:
        """The host of `rank`; where one name stands for several nodes, the announced name or the node's number."""
        hello = self.hellos.get(rank)
        if hello is None:
            node = rank // self.local_world if self.local_world else rank
            return self.expected.get(node) or self.nodes.get(node) or f"node {node}"
        same = {h.node for h in self.hellos.values() if h.host == hello.host}
        if len(same) == 1:
            return hello.host
        return self.expected.get(hello.node) or f"{hello.host}/node{hello.node}"

    def problem(self, code: str, summary: str, ranks: Iterable[int], next_step: str = "", **more: Any) -> Problem:
        """A problem of `ranks` and their hosts; `more` are other fields of it."""
        concerned = sorted(ranks)
        told = {"hosts": self.labels(concerned), "next_step": next_step, "confidence": Confidence.CERTAIN} | more
        return Problem(code, summary, tuple(concerned), **told)

    def labels(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The hosts of `ranks`, each once."""
        return tuple(dict.fromkeys(self.label(rank) for rank in sorted(ranks)))


@dataclass
class Report:
    """The outcome."""

    evidence: PreflightEvidence
    problems: list[Problem]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As ``dtobs preflight --json`` prints it."""
        seen = self.evidence
        return {
            "schema": SCHEMA,
            "ok": not self.problems,
            "seconds": round(self.seconds, 3),
            "world_size": seen.world,
            "missing_ranks": sorted(set(range(seen.world)) - set(seen.hellos)),
            "problems": [problem.to_json() for problem in self.problems],
            "ranks": [
                {**asdict(hello), "host": seen.label(rank), "facts": _facts(seen.facts.get(rank))}
                for rank, hello in sorted(seen.hellos.items())
            ],
            "reached": [asdict(one) for one in seen.reached],
            "links": [asdict(one) for one in seen.links],
            "collectives": {
                "checked": seen.checked,
                "wrong": [asdict(one) for one in seen.wrong],
                "speed": [asdict(one) for one in seen.speeds],
            },
        }


def _facts(facts: Facts | None) -> dict[str, Any] | None:
    return asdict(facts) if facts is not None else None

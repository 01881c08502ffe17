"""How the monitors of a job on several nodes find each other: ranks exchange addresses through the store.

The monitors speak no rendezvous protocol, and a rank does no network I/O once it trains. So rank 0 makes the socket
that its monitor will listen on, and puts that address and the run's token beside the run directory that all ranks
agree on anyway. The first rank of each node keeps both where its monitor looks: ``token`` and ``lead.json``. All that
is further to be known, the monitors tell each other.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtobs.errors import RecordingDisabled, TargetError
from dtobs.host.address import address_towards
from dtobs.host.process import read_process
from dtobs.nodes.token import ensure_token, write_token
from dtobs.recording.rundir import RunDirectory, read_json, write_json
from dtobs.session.identity import PER_NODE, Identity, first_number, told_by_first

VARIABLE = "DTOBS_MONITOR_BIND"
AUTO = "auto"
_BACKLOG = 64


@dataclass
class Listening:
    """Where this node's monitor is to listen. `socket` listens already; None lets the monitor make its own."""

    host: str
    port: int = 0
    socket: socket.socket | None = None

    @property
    def argument(self) -> str:
        """For ``--listen``."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def nodes_of(who: Identity, environment: Mapping[str, str] = os.environ) -> int:
    """How many nodes the job runs on, as its launcher says; 1 when it does not."""
    here = first_number(environment, *PER_NODE)
    counted = -(-who.world_size // here) if here else 1
    return first_number(environment, "GROUP_WORLD_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or counted


def bind_address(asked: str, environment: Mapping[str, str] = os.environ) -> str:
    """The address of this host that `asked` means. Raises ValueError, saying what to set."""
    if asked != AUTO:
        try:
            return str(ipaddress.ip_address(asked))
        except ValueError:
            raise ValueError(
                f"{VARIABLE}={asked!r} is no address: give one of this host's, or {AUTO!r} for the one "
                "that MASTER_ADDR is reached from"
            ) from None
    try:
        found = address_towards(environment.get("MASTER_ADDR", ""))
    except OSError:
        found = "127.0.0.1"
    if ipaddress.ip_address(found).is_loopback:
        raise ValueError(
            f"{VARIABLE}={AUTO}: MASTER_ADDR={environment.get('MASTER_ADDR', '')!r} leads to no address of this "
            f"host that others reach: set {VARIABLE} to one"
        )
    return found


def arrange(run: RunDirectory, who: Identity, asked: str, warn: Callable[[str], object]) -> Listening | None:
    """For the first rank of each node: where its monitor is to listen; None for the loopback default.

    Leaves the monitor what it needs to find the others. `asked` is an address or "auto", "" for nothing. What keeps
    the monitors apart is told to `warn`, and training goes on.
    """
    nodes = nodes_of(who)
    try:
        host = bind_address(asked) if asked else ""
    except ValueError as error:
        warn(str(error))
        host = ""
    if nodes < 2:
        if who.node > 0:
            warn(
                "this job runs on several hosts, and nothing says on how many. Unless the run directory is on a disk "
                "that they share, no finding compares ranks of different hosts. To connect their monitors, set "
                f"LOCAL_WORLD_SIZE, LOCAL_RANK and GROUP_RANK, as torchrun does, and {VARIABLE}={AUTO}"
            )
        return Listening(host) if host else None
    if not host and who.rank == 0 and not asked:
        warn(
            f"this job runs on {nodes} nodes, whose monitors listen on loopback only. Unless the run directory is on "
            "a disk that they share, no finding compares ranks of different nodes. To connect them, set "
            f"{VARIABLE}={AUTO} (or an address of each node)"
        )
    if not host and who.rank != 0:
        return None
    listening = Listening(host) if host else None

    def tell() -> dict[str, str]:
        nonlocal listening
        if not host:
            return {}
        try:
            listening, address = _listen(run, who.node, host)
            return {"address": address, "token": ensure_token(run.token)}
        except (OSError, ValueError, RecordingDisabled) as error:
            warn(f"the monitors of the other nodes will not find this one: {error}")
            return {}

    try:
        said = told_by_first(who, f"monitors/{who.attempt}/{next(_uses)}", tell)
    except (OSError, RuntimeError, ValueError) as error:
        warn(f"rank 0 did not say where its monitor is: {error}")
        return listening
    if isinstance(said, dict) and said.get("address"):
        write_token(run.token, str(said["token"]))
        write_json(run.lead(who.node), {"node": 0, "address": str(said["address"])})
    return listening


_uses = itertools.count()
"""How often this process has arranged monitors: a second session gets a topic of its own."""


def _listen(run: RunDirectory, node: int, host: str) -> tuple[Listening, str]:
    """Where the monitor of rank 0's node listens, and how others reach it. Raises OSError, ValueError.

    A monitor that still watches this run (after a restart of the ranks) keeps its place.
    """
    known = _living(run, node)
    if known:
        name, _, port = known.removeprefix("http://").rpartition(":")
        return Listening(name.strip("[]"), int(port)), known
    shown = bind_address(AUTO) if ipaddress.ip_address(host).is_unspecified else host
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.bind((host, 0))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    port = made.getsockname()[1]
    return Listening(host, port, made), f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _living(run: RunDirectory, node: int) -> str:
    """The address of a monitor of this node that lives, "" without one."""
    try:
        entry = read_json(run.monitor_json).get(str(node))
    except TargetError:
        return ""
    if not isinstance(entry, dict) or not isinstance(entry.get("pid"), int) or not entry.get("address"):
        return ""
    return str(entry["address"]) if read_process(entry["pid"]).alive else ""

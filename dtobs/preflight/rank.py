"""One rank: measures in a thread, while the main thread tells the others that this process lives.

The thread may block in a collective for as long as it likes. What it found until then has been posted, the board says
in which stage it is, and the process leaves when the verdict is there or its time is up.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dtobs.preflight import blame, collectives, disk, links, machine, reach
from dtobs.preflight.board import GONE, Meeting
from dtobs.preflight.model import Hello, Link, Reached, Wrong

BEAT_SECONDS = 0.5
_MORE_LOOKS = 5


@dataclass(frozen=True)
class Options:
    """What to measure, and how long that may take, in seconds."""

    run_dir: Path = Path("runs")
    backend: str = "auto"
    join_seconds: float = 60.0  #: for all ranks to arrive, after the first
    seconds: float = 180.0  #: for everything
    stage_seconds: float = 30.0  #: for one collective or transfer
    silent_seconds: float = 15.0  #: without a sign of life, before a rank counts as stopped


@dataclass(frozen=True)
class RankPlace:
    """Which rank this is, from torchrun's variables."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    address: str  #: of the rendezvous
    port: int

    @property
    def nodes(self) -> int:
        """How many nodes there are; every node has as many ranks."""
        return max(1, self.world // self.local_world)

    @classmethod
    def of(cls, values: Mapping[str, str]) -> RankPlace:
        """Read the place from a launcher's variables.

        Raises KeyError or ValueError where one is missing or is no number.
        """
        rank, world = int(values["RANK"]), int(values["WORLD_SIZE"])
        local_world = int(values.get("LOCAL_WORLD_SIZE", world))
        return cls(
            rank,
            world,
            int(values.get("LOCAL_RANK", rank)),
            local_world,
            int(values.get("GROUP_RANK", rank // local_world)),
            values["MASTER_ADDR"],
            int(values["MASTER_PORT"]),
        )


def choose_backend(asked: str, local_world: int) -> str:
    """`asked`, or with "auto" what a training job here would use."""
    if asked != "auto":
        return asked
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


class PreflightRank:
    """Measures everything, stage by stage; `run` is the body of its thread."""

    def __init__(self, place: RankPlace, options: Options, meeting: Meeting, values: Mapping[str, str]) -> None:
        self.place, self.options, self.values = place, options, values
        self.meeting = meeting  # of the measuring thread alone
        self.stage = "start"
        self.finished = threading.Event()
        self._listener: reach.Listener | None = None

    def say(self, stage: str) -> None:
        """What this rank is about to do; the main thread tells the others."""
        self.stage = stage

    def run(self) -> None:
        """Do all stages; an error is posted, as is whatever was found before it."""
        try:
            self._measure()
        except Exception as error:  # noqa: BLE001 - posted: the verdict is made of it
            said = (str(error).splitlines() or [""])[0]
            self._leave("error", f"{self.stage}: {type(error).__name__}: {said}"[:500])
        else:
            self._leave("done", True)
        self.finished.set()

    def _leave(self, kind: str, note: object) -> None:
        try:
            self.meeting.post(kind, self.place.rank, note)
        except GONE:
            pass  # nobody is left to read it

    def _measure(self) -> None:
        hello = self._hello()
        self.meeting.post("hello", hello.rank, asdict(hello))
        self.say("machine and disk")
        measured = disk.measure(self.options.run_dir) if hello.local_rank == 0 else None
        facts = machine.facts(self.values, measured, self.place.local_world)
        self.meeting.post("facts", hello.rank, asdict(facts))
        self.say("waiting for the other ranks")
        hellos = self._meet()
        if len(hellos) < self.place.world:
            return
        self.say("reaching the other hosts")
        reached = [reach.reach(hello, peer) for peer in reach.peers(hellos, hello)]
        self.meeting.post("reached", hello.rank, [asdict(one) for one in reached])
        if self._cut_off(reached):
            return
        device = self._connect()
        self._links(hellos, device)
        self._values(device)
        if self.place.world > 1:
            found = collectives.speeds(self.place.world, device, self.say)
            self.meeting.post("speeds", hello.rank, [asdict(one) for one in found])
        self.say("end")

    def _hello(self) -> Hello:
        place, address = self.place, ""
        try:
            address = reach.own_address(place.address, place.port, place.nodes)
            if place.local_rank == 0:
                self._listener = reach.Listener(address)
        except OSError:
            pass  # without a port its host is judged as one that nobody reaches
        port = self._listener.port if self._listener is not None else 0
        return Hello(place.rank, place.local_rank, place.node, socket.gethostname(), os.getpid(), address, port)

    def _meet(self) -> list[Hello]:
        """Everybody's hello; those that came when time was up."""
        deadline = time.monotonic() + self.options.join_seconds
        while True:
            notes = self.meeting.read_all("hello", self.place.world)
            if len(notes) == self.place.world or time.monotonic() > deadline:
                return [Hello(**note) for _, note in sorted(notes.items())]
            time.sleep(0.1)

    def _cut_off(self, reached: list[Reached]) -> bool:
        """Whether hosts do not reach each other: a backend would only wait for its timeout."""
        bad = any(one.error for one in reached)
        leaders = range(0, self.place.world, self.place.local_world)
        self.meeting.post("cut", self.place.rank, bad)
        others = [self.meeting.wait("cut", rank, self.options.stage_seconds) for rank in leaders]
        return any(others)

    def _connect(self) -> torch.device:
        """Join the process group, with the backend that the job will use."""
        backend = choose_backend(self.options.backend, self.place.local_world)
        self.say(f"connecting all ranks with {backend}")
        device = torch.device("cuda", self.place.local_rank) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", self.meeting.store),  # type: ignore[attr-defined]
            rank=self.place.rank,
            world_size=self.place.world,
            timeout=timedelta(seconds=self.options.stage_seconds),
        )
        dist.barrier()
        return device

    def _links(self, hellos: list[Hello], device: torch.device) -> None:
        """Measure all links; those that look slow again, with nothing else under way: machines have bad moments."""
        rank, node_of = self.place.rank, {hello.rank: hello.node for hello in hellos}
        found = links.run(rank, links.timetable(hellos), device, self.say)
        for _ in range(_MORE_LOOKS):
            self.meeting.post("links", rank, [asdict(link) for link in found])
            dist.barrier()
            everybody = self.meeting.read_all("links", self.place.world)
            seen = [Link(**link) for notes in everybody.values() for link in notes]
            again = blame.to_measure_again(seen, node_of)  # the same on all ranks: they read the same notes
            if not again:
                return
            second = links.run(rank, [[pair] for pair in again], device, self.say)
            better = {(link.source, link.target): link for link in second}
            found = [link.best(better.get((link.source, link.target), link)) for link in found]
        self.meeting.post("links", rank, [asdict(link) for link in found])

    def _values(self, device: torch.device) -> None:
        rank, members = self.place.rank, range(self.place.world)
        compared, wrong = collectives.check(members, rank, device, self.say)
        self.meeting.post("wrong", rank, [compared, [asdict(one) for one in wrong]])
        dist.barrier()
        everybody = self.meeting.read_all("wrong", self.place.world)
        seen = [Wrong(**one) for _, notes in everybody.values() for one in notes]
        if not seen:
            return
        pairs = collectives.pairs_to_check(members)
        wrong += collectives.check_pairs(pairs, rank, device, self.say)
        self.meeting.post("wrong", rank, [compared, [asdict(one) for one in wrong]])
        self.meeting.post("pairs", rank, pairs)


def live(rank: PreflightRank, beats: Meeting, until: Callable[[], bool]) -> None:
    """Start `rank` in a thread and say every half second that this process lives, until `until()` is true."""
    threading.Thread(target=rank.run, daemon=True, name="preflight").start()
    count = 0
    while True:
        count += 1
        try:
            beats.post("beat", rank.place.rank, [count, rank.stage])
            if until():
                return
        except GONE:
            return
        time.sleep(BEAT_SECONDS)

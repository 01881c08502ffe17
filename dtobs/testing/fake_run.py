"""A run that never ran: writes a real run directory, with the real writers, from a few lines. For tests and demos.

::

    run = FakeRun(tmp_path, world=4)
    for _ in range(10):
        for rank in run.ranks:
            rank.step()                                  # a healthy step of 100 ms
    run.rank(2).step(loss=float("nan"))                  # any field of STEP_DTYPE
    run.rank(1).step(forward=0.25)                       # a part of the step, in seconds
    run.rank(3).phase("data").collective("all_reduce", wait=True)
    view = run.view(later=120)                           # looked at two minutes later

Every rank has a clock of its own that starts at the same instant and advances by what it is told to do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from dtobs.events import (
    EVENT_DTYPE,
    FIRST_CUSTOM_PHASE,
    FORMAT_FIELDS,
    PHASE_BY_NAME,
    STEP_DTYPE,
    STEP_PARTS,
    Kind,
    RankState,
    group_id,
    identify,
)
from dtobs.host.process import ProcessState, boot_id
from dtobs.recording.meta import Op, Parameter, Site
from dtobs.recording.page import PAGE_FLOATS, PAGE_INTS
from dtobs.recording.pipeline_ring import PipelineWriter
from dtobs.recording.recorder import Recorder
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import RunView, load_run

HEALTHY_SECONDS = {"data": 0.001, "forward": 0.040, "backward": 0.050, "exposed": 0.005, "optimizer": 0.004}
"""The parts of a step when nobody says otherwise: 100 ms."""

_NAN_FIELDS = (
    "sample_norm",
    "reduced_norm",
    "reduced_square",
    "loss_scale",
    "model_flops",
    "private_bytes",
    "device_bytes",
    "device_peak_bytes",
    *FORMAT_FIELDS,
)


class FakeRank:
    """One rank of a FakeRun. Methods return the rank itself so that they can be chained."""

    def __init__(self, run: FakeRun, rank: int) -> None:
        self.run, self.number = run, rank
        self.clock_ns = run.start_ns
        self.next_step = 0
        self._pipeline: PipelineWriter | None = None
        self.seqs: dict[int, int] = {}  #: last collective of each group
        self.recorder = Recorder(
            run.directory,
            rank,
            run.world,
            local_rank=rank % run.ranks_per_node,
            node=rank // run.ranks_per_node,
            attempt=run.attempt,
            pid=run.pid_of(rank),
        )
        process: dict[str, Any] = {
            "pid": run.pid_of(rank),
            "host": f"host{rank // run.ranks_per_node}",
            "attach_ns": self.clock_ns,
            "clock_offset_ns": self.recorder.page.get("clock_offset_ns"),
            "steps_numbered": True,
            "boot_id": boot_id() if run.live else "of another machine",
        }
        self.recorder.meta.add("process", **process)
        if run.layout is not None:
            self.recorder.meta.add("layout", **run.layout)
        self.page(attach_ns=self.clock_ns)

    def page(self, **values: float) -> Self:
        """Set fields of the page and publish it. Raises TypeError for a field there is not."""
        for name in values:
            if name not in PAGE_INTS and name not in PAGE_FLOATS:
                raise TypeError(f"a page has no field {name!r}")
        self.recorder.page.set(**values)
        self.recorder.page.commit()
        return self

    def meta(self, type_: str, **fields: Any) -> Self:
        """Append a meta entry: ``policy``, ``layout``, ``exception``, ``probe``, ..."""
        self.recorder.meta.add(type_, **fields)
        return self

    def event(self, kind: Kind, **fields: float) -> Self:
        """Append an event at this rank's present time."""
        record = np.zeros((), EVENT_DTYPE)
        record["t_ns"], record["kind"], record["step"] = self.clock_ns, kind, max(0, self.next_step)
        for name, value in fields.items():
            record[name] = value
        self.recorder.events.append(record)
        return self

    def advance(self, seconds: float) -> Self:
        """Let this rank's clock go on."""
        self.clock_ns += round(seconds * 1e9)
        return self

    def step(self, step: int | None = None, **fields: float) -> Self:
        """Do one whole step; `fields` are parts of the step in seconds (``forward=0.2``) or fields of STEP_DTYPE.

        Without `step` it is the one after the last. What is not given is healthy: the parts of HEALTHY_SECONDS, a
        loss, norms of 1, and inputs and generators that are this rank's own. Raises TypeError for unknown fields.
        """
        number = self.next_step if step is None else step
        seconds = HEALTHY_SECONDS | {p: float(fields.pop(p)) for p in STEP_PARTS if p in fields}
        record = np.zeros((), STEP_DTYPE)
        for name in _NAN_FIELDS:
            record[name] = np.nan
        record["step"], record["begin_ns"] = number, self.clock_ns
        for part, value in seconds.items():
            record[f"{part}_ns"] = round(value * 1e9)
        wall = sum(int(record[f"{part}_ns"]) for part in STEP_PARTS)
        record["exposed_data_ns"] = record["exposed_ns"]
        healthy: dict[str, float] = {
            "end_ns": self.clock_ns + wall,
            "cpu_ns": wall - int(record["exposed_ns"]),
            "micro_batches": 1,
            "tokens": 1024,
            "loss": 2.0,
            "losses": 1,
            "learning_rate": 1e-3,
            "local_norm": 1.0,
            "nonfinite_param": -1,
            "collectives": 1,
            "collective_bytes": 4e6,
            "input_digest": identify(f"input {self.number} {number}"),
            "rng_python": identify(f"python {self.number} {number}"),
            "rng_numpy": identify(f"numpy {self.number} {number}"),
            "rng_torch": identify(f"torch {self.number} {number}"),
            "rss_bytes": 1e9,
        }
        for name, given in (healthy | fields).items():
            if name not in (STEP_DTYPE.names or ()):
                raise TypeError(f"a step has no field {name!r}")
            record[name] = given
        self._do(number, seconds, record)
        return self

    def phase(self, name: str) -> Self:
        """Enter a phase and stay in it ("" leaves it)."""
        number = _phase(name)
        if name and number >= FIRST_CUSTOM_PHASE:
            self.recorder.meta.define("phase", number, name=name)
        self.event(Kind.PHASE_BEGIN if name else Kind.PHASE_END, phase=number)
        return self.page(phase=number, phase_begin_ns=self.clock_ns, step=self.next_step, state=RankState.RUNNING)

    def collective(
        self,
        op: str | Op = "all_reduce",
        group: int | None = None,
        *,
        seq: int | None = None,
        site: Site | None = None,
        wait: bool = False,
        thread: int = 0,
        payload: float = 4096.0,
    ) -> Self:
        """Issue a collective in `group` (a number from `FakeRun.group`, default the world); `wait` for it forever.

        `thread`: number of the thread that does, 0 for the main one. `payload` is in bytes.
        """
        number = self.run.group() if group is None else group
        what = op if isinstance(op, Op) else Op(op, "sum", ((1024,),), ("float32",))
        where = site or Site("train.py", 20, "train_step")
        members = self.run.groups[number]
        at = self.seqs.get(number, 0) + 1 if seq is None else seq
        self.seqs[number] = at
        op_id, site_id = identify(str(what)), identify(str(where))
        define = self.recorder.meta.define
        define("group", number, name=members[0], ranks=members[1], backend="gloo")
        define(
            "op", op_id, op=what.op, reduce_op=what.reduce_op, shapes=what.shapes, dtypes=what.dtypes, root=what.root
        )
        define("site", site_id, file=where.file, line=where.line, function=where.function)
        by = thread or self.run.pid_of(self.number)
        self.event(Kind.COLLECTIVE, group=number, seq=at, op=op_id, site=site_id, thread=by, value=payload)
        self.page(
            collective_group=number,
            collective_seq=at,
            collective_op=op_id,
            collective_site=site_id,
            collective_ns=self.clock_ns,
            wait_since_ns=self.clock_ns if wait else 0,
            state=RankState.RUNNING,
            step=self.next_step,
        )
        if wait:
            self.event(Kind.WAIT_BEGIN, group=number, seq=at)
        return self

    def parameters(self, *rows: Parameter) -> Self:
        """The parameter table; `digests` follow its order."""
        self.recorder.parameters(rows)
        return self

    def digests(self, *values: int, step: int | None = None) -> Self:
        """Digests of all parameters after `step` (default: the last step done)."""
        number = self.next_step - 1 if step is None else step
        self.recorder.digests(number, np.array(values, np.uint64))
        return self

    def pipeline(self, op: int, begin_ns: int, end_ns: int, **fields: int) -> Self:
        """Append a record of the pipeline schedule, of the step in progress unless `step` is given."""
        if self._pipeline is None:
            path = self.run.directory.pipeline(self.number, self.run.attempt)
            self._pipeline = PipelineWriter(path)
        given = {"step": self.next_step, "micro_batch": 0, "stage": self.number, **fields}
        self._pipeline.write(op, begin_ns, end_ns, **given)
        return self

    def close(self, state: RankState = RankState.CLOSED) -> Self:
        """The rank ends by itself."""
        self.recorder.close(state)
        return self

    def _do(self, number: int, seconds: dict[str, float], record: npt.NDArray[np.void]) -> None:
        begin = self.clock_ns
        self.next_step = number
        self.event(Kind.STEP_BEGIN)
        for part, value in seconds.items():
            if part in PHASE_BY_NAME and value:
                self.event(Kind.PHASE_BEGIN, phase=PHASE_BY_NAME[part]).advance(value)
                self.event(Kind.PHASE_END, phase=PHASE_BY_NAME[part])
            else:
                self.advance(value)
        self.clock_ns = int(record["end_ns"])
        self.event(Kind.STEP_END, value=(self.clock_ns - begin) / 1e9)
        self.recorder.step(record)
        self.next_step = number + 1
        wall = self.clock_ns - begin
        self.page(
            state=RankState.RUNNING,
            step=number,
            steps_done=self.recorder.page.get("steps_done") + 1,
            step_begin_ns=begin,
            phase=0,
            phase_begin_ns=self.clock_ns,
            step_ns=wall,
            exposed_ns=int(record["exposed_ns"]),
            busy_ns=wall - int(record["exposed_ns"]),
            data_ns=int(record["data_ns"]),
            wait_since_ns=0,
            loss=float(record["loss"]),
            learning_rate=float(record["learning_rate"]),
            local_norm=float(record["local_norm"]),
            reduced_norm=float(record["reduced_norm"]),
            rss_bytes=float(record["rss_bytes"]),
        )


class FakeRun:
    """A run directory of `world` ranks below `root`.

    `live` runs look as if this very process were every rank, on this host; the others come from another machine that
    is gone. `ranks_per_node` spreads the ranks over nodes. `layout` is every rank's ``layout`` entry: by default all
    ranks are data-parallel; None leaves it unknown. `start_ns` is what all clocks show at first.
    """

    def __init__(
        self,
        root: Path,
        world: int = 2,
        *,
        live: bool = True,
        attempt: int = 0,
        ranks_per_node: int = 8,
        info: dict[str, Any] | None = None,
        start_ns: int | None = None,
        layout: dict[str, Any] | Literal["ddp"] | None = "ddp",
    ) -> None:
        self.directory = RunDirectory(root)
        self.world, self.live, self.attempt, self.ranks_per_node = world, live, attempt, ranks_per_node
        everyone = {"kind": "ddp", "data_ranks": list(range(world)), "stage": 0, "coordinates": {}, "dropout": 0}
        self.layout = everyone if layout == "ddp" else layout
        self.start_ns = time.monotonic_ns() if start_ns is None else start_ns
        self.groups: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.directory.create()
        self.directory.write_run({"name": "fake", "world_size": world, **(info or {})})
        self._ranks: dict[int, FakeRank] = {}

    def rank(self, number: int) -> FakeRank:
        """Rank `number`; a rank that is never asked for never recorded."""
        if number not in self._ranks:
            self._ranks[number] = FakeRank(self, number)
        return self._ranks[number]

    @property
    def ranks(self) -> list[FakeRank]:
        """All ranks of the world, in order."""
        return [self.rank(number) for number in range(self.world)]

    def steps(self, count: int, **fields: float) -> Self:
        """`count` equal steps of every rank."""
        for _ in range(count):
            for rank in self.ranks:
                rank.step(None, **fields)
        return self

    def group(self, name: str = "default", ranks: tuple[int, ...] | None = None) -> int:
        """The number of a process group; of the whole world without `ranks`."""
        members = tuple(range(self.world)) if ranks is None else ranks
        number = group_id(name, members)
        self.groups[number] = (name, members)
        return number

    def pid_of(self, rank: int) -> int:
        """The process id the recording names; of a dead run one that no kernel hands out."""
        return os.getpid() if self.live else 5_000_000 + rank

    def view(self, *, later: float = 0.0, processes: dict[int, ProcessState] | None = None) -> RunView:
        """The run as a reader sees it, `later` seconds after the last rank's clock.

        `processes` says what the kernel knows of ranks; the others live when the run does.
        """
        known = {
            number: ProcessState(self.pid_of(number), alive=self.live, state="S" if self.live else "")
            for number in self._ranks
        }
        view = load_run(self.directory.root, processes=known | (processes or {}))
        last = max((r.clock_ns for r in self._ranks.values()), default=self.start_ns)
        view.now_ns = last + round(later * 1e9)
        return view


def _phase(name: str) -> int:
    if not name:
        return 0
    if name in PHASE_BY_NAME:
        return int(PHASE_BY_NAME[name])
    return FIRST_CUSTOM_PHASE + identify(name) % 1000

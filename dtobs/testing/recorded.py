"""The same job as recordings: writes what a `Job`'s ranks would have recorded, so that both sources can be compared."""

from __future__ import annotations

from pathlib import Path

from dtobs.events import Kind, identify
from dtobs.recording.meta import Op, Site
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRank, FakeRun
from dtobs.testing.layout import JobLayout, step_of
from dtobs.testing.simulate import Issued, simulate
from dtobs.testing.synthetic_dumps import SimulatedJob

CALL_SECONDS = 0.001
_DTYPES = {"BFloat16": "bfloat16", "Float": "float32"}


def recording_of(job: SimulatedJob, root: Path, *, backend: str = "gloo", later: float = 600) -> RunView:
    """The run directory that the ranks of `job` would have left, looked at `later` seconds after its last call."""
    layout = job.layout
    outcome = simulate(layout, job.faults, job.simulated_steps, job.run_ahead)
    run = FakeRun(root, world=layout.world_size, ranks_per_node=1024)
    before = job.steps - job.simulated_steps
    for rank, issued in enumerate(outcome.issued):
        done = [
            Issued(call, "completed", step - before)
            for step in range(before)
            for call in step_of(layout, layout.stage(rank)).calls
        ]
        _Writer(run, layout, rank, backend).write([*done, *issued], before)
    return run.view(later=later)


class _Writer:
    """Writes one rank's calls: collectives into their groups, messages counted for each peer and direction."""

    def __init__(self, run: FakeRun, layout: JobLayout, rank: int, backend: str) -> None:
        self.run, self.layout, self.backend = run, layout, backend
        self.rank: FakeRank = run.rank(rank)
        self.messages: dict[tuple[int, str, int], int] = {}

    def write(self, calls: list[Issued], before: int) -> None:
        """All calls in order, and a step for each that is done; the last one that is not complete is waited for."""
        for place, made in enumerate(calls):
            step = before + made.step
            if step > self.rank.next_step:
                self.rank.step(step - 1)
            self._call(made, waits=made.state != "completed" and place == len(calls) - 1)
            self.rank.advance(CALL_SECONDS)

    def _call(self, made: Issued, *, waits: bool) -> None:
        call, number = made.call, self.rank.number
        members = tuple(self.layout.members(number, call.axis))
        group = self.run.group(self.layout.group_name(number, call.axis), members)
        file, line, function = call.site.split(":")
        reduce_op = "sum" if call.operation == "all_reduce" else ""
        op = Op(call.operation, reduce_op, (call.size,), (_DTYPES.get(call.dtype, call.dtype),))
        site = Site(file, int(line), function)
        meta = self.rank.recorder.meta
        meta.define("group", group, name=self.run.groups[group][0], ranks=members, backend=self.backend)
        if not call.peer_offset:
            self.rank.collective(op, group, site=site, wait=waits)
            return
        peer = members[members.index(number) + call.peer_offset]
        key = (group, call.operation, peer)
        seq = self.messages[key] = self.messages.get(key, 0) + 1
        ids = identify(str(op)), identify(str(site))
        meta.define("op", ids[0], op=op.op, reduce_op="", shapes=op.shapes, dtypes=op.dtypes, root=-1)
        meta.define("site", ids[1], file=site.file, line=site.line, function=site.function)
        self.rank.event(Kind.P2P, group=group, seq=seq, op=ids[0], site=ids[1], value=float(peer))
        if waits:
            self.rank.event(Kind.WAIT_BEGIN, group=group, seq=seq)
            self.rank.page(wait_since_ns=self.rank.clock_ns, step=self.rank.next_step)

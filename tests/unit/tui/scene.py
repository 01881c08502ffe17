"""A run to look at: eight ranks on two hosts, one of them stuck in its data loader while the others wait for it.

``python -m tests.unit.tui.scene`` draws it into ``dtobs/tui/top.svg``, the picture of the README.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from textual.worker import WorkerCancelled

from dtobs.errors import UsageError
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.recording.journal import Entry, open_entries, read_journal
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun
from dtobs.tui.app import TopApp
from dtobs.tui.detail import RankDetail, rank_detail
from dtobs.tui.model import ScreenFrame, build_frame

STUCK = 5
SLOW = 2
PICTURE = Path("dtobs/tui/top.svg")


def stalled_run(root: Path, *, steps: int = 120) -> FakeRun:
    """The run as it stands 42 s after rank 5 stopped reading data; two findings are open."""
    info = {
        "name": "llama-small",
        "mesh": {"dim_names": ["replicate", "shard"], "shape": [4, 2]},
        "config": {"run": {"steps": 2000, "peak_flops": 60e12}},
    }
    run = FakeRun(root, 8, live=False, ranks_per_node=4, info=info)
    noise = random.Random(3)
    for step in range(1120, 1120 + steps):
        loss = 2.2 + 3.1 * math.exp(-(step - 1120) / 45) + noise.gauss(0, 0.03)
        busy = {r: 0.52 + (0.11 if r == SLOW else 0.0) + abs(noise.gauss(0, 0.008)) for r in range(8)}
        slowest = max(busy.values())
        for rank in run.ranks:
            own = busy[rank.number]
            first = rank.clock_ns + round(own * 0.62e9)
            rank.step(
                step,
                data=0.02,
                forward=own * 0.34,
                backward=own * 0.6,
                exposed=slowest - own + 0.015,
                optimizer=own * 0.06 - 0.02,
                loss=loss + noise.gauss(0, 0.02),
                local_norm=1.1 + abs(noise.gauss(0, 0.1)),
                reduced_norm=0.84,
                sync_group=run.group(),
                sync_seq=step,
                sync_ns=first,
                rss_bytes=5.1e9 + rank.number * 4e7,
            )
            rank.page(model_flops=1.36e13, global_tokens=(step - 1119) * 65536.0, validation_loss=2.613)
    for rank in run.ranks:
        if rank.number == STUCK:
            rank.collective("all_reduce").page(wait_since_ns=0)
            rank.phase("data")
        else:
            rank.advance(0.4).phase("backward").advance(0.1).collective("all_reduce").collective(
                "all_reduce", wait=True
            )
    return run


def findings(run: FakeRun) -> list[Finding]:
    """What a monitor would have found, oldest first."""
    stuck_since = run.rank(STUCK).clock_ns
    return [
        Finding(
            "straggler",
            "Rank 2 works 118 ms longer than its peers in every step (21%): the job goes at its pace",
            (SLOW,),
            step=1174,
            evidence=({"what": "own time, median of 64 steps", "rank": SLOW, "seconds": 0.64, "peers": 0.52},),
            since_ns=stuck_since - 60_000_000_000,
        ),
        Finding(
            "stuck-in-dataloader",
            "Rank 5 has waited for its data for 42 s at queue.get (train.py:88); its 7 peers wait for it in all_reduce",
            (STUCK,),
            step=1240,
            evidence=(
                {"what": "phase", "rank": STUCK, "phase": "data", "seconds": 42.0},
                {"what": "stack", "rank": STUCK, "frame": "train.py:88 in next_batch"},
            ),
            since_ns=stuck_since,
        ),
    ]


def write_findings(run: FakeRun) -> None:
    """Put them into the run's journal."""
    entries = [Entry("found", "2026-11-20T12:00:42+00:00", f.since_ns, 0, f) for f in findings(run)]
    run.directory.findings.write_text("".join(json.dumps(e.to_json()) + "\n" for e in entries))


class FakeSource:
    """A source over a FakeRun: every look is `later` seconds after the last rank's clock."""

    def __init__(self, run: FakeRun, later: float = 42.0) -> None:
        self.run, self.later, self.looks = run, later, 0
        self.processes: dict[int, ProcessState] = {}
        self._view: RunView | None = None

    def view(self) -> RunView:
        """The run with all its processes alive, but for those in `processes`."""
        alive = {r: ProcessState(1000 + r, alive=True, state="S") for r in range(self.run.world)}
        view = self.run.view(later=self.later, processes=alive | self.processes)
        # The pages were published now; on the run's own clock they were when each rank did its last thing.
        clocks = {r: self.run.rank(r).clock_ns + view._clock.get(r, 0) for r in view.ranks}
        view.pages["heartbeat_ns"] = list(clocks.values())
        return view

    def look(self) -> ScreenFrame:
        """A new frame."""
        self.looks += 1
        self._view = self.view()
        entries = open_entries(read_journal(self.run.directory.findings))
        return replace(build_frame(self._view, entries), target="runs/20261120T115800Z-llama-small")

    def detail(self, rank: int) -> RankDetail | None:
        """One rank of the last look."""
        return rank_detail(self._view, rank) if self._view is not None else None

    def profile(self, steps: int) -> str:
        """Nobody is asked."""
        if not self.run.live:
            raise UsageError("the run has ended")
        return f"{steps} steps will be profiled"


async def draw(size: tuple[int, int] = (138, 28), *keys: str) -> str:
    """The screen of the scene as SVG, after `keys`."""
    with tempfile.TemporaryDirectory() as folder:
        run = stalled_run(Path(folder) / "run")
        write_findings(run)
        app = TopApp(FakeSource(run), interval=60.0)
        async with app.run_test(size=size) as pilot:
            await settle(app, pilot.pause)
            for key in keys:
                await pilot.press(key)
                await settle(app, pilot.pause)
            return app.export_screenshot(title="dtobs top")


async def settle(app: TopApp, pause: object) -> None:
    """Wait until the looks that were begun are on the screen."""
    try:
        await app.workers.wait_for_complete()
    except WorkerCancelled:  # by the end of the app
        return
    await pause()  # type: ignore[operator]


if __name__ == "__main__":
    PICTURE.write_text(asyncio.run(draw()), encoding="utf-8")

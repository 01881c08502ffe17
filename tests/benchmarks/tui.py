"""What the live screen costs: ``python -m tests.benchmarks.tui [RANKS]``. Process CPU time of one look and one draw."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtobs.testing.fake_run import FakeRun
from dtobs.tui.app import TopApp
from dtobs.tui.order import Order
from dtobs.tui.source import DirectorySource
from tests.unit.tui.scene import settle


@contextmanager
def _timed(label: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    print(f"{label:<34}{(time.process_time() - begin) * 1e3:8.1f} ms")


async def measure(ranks: int) -> None:
    """Print the figures of a run of `ranks` ranks whose every figure changes between looks."""
    with tempfile.TemporaryDirectory() as folder:
        run = FakeRun(Path(folder) / "run", ranks, ranks_per_node=8)
        for rank in run.ranks:
            rank.step(forward=0.04 + rank.number * 1e-5)
        source = DirectorySource(run.directory.root)
        with _timed("first look"):
            source.look()
        app = TopApp(source, interval=3600.0, order=Order("busy"))
        async with app.run_test(size=(140, 45)) as pilot:
            await settle(app, pilot.pause)
            for _ in range(3):
                for rank in run.ranks:
                    rank.step(forward=0.04 + (rank.number * 7919 % ranks) * 1e-5)
                with _timed("a look"):
                    frame = source.look()
                with _timed("a draw, all figures changed"):
                    app.show_frame(frame)
                    await pilot.pause()
                with _timed("a look, no step since the last"):
                    source.look()


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1024))

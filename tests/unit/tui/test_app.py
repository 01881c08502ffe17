"""The live screen, driven by keys: what its widgets hold."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from textual.pilot import Pilot

from dtobs.errors import TargetError
from dtobs.events import RankState
from dtobs.testing.fake_run import FakeRun
from dtobs.tui.app import TopApp
from dtobs.tui.findings_panel import FindingsPanel
from dtobs.tui.model import ScreenFrame
from dtobs.tui.order import Order
from dtobs.tui.screens import RankScreen, ScreenPanel
from dtobs.tui.table import RankTable
from tests.unit.tui.scene import SLOW, STUCK, FakeSource, draw, settle, stalled_run, write_findings

SIZE = (138, 34)


@asynccontextmanager
async def screen(
    source: FakeSource,
    size: tuple[int, int] = SIZE,
    *,
    order: Order | None = None,
    exit_with_run: bool = False,
) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    app = TopApp(source, interval=3600.0, order=order, exit_with_run=exit_with_run)
    async with app.run_test(size=size) as pilot:
        await settle(app, pilot.pause)
        yield app, pilot


async def look_again(app: TopApp, pilot: Pilot[None]) -> None:
    app.tick()
    await settle(app, pilot.pause)


def table_of(app: TopApp) -> RankTable:
    return app.screen_stack[0].query_one(RankTable)


def cell(app: TopApp, rank: int, column: str) -> str:
    return table_of(app).get_cell(str(rank), column).plain.strip()


def rows_on_screen(app: TopApp) -> list[int]:
    table = table_of(app)
    return [int(table.get_row_at(i)[0].plain.split()[-1]) for i in range(table.row_count)]


def scene(tmp_path: Path) -> FakeSource:
    run = stalled_run(tmp_path / "run", steps=20)
    write_findings(run)
    return FakeSource(run)


async def test_what_is_shown(tmp_path: Path) -> None:
    async with screen(scene(tmp_path)) as (app, _):
        assert rows_on_screen(app) == list(range(8))
        assert cell(app, STUCK, "state") == "loading"
        assert cell(app, STUCK, "rank") == "● 5"
        assert cell(app, 0, "state") == "waits in all_reduce"
        assert cell(app, 0, "phase") == "backward 42 s"
        assert cell(app, SLOW, "busy").endswith(" ms")
        panel = app.query_one(FindingsPanel)
        assert panel.option_count == 2
        assert panel.chosen is not None
        assert panel.chosen.code == "stuck-in-dataloader"


async def test_values_change_in_place(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 3).steps(4)
    async with screen(FakeSource(run, 0.1)) as (app, pilot):
        await pilot.press("down", "down")
        assert table_of(app).selected_rank == 2
        assert not app.query_one(FindingsPanel).display
        for _ in range(20):  # medians of the last steps are shown
            run.rank(1).step(forward=0.5)
        await look_again(app, pilot)
        assert cell(app, 1, "busy") == "555 ms"
        assert cell(app, 0, "busy") == "95.0 ms"
        assert table_of(app).selected_rank == 2


async def test_sort_and_reverse(tmp_path: Path) -> None:
    async with screen(scene(tmp_path)) as (app, pilot):
        await pilot.press("s", "s")
        assert app.order == Order("busy")
        assert rows_on_screen(app)[0] == SLOW
        assert app.query_one(RankTable).columns["busy"].label.plain == "busy ▾"  # type: ignore[index]
        await pilot.press("r")
        assert rows_on_screen(app)[-1] == SLOW


async def test_the_cursor_follows_its_rank_when_the_order_changes(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 3).steps(1)
    async with screen(FakeSource(run, 0.1), order=Order("busy")) as (app, pilot):
        assert rows_on_screen(app) == [0, 1, 2]
        await pilot.press("down")
        run.rank(2).step(forward=0.9)
        run.rank(0).step(forward=0.01)
        await look_again(app, pilot)
        assert rows_on_screen(app) == [2, 1, 0]
        assert table_of(app).selected_rank == 1
        run.rank(1).step(forward=2.0)
        await look_again(app, pilot)
        assert rows_on_screen(app) == [1, 2, 0]
        assert table_of(app).selected_rank == 1


async def test_filter_and_back(tmp_path: Path) -> None:
    async with screen(scene(tmp_path)) as (app, pilot):
        await pilot.press("f")
        assert rows_on_screen(app) == [SLOW, STUCK]
        assert table_of(app).border_title == "suspicious ranks (2 of 8)"
        await pilot.press("f")
        assert rows_on_screen(app) == list(range(8))


async def test_pause(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2).steps(1)
    source = FakeSource(run, 0.1)
    async with screen(source) as (app, pilot):
        await pilot.press("space")
        looks = source.looks
        run.steps(5)
        await look_again(app, pilot)
        assert source.looks == looks
        assert cell(app, 0, "step") == "0"
        await pilot.press("p")
        await settle(app, pilot.pause)
        assert cell(app, 0, "step") == "5"


async def test_rank_in_full_stays_live(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2).steps(3)
    async with screen(FakeSource(run, 0.1)) as (app, pilot):
        await pilot.press("down", "enter")
        await settle(app, pilot.pause)
        assert isinstance(app.screen, RankScreen)
        assert app.screen.rank == 1
        assert "last steps" in app.export_screenshot().replace("&#160;", " ")
        run.rank(1).step(41)
        await look_again(app, pilot)
        assert "41" in app.export_screenshot()
        await pilot.press("escape")
        assert not isinstance(app.screen, RankScreen)


async def test_evidence_and_help(tmp_path: Path) -> None:
    async with screen(scene(tmp_path)) as (app, pilot):
        await pilot.press("tab", "down", "enter")
        assert isinstance(app.screen, ScreenPanel)
        assert "own&#160;time,&#160;median" in app.export_screenshot()
        await pilot.press("q")
        assert not isinstance(app.screen, ScreenPanel), "q closes the sheet first"
        await pilot.press("question_mark")
        assert isinstance(app.screen, ScreenPanel)
        await pilot.press("escape")


async def test_a_key_asks_for_a_profile_and_tells(tmp_path: Path) -> None:
    source = scene(tmp_path)
    async with screen(source) as (app, pilot):
        source.run.live = True
        await pilot.press("t")
        await settle(app, pilot.pause)
        source.run.live = False
        await pilot.press("t")
        await settle(app, pilot.pause)
        told = {note.message: note.severity for note in app._notifications}
        assert told == {"3 steps will be profiled": "information", "the run has ended": "warning"}


async def test_findings_come_and_go_and_the_highlight_stays(tmp_path: Path) -> None:
    source = scene(tmp_path)
    journal = source.run.directory.findings
    both = journal.read_text()
    async with screen(source) as (app, pilot):
        panel = app.query_one(FindingsPanel)
        await pilot.press("tab", "down")
        assert panel.chosen is not None
        assert panel.chosen.code == "straggler"
        first = json.loads(both.splitlines()[1])
        journal.write_text(both + json.dumps({**first, "event": "cleared"}) + "\n")
        await look_again(app, pilot)
        assert panel.option_count == 1
        assert panel.chosen.code == "straggler"
        journal.write_text("")
        await look_again(app, pilot)
        assert not panel.display


async def test_it_fits_a_small_terminal_and_grows(tmp_path: Path) -> None:
    async with screen(scene(tmp_path), (80, 24)) as (app, pilot):
        narrow = set(table_of(app).columns)
        assert table_of(app).size.height >= 4
        await pilot.resize_terminal(200, 50)
        await settle(app, pilot.pause)
        assert narrow < set(table_of(app).columns)
        assert "host" in {str(k.value) for k in table_of(app).columns}
        assert rows_on_screen(app) == list(range(8))
        await pilot.resize_terminal(40, 10)
        await settle(app, pilot.pause)


async def test_new_ranks_appear(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 3)
    async with screen(FakeSource(run, 0.1)) as (app, pilot):
        assert rows_on_screen(app) == []
        run.rank(2).step()
        await look_again(app, pilot)
        assert table_of(app).border_subtitle == "2 ranks have not recorded"
        run.rank(0).step()
        await look_again(app, pilot)
        assert rows_on_screen(app) == [0, 2]


async def test_it_ends_with_the_run_when_asked(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 2).steps(1)
    async with screen(FakeSource(run, 0.1), exit_with_run=True) as (app, pilot):
        assert app.is_running
        for rank in run.ranks:
            rank.page(state=RankState.CLOSED)
        await look_again(app, pilot)
    assert app.return_code == 0
    run = FakeRun(tmp_path / "stays", 2).steps(1)
    async with screen(FakeSource(run, 0.1)) as (app, pilot):
        for rank in run.ranks:
            rank.page(state=RankState.CLOSED)
        await look_again(app, pilot)
        assert cell(app, 0, "state") == "finished"
        await pilot.press("q")
    assert app.return_code == 0


class Broken(FakeSource):
    def look(self) -> ScreenFrame:
        raise TargetError("it is something else now")


async def test_an_error_ends_the_screen_with_its_code(tmp_path: Path) -> None:
    app = TopApp(Broken(FakeRun(tmp_path / "run", 1)))
    async with app.run_test() as pilot:
        await settle(app, pilot.pause)
    assert app.return_code == 1


async def test_a_thousand_ranks_show_the_worst(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", 300, ranks_per_node=64)
    for rank in run.ranks:
        rank.page(state=RankState.RUNNING, steps_done=1)
    run.rank(277).page(state=RankState.FAILED)
    async with screen(FakeSource(run, 0.1)) as (app, _):
        assert table_of(app).row_count == 256
        assert 277 in rows_on_screen(app)
        assert table_of(app).border_title == "256 of 300 ranks, those that differ first"


async def test_the_picture_of_the_readme_is_what_the_screen_shows() -> None:
    shown = await draw()
    kept = Path("dtobs/tui/top.svg").read_text(encoding="utf-8")
    assert _words(shown) == _words(kept), "draw it again: python -m tests.unit.tui.scene"


def _words(svg: str) -> list[str]:
    import re

    return re.findall(r">([^<>{}]+)</text>", svg)

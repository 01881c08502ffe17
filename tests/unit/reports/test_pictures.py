"""The pictures of the reports: what is in them for a job of dumps and for a recorded run, at 2, 64 and 1,024 ranks."""

from __future__ import annotations

import json as stdlib_json
import re
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest

from dtobs.cli import main
from dtobs.diagnose import Diagnosis, diagnose
from dtobs.diagnose.dumps import diagnosis_of
from dtobs.diagnose.gather import Evidence
from dtobs.diagnose.pictures import Cell, RankWait, call_grid, wait_picture
from dtobs.flight_recorder import dumps_from_objects
from dtobs.host.process import ProcessState
from dtobs.reports import html, json, text
from dtobs.testing.fake_run import FakeRun
from dtobs.testing.layout import JobLayout
from dtobs.testing.simulate import SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of

LAYOUTS = {2: JobLayout(2, 1, 1), 64: JobLayout(4, 4, 4), 1024: JobLayout(32, 8, 4, layers=1, micro_batches=1)}
FAULTS = [
    SimulatedFault("rank-not-joined", 21, "tp"),
    SimulatedFault("device-stopped", 21, "tp"),
    SimulatedFault("network-stalled", 21, "dp"),
    SimulatedFault("shape-mismatch", 21, "dp"),
    SimulatedFault("call-site-mismatch", 21, "dp"),
    SimulatedFault("dumps-missing", 21, "tp"),
    SimulatedFault("group-deadlock", 21),
    SimulatedFault("p2p-unmatched", 21),
]


def of_dumps(world: int, fault: SimulatedFault | None) -> Diagnosis:
    job = SimulatedJob(LAYOUTS[world], fault, entries=60, steps=6)
    return diagnosis_of("dumps", dumps_from_objects(dict(dumps_of(job))))


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """Four ranks of which one stays in its data while the others wait."""
    run = FakeRun(tmp_path_factory.mktemp("run"), 4, info={"versions": {"torch": "2.13.0"}, "config": {"lr": 0.1}})
    run.steps(8)
    for rank in run.ranks:
        if rank.number == 2:
            rank.phase("data")
        else:
            rank.phase("backward").collective("all_reduce", wait=True)
    return diagnose(Evidence("runs/x", run.view(later=300)))


class Document(HTMLParser):
    """Collects what a browser would load or run, and whether every element is closed."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.tags: set[str] = set()
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda f: f.name if f else "healthy")
def test_reports_of_dumps(fault: SimulatedFault | None):
    diagnosis = of_dumps(64, fault)
    page = Document(html.render(diagnosis))
    assert not page.tags & {"script", "img", "link", "iframe", "object"}
    assert not {name for name in page.attributes if name.startswith("on")} | page.attributes & {"src", "href"}
    assert max(map(len, text.render(diagnosis, 80).splitlines())) <= 80
    jsonschema.validate(stdlib_json.loads(json.render(diagnosis)), stdlib_json.loads(json.schema()))


@pytest.mark.parametrize("world", [2, 64, 1024])
def test_size_and_verdict_first(world: int):
    diagnosis = of_dumps(world, SimulatedFault("rank-not-joined", 1, "dp"))
    page = html.render(diagnosis)
    assert len(page.encode()) < (2_000_000 if world <= 64 else 8_000_000)
    order = [
        "<h1",
        "Who waits for whom",
        "What every rank did",
        "Last calls",
        "Findings",
        "Ranks<",
        "Environment",
    ]
    places = [page.index(part) for part in order]
    assert places == sorted(places)


def test_picture_of_waits_ends_at_the_cause():
    waits = of_dumps(64, SimulatedFault("rank-not-joined", 21, "tp")).pictures.waits
    assert waits is not None
    (cause,) = [index for index, node in enumerate(waits.nodes) if node.accused]
    assert (waits.nodes[cause].ranks, waits.nodes[cause].waits) == ((21,), False)
    assert all(source != cause for source, _ in waits.edges)
    assert sorted(rank for node in waits.nodes for rank in node.ranks) == list(range(64))


def test_a_circle_is_drawn_as_one():
    diagnosis = of_dumps(64, SimulatedFault("group-deadlock", 21))
    waits = diagnosis.pictures.waits
    assert waits is not None
    by_ranks = {node.ranks: index for index, node in enumerate(waits.nodes)}
    assert (by_ranks[21,], by_ranks[5, 37, 53]) in waits.edges
    assert (by_ranks[5, 37, 53], by_ranks[21,]) in waits.edges


def test_who_made_the_call_that_does_not_fit_is_waited_for():
    pictures = of_dumps(64, SimulatedFault("shape-mismatch", 21, "dp")).pictures
    assert pictures.waits is not None
    by_ranks = {node.ranks: index for index, node in enumerate(pictures.waits.nodes)}
    assert (by_ranks[5, 37, 53], by_ranks[21,]) in pictures.waits.edges
    table = pictures.calls[0]
    assert table.columns == ((21,), (5, 37, 53))
    assert [(cell.state, cell.odd) for cell in table.rows[-1]] == [("waiting", True), ("waiting", False)]
    assert "[4096, 1031]" in table.rows[-1][0].text


def test_a_healthy_job_waits_for_nobody():
    pictures = of_dumps(64, None).pictures
    assert pictures.waits is None
    assert pictures.calls == ()
    assert pictures.strip is not None


def test_a_recorded_run(hung: Diagnosis):
    pictures = hung.pictures
    assert pictures.waits is not None
    (cause,) = [node for node in pictures.waits.nodes if node.accused]
    assert (cause.ranks, cause.text) == ((2,), "loading in data")
    (waiting,) = [node for node in pictures.waits.nodes if node.waits]
    assert waiting.ranks == (0, 1, 3)
    assert pictures.strip is not None
    ends = [pictures.strip.kinds[kind] for kind in pictures.strip.cells[:, -1].tolist()]
    assert ends == ["waits", "waits", "data", "waits"]
    assert {"forward", "backward"} <= {
        pictures.strip.kinds[kind] for kind in set(pictures.strip.cells.ravel().tolist())
    }
    (table,) = pictures.calls
    assert table.columns == ((2,), (0, 1, 3))
    assert [cell.state for cell in table.rows[-1]] == ["missing", "waiting"]
    assert ("config lr", "0.1") in pictures.environment
    page = html.render(hung)
    assert "torch 2.13.0" in page
    assert page.count("<svg") >= 2
    Document(page)
    shown = text.render(hung, 80)
    assert "ranks 0, 1 and 3 wait in all_reduce" in shown
    assert re.search(r"#1 .*not issued +waits", shown)
    assert max(map(len, shown.splitlines())) <= 80


def test_a_rank_suspended_in_a_collective_waits_for_nobody(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    run.steps(8)
    for rank in run.ranks:
        rank.phase("backward").collective("all_reduce", wait=rank.number == 1)
    run.rank(0).collective("all_reduce", wait=True)
    stopped = {1: ProcessState(4242, alive=True, state="T")}
    waits = diagnose(Evidence("runs/x", run.view(later=300, processes=stopped))).pictures.waits
    assert waits is not None
    said = {node.ranks: (node.text, node.waits) for node in waits.nodes}
    assert said[1,] == ("suspended in all_reduce(sum, float32[1024]) #1 of default", False)
    assert said[0,] == ("all_reduce(sum, float32[1024]) #2 of default", True)


def test_the_states_of_ranks_break_between_words_on_a_phone(hung: Diagnosis):
    page = html.render(hung)
    for status in hung.ranks.values():
        assert f'<td class="number">{status.rank}</td><td class="word">{status.state}' in page
    assert "td.word { overflow-wrap: break-word; }" in page


def test_a_healthy_run_is_drawn_without_waits(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    run.steps(8)
    pictures = diagnose(Evidence("x", run.view(later=1))).pictures
    assert (pictures.waits, pictures.calls) == (None, ())


def test_many_different_ranks_become_few_boxes():
    waits = {rank: RankWait(f"call {rank}", on=(99,)) for rank in range(50)}
    picture = wait_picture(waits | {99: RankWait("nothing", waits=False)}, frozenset({99}))
    assert picture is not None
    assert len(picture.nodes) <= 14
    assert sorted(rank for node in picture.nodes for rank in node.ranks) == [*range(50), 99]


def test_a_shorter_ring_does_not_make_a_rank_different():
    done, gone, missing = Cell("completed", "x"), Cell("gone"), Cell("missing")
    cells = {0: (done, done, done), 1: (gone, done, done), 2: (gone, gone, missing)}
    table = call_grid("g", (1, 2, 3), cells)
    assert table.columns == ((2,), (0, 1))
    assert table.rows[0] == (gone, done)


def test_hostile_names_stay_text(tmp_path: Path):
    dumps = dict(
        dumps_of(SimulatedJob(JobLayout(2, 1, 1), SimulatedFault("rank-not-joined", 1, "dp"), entries=30, steps=6))
    )
    for dump in dumps.values():
        for entry in dump["entries"]:
            entry["process_group"] = (entry["process_group"][0], "<script>alert(1)</script>\x1b[2J\ud800")
    diagnosis = diagnosis_of("<img src=x onerror=alert(2)>", dumps_from_objects(dumps))
    page = html.render(diagnosis)
    document = Document(page)
    assert not document.tags & {"script", "img"}
    assert "&lt;script&gt;" in page
    (tmp_path / "x.html").write_text(page, encoding="utf-8")
    assert "\x1b" not in text.render(diagnosis)
    assert "\ud800" in stdlib_json.loads(json.render(diagnosis))["findings"][0]["group"]


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["diagnose", "--json-schema"]) == 0
    schema = stdlib_json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == "dtobs.diagnosis/1"


def test_evidence_that_json_cannot_say_is_null():
    diagnosis = of_dumps(2, SimulatedFault("rank-not-joined", 1, "dp"))
    diagnosis.findings[0].evidence[0].update(value=float("nan"), deep=_nested(2000))
    assert stdlib_json.loads(json.render(diagnosis))["findings"][0]["evidence"][0]["value"] is None


def _nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value

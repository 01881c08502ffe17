"""The MCP server, asked by the SDK's own client over standard input and output; answers are bounded and only read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import pytest

from dtobs.cli import main
from dtobs.mcp.answers import MAX_CHARACTERS, Answers, bounded
from dtobs.testing.fake_run import FakeRun
from tests.unit.logs.generator import CASES, write


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    case = next(case for case in CASES if case.name == "not-joined")
    write(tmp_path, "slurm", case.lines("2.5", 4, 2), [], Random(1))
    return tmp_path


async def test_over_stdio(logs: Path):
    mcp = pytest.importorskip("mcp")
    command = mcp.StdioServerParameters(command=sys.executable, args=["-m", "dtobs", "mcp", str(logs)])
    before = {path: path.stat().st_mtime_ns for path in logs.rglob("*")}
    async with mcp.Client(command) as client:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == ["diagnose", "findings", "ranks", "timeline", "metrics"]
        assert all(tool.annotations.read_only_hint and tool.description for tool in tools)
        said = json.loads((await client.call_tool("diagnose", {})).content[0].text)
        assert (said["verdict"]["code"], said["verdict"]["ranks"]) == ("rank-not-joined", [2])
        said = json.loads((await client.call_tool("ranks", {"first": 1, "count": 2})).content[0].text)
        assert list(said["ranks"]) == ["1", "2"]
        said = json.loads((await client.call_tool("metrics", {})).content[0].text)
        assert said["error"].startswith("this target is no run directory")
    assert {path: path.stat().st_mtime_ns for path in logs.rglob("*")} == before


def test_the_configuration_that_a_client_needs(logs: Path, monkeypatch, capsys):
    monkeypatch.chdir(logs.parent)
    assert main(["mcp", "--json", logs.name, "http://127.0.0.1:9400"]) == 0
    entry = json.loads(capsys.readouterr().out)["mcpServers"]["dtobs"]
    assert entry == {"command": sys.executable, "args": ["-m", "dtobs", "mcp", str(logs), "http://127.0.0.1:9400"]}


def test_run_directory(tmp_path: Path):
    run = FakeRun(tmp_path / "runs" / "20261120T120000Z-x", 2)
    run.steps(5)
    answers = Answers([str(run.directory.root)])
    assert answers.diagnose()["world_size"] == 2
    assert answers.timeline(rank=1, steps=2)["steps"] == [4, 5] or len(answers.timeline(rank=1, steps=2)["steps"]) == 2
    assert {span["track"] for span in answers.timeline(rank=1)["spans"]} >= {"steps"}
    assert answers.timeline(rank=7) == {"error": "rank 7 has recorded nothing: there are ranks 0 and 1"}
    found = answers.metrics("step", rank=1)["metrics"]
    assert found
    assert all(sample.get("rank", "1") == "1" for samples in found.values() for sample in samples)


def test_thousand_ranks_stay_within_bounds(tmp_path: Path):
    run = FakeRun(tmp_path / "runs" / "20261120T120000Z-x", 64)
    run.steps(5)
    answers = Answers([str(run.directory.root)])
    for said in (answers.ranks(count=10_000), answers.metrics(), answers.findings(count=1000), answers.diagnose()):
        assert len(json.dumps(said)) <= MAX_CHARACTERS + 200
    assert answers.ranks(count=2)["total"] == 64


def test_bounded():
    assert bounded({"a": 1}) == {"a": 1}
    long = bounded({"a": ["x" * 5000] * 5000, "b": {str(n): [n] * 100 for n in range(5000)}})
    assert len(json.dumps(long)) <= MAX_CHARACTERS + 200
    assert "ask for fewer" in long["left_out"]


def test_target_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert main(["mcp", "/nowhere/at/all"]) == 1
    assert "there is no /nowhere/at/all" in capsys.readouterr().err

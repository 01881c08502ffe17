"""`dtobs diagnose DUMPS/`: the command on folders of Flight Recorder dumps."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import jsonschema
import pytest

import dtobs.reports
from dtobs.cli import main
from dtobs.diagnose import holds_dumps
from dtobs.flight_recorder.snapshot import BY_FILE_TIMES
from dtobs.testing.layout import JobLayout
from dtobs.testing.simulate import SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, write_dumps
from tests.unit.flight_recorder.builders import BASE_NS, call, dump

SCHEMA = json.loads((Path(dtobs.reports.__file__).parent / "diagnosis.schema.json").read_text())
LAYOUT = JobLayout(dp=3, tp=1, pp=1)


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    folder = tmp_path / "dumps"
    write_dumps(SimulatedJob(LAYOUT, SimulatedFault("rank-not-joined", 1, "dp"), entries=30, steps=8), folder)
    return folder


def test_text(hung: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["diagnose", str(hung)]) == 4
    text = capsys.readouterr().out
    assert text.startswith("Rank 1 has not issued all_reduce [4096, 1024] Float")
    assert "rank-not-joined (critical, likely)" in text
    assert "   0  waiting" in text


def test_json_is_of_the_published_schema(hung: Path, capsys: pytest.CaptureFixture[str]):
    (hung / "nccl_trace_rank_0").unlink()
    assert main(["diagnose", "--json", str(hung)]) == 4
    value = json.loads(capsys.readouterr().out)
    jsonschema.validate(value, SCHEMA)
    assert value["verdict"]["code"] == "rank-not-joined"
    assert value["verdict"]["ranks"] == [1]
    assert (value["missing_ranks"], value["world_size"]) == ([0], 3)


def test_html(hung: Path, tmp_path: Path):
    assert main(["diagnose", str(hung), "--html", str(tmp_path / "report.html")]) == 4
    assert "rank-not-joined" in (tmp_path / "report.html").read_text()


def test_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_dumps(SimulatedJob(LAYOUT, None, entries=30, steps=8), tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("nothing found")


def test_damaged_files_are_noted(hung: Path, capsys: pytest.CaptureFixture[str]):
    (hung / "nccl_trace_rank_2").write_bytes(b"\x80\x02")
    assert main(["diagnose", str(hung)]) == 4
    text = " ".join(capsys.readouterr().out.split())
    assert "note: not used:" in text
    assert "nccl_trace_rank_2: it is cut off: the process died while it wrote the dump" in text


def test_reports_for_programs_and_browsers_say_what_was_not_used(
    hung: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (hung / "nccl_trace_rank_1").write_bytes(b"\x80\x02")
    main(["diagnose", "--json", str(hung), "--html", str(tmp_path / "report.html")])
    value = json.loads(capsys.readouterr().out)
    jsonschema.validate(value, SCHEMA)
    (note,) = [note for note in value["notes"] if note.startswith("not used: ")]
    assert note.endswith("nccl_trace_rank_1: it is cut off: the process died while it wrote the dump")
    assert "it is cut off" in (tmp_path / "report.html").read_text()


def _motion(folder: Path, behind: int) -> None:
    """Rank 2 is `behind` calls behind the others, as every rank of a job in motion may be."""
    for rank in range(3):
        calls = [call(seq, at_ns=BASE_NS + seq * 10**7) for seq in range(1, 100 - behind * (rank == 2) + 1)]
        for waiting in calls[100 - behind :]:
            waiting |= {"state": "started", "retired": False}
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(pickle.dumps(dump(calls, {"0": [0, 1, 2]}), protocol=2))
        os.utime(path, ns=(BASE_NS + 1001 * 10**6, BASE_NS + 1001 * 10**6))


@pytest.mark.parametrize(("behind", "confidence"), [(1, "likely"), (2, "likely"), (3, "certain")])
def test_a_copy_without_times_makes_nothing_certain(
    behind: int, confidence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _motion(tmp_path, behind)
    assert main(["diagnose", "--json", str(tmp_path)]) == 0
    assert "the dumps show a job in motion" in capsys.readouterr().out
    for path in tmp_path.iterdir():
        os.utime(path, ns=(BASE_NS + 3600 * 10**9, BASE_NS + 3600 * 10**9))
    assert main(["diagnose", "--json", str(tmp_path)]) == 4
    value = json.loads(capsys.readouterr().out)
    (finding,) = value["findings"]
    assert (finding["code"], finding["ranks"], finding["confidence"]) == ("rank-not-joined", [2], confidence)
    warned = [BY_FILE_TIMES] if confidence == "likely" else []
    assert value["notes"] == warned
    assert [record["what"] for record in finding["evidence"]][2:] == warned


def test_run_directories_are_no_dumps(hung: Path, tmp_path: Path):
    assert holds_dumps(hung)
    (hung / "run.json").write_text("{}")
    assert not holds_dumps(hung)
    assert not holds_dumps(tmp_path)
    assert not holds_dumps(tmp_path / "absent")

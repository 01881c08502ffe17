"""`dtobs whatif`: known answers, causes told apart, healthy twins, tables that are not right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from dtobs.cli import main
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun
from dtobs.timeline import whatif
from dtobs.timeline.operations import from_run
from dtobs.timeline.whatif import RecentWhatIf
from tests.unit.timeline.jobs import HEAD, Duration, Row, job, noisy, usual, write


def say(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, dict[str, Any], str]:
    code = main(["whatif", str(path), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def test_equal_durations_waste_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, found, _ = say(capsys, write(job(4, 2, 3, 8, usual), tmp_path / "t.csv"))
    assert (code, found["S"], found["findings"]) == (0, 1.0, [])
    assert found["simulated_seconds"] == pytest.approx(found["actual_seconds"], rel=1e-6)
    assert set(found) >= {"schema", "S", "by_op", "by_stage", "by_rank", "by_dp", "fix", "findings"}
    assert set(found["fix"]) >= {"worst_workers", "last_stage"}


def test_data_parallel_alone_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two ranks without a pipeline, one twice as slow: 60 ms where 45 would be ideal, beside 2 ms of reduction."""
    rows = job(1, 2, 4, 1, lambda op, s, d, p, m: usual(op, s, d, p, m) * (2 if d and "compute" in op else 1))
    code, found, _ = say(capsys, write(rows, tmp_path / "t.csv"))
    assert found["S"] == pytest.approx(62 / 47, abs=1e-4)
    assert found["by_rank"]["1"] == pytest.approx(62 / 47, abs=1e-4)
    assert found["by_rank"]["0"] == pytest.approx(1.0, abs=1e-4)
    assert found["by_op"]["backward-compute"] == pytest.approx((15 + 40 + 2) / 47, abs=1e-4)
    assert found["fix"]["worst_workers"] == 1.0
    assert (code, [f["code"] for f in found["findings"]], found["worst_workers"]) == (3, ["straggler"], [1])


def slow_worker(op: str, s: int, d: int, p: int, m: int) -> float:
    return usual(op, s, d, p, m) * (1.6 if (d, p) == (1, 2) and "compute" in op else 1)


def long_stage(op: str, s: int, d: int, p: int, m: int) -> float:
    return usual(op, s, d, p, m) * (1.5 if p == 3 and "compute" in op else 1)


def sequences(op: str, s: int, d: int, p: int, m: int) -> float:
    long = random.Random(f"{s} {d} {m}").choice((0.5, 0.7, 1.0, 1.0, 2.2))
    return usual(op, s, d, p, m) * (long if "compute" in op else 1)


def bad_link(op: str, s: int, d: int, p: int, m: int) -> float:
    return usual(op, s, d, p, m) * (200 if d == 1 and p == 2 and ("send" in op or "recv" in op) else 1)


CAUSES = [
    (slow_worker, "straggler", [6]),
    (long_stage, "stage-imbalance", [3, 7, 11, 15]),
    (sequences, "sequence-imbalance", []),
    (bad_link, "slow-link", None),
]


@pytest.mark.parametrize(("take", "code", "ranks"), CAUSES, ids=[c for _, c, _ in CAUSES])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_causes_told_apart(
    take: Duration, code: str, ranks: list[int] | None, noise: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    status, found, _ = say(capsys, write(job(4, 4, 4, 8, noisy(noise, take)), tmp_path / "t.csv"))
    assert status == 3
    assert found["S"] > 1.1
    assert [f["code"] for f in found["findings"]] == [code]
    assert ranks is None or found["findings"][0]["ranks"] == ranks
    if code == "stage-imbalance":
        assert found["fix"]["last_stage"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("copies", [2, 4, 8])
@pytest.mark.parametrize("batches", [1, 2, 8])
def test_unequal_sequences_accuse_no_rank(
    copies: int, batches: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, found, _ = say(capsys, write(job(1, copies, 10, batches, noisy(0.02, sequences)), tmp_path / "t.csv"))
    assert {f["code"] for f in found["findings"]} <= {"sequence-imbalance"}


def test_a_slow_rank_stands_out_from_unequal_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = job(1, 8, 10, 4, lambda *what: sequences(*what) * (6 if what[2] == 5 else 1))
    _, found, _ = say(capsys, write(rows, tmp_path / "t.csv"))
    assert [(f["code"], f["ranks"]) for f in found["findings"]] == [("straggler", [5])]


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_noise_is_no_cause(share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, found, _ = say(capsys, write(job(4, 4, 4, 8, noisy(share)), tmp_path / "t.csv"))
    assert (code, found["findings"]) == (0, [])


@pytest.mark.exhaustive
def test_128_ranks_and_50_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = job(8, 16, 50, 8, noisy(0.02, lambda op, s, d, p, m: slow_worker(op, s, d, p, m)))
    _, found, _ = say(capsys, write(rows, tmp_path / "t.csv"))
    assert (len(found["by_rank"]), found["worst_workers"][0]) == (128, 10)
    assert [f["code"] for f in found["findings"]] == ["straggler"]


def test_parquet_units_case_and_optional_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = job(2, 2, 3, 4, slow_worker)
    last = max(row[7] + row[8] for row in rows)
    rows += [(2, r, r // 2, r % 2, 0, 0, "optimizer", last, 1_000_000) for r in range(4)]
    columns = dict(zip(HEAD.split(","), map(list, zip(*rows, strict=True)), strict=True))
    columns["vpp"] = [None] * len(rows)
    columns["start_us"] = [t / 1e3 for t in columns.pop("start_ns")]
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    _, one, _ = say(capsys, write(rows, tmp_path / "t.csv"))
    _, other, _ = say(capsys, tmp_path / "t.parquet")
    assert one == other and one["by_op"]["optimizer"] >= 1.0


def changed(row: int, column: int, value: object) -> list[Row]:
    rows = [list(r) for r in job(2, 1, 1, 2, usual)]
    rows[row][column] = value
    return [tuple(r) for r in rows]  # type: ignore[misc]


WRONG = [
    (changed(4, 6, "forwards"), "row 6: op 'forwards' is none of"),
    (changed(2, 8, "fast"), "row 4: duration_ns 'fast'"),
    (changed(2, 8, -5), "row 4: duration is negative"),
    (changed(0, 1, -1), "row 2: rank '-1'"),
    (changed(1, 0, "1e400"), "row 3: step '1e400'"),
    (changed(1, 3, ""), "row 3: pp ''"),
]


@pytest.mark.parametrize(("rows", "says"), WRONG)
def test_bad_rows_give_one_line_with_their_number(
    rows: list[Row], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, _, err = say(capsys, write(rows, tmp_path / "t.csv"))
    assert code == 1 and says in err and err.count("\n") == 1


FILES = [
    (b"", "no column step"),
    (HEAD.encode() + b"\n", "the table has no rows"),
    (HEAD.encode() + b"\n1,2,3\n", "row 2 has 3 columns, the head has 9"),
    (b"PAR1 nonsense", "is no Parquet"),
    (b"\0\xff" * 100, "no column"),
    (HEAD.replace("op,", "").encode() + b"\n1,1,1,1,1,1,1,1\n", "the table has no column op"),
]


@pytest.mark.parametrize(("data", "says"), FILES)
def test_files_that_are_no_table(data: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "t"
    path.write_bytes(data)
    code, _, err = say(capsys, path)
    assert code == 1 and says in err and err.count("\n") == 1


def test_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(job(4, 4, 4, 8, slow_worker), tmp_path / "t.csv")
    assert main(["whatif", str(path)]) == 3
    out = capsys.readouterr().out
    assert "S = " in out and "by rank: 6 " in out
    assert main(["whatif", str(tmp_path / "missing")]) == 1


def test_a_run_is_simulated_again_when_all_ranks_have_finished_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, simulated = FakeRun(tmp_path / "run", 2), []
    real = whatif.recent
    monkeypatch.setattr(whatif, "recent", lambda view: simulated.append(view) or real(view))
    seen = RecentWhatIf()

    def slowdown() -> float | None:
        found = seen(load_run(run.directory.root))
        return found and found.slowdown

    run.ranks[0].step(forward=0.04)
    assert slowdown() is None
    run.ranks[1].step(forward=0.02)
    first = slowdown()
    assert first == slowdown() == real(load_run(run.directory.root)).slowdown > 1.1
    run.ranks[0].step(forward=0.02)
    assert slowdown() == first and len(simulated) == 2
    run.ranks[1].step(forward=0.04)
    assert slowdown() == real(load_run(run.directory.root)).slowdown and len(simulated) == 3


def test_what_a_loop_does_besides_is_a_part_of_its_time(tmp_path: Path):
    """A loop sleeps 50 ms a step, and what varies are 3 ms of computing: next to nothing would be won."""
    run = FakeRun(tmp_path / "run", 2)
    quick = {"data": 0.0, "forward": 0.001, "exposed": 0.0, "optimizer": 0.0, "other": 0.05}
    for step in range(8):
        for number, rank in enumerate(run.ranks):
            slow = (step + number) % 2
            rank.step(**quick, backward=0.003 if slow else 0.001)
    found = whatif.whatif(from_run(load_run(run.directory.root)))
    assert found.slowdown < 1.05 and not found.findings
    assert found.simulated_ns == pytest.approx(found.actual_ns, rel=0.05)


def test_comments_and_other_spellings_of_names_are_read(tmp_path, capsys):
    text = write(job(2, 2, 2, 4, slow_worker), tmp_path / "t.csv").read_text()
    _, plain, _ = say(capsys, tmp_path / "t.csv")
    head, _, rows = text.partition("\n")
    head = head.replace("microbatch", "Micro Batch").replace("duration_ns", "Duration NS")
    other = tmp_path / "other.csv"
    other.write_text(f"# of job 7\n\n{head}\n# warm\n" + rows.replace("forward-compute", "Forward compute"))
    assert say(capsys, other)[1] == plain
    other.write_text(f"# of job 7\n\n{head}\n# warm\n" + rows.replace("forward-compute", "forwards"))
    assert "row 5: op 'forwards'" in say(capsys, other)[2]

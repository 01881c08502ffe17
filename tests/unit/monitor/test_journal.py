"""findings.jsonl: once when found, once when gone, nothing lost, nothing repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtobs.codec import decode
from dtobs.findings import Confidence, Finding
from dtobs.monitor.journal import Journal
from dtobs.recording.journal import Entry, open_entries, read_journal

DEAD = Finding("rank-dead", "rank 1 is gone", (1,), evidence=({"what": "exit"},))
SLOW = Finding("straggler", "rank 0 is slow", (0,), Confidence.POSSIBLE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "findings.jsonl"


def events(path: Path) -> list[tuple[str, str]]:
    return [(e.event, e.finding.code) for e in read_journal(path)]


def test_found_once_and_cleared_after_two_passes_without_it(path: Path):
    journal = Journal(path)
    assert [e.event for e in journal.update([DEAD], 5, may_clear=True)] == ["found"]
    assert journal.update([DEAD], 6, may_clear=True) == []
    assert journal.update([], 7, may_clear=True) == []
    assert [e.event for e in journal.update([], 8, may_clear=True)] == ["cleared"]
    assert events(path) == [("found", "rank-dead"), ("cleared", "rank-dead")]
    assert read_journal(path)[0].finding.since_ns == 5
    assert oct(path.stat().st_mode & 0o777) == "0o600"


def test_one_pass_without_it_is_not_the_end(path: Path):
    journal = Journal(path)
    for found in ([DEAD], [], [DEAD], [], [DEAD]):
        journal.update(found, 1, may_clear=True)
    assert events(path) == [("found", "rank-dead")]


@pytest.mark.parametrize(("known", "until"), [(0, 6), (7, 7), (99, 9)])
def test_what_is_over_lasted_until_it_was_last_seen_or_as_is_known_better(path: Path, known: int, until: int):
    journal = Journal(path)
    for now, found in ((5, [DEAD]), (6, [DEAD]), (8, []), (9, [])):
        journal.update(found, now, may_clear=True, until=lambda finding: known)
    assert read_journal(path)[-1].until_ns == until


def test_a_run_that_ends_clears_nothing(path: Path):
    journal = Journal(path)
    journal.update([DEAD], 1, may_clear=True)
    for _ in range(5):
        assert journal.update([], 2, may_clear=False) == []
    assert journal.findings == [replace(DEAD, since_ns=1)]


def test_written_again_when_it_is_surer_but_not_for_every_bit_of_evidence(path: Path):
    journal = Journal(path)
    journal.update([SLOW], 1, may_clear=True)
    (again,) = journal.update([replace(SLOW, confidence=Confidence.CERTAIN)], 9, may_clear=True)
    assert (again.finding.confidence, again.finding.since_ns) == (Confidence.CERTAIN, 1)
    growing = replace(SLOW, confidence=Confidence.CERTAIN)
    lines = 0
    for count in range(1, 65):
        lines += len(journal.update([replace(growing, evidence=({"what": "step"},) * count)], 9, may_clear=True))
    assert lines <= 8


def test_who_ended_is_corrected_when_it_is_known_better(path: Path):
    unknown = Finding("rank-dead", "every process is gone", (0, 1, 2), Confidence.POSSIBLE)
    sure = replace(DEAD, confidence=Confidence.CERTAIN)
    other = replace(sure, ranks=(7,))
    for found in ([SLOW, unknown], [sure, other]):
        Journal(path).update(found, 1, may_clear=False)
    assert [e.finding.ranks for e in open_entries(read_journal(path))] == [(0,), (1,), (7,)]


def test_the_next_monitor_continues(path: Path):
    Journal(path).update([DEAD, SLOW], 1, may_clear=True)
    taken_over = Journal(path)
    assert {f.code for f in taken_over.findings} == {"rank-dead", "straggler"}
    assert taken_over.update([DEAD, SLOW], 2, may_clear=True) == []


def test_a_new_attempt_starts_clean(path: Path):
    journal = Journal(path)
    journal.update([DEAD], 1, may_clear=True)
    journal.restart(1, 2)
    assert journal.findings == []
    journal.update([DEAD], 3, may_clear=True)
    assert [e.attempt for e in open_entries(read_journal(path))] == [1]
    assert open_entries(read_journal(path), attempt=0) == []


def test_full_disk_keeps_them_in_memory(path: Path, tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    journal = Journal(blocked / "findings.jsonl")
    journal.update([DEAD], 1, may_clear=True)
    assert not journal.flush()
    assert len(journal.findings) == len(journal.unwritten) == 1
    journal._path = path  # the disk has space again
    assert journal.flush()
    assert events(path) == [("found", "rank-dead")]


def test_cut_and_foreign_lines_are_left_out(path: Path):
    Journal(path).update([DEAD], 1, may_clear=True)
    line = path.read_bytes()
    foreign = [
        b"[]",
        b'{"event":"moved"}',
        b'{"event":"found","code":"not-a-code"}',
        b"\xff\xfe",
        b"[" * 10_000,
    ]
    path.write_bytes(b"\n".join(foreign) + b"\n" + line + line[:-20])
    assert events(path) == [("found", "rank-dead")]


def test_entry_round_trip():
    entry = Entry("found", "2026-01-01T00:00:00+00:00", 7, 2, replace(DEAD, since_ns=3, step=4, group="dp"))
    assert decode(Entry, entry.to_json() | {"finding": entry.to_json()}) == entry

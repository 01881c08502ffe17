"""Which lines of a log are handed out: the ones that a plain search finds, whatever surrounds them."""

from __future__ import annotations

from pathlib import Path
from random import Random

from dtobs.diagnose import diagnose_logs
from dtobs.logs.reader import LogFile
from dtobs.logs.templates import ANCHORS, TEMPLATES

ALPHABET = [*ANCHORS, b"a", b"r", b"o", b"N", b" ", b"\n", b"\n", b"\xff", b"123", b"Err", b"nccI", b"rro", b"\t"]


def test_lines_are_those_that_a_plain_search_finds(tmp_path: Path):
    random = Random(5)
    path = tmp_path / "x.log"
    for _ in range(300):
        data = b"".join(random.choices(ALPHABET, k=random.randint(0, 60)))
        path.write_bytes(data)
        wanted = [
            (number, line)
            for number, line in enumerate(data.split(b"\n"), 1)
            if any(anchor in line for anchor in ANCHORS)
        ]
        assert list(LogFile(path).lines(ANCHORS, lambda: False)) == wanted


def test_every_line_while_it_is_hot(tmp_path: Path):
    path = tmp_path / "x.log"
    path.write_bytes(b"a\nTraceback\nb\n\nc\nrror\n")
    seen: list[bytes] = []
    for _, line in LogFile(path).lines(ANCHORS, lambda: 0 < len(seen) < 4):
        seen.append(line)
    assert seen == [b"Traceback", b"b", b"", b"c", b"rror"]


def test_lines_that_differ_in_digits_only(tmp_path: Path):
    """Of a form that means nothing only some numbers may mean something."""
    lines = [f"writing shard {n}: failed, [Errno {17 if n < 20 else 28}]" for n in range(21)]
    path = tmp_path / "job.log"
    path.write_text("\n".join(["step 1 loss 2.0", *lines]))
    verdict = diagnose_logs([str(path)]).verdict
    assert verdict is not None
    assert verdict.code == "disk-full"


def test_the_last_of_many_lines_that_say_nothing_may_say_something(tmp_path: Path):
    """Lines of a form that says nothing are left in time, whatever their digits; one that digits give a meaning is not."""
    lines = [f"step 1 loss 2.0\n[rank{n % 4}]: saved shard {n}: failed" for n in range(9000)]
    path = tmp_path / "job.log"
    path.write_text("\n".join([*lines, "[rank2]: saved shard 9000: failed, [Errno 28]"]))
    verdict = diagnose_logs([str(path)]).verdict
    assert verdict is not None
    assert (verdict.code, verdict.ranks) == ("disk-full", (2,))


def test_every_literal_of_the_table_has_an_anchor():
    """A line without one is never looked at."""
    literals = [literal.encode() for row in TEMPLATES for literal in row.literals]
    assert [literal for literal in literals if not any(anchor in literal for anchor in ANCHORS)] == []

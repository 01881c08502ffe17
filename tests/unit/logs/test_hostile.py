"""Logs that mean harm or were damaged: bounded memory and time, and one clear line."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from dtobs.diagnose import diagnose_logs
from dtobs.errors import TargetError
from dtobs.reports import html, text

MEMORY = 40 << 20
_CHILD = """
import resource, sys
from pathlib import Path
from dtobs.diagnose.logs import diagnosis_of_logs
from dtobs.logs import LogFile, analyse_logs, reader
reader._BOMB_BYTES = 16 << 20  # 128 MB take longer than a test should
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
file = LogFile(None if sys.argv[1] == "-" else Path(sys.argv[1]))
found = diagnosis_of_logs("x", analyse_logs([file]))
print(file.bytes_read, file.problem or "-", found.verdict.code if found.verdict else "-", sep="|")
"""


def read_within(path: Path | str, memory: int = MEMORY, stdin: bytes | None = None) -> tuple[int, str, str]:
    """The bytes read, the problem and the verdict of a log in a process that may take so many bytes more."""
    run = subprocess.run(
        [sys.executable, "-c", _CHILD, str(path), str(memory)], input=stdin, capture_output=True, timeout=120, check=False
    )  # fmt: skip
    assert run.returncode == 0, run.stderr.decode()[-2000:]
    count, problem, verdict = run.stdout.decode().strip().split("|")
    return int(count), problem, verdict


def _packed(piece: bytes, times: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(piece) for _ in range(times)), packer.flush()])


ROOT_LINE = b"\n[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


def test_a_line_of_80_megabytes(tmp_path: Path):
    path = tmp_path / "job.log"
    with path.open("wb") as file:
        for _ in range(80):
            file.write(b"an error " * 116508)
        file.write(ROOT_LINE)
    size, problem, verdict = read_within(path)
    assert size > 80_000_000
    assert (problem, verdict) == ("-", "device-fault")


def test_an_endless_line_on_standard_input():
    assert read_within("-", stdin=b"e" * (60 << 20) + ROOT_LINE)[1:] == ("-", "device-fault")


def test_a_zip_bomb_of_lines_is_left(tmp_path: Path):
    path = tmp_path / "job.log.gz"
    path.write_bytes(_packed(b"x\n" * (1 << 19), 60))
    size, problem, _ = read_within(path)
    assert "times its size: the rest is left" in problem
    assert size < 30 << 20


@pytest.mark.parametrize(
    ("inner", "times"),
    [(b"\0" * (1 << 20), 100), (gzip.compress(b"[rank0]: an error\n" * 9), 1)],
    ids=["zeros", "gz in gz"],
)
def test_a_packed_file_without_text_is_refused_at_once(tmp_path: Path, inner: bytes, times: int):
    path = tmp_path / "job.log.gz"
    path.write_bytes(_packed(inner, times))
    size, problem, _ = read_within(path)
    assert size == 0
    assert problem.endswith("holds no text: unpack it first")


def test_a_cut_gzip_file_is_read_as_far_as_it_goes(tmp_path: Path):
    path = tmp_path / "job.log.gz"
    path.write_bytes(gzip.compress(ROOT_LINE + os.urandom(5000).hex().encode())[:-500])
    assert read_within(path)[2] == "device-fault"


def test_utf_16_as_powershell_writes_it(tmp_path: Path):
    path = tmp_path / "job.log"
    path.write_bytes(("step 1 loss 2.0\n" * 90_000 + ROOT_LINE.decode()).encode("utf-16"))
    assert read_within(path)[1:] == ("-", "device-fault")


@pytest.mark.parametrize(
    "junk", [b"\0" * 9000, b"\xff\xfe\xed\xa0\x80\xc3(", b"\x1b]52;c;" + b"A" * 9000, b"\r" * 9000]
)
def test_junk_between_lines_hides_nothing(tmp_path: Path, junk: bytes):
    path = tmp_path / "job.log"
    path.write_bytes(b"step 1 loss 2.0\n" * 400 + junk + ROOT_LINE)
    assert read_within(path)[1:] == ("-", "device-fault")


def test_no_escape_reaches_the_reader_of_a_report(tmp_path: Path):
    path = tmp_path / "job.log"
    evil = "\x1b]0;title\x07\x1b[2J\x1b]52;c;AAAA\x07\x9b31m\u202e\u2066"
    path.write_text(
        f'[rank0]: {evil}Traceback (most recent call last):\n[rank0]:   File "/a{evil}.py", line 3, in f\n[rank0]: ValueError: {evil}<script>alert(1)</script>\n'
    )
    found = diagnose_logs([str(path)])
    shown = text.render(found) + html.render(found)
    assert "ValueError" in shown
    assert not {char for char in shown if char in "\x1b\x07\x9b\u202e\u2066"}
    assert "<script>alert" not in html.render(found)


def test_pipes_devices_and_loops_in_a_folder_are_not_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "zero.log").symlink_to("/dev/zero")
    (tmp_path / "loop.log").symlink_to("loop.log")
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "rank1.log").write_bytes(ROOT_LINE)
    found = diagnose_logs([str(tmp_path)])
    assert found.verdict is not None
    assert (found.verdict.code, found.verdict.ranks) == ("device-fault", (1,))


def test_a_file_of_zeros_is_no_text(tmp_path: Path):
    path = tmp_path / "job.log"
    path.write_bytes(b"\0" * 5000)
    with pytest.raises(TargetError, match="is no text"):
        diagnose_logs([str(path)])


@pytest.mark.parametrize("text", ["hello\n", '{"entries": [', "", "Compiling crate 3 of 40\n" * 50])
def test_a_text_that_tells_nothing_is_not_called_healthy(tmp_path: Path, text: str):
    path = tmp_path / "job.log"
    path.write_text(text)
    found = diagnose_logs([str(path)])
    assert found.verdict is None
    assert any("says nothing of the job" in note for note in found.notes)


@pytest.mark.parametrize("text", ["step 3 loss 2.31\n", f"{ROOT_LINE.decode()}\n"])
def test_a_text_that_tells_something_is_believed(tmp_path: Path, text: str):
    path = tmp_path / "job.log"
    path.write_text(text)
    assert not any("says nothing of the job" in note for note in diagnose_logs([str(path)]).notes)

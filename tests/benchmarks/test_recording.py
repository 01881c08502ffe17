"""Reading pages scales with the ranks and stays within reach of a plain copy. Ratios only: the machine is shared."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.recording import copy_seconds, read_pages_seconds, write_pages


def test_reading_pages_is_linear_in_the_ranks(tmp_path: Path) -> None:
    write_pages(tmp_path / "few.bin", 256)
    write_pages(tmp_path / "many.bin", 1024)
    assert read_pages_seconds(tmp_path / "many.bin") < 10 * read_pages_seconds(tmp_path / "few.bin")


def test_reading_1024_pages_is_no_more_than_a_few_copies(tmp_path: Path) -> None:
    write_pages(tmp_path / "many.bin", 1024)
    assert read_pages_seconds(tmp_path / "many.bin") < 60 * copy_seconds(tmp_path / "many.bin")

"""The judge of logs is judged: every fault in the words of every torch version, in every format, must be named."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from dtobs.diagnose import diagnose_logs
from tests.unit.logs.generator import CASES, FORMATS, VERSIONS, Case, table, write


def _verdict(
    tmp_path: Path, case: Case, version: str, form: str, world: int, odd: int
) -> tuple[str, tuple[int, ...]] | None:
    random = Random(f"{case.name}{version}{form}{world}")
    tail = []
    if case.exits is not None:
        exits = case.exits(world, odd)
        tail = table(exits, (odd + 1) % world)
    verdict = diagnose_logs(write(tmp_path, form, case.lines(version, world, odd), tail, random)).verdict
    return None if verdict is None else (verdict.code, verdict.ranks)


def _check(tmp_path: Path, case: Case, version: str, form: str) -> None:
    if case.name == "killed" and form == "slurm":
        pytest.skip("nothing but the launcher tells of a kill")
    assert _verdict(tmp_path, case, version, form, 4, 2) == (case.code, case.accused(4, 2))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fault_in_the_words_of_each_version(tmp_path: Path, case: Case, version: str):
    if version in case.versions:
        _check(tmp_path, case, version, "tee")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fault_in_each_format(tmp_path: Path, case: Case, form: str):
    _check(tmp_path, case, "2.5", form)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("case", "version"), [(c, v) for c in CASES for v in c.versions], ids=lambda x: getattr(x, "name", x)
)
def test_fault_in_all(tmp_path: Path, case: Case, version: str, form: str):
    _check(tmp_path, case, version, form)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_thousand_ranks(tmp_path: Path, case: Case):
    assert _verdict(tmp_path, case, "2.5", "console", 1024, 700) == (case.code, case.accused(1024, 700))

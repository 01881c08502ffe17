"""Programs that never heard of dtobs: it finds nothing in them, and changes no bit of their losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import RankFailure
from tests.plain.subjects import PROGRAMS
from tests.plain.ways import by_command, findings, forked

ALWAYS, OFTEN = {"ddp", "fsdp2", "local_sgd"}, {"zero1_by_hand", "grad_scaler"}
"""These run every time, those in one commit of four; of the others a share by commit, see `tests/conftest.py`."""
NOT_TWICE_THE_SAME = {"hogwild"}
NOTHING_TO_RECORD = dict.fromkeys(("hogwild", "one_process_without_an_optimizer"), ("nothing was recorded",))
"""Without optimizer or process group nobody tells dtobs where a training is."""


def each(always: set[str]) -> list[object]:
    often, rest = pytest.mark.exhaustive(one_in=4), pytest.mark.exhaustive
    return [pytest.param(n, marks=() if n in always else often if n in OFTEN else rest) for n in sorted(PROGRAMS)]


@pytest.mark.parametrize("name", each(ALWAYS))
def test_nothing_is_found_and_nothing_changes(name: str, tmp_path: Path):
    alone = forked(name, "alone", tmp_path / "none")
    attached = forked(name, "attached", tmp_path / "attached")
    started = forked(name, "as dtobs run", tmp_path / "started")
    for way in ("attached", "started"):
        assert [text for text in findings(tmp_path / way) if text not in NOTHING_TO_RECORD.get(name, ())] == []
    assert attached == alone
    assert started == alone


@pytest.mark.parametrize("name", each({"ddp"}))
def test_by_the_command(name: str, tmp_path: Path):
    losses = by_command(name, tmp_path / "run")
    assert [text for text in findings(tmp_path / "run") if text not in NOTHING_TO_RECORD.get(name, ())] == []
    if name not in NOT_TWICE_THE_SAME:
        assert losses == forked(name, "alone", tmp_path / "none")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", each({"ddp"}))
def test_on_a_gpu(name: str, tmp_path: Path):
    if not PROGRAMS[name].group:
        pytest.skip("runs by the command, which makes its tensors on the host")
    try:
        forked(name, "as dtobs run", tmp_path / "run", "cuda")
    except RankFailure:
        try:
            forked(name, "alone", tmp_path / "none", "cuda")
        except RankFailure as failed:
            pytest.skip(f"does not run on a GPU by itself: {failed}")
        raise
    assert findings(tmp_path / "run") == []


def test_there_are_enough_programs():
    assert len(PROGRAMS) >= 60

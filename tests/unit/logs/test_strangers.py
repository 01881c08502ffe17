"""What people paste who ask for help: the answer is right, or it says honestly that it cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.diagnose import diagnose_logs
from tests.unit.logs.pasted import EXCERPTS
from tests.unit.logs.strangers import Answer


@pytest.mark.parametrize(("text", "answer"), [row[1:] for row in EXCERPTS], ids=[row[0] for row in EXCERPTS])
def test_excerpt(tmp_path: Path, text: str, answer: Answer):
    path = tmp_path / "pasted.log"
    path.write_text(text)
    found = diagnose_logs([str(path)])
    assert (None if found.verdict is None else (found.verdict.code, found.verdict.ranks)) == answer
    if answer is None:
        assert not found.findings

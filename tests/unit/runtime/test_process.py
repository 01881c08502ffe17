"""What a failing rank leaves for its launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import pytest
from torch.distributed.elastic.multiprocessing.errors import error_handler

from runtime.process import ERROR_FILE, tell_launcher


@pytest.fixture
def reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv(ERROR_FILE, str(path))
    return path


def test_the_launcher_reads_what_happened(reply: Path) -> None:
    tell_launcher(ValueError("a shape"))
    assert json.loads(reply.read_text())["message"]["message"] == "ValueError: a shape"
    assert list(reply.parent.iterdir()) == [reply]


def test_a_rank_that_is_ended_while_it_writes_leaves_no_file_that_the_launcher_cannot_read(
    reply: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(data: object, file: TextIO) -> None:
        file.write("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(error_handler.json, "dump", ended)
    with pytest.raises(KeyboardInterrupt):
        tell_launcher(ValueError("a shape"))
    assert not reply.exists()


def test_without_a_launcher_there_is_nobody_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    tell_launcher(ValueError("a shape"))
    assert list(tmp_path.iterdir()) == []

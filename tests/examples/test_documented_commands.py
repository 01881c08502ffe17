"""Every command in a README runs: lines that start with `$` in fenced `console` blocks, in order, file by file.

Each file gets an empty folder that sees the repository through links, so that `runs/` in one file's commands is
that file's own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.harness import launch
from tests.harness.launch import REPOSITORY

FENCE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
SKIPPED_FOLDERS = {".venv", "runs", "build", "dist", "node_modules"}
# Commands not run here, by pattern, and why.
NOT_RUN = {
    r"^make (train|test|check|lint)\b": "makes an environment and runs minutes; this very test is part of make test",
    r"^git clone\b": "needs the network",
    r"^pip install\b": "needs the network",
    r"examples/hang_then_diagnose/": "hangs on purpose; test_examples.py runs it",
    r"^dtobs diagnose runs/hang": "the other terminal of the line above",
}
# `dtobs` says by its exit code that it found something (3, 4): the command itself worked.
FOUND_SOMETHING = {3, 4}
TIMEOUT_SECONDS = 180


def documents() -> list[Path]:
    found = [p for p in REPOSITORY.rglob("*.md") if not SKIPPED_FOLDERS & set(p.relative_to(REPOSITORY).parts)]
    return sorted(p for p in found if commands(p))


def commands(document: Path) -> list[str]:
    """The commands of a file, continuation lines joined, without the prompt."""
    joined = document.read_text().replace("\\\n", " ")
    lines = [line for block in FENCE.findall(joined) for line in block.splitlines()]
    return [line[2:].split("  #")[0].strip() for line in lines if line.startswith("$ ")]


def is_run(command: str) -> bool:
    return not any(re.search(pattern, command) for pattern in NOT_RUN)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder whose entries are links to the repository's, without its `runs`."""
    for entry in REPOSITORY.iterdir():
        if entry.name not in SKIPPED_FOLDERS | {".git"}:
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def marks(document: Path) -> object:
    """What an example's README says is nearly what `test_examples.py` runs."""
    return pytest.mark.exhaustive if document.parent.parent.name == "examples" else ()


@pytest.mark.parametrize(
    "document",
    [pytest.param(d, marks=marks(d), id=d.relative_to(REPOSITORY).as_posix()) for d in documents()],
)
def test_commands_run(document: Path, checkout: Path):
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    for command in filter(is_run, commands(document)):
        with launch(["bash", "-c", command], cwd=checkout, env={"PATH": path}, timeout=TIMEOUT_SECONDS) as running:
            code = running.wait()
            allowed = {0} | (FOUND_SOMETHING if command.startswith("dtobs ") else set())
            assert code in allowed, f"$ {command}\nexited {code}\n{running.stdout}\n{running.stderr}"


def test_exceptions_are_still_needed():
    everything = [command for document in documents() for command in commands(document)]
    needed = {pattern for pattern in NOT_RUN for command in everything if re.search(pattern, command)}
    unused = set(NOT_RUN) - needed - {r"^git clone\b", r"^pip install\b"}
    assert unused == set()

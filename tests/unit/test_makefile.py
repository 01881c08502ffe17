"""The Makefile's own errors: an interpreter that is too old, absent, or nowhere to be found."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with only what making the environment looks at, and without an environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS")}
    if path is not None:
        environment["PATH"] = path
    program = shutil.which("make")
    assert program is not None
    return subprocess.run(
        [program, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_help_names_every_target_and_variable(checkout: Path):
    text = make(checkout).stdout
    for word in ("make train", "make test", "make check", "make clean", "NPROC", "ARGS", "PYTHON"):
        assert word in text


def test_an_old_interpreter_is_refused(checkout: Path):
    old = checkout / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")  # what `sys.exit(sys.version_info < (3, 11))` does there
    old.chmod(0o755)
    done = make(checkout, "train", f"PYTHON={old}")
    assert done.returncode != 0
    assert f"error: {old} is older than 3.11, or does not run; name another" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_interpreter_at_all(checkout: Path, tmp_path: Path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "test", "echo"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    done = make(checkout, "train", path=str(tools))
    assert done.returncode != 0
    assert "error: no Python >= 3.11 found" in done.stderr

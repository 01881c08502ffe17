"""Every analysis command works where torch is not installed: a laptop that only has the run directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Imported by the interpreter at start-up when its folder is on the path; makes torch look not installed.
BLOCKER = '''
import sys

class NoTorch:
    """Refuses torch and what belongs to it, as an interpreter without it would."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchgen", "functorch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, NoTorch())
'''
NEEDS_TORCH = {"drill", "preflight", "run"}  # they run training processes


def subcommands() -> list[str]:
    """One file a subcommand: the files of dtobs/cli that are not private."""
    folder = REPOSITORY / "dtobs" / "cli"
    return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_") and p.stem not in NEEDS_TORCH)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("no-torch")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}


def python(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_blocker_blocks(environment: dict[str, str]):
    done = python(["-c", "import torch"], environment)
    assert "No module named 'torch'" in done.stderr


@pytest.mark.parametrize("command", subcommands())
def test_help(command: str, environment: dict[str, str]):
    done = python(["-m", "dtobs", command, "--help"], environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert command in done.stdout

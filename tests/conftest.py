"""Shared by all tests: `--update-golden`, servers that are required or skipped, a share of the exhaustive tests."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
import zlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: at the sizes of tests a second thread only waits for the first, and keeps a core for that.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The machine is shared: how long an example takes says nothing about the code.
settings.register_profile("dtobs", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dtobs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from what the code says now")


SHARES = 80
"""`.ci/run` runs one exhaustive test of so many, others for another commit; `exhaustive(one_in=4)` is its own share."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a commit's hash in DTOBS_TEST_SHARE, take the mark off the exhaustive tests whose turn it is."""
    commit = os.environ.get("DTOBS_TEST_SHARE", "")
    for item in items if commit else ():
        mark = item.get_closest_marker("exhaustive")
        if mark is not None and its_turn(item.nodeid, commit, mark.kwargs.get("one_in", SHARES)):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "exhaustive"]


def its_turn(test: str, commit: str, shares: int) -> bool:
    """Whether a test is in the share of a commit: the same for the same two, and each test in turn."""
    return (zlib.crc32(test.encode()) + zlib.crc32(commit.encode())) % shares == 0


def pytest_collection_finish() -> None:
    """What was imported and collected stays: neither the garbage collector nor dtobs looks through it in each test."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # the first step of an optimizer imports it
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """True when golden files are to be rewritten instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(scope="session")
def require_program() -> Callable[[str], str]:
    """`require_program("promtool")` → its path; skips the test without it, fails it with DTOBS_REQUIRE_SERVERS=1."""

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is not None:
            return path
        if os.environ.get("DTOBS_REQUIRE_SERVERS") == "1":
            pytest.fail(f"{name} is not installed and DTOBS_REQUIRE_SERVERS=1")
        pytest.skip(f"{name} is not installed")

    return find

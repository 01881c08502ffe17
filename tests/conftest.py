"""Shared by all tests: `--update-golden`, and real servers that are required or skipped, never silently absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

# The machine is shared: how long an example takes says nothing about the code.
settings.register_profile("dtobs", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dtobs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from what the code says now")


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

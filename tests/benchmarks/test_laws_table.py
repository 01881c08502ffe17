"""The table of the laws is of faults that exist, each in the layouts in which drills try it and in others besides."""

from __future__ import annotations

import pytest

from dtobs.drills.faults import TROUBLES
from tests.benchmarks.laws_table import _LATER, COLUMNS, LAWS, found

exhaustive = pytest.mark.exhaustive


def test_the_table_is_of_faults_that_the_drills_have():
    tried = {name: wrappers for faults in LAWS.values() for name, wrappers in faults.items()}
    assert tried.keys() <= TROUBLES.keys()
    assert tried.keys() >= _LATER
    missing = {name: set(TROUBLES[name].wrappers) - set(wrappers) for name, wrappers in tried.items()}
    assert not any(missing.values()), missing


@pytest.mark.parametrize(
    "column", [pytest.param(c, marks=() if c in ("zero1", "dp-tp", "dp-pp") else exhaustive) for c in COLUMNS]
)
def test_without_a_fault_every_column_is_quiet(column: str):
    assert found("none", column) == []

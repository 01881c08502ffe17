"""The table of what each source tells of a job is true, and no source is ever wrong."""

from __future__ import annotations

from tests.unit.calls.table import table, written


def test_table_of_the_readme():
    made = table()
    assert "WRONG" not in made
    assert made == written(), "python -m tests.unit.calls.table --write"

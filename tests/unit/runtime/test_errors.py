"""What the command shows of a save that failed."""

from __future__ import annotations

from runtime import process
from runtime.errors import SaveWarning


def test_a_failed_save_is_one_line_and_other_warnings_name_their_place() -> None:
    said = process._format_warning("checkpoint of step 4 was not saved", SaveWarning, "resume.py", 3)
    assert said == "warning: checkpoint of step 4 was not saved\n"
    assert process._format_warning("old", DeprecationWarning, "other.py", 3).startswith("other.py:3: Deprecation")

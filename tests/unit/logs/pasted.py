"""All rows of all files of excerpts: each file adds its own when it is imported."""

from __future__ import annotations

from tests.unit.logs import (
    strangers_asked,
    strangers_devices,
    strangers_elsewhere,
    strangers_more,
    strangers_public,
    strangers_reported,
    strangers_threads,
)
from tests.unit.logs.strangers import ROWS

assert strangers_asked
assert strangers_more
assert strangers_public
assert strangers_elsewhere
assert strangers_devices
assert strangers_reported
assert strangers_threads
EXCERPTS = tuple(ROWS)

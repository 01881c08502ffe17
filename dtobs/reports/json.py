"""A diagnosis as JSON; ``diagnosis.schema.json`` beside this file describes it."""

from __future__ import annotations

import json
from pathlib import Path

from dtobs.diagnose.model import Diagnosis

SCHEMA_PATH = Path(__file__).with_name("diagnosis.schema.json")


def render(diagnosis: Diagnosis) -> str:
    """One JSON object, indented, with a newline at its end."""
    return json.dumps(diagnosis.to_json(), indent=1, default=str, allow_nan=False, ensure_ascii=False) + "\n"

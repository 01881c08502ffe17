"""A diagnosis as JSON; ``diagnosis.schema.json`` beside this file describes it."""

from __future__ import annotations

import json
from pathlib import Path

from dtobs.codec import finite
from dtobs.diagnose.model import Diagnosis

SCHEMA_PATH = Path(__file__).with_name("diagnosis.schema.json")


def render(diagnosis: Diagnosis) -> str:
    """One JSON object, indented, with a newline at its end."""
    value = finite(diagnosis.to_json())
    text = json.dumps(value, indent=1, default=str, allow_nan=False, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()  # half a character, as JSON writes it


def schema() -> str:
    """The published JSON schema of what `render` gives."""
    return SCHEMA_PATH.read_text(encoding="utf-8")

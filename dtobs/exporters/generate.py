"""``python -m dtobs.exporters.generate [ROOT]``: writes what is generated from the table into a checkout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dtobs.exporters.alerts import promtool_yaml, rules_yaml
from dtobs.exporters.grafana import run_overview
from dtobs.exporters.reference import reference_page


def generated() -> dict[str, str]:
    """Every generated file's text, by its path in the repository."""
    return {
        "dashboards/run-overview.json": json.dumps(run_overview(), indent=2, ensure_ascii=False) + "\n",
        "alerts/dtobs.rules.yml": rules_yaml(),
        "alerts/tests/dtobs.test.yml": promtool_yaml(),
        "dtobs/exporters/README.md": reference_page(),
    }


def write(root: Path) -> list[Path]:
    """Write them below `root`; returns the paths."""
    written = []
    for name, text in generated().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2])

"""What is generated is what is committed, complete, and understood by the programs it is for."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dtobs.exporters.alerts import alert_name, alerts
from dtobs.exporters.generate import generated, write
from dtobs.exporters.grafana import expressions, run_overview
from dtobs.exporters.metrics import BY_NAME, TABLE
from dtobs.exporters.panels import Panel, PanelGrid, Query
from dtobs.findings import CATALOGUE

REPOSITORY = Path(__file__).resolve().parents[3]
RUNBOOKS = REPOSITORY / "alerts" / "runbooks"
NAME = re.compile(r"\bdtobs_[a-z0-9_]+\b")


@pytest.mark.parametrize("name", generated())
def test_committed_files_are_up_to_date(name: str):
    assert (REPOSITORY / name).read_text() == generated()[name], "run python -m dtobs.exporters.generate"


def test_write(tmp_path: Path):
    assert sorted(p.relative_to(tmp_path).as_posix() for p in write(tmp_path)) == sorted(generated())


def exposed_names() -> set[str]:
    """Every series name there is, histograms by their parts."""
    names = set(BY_NAME)
    for metric in TABLE:
        if metric.kind == "histogram":
            names |= {f"{metric.exposed}_{part}" for part in ("bucket", "count", "sum")}
    return names


class TestAlerts:
    def rules(self) -> list[dict]:
        document = yaml.safe_load(generated()["alerts/dtobs.rules.yml"])
        return [rule for group in document["groups"] for rule in group["rules"]]

    def test_every_code_has_its_alert(self):
        by_name = {rule["alert"]: rule for rule in self.rules()}
        for code in CATALOGUE.values():
            rule = by_name[alert_name(code.name)]
            assert f'code="{code.name}"' in rule["expr"]
            assert rule["labels"]["severity"] == code.severity.value
            assert code.next_step in rule["annotations"]["description"]

    def test_every_alert_has_its_runbook_and_no_runbook_is_left_over(self):
        pages = {rule["annotations"]["runbook"] for rule in self.rules()}
        assert pages == {p.relative_to(REPOSITORY).as_posix() for p in RUNBOOKS.glob("*.md")}

    @pytest.mark.parametrize("path", sorted(RUNBOOKS.glob("*.md")), ids=lambda p: p.stem)
    def test_runbooks_say_what_they_must(self, path: Path):
        text = path.read_text()
        assert text.startswith(f"# {path.stem}\n")
        for heading in ("## What it means", "## How to confirm", "## What to do"):
            _, _, after = text.partition(heading)
            assert len(after.partition("\n## ")[0].split()) >= 5, heading

    def test_only_metrics_of_the_table_are_used(self):
        for rule in self.rules():
            used = set(NAME.findall(rule["expr"])) | set(NAME.findall(rule["annotations"]["description"]))
            assert used <= exposed_names(), rule["alert"]

    def test_names_are_unique(self):
        names = [alert.name for alert in alerts()]
        assert len(names) == len(set(names))

    def test_promtool_accepts_the_rules(self, require_program: Callable[[str], str]):
        self.promtool(require_program("promtool"), "check", "rules", "alerts/dtobs.rules.yml")

    @pytest.mark.slow
    def test_promtool_sees_each_fire_and_stay_quiet(self, require_program: Callable[[str], str]):
        self.promtool(require_program("promtool"), "test", "rules", "alerts/tests/dtobs.test.yml")

    def promtool(self, program: str, *arguments: str) -> None:
        done = subprocess.run([program, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


class TestDashboard:
    def test_panels_have_ids_places_units_and_queries(self):
        board = run_overview()
        assert board["schemaVersion"] >= 36
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        assert all(isinstance(i, int) and i > 0 for i in ids)
        cells: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24
            taken = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            cells |= taken
            if panel["type"] != "row":
                assert panel["targets"], panel["title"]
                assert panel["description"], panel["title"]
                assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
                assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] is None

    def test_variables_and_annotations(self):
        board = run_overview()
        assert [v["name"] for v in board["templating"]["list"]] == ["datasource", "run", "rank"]
        assert "dtobs_findings" in board["annotations"]["list"][0]["expr"]

    def test_only_metrics_of_the_table_are_used_and_variables_are_filled_in(self):
        for expression in expressions(run_overview(), "r"):
            assert set(NAME.findall(expression)) <= exposed_names(), expression
            assert "$" not in expression
            assert 'run="r"' in expression

    def test_is_json(self):
        assert json.loads(json.dumps(run_overview(), allow_nan=False)) == run_overview()

    def test_an_unknown_kind_of_panel_is_refused(self):
        with pytest.raises(ValueError, match="no such panel"):
            PanelGrid().row("x", [Panel("x", "piechart", (Query("up"),))])

"""The mutants are what the benchmark says they are: one change each, runnable, the same ones every time."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtobs.findings import Finding
from tests.benchmarks.mutants.__main__ import read
from tests.benchmarks.mutants.mutate import mutants
from tests.benchmarks.mutants.run import Verdict, _distance, _first, _misplaced, run
from tests.benchmarks.mutants.scripts import SCRIPTS


def healthy(rank: int, world: int, watch: Any, note: Any) -> None:
    watch(model=1)
    total = 0
    for step in range(3):
        total += step * 2
        if rank == 0:
            total -= 1
    note(total, None)


def test_every_kind_of_change_is_made_once() -> None:
    made = mutants(healthy)
    by_operator = {m.operator: [x.change for x in made if x.operator == m.operator] for m in made}
    assert sorted(by_operator["delete"]) == [
        "for step in range(3):",
        "if rank == 0:",
        "total += step * 2",
        "total -= 1",
    ]
    assert sorted(by_operator["number"]) == ["0 -> 1", "0 -> 1", "1 -> 2", "2 -> 3", "3 -> 4"]
    assert set(by_operator) == {"delete", "number", "rank", "rank condition", "swap", "operator"}
    assert len({m.source for m in made}) == len(made)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_mutants_of_a_script_can_be_compiled_and_are_observed(script: Any) -> None:
    made = mutants(script)
    assert made == mutants(script)
    original = ast.unparse(ast.parse(inspect.getsource(script)))
    for mutant in made:
        compile(mutant.source, mutant.name, "exec")
        assert mutant.source != original
        assert "note(" in mutant.source and "watch(" in mutant.source


def test_trainings_are_compared_by_their_parameters() -> None:
    one = [[{"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)} for _ in range(3)]]
    other = [[{name: values.copy() for name, values in step.items()} for step in one[0]]]
    assert _distance(one, other) == 0
    assert _first(one, other) == (None, ())
    other[0][1]["b"][0] = 2
    other[0][2]["b"][0] = 2
    assert _distance(one, other) > 0.1
    assert _first(one, other) == (2, ("b",))
    other[0].pop()
    assert _distance(one, other) == float("inf")


def test_a_verdict_before_the_change_or_about_an_untouched_parameter_is_misplaced() -> None:
    def named(step: int, parameter: str) -> Finding:
        return Finding("optimizer-stale", "", step=step, evidence=({"what": "x", "parameter": parameter},))

    assert _misplaced(named(1, "b"), 2, ("b",))
    assert _misplaced(named(2, "a"), 2, ("b",))
    assert not _misplaced(named(2, "b"), 2, ("b",))
    assert not _misplaced(named(3, "a"), 2, ("b",))


def test_a_mutant_runs_and_is_found() -> None:
    mutant = next(m for m in mutants(SCRIPTS["accumulation"]) if m.change == "micro < 2" and m.operator == "operator")
    traces, found = run(mutant.source, mutant.script)
    assert traces is not None
    assert "gradients-not-synchronized" in {finding.code for finding in found}


def test_what_an_earlier_run_wrote_is_read_back_with_both_of_two_mutants_of_one_name(tmp_path: Path) -> None:
    one = Verdict("ddp:3 number: 1 -> 2", "number", "changed", 4, ("0.bias",), ("optimizer-stale",), ("s",), ())
    other = Verdict("ddp:3 number: 1 -> 2", "number", "same", None, (), (), (), ())
    third = Verdict("ddp:4 delete: x = 1", "delete", "stopped", None, (), (), (), ())
    file = tmp_path / "verdicts.jsonl"
    file.write_text("".join(json.dumps(asdict(v)) + "\n" for v in (one, other, third)))
    assert read(file) == {one.mutant: [one, other], third.mutant: [third]}

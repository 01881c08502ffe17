"""The table of metrics, the exposition it makes, and the sources behind it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dtobs.errors import DependencyMissing
from dtobs.events import Kind
from dtobs.exporters import prometheus
from dtobs.exporters.bandwidth import bus_bandwidth
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.metrics import BY_NAME, TABLE
from dtobs.exporters.prometheus import RunCollector, exposition
from dtobs.exporters.totals import BUCKETS, StepTotals
from dtobs.findings import CATALOGUE
from dtobs.host.process import ProcessState
from dtobs.recording.meta import Op
from dtobs.testing.fake_run import FakeRun
from dtobs.timeline.whatif import RECENT_RANKS
from tests.unit.exporters.looks import full_look

GOLDEN = Path(__file__).with_name("exposition.golden.txt")


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k != "run"))): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
    }


@pytest.mark.parametrize("metric", TABLE, ids=lambda m: m.name)
def test_rows_follow_the_naming_rules(metric):
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    assert not metric.name.endswith("_total")  # the type adds it
    assert len(metric.help) > 10
    assert not metric.help.endswith(".")
    assert "run" not in metric.labels
    assert metric.name == "rank_info" or set(metric.labels) <= {
        "rank", "code", "dimension", "severity", "phase", "reason", "role", "state", "part", "check", "world_size",
        "torch", "dtobs", "stage", "fix", "op", "group",
    }  # fmt: skip
    assert (metric.source is None) == (metric.kind == "histogram")
    assert metric.kind != "histogram" or "rank" not in metric.labels


def test_names_are_unique():
    assert len(BY_NAME) == len(TABLE)


def test_every_metric_can_be_sourced(tmp_path: Path):
    families = {f.name for f in prometheus.families(full_look(tmp_path / "run"))}
    assert families == {f"dtobs_{metric.name}" for metric in TABLE}


def test_exposition_is_the_golden_one(tmp_path: Path, update_golden: bool):
    lines = exposition(full_look(tmp_path / "run")).decode().splitlines(keepends=True)
    # The codes that are not there grow with the catalogue and have a test of their own.
    text = "".join(x for x in lines if not (x.startswith("dtobs_findings{") and x.endswith(" 0.0\n")))
    text = re.sub(r'pid="[0-9]+"', 'pid="1"', text)
    if update_golden:
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_promtool_has_nothing_to_say(tmp_path: Path, require_program: Callable[[str], str]):
    done = subprocess.run(
        [require_program("promtool"), "check", "metrics"],
        input=exposition(full_look(tmp_path / "run")),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr.decode(), done.stdout.decode()) == (0, "", "")


def test_values(tmp_path: Path):
    found = samples(exposition(full_look(tmp_path / "run")))
    assert found["dtobs_steps_total", (("rank", "1"),)] == 20
    assert found["dtobs_ranks", (("state", "suspended"),)] == 1
    assert found["dtobs_ranks", (("state", "running"),)] == 1
    assert found["dtobs_findings", (("code", "rank-stopped"), ("severity", "critical"))] == 1
    assert found["dtobs_findings", (("code", "straggler"), ("severity", "warning"))] == 0
    assert found["dtobs_finding_rank", (("code", "rank-stopped"), ("rank", "1"))] == 1
    assert sum(name == "dtobs_findings" for name, _ in found) == len(CATALOGUE) + sum(
        bool(code.expect) for code in CATALOGUE.values()
    ), "what may be meant is counted as a note or by the severity of its code"
    assert found["dtobs_arrival_skew_seconds", (("rank", "0"),)] == 0
    assert found["dtobs_arrival_skew_seconds", (("rank", "1"),)] == pytest.approx(0.001)
    assert found["dtobs_mfu_ratio", ()] == pytest.approx(5e10 / 0.11 / 1e12)
    assert found["dtobs_hfu_ratio", ()] == pytest.approx(6e10 / 0.11 / 1e12)
    assert found["dtobs_checkpoint_age_seconds", ()] == pytest.approx(30, abs=1e-3)
    assert found["dtobs_step_duration_seconds_count", ()] == 40
    assert found["dtobs_step_duration_seconds_bucket", (("le", "0.1"),)] == 0
    assert found["dtobs_step_duration_seconds_bucket", (("le", "0.25"),)] == 40
    assert found["dtobs_monitor_errors_total", (("part", "journal"),)] == 2


def test_time_is_partitioned_into_goodput_and_badput(tmp_path: Path):
    look = full_look(tmp_path / "run")
    found = samples(exposition(look))
    bad = {dict(labels)["reason"]: v for (name, labels), v in found.items() if name == "dtobs_badput_seconds_total"}
    assert bad["data"] == pytest.approx(0.02)
    assert bad["communication"] == pytest.approx(0.1)
    assert bad["checkpoint"] == pytest.approx(0.2)
    elapsed = 20 * 0.11
    assert sum(bad.values()) + look.totals.ranks[0].productive == pytest.approx(elapsed)
    assert found["dtobs_goodput_ratio", ()] == pytest.approx(20 * 0.094 / (elapsed + 1.0))


def test_a_hang_is_no_backward(tmp_path: Path):
    run = FakeRun(tmp_path / "run", 2)
    run.steps(20)
    totals = StepTotals()
    totals.update(run.view(), [0, 1])
    since = run.rank(0).clock_ns + 40_000_000
    run.rank(0).step(exposed=30.005)
    run.rank(1).step(backward=30.03)
    totals.update(run.view(), [0, 1], [since])
    found = samples(exposition(replace(full_look(tmp_path / "other"), view=run.view(), totals=totals)))
    assert found["dtobs_badput_seconds_total", (("reason", "hang"),)] == pytest.approx(30.0, abs=0.1)
    assert found["dtobs_badput_seconds_total", (("reason", "communication"),)] == pytest.approx(21 * 0.005, abs=0.1)
    assert totals.ranks[1].productive == pytest.approx(21 * 0.094, abs=0.1)


def lopsided(root: Path, world: int, nodes: int = 1) -> FakeRun:
    """Rank 1 goes forward for 230 ms, the others for 30 and wait for it."""
    run = FakeRun(root, world, ranks_per_node=world // nodes)
    for _ in range(12):
        for rank in run.ranks:
            slow = rank.number == 1
            rank.step(forward=0.23 if slow else 0.03, exposed=0.005 if slow else 0.205)
    return run


def test_what_a_slow_rank_costs_and_what_fixing_it_returns(tmp_path: Path):
    look = replace(full_look(tmp_path / "other"), view=lopsided(tmp_path / "run", 4).view(), totals=StepTotals())
    found = samples(exposition(look))
    # Equal would be the mean, 80 ms: that is 150 ms of each step.
    rest = look.view.steps(1).records[1][0]
    step = sum(int(rest[f"{part}_ns"]) for part in ("data", "forward", "backward", "exposed", "optimizer")) / 1e9
    assert found["dtobs_slowdown_ratio", ()] == pytest.approx(step / (step - 0.15), rel=1e-6)
    assert found["dtobs_slowdown_returned_ratio", (("fix", "worst_workers"),)] == pytest.approx(1.0, abs=0.01)
    assert found["dtobs_slowdown_returned_ratio", (("fix", "communication"),)] == pytest.approx(0.0, abs=0.01)
    assert not any(name == "dtobs_slowdown_stage_ratio" for name, _ in found)


def test_what_slowness_costs_is_the_leads_to_say_and_not_of_a_large_run(tmp_path: Path):
    small = lopsided(tmp_path / "run", 2).view()
    large = lopsided(tmp_path / "large", RECENT_RANKS + 1).view()
    look = full_look(tmp_path / "other")
    for other in (replace(look, view=small, leads=False), replace(look, view=large)):
        found = samples(exposition(replace(other, totals=StepTotals())))
        assert not any("slowdown" in name for name, _ in found)


def test_noise_scale_formula(tmp_path: Path):
    # |G_small|² = 4 at b = 1024, |G_big|² = 2.25 at B = 2048:
    # |G|² = (B·2.25 − b·4) / (B − b), S = (4 − 2.25) / (1/b − 1/B)
    found = samples(exposition(full_look(tmp_path / "run")))
    signal = (2048 * 2.25 - 1024 * 4) / 1024
    noise = (4 - 2.25) / (1 / 1024 - 1 / 2048)
    assert found["dtobs_gradient_noise_scale_tokens", ()] == pytest.approx(noise / signal)


def test_only_the_lead_speaks_for_the_run_and_each_node_for_its_ranks(tmp_path: Path):
    run = FakeRun(tmp_path / "run", world=4, ranks_per_node=2)
    run.steps(3)
    view = run.view()
    look = full_look(tmp_path / "other")
    first = samples(exposition(replace(look, view=view, node=0, leads=True, totals=StepTotals())))
    second = samples(exposition(replace(look, view=view, node=1, leads=False, totals=StepTotals())))
    assert {labels for name, labels in first if name == "dtobs_steps_total"} == {
        (("rank", "0"),),
        (("rank", "1"),),
    }
    assert {labels for name, labels in second if name == "dtobs_steps_total"} == {
        (("rank", "2"),),
        (("rank", "3"),),
    }
    assert not {name for name, _ in second} & {"dtobs_findings", "dtobs_ranks", "dtobs_run_info"}


def test_an_empty_run_and_values_nobody_reported(tmp_path: Path):
    run = FakeRun(tmp_path / "run", world=2)
    look = full_look(tmp_path / "other")
    empty = samples(exposition(replace(look, view=run.view(), totals=StepTotals())))
    assert empty["dtobs_ranks", (("state", "missing"),)] == 2
    run.rank(0)
    some = samples(exposition(replace(look, view=run.view(), totals=StepTotals())))
    assert not [name for name, _ in some if name in ("dtobs_loss", "dtobs_learning_rate", "dtobs_mfu_ratio")]


def test_states_of_processes(tmp_path: Path):
    run = FakeRun(tmp_path / "run", world=4)
    run.steps(1)
    run.rank(3).close()
    dead = ProcessState(1, alive=False, exit_code=-9)
    view = run.view(processes={0: dead, 3: dead})
    found = samples(exposition(replace(full_look(tmp_path / "other"), view=view, totals=StepTotals())))
    states = {dict(labels)["state"]: v for (name, labels), v in found.items() if name == "dtobs_ranks"}
    assert {k: v for k, v in states.items() if v} == {"dead": 1, "running": 2, "finished": 1}
    assert ("dtobs_heartbeat_age_seconds", (("rank", "3"),)) not in found


def test_labels_are_escaped(tmp_path: Path):
    text = exposition(full_look(tmp_path / 'ru"n\\x'))
    assert b'run="ru\\"n\\\\x"' in text
    assert samples(text)


def test_without_prometheus_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(DependencyMissing, match=r"dtobs\[prometheus\]"):
        exposition(full_look(tmp_path / "run"))


class TestTotals:
    def test_each_step_counts_once_and_over_restarts(self, tmp_path: Path):
        totals, heard = StepTotals(), []
        totals.listeners.append(lambda walls: heard.extend(walls))
        run = FakeRun(tmp_path / "run", world=1)
        for _ in range(3):
            run.steps(5)
            totals.update(run.view(), [0])
            totals.update(run.view(), [0])
        assert totals.count == totals.ranks[0].steps == len(heard) == 15
        again = FakeRun(tmp_path / "run", world=1, attempt=1)
        again.steps(2)
        totals.update(again.view(), [0])
        assert totals.count == 17
        assert totals.ranks[0].parts["forward"] == pytest.approx(17 * 0.04)

    def test_buckets_are_sorted_and_the_last_is_open(self, tmp_path: Path):
        assert list(BUCKETS) == sorted(BUCKETS)
        run = FakeRun(tmp_path / "run", world=1)
        run.rank(0).step(forward=1000.0)
        totals = StepTotals()
        totals.update(run.view(), [0])
        assert totals.buckets[-1] == 1

    def restarted(self, run: FakeRun, first_step: int = 3) -> FakeRun:
        """Up to step 9, a second later a restart, nine seconds after that five steps from `first_step` on."""
        run.steps(10 - run.rank(0).next_step)
        end_ns = run.rank(0).clock_ns
        again = FakeRun(run.directory.root, world=1, attempt=1, start_ns=end_ns + 1_000_000_000)
        again.rank(0).advance(9.0).next_step = first_step
        again.steps(5)
        return again

    @pytest.mark.parametrize("watched", [True, False], ids=["one-monitor", "a-later-monitor"])
    def test_a_restart_costs_the_time_down_and_the_steps_done_again(self, tmp_path: Path, watched: bool):
        totals, run = StepTotals(), FakeRun(tmp_path / "run", world=1)
        if watched:
            run.steps(4)
            totals.update(run.view(), [0])  # the other six it did not see in time
        again = self.restarted(run)
        totals.update(again.view(), [0])
        rank = totals.ranks[0]
        assert (rank.steps, rank.redone_steps) == (15, 5)
        assert rank.restart == pytest.approx(10.0)
        assert sum(rank.redone.values()) == pytest.approx(5 * 0.1)
        assert rank.productive == pytest.approx(10 * 0.094)
        assert rank.elapsed == pytest.approx(11.5)
        look = replace(full_look(tmp_path / "other"), view=again.view(later=0.5), totals=totals)
        found = samples(exposition(look))
        assert found["dtobs_badput_seconds_total", (("reason", "restart"),)] == pytest.approx(10.0)
        assert found["dtobs_badput_seconds_total", (("reason", "redone"),)] == pytest.approx(0.5)
        assert found["dtobs_redone_steps_total", ()] == 5
        assert found["dtobs_goodput_ratio", ()] == pytest.approx(0.94 / 12.0)

    def test_steps_that_go_on_are_not_done_again(self, tmp_path: Path):
        totals = StepTotals()
        totals.update(self.restarted(FakeRun(tmp_path / "run", world=1), first_step=10).view(), [0])
        assert (totals.ranks[0].redone_steps, totals.ranks[0].steps) == (0, 15)

    def test_a_rank_that_is_new_after_a_restart_pays_for_it_too(self, tmp_path: Path):
        one = FakeRun(tmp_path / "run", world=1)
        one.steps(10)
        start = one.rank(0).clock_ns + 2_000_000_000
        two = FakeRun(tmp_path / "run", world=2, attempt=1, start_ns=start)
        two.rank(0).next_step = two.rank(1).next_step = 8
        two.steps(3)
        totals = StepTotals()
        totals.update(two.view(), [0, 1])
        for rank in totals.ranks.values():
            assert rank.restart == pytest.approx(2.0)
            assert rank.redone_steps == 2
        assert (totals.ranks[0].steps, totals.ranks[1].steps) == (13, 3)


def test_repeated_lines_are_those_that_prometheus_client_writes(tmp_path: Path):
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest

    run = FakeRun(tmp_path / 'a "run"', 3).steps(4, loss=2.5, local_norm=float("inf"), rss_bytes=1e9)
    totals = StepTotals()
    view = run.view()
    totals.update(view, view.ranks)
    look = MonitorSnapshot(view, totals=totals)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(lambda: look))
    assert exposition(look).decode() == generate_latest(registry).decode()


def test_where_each_rank_is(tmp_path: Path):
    layout = {
        "kind": "ddp",
        "data_ranks": [0, 1],
        "stage": 0,
        "coordinates": {"replicate": 1, "shard": 0},
        "dropout": 0,
    }
    run = FakeRun(tmp_path / "run", 2, layout=layout).steps(1)
    lines = exposition(MonitorSnapshot(run.view())).decode().splitlines()
    (line,) = [line for line in lines if line.startswith("dtobs_rank_info{") and 'rank="1"' in line]
    assert 'mesh="replicate=1,shard=0"' in line
    assert 'host="' in line


def test_bus_bandwidth_is_that_of_the_slowest_group(tmp_path: Path):
    """Two groups alike of two ranks each, whose all-reduces of 4 KiB take 1 and 4 ms after the last has come."""
    run = FakeRun(tmp_path / "run", 4)
    numbers = [run.group(name, ranks) for name, ranks in (("1", (0, 1)), ("2", (2, 3)))]
    for call in range(6):
        for rank in run.ranks:
            pair = rank.number // 2
            late = 0.002 * (rank.number % 2)
            rank.advance(late).collective("all_reduce", numbers[pair]).advance((0.001, 0.004)[pair] + 0.002 - late)
            rank.event(Kind.WAIT_END, group=numbers[pair], seq=2 * call + 1, value=0.001)
            rank.collective(Op("all_reduce", "max", ((2,),), ("float32",)), numbers[pair], payload=8).advance(0.05)
            rank.event(Kind.WAIT_END, group=numbers[pair], seq=2 * call + 2, value=0.05)
            rank.clock_ns = run.start_ns + (call + 1) * 100_000_000
    assert list(bus_bandwidth(MonitorSnapshot(run.view()))) == [
        (("all_reduce", "unnamed"), pytest.approx(4096 / 0.004))
    ]
    assert list(bus_bandwidth(MonitorSnapshot(run.view(), node=1))) == []

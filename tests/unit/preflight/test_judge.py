"""What is concluded from what three hosts left: healthy ones are left alone, each fault is named with its host."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dtobs.findings import Severity, exit_code
from dtobs.preflight.judge import judge
from dtobs.preflight.model import PreflightEvidence, Problem, Reached, Report, Wrong
from dtobs.preflight.text import render
from tests.unit.preflight.evidence import GIB, facts, healthy, link


def one(seen: PreflightEvidence) -> Problem:
    found = judge(seen, "gloo")
    assert [p.code for p in found] == [found[0].code], found
    return found[0]


def leave_out(seen: PreflightEvidence, rank: int) -> None:
    """As if `rank` had never come: the others then measure nothing together."""
    seen.hellos.pop(rank)
    seen.facts.pop(rank)
    seen.reached, seen.links, seen.speeds, seen.done = [], [], [], set()


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
def test_healthy_hosts_have_no_problem(nodes: int):
    assert judge(healthy(nodes, 2), "gloo") == []


def test_a_node_that_never_came_is_named():
    seen = healthy()
    leave_out(seen, 2)
    seen.nodes.pop(2)
    found = one(seen)
    assert (found.code, found.severity, found.ranks, found.hosts) == (
        "rendezvous-incomplete",
        Severity.CRITICAL,
        (2,),
        ("c",),
    )
    assert found.summary == "1 of 3 ranks are missing: node 2 (c) never came"


def test_a_rank_that_did_not_come_up_on_a_host_that_did():
    seen = healthy(2, 2)
    leave_out(seen, 3)
    seen.errors[3] = "start: the process exited with code 1: ImportError: no torch"
    assert one(seen).summary == (
        "1 of 4 ranks are missing: rank 3 of node 1 (b) did not come up"
        " (the process exited with code 1: ImportError: no torch)"
    )


def test_a_silent_rank_is_named_and_those_that_wait_for_it_are_not():
    seen = healthy()
    seen.done, seen.silent[1] = set(), 16.0
    seen.stages[1] = "values: all_reduce"
    seen.errors = {
        0: "values: all_gather: RuntimeError: Timed out",
        2: "values: all_gather: RuntimeError: Timed out",
    }
    found = one(seen)
    assert (found.code, found.ranks) == ("rank-silent", (1,))
    assert found.summary == "rank 1 on b has given no sign of life for 16 s, in 'values: all_reduce'"


def test_a_dead_rank_is_named():
    seen = healthy()
    seen.done = set()
    seen.errors = {
        2: "links: rank 0 with rank 2: the process was killed by signal 9",
        0: "links: rank 0 with rank 2: RuntimeError: closed",
    }
    assert (one(seen).code, one(seen).ranks) == ("rank-died", (2,))


def test_a_stage_that_does_not_end():
    seen = healthy()
    seen.done = set()
    seen.errors = {0: "connecting all ranks with gloo: RuntimeError: connect timeout"}
    found = one(seen)
    assert found.code == "not-finished"
    assert "rank 0 on a: connecting all ranks with gloo: RuntimeError: connect timeout" in found.summary


def test_a_host_that_nobody_reaches():
    seen = healthy()
    seen.done, seen.links = set(), []
    seen.reached = [
        replace(r, error="10.0.0.3:40000: no answer") if 2 in (r.source, r.target) else r for r in seen.reached
    ]
    found = one(seen)
    assert (found.code, found.ranks, found.hosts) == ("unreachable", (2,), ("c",))


def test_a_host_without_an_address():
    seen = healthy()
    seen.hellos[1] = replace(seen.hellos[1], address="", port=0)
    assert one(seen).summary == "b has no address that the other hosts could reach it by"


def test_one_blocked_link():
    seen = healthy()
    seen.done = set()
    seen.reached = [
        replace(r, error="10.0.0.2:40000: no answer") if (r.source, r.target) == (0, 1) else r for r in seen.reached
    ]
    assert one(seen).summary == "a does not reach b (10.0.0.2:40000: no answer)"
    assert one(seen).links == (("a", "b"),)


def test_a_clock_that_is_off():
    seen = healthy()
    off = {0: 0.0, 1: 0.0, 2: 4.0}
    seen.reached = [Reached(r.source, r.target, 1e-3, off[r.target] - off[r.source]) for r in seen.reached]
    assert one(seen).summary == "the clock of c is 4 s ahead of the other hosts"


def test_a_clock_is_not_accused_within_what_is_uncertain():
    seen = healthy()
    seen.reached = [replace(r, clock_ahead_seconds=0.3, round_trip_seconds=0.9) for r in seen.reached]
    assert judge(seen, "gloo") == []


def test_a_host_that_sends_slowly_and_not_its_links():
    seen = healthy()
    seen.links = [link(x.source, x.target, bytes_per_second=5e6 if x.source == 2 else 1e9) for x in seen.links]
    found = one(seen)
    assert (found.code, found.hosts) == ("slow-host", ("c",))
    assert found.summary == "c sends 4.77 MiB/s, the others 954 MiB/s"


def test_waiting_for_cores_makes_no_host_slow():
    """Ten times too much is taken off the waits of b and c; a waited as long, and nothing of it was counted."""
    seen = healthy()
    measured = [link(x.source, x.target, bytes_per_second=2e8) for x in seen.links]
    seen.links = [replace(x, most_bytes_per_second=2e8 if 0 in (x.source, x.target) else 2e9) for x in measured]
    assert judge(seen, "gloo") == []
    measured = [link(x.source, x.target, latency_seconds=0.02) for x in seen.links]
    seen.links = [replace(x, least_latency_seconds=0.02 if 0 in (x.source, x.target) else 5e-5) for x in measured]
    assert judge(seen, "gloo") == []


def test_a_host_that_only_waited_for_its_cores_is_not_slow():
    seen = healthy()
    slow = [link(x.source, x.target, bytes_per_second=5e6 if x.source == 2 else 1e9) for x in seen.links]
    seen.links = [replace(x, most_bytes_per_second=9e8) for x in slow]
    assert judge(seen, "gloo") == []


def test_one_slow_link_between_good_hosts():
    seen = healthy(4)
    seen.links = [
        link(x.source, x.target, bytes_per_second=5e6 if (x.source, x.target) == (1, 3) else 1e9) for x in seen.links
    ]
    found = one(seen)
    assert (found.code, found.links) == ("slow-link", (("b", "d"),))


def test_a_distant_host():
    seen = healthy(4)
    seen.links = [
        link(x.source, x.target, latency_seconds=0.03 if 3 in (x.source, x.target) else 5e-5) for x in seen.links
    ]
    assert one(seen).summary == "d answers in 30 ms, the others in 50 µs"


def test_two_hosts_have_nothing_to_compare():
    seen = healthy(2)
    seen.links = [link(0, 1, bytes_per_second=1e6), link(1, 0)]
    assert judge(seen, "gloo") == []


def test_wrong_values_name_the_rank():
    seen = healthy()
    seen.wrong = [Wrong(rank, "all_gather", "float32", 1021, 1, (1,)) for rank in (0, 2)]
    found = one(seen)
    assert (found.code, found.severity, found.ranks, found.hosts) == (
        "wrong-values",
        Severity.CRITICAL,
        (1,),
        ("b",),
    )


def test_versions_that_differ():
    seen = healthy()
    seen.facts[1] = facts(local_world=1, versions={"python": "3.11.7", "torch": "2.12.0"})
    found = one(seen)
    assert (found.code, found.severity, found.hosts) == ("version-mismatch", Severity.CRITICAL, ("b",))
    assert found.summary == "torch is not the same everywhere: 2.13.0 on a, c; 2.12.0 on b"


def test_variables_that_differ():
    seen = healthy()
    seen.facts[2] = facts({"NCCL_IB_HCA": "mlx5_0"}, local_world=1)
    found = one(seen)
    assert (found.code, found.ranks) == ("environment-differs", (2,))
    assert found.summary == "NCCL_IB_HCA is not the same everywhere: 'unset' on ranks 0 and 1; 'mlx5_0' on rank 2"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"error": "cannot be written: Read-only file system"}, "cannot be written: Read-only file system"),
        ({"free_bytes": 1 << 20}, "is full"),
        ({"free_bytes": 2 * GIB}, "has 2 GiB free of 1000 GiB"),
        ({"write_bytes_per_second": 1e6}, "takes 977 KiB/s"),
    ],
)
def test_disks(changes: dict[str, object], text: str):
    seen = healthy()
    disk = seen.facts[1].disk
    assert disk is not None
    seen.facts[1] = replace(seen.facts[1], disk=replace(disk, **changes))
    found = one(seen)
    assert (found.code, found.hosts) == ("disk", ("b",))
    assert text in found.summary


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"open_files": 256}, "open-files"),
        ({"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "shared-memory"),
        ({"shm_free_bytes": 1 << 20}, "shared-memory"),
        ({"infiniband": True}, "memlock"),
    ],
)
def test_limits(changes: dict[str, object], check: str):
    seen = healthy()
    seen.facts[0] = replace(seen.facts[0], **changes)
    assert (one(seen).code, one(seen).hosts) == (check, ("a",))


def test_the_report_says_what_is_wrong_first():
    seen = healthy()
    seen.links[0] = link(0, 1, wrong_bytes=3)
    report = Report(seen, judge(seen, "gloo"), 12.0)
    assert exit_code(report.problems) == 4
    assert render(report).splitlines()[:3] == [
        "preflight: 1 problem, 3 of 3 ranks on 3 hosts, 12 s",
        "",
        "CRITICAL  wrong-values: 3 bytes from rank 0 to rank 1 arrived wrong;"
        " concerned: ranks 0 and 1 on a, b: no single rank explains it",
    ]
    told = json.loads(json.dumps(report.to_json()))
    assert (told["schema"], told["ok"], told["problems"][0]["severity"]) == (
        "dtobs.preflight/1",
        False,
        "critical",
    )
    assert exit_code(Report(seen, [], 12.0).problems) == 0

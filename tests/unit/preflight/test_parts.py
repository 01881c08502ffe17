"""The parts of preflight on their own: rules, timetable, blame, hosts, disk, clocks, patterns."""

from __future__ import annotations

import threading
import time
from itertools import combinations
from pathlib import Path

import pytest
import torch

from dtobs.errors import ServiceError, UsageError
from dtobs.host.address import address_towards
from dtobs.preflight import board, disk, hosts, launch, links, machine, reach
from dtobs.preflight.blame import corrupting, to_measure_again
from dtobs.preflight.collectives import contribution
from dtobs.preflight.environment import RULES, Setting, differences
from dtobs.preflight.model import Hello, Wrong
from tests.unit.preflight.evidence import facts, healthy, link


def wrong_rules(nodes: int = 1, backend: str = "nccl", **changes: object) -> list[str]:
    environment = changes.pop("environment", {})
    seen = facts(environment, **{"devices": 8, **changes})  # type: ignore[arg-type]
    return [rule.name for rule in RULES if rule.wrong(Setting(seen.environment, seen, nodes, backend))]


BITES = {
    "GLOO_SOCKET_IFNAME": "eth9",
    "NCCL_SOCKET_IFNAME": "=eth",
    "TP_SOCKET_IFNAME": "eth",
    "MASTER_ADDR": "localhost",
    "OMP_NUM_THREADS": "8",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_NCCL_ENABLE_TIMING": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "false",
    "TORCH_FR_BUFFER_SIZE": "0",
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_DEBUG": "INFO",
    "DTOBS_DISABLE": "1",
}
HARMLESS = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "^docker,lo",
    "TP_SOCKET_IFNAME": "eth0",
    "MASTER_ADDR": "gpu01",
    "OMP_NUM_THREADS": "4",
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "TORCH_NCCL_ENABLE_TIMING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_FR_BUFFER_SIZE": "20000",
    "CUDA_LAUNCH_BLOCKING": "0",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_SHM_DISABLE": "0",
    "NCCL_DEBUG": "WARN",
    "DTOBS_DISABLE": "0",
}


@pytest.mark.parametrize("name", BITES)
def test_a_variable_that_bites_and_one_that_does_not(name: str):
    assert wrong_rules(2, environment={name: BITES[name]}) == [name]
    assert wrong_rules(2, environment={name: HARMLESS[name]}) == []


def test_rules_that_need_more_than_one_variable():
    assert wrong_rules(environment={"NCCL_IB_DISABLE": "1"}) == []
    assert wrong_rules(environment={"NCCL_IB_DISABLE": "1"}, infiniband=True) == ["NCCL_IB_DISABLE"]
    assert wrong_rules(environment={"NCCL_NET_GDR_LEVEL": "LOC"}, infiniband=True) == ["NCCL_NET_GDR_LEVEL"]
    assert wrong_rules(environment={"NCCL_ALGO": "Ring"}) == ["NCCL tuning"]
    assert wrong_rules(devices=1) == ["CUDA_VISIBLE_DEVICES"]
    assert wrong_rules(2, "gloo", name_is_loopback=True) == ["GLOO_SOCKET_IFNAME unset"]
    assert wrong_rules(1, "gloo", name_is_loopback=True) == []
    assert wrong_rules(environment={"MASTER_ADDR": "127.0.0.1"}) == []
    assert wrong_rules(2, environment={"NCCL_SOCKET_IFNAME": "lo"}) == ["NCCL_SOCKET_IFNAME"]


def test_every_rule_has_a_case_here():
    more = {
        "NCCL_IB_DISABLE",
        "NCCL_NET_GDR_LEVEL",
        "NCCL tuning",
        "CUDA_VISIBLE_DEVICES",
        "GLOO_SOCKET_IFNAME unset",
    }
    assert {rule.name for rule in RULES} == set(BITES) | more


def test_variables_of_one_rank_only():
    same, odd = {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}
    assert differences({0: same, 1: same, 2: odd}) == {"NCCL_DEBUG": {"WARN": [0, 1], "unset": [2]}}


def test_secrets_stay_at_home():
    known = machine.facts({"TORCH_HUB_TOKEN": "x", "NCCL_DEBUG": "WARN", "AWS_KEY": "x"}, None, 1)
    assert known.environment == {"NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
@pytest.mark.parametrize("local_world", [1, 2, 6])
def test_the_timetable_has_every_pair_of_nodes_once(nodes: int, local_world: int):
    hellos = list(healthy(nodes, local_world).hellos.values())
    rounds = links.timetable(hellos)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)), "nobody talks to two at once"
    met = [pair for pairs in rounds for pair in pairs]
    leaders = range(0, nodes * local_world, local_world)
    between = [(a, b) for a, b in met if a // local_world != b // local_world]
    assert sorted(between) == list(combinations(leaders, 2))
    assert len(met) - len(between) == nodes * {1: 0, 2: 1, 6: 5}[local_world]


def test_only_suspects_are_measured_again():
    seen = healthy(4)
    node_of = {rank: hello.node for rank, hello in seen.hellos.items()}
    assert to_measure_again(seen.links, node_of) == []
    slow = [link(x.source, x.target, bytes_per_second=1e6 if x.target == 2 else 1e9) for x in seen.links]
    assert to_measure_again(slow, node_of) == [(0, 2), (1, 2), (2, 3)]


def wrong(rank: int, *sources: int, members: tuple[int, ...] = ()) -> Wrong:
    return Wrong(rank, "all_reduce", "float32", 8, 1, sources, members)


@pytest.mark.parametrize(
    ("found", "pairs", "ranks"),
    [
        ([wrong(1)], [], (1,)),
        ([wrong(0, 2), wrong(1, 2)], [], (2,)),
        (
            [wrong(r) for r in range(4)] + [wrong(r, members=pair) for pair in ((1, 2), (2, 3)) for r in pair],
            [(0, 1), (1, 2), (2, 3), (0, 3)],
            (2,),
        ),
        ([wrong(0), wrong(1), wrong(2)], [], (0, 1, 2)),
    ],
)
def test_who_wrong_values_come_from(found: list[Wrong], pairs: list[tuple[int, int]], ranks: tuple[int, ...]):
    assert corrupting(found, [], 4, pairs)[0] == ranks


@pytest.mark.parametrize("world", [2, 61, 1024])
def test_contributions_are_exact_in_every_type(world: int):
    total = sum(contribution(rank, world, 97) for rank in range(world))
    assert isinstance(total, torch.Tensor)
    assert 0 < int(total.max()) <= 240
    assert torch.equal(total.to(torch.bfloat16).to(torch.int64), total)


def test_names_of_nodes():
    assert hosts.expand("gpu[01-03,7],login") == ["gpu01", "gpu02", "gpu03", "gpu7", "login"]
    assert hosts.expected("a,b", 2, {}) == {0: "a", 1: "b"}
    assert hosts.expected(None, 2, {"SLURM_JOB_NODELIST": "n[1-2]"}) == {0: "n1", 1: "n2"}
    assert hosts.expected(None, 3, {"SLURM_JOB_NODELIST": "n[1-2]"}) == {0: "", 1: "", 2: ""}
    with pytest.raises(UsageError, match="--hosts names 1 hosts and --nnodes is 2"):
        hosts.expected("a", 2, {})


def test_a_folder_that_can_be_written(tmp_path: Path):
    found = disk.measure(tmp_path / "runs" / "not yet there")
    assert found.error == ""
    assert found.write_bytes_per_second > 0
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.write", full)
    assert disk.measure(tmp_path).error == "cannot be written: No space left on device"


def test_a_clock_is_read_across_a_connection():
    listener = reach.Listener("127.0.0.1", lambda: 1000.0)
    own = Hello(0, 0, 0, "a", 1, "127.0.0.1", 1)
    peer = Hello(1, 0, 1, "b", 2, "127.0.0.1", listener.port)
    found = reach.reach(own, peer, lambda: 990.0)
    listener.close()
    assert found.error == ""
    assert found.clock_ahead_seconds + found.round_trip_seconds / 2 == pytest.approx(10.0)


def test_a_port_nobody_listens_on():
    listener = reach.Listener("127.0.0.1")
    listener.close()
    peer = Hello(1, 0, 1, "b", 2, "127.0.0.1", listener.port)
    assert reach.reach(peer, peer).error == f"127.0.0.1:{listener.port}: Connection refused"


def test_the_address_of_a_host():
    assert reach.own_address("127.0.0.1", 1, 1) == "127.0.0.1"
    try:
        outside = address_towards("192.0.2.1", 1)
    except OSError:
        pytest.skip("this machine has no route to anywhere")
    assert reach.own_address("127.0.1.1", 1, 2) == outside


def test_whom_a_host_connects_to():
    hellos = list(healthy(3, 2).hellos.values())
    assert [h.rank for h in reach.peers(hellos, hellos[2])] == [4, 0]
    assert reach.peers(hellos, hellos[3]) == []
    assert [h.rank for h in reach.peers(hellos, hellos[0], most=1)] == [2]


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (
            "no-such-host.invalid",
            "does not reach the rendezvous at no-such-host.invalid:1: the name does not resolve",
        ),
        ("127.0.0.1", "the host answers and nothing listens on the port"),
    ],
)
def test_a_rendezvous_that_is_not_there(address: str, text: str):
    with pytest.raises(ServiceError, match=text):
        board.join(address, 1, 0.0)


def test_node_0_stays_until_the_nodes_that_came_have_read_its_verdict():
    kept = board.keep("127.0.0.1", 0)
    meeting = board.Meeting(kept)
    for node in (1, 2):
        meeting.post("node", node, f"host{node}")  # node 3 never came
    meeting.post("heard", 2, True)
    late = board.Meeting(board.join("127.0.0.1", kept.port, 5.0))
    began = time.monotonic()
    reader = threading.Timer(0.4, late.post, ("heard", 1, True))
    reader.start()
    launch.await_readers(meeting, 4, seconds=30.0)
    reader.join()
    assert 0.4 <= time.monotonic() - began < 30.0
    meeting.post("node", 3, "stopped")
    launch.await_readers(meeting, 4, seconds=0.1)  # one that is stopped holds nobody up

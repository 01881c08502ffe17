"""Preflight for real: healthy on loopback, and each kind of trouble named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Launched, launch, torchrun

SECONDS = 240
PREFLIGHT = (sys.executable, "-m", "dtobs", "preflight", "--json")
OF_THE_MACHINE = {"disk", "shared-memory", "open-files", "memlock"}
"""What the machine under the tests may lack for real."""


def problems(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for p in report["problems"] if p["check"] not in OF_THE_MACHINE]


def preflight(*words: str, env: dict[str, str | None] | None = None) -> Launched:
    return launch([*PREFLIGHT, *words], env=env, timeout=SECONDS)


def test_a_healthy_machine(tmp_path: Path):
    with preflight("--run-dir", str(tmp_path / "runs")) as command:
        code = command.wait()
        report = json.loads(command.stdout)
    assert problems(report) == []
    assert code == (0 if report["ok"] else 3)
    assert report["missing_ranks"] == []
    assert {(link["source"], link["target"]) for link in report["links"]} == {(0, 1), (1, 0)}
    assert all(link["bytes_per_second"] > 0 for link in report["links"])
    assert report["collectives"]["checked"] > 200
    assert report["collectives"]["wrong"] == []
    assert {speed["operation"] for speed in report["collectives"]["speed"]} == {"all_reduce", "all_gather"}


FAULTY = """
import os, runpy, sys
import torch.distributed as dist
good = dist.all_gather_into_tensor
def faulty(output, given, **rest):
    os.write(1, b"NCCL version 2.28.9\\n")  # libraries print where the report is read
    if os.environ["RANK"] == "1" and len(given) > 10:
        given = given.clone(); given[3] += 1
    return good(output, given, **rest)
dist.all_gather_into_tensor = faulty
sys.argv[0] = "dtobs.preflight"
runpy.run_module("dtobs.preflight", run_name="__main__")
"""


@pytest.mark.exhaustive(one_in=4)
def test_a_rank_that_contributes_wrong_values_below_torchrun(tmp_path: Path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    with torchrun([tmp_path / "faulty.py", "--json"], nproc=3, timeout=SECONDS) as command:
        command.wait()
        report = json.loads(command.stdout)
    (found,) = problems(report)
    assert (found["check"], found["severity"], found["ranks"]) == ("wrong-values", "critical", [1])
    assert "all_gather" in found["summary"]


@pytest.mark.exhaustive(one_in=4)
def test_a_rank_that_stops_in_the_middle():
    with preflight("--silence", "8", "--join-timeout", "15") as command:
        rank = until(lambda: child(command, rank=1))
        os.kill(rank, signal.SIGSTOP)
        assert command.wait() == 4
        report = json.loads(command.stdout)
    found = problems(report)
    # Stopped before it had said hello, it is missing; after that, silent.
    assert [(p["check"], p["ranks"]) for p in found] in (
        [("rank-silent", [1])],
        [("rendezvous-incomplete", [1])],
    )


def test_a_node_that_never_comes_and_an_environment_that_bites():
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--hosts", "here,gpu07", "--master-port", "0")
    bites = {"GLOO_SOCKET_IFNAME": "eth-none", "NCCL_DEBUG": "INFO"}
    with preflight(*words, "--master-addr", "localhost", "--join-timeout", "2", env=bites) as command:
        assert command.wait() == 4
        report = json.loads(command.stdout)
    (found,) = [p for p in problems(report) if p["check"] == "rendezvous-incomplete"]
    assert (found["ranks"], found["hosts"]) == ([1], ["gpu07"])
    assert found["summary"] == "1 of 2 ranks are missing: node 1 (gpu07) never came"
    told = {p["summary"].partition("=")[0]: p["severity"] for p in report["problems"] if p["check"] == "environment"}
    assert told["GLOO_SOCKET_IFNAME"] == "critical"
    assert told["NCCL_DEBUG"] == "warning"


def test_a_rendezvous_that_is_not_there():
    words = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1.", "--master-port", "1")
    with preflight(*words, "--join-timeout", "1") as command:
        assert command.wait() == 1
        assert "does not reach the rendezvous" in command.stderr


def child(command: Launched, rank: int) -> int | None:
    """The process of one rank, once it has torch and so handles its own work."""
    for pid in command.pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            mapped = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment and "libtorch_python" in mapped:
            return pid
    return None


def until(look: Any) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


class Network:
    """Nodes in network namespaces of their own, 10.77.0.1 and up, joined by a bridge."""

    def __init__(self, stack: ExitStack, nodes: int) -> None:
        self._prefix, self._stack = f"dtobs{os.getpid()}", stack
        self._namespace("s")
        self.ip("s", "link", "add", "br0", "type", "bridge")
        self.ip("s", "link", "set", "br0", "up")
        for node in range(nodes):
            self._namespace(str(node))
            peer = ("peer", "name", f"p{node}", "netns", f"{self._prefix}s")
            run("ip", "link", "add", "veth0", "netns", f"{self._prefix}{node}", "type", "veth", *peer)
            self.ip("s", "link", "set", f"p{node}", "master", "br0", "up")
            self.ip(str(node), "addr", "add", f"10.77.0.{node + 1}/24", "dev", "veth0")
            for device in ("veth0", "lo"):
                self.ip(str(node), "link", "set", device, "up")

    def ip(self, name: str, *words: str) -> None:
        run("ip", "-n", f"{self._prefix}{name}", *words)

    def inside(self, node: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self._prefix}{node}", *words]

    def _namespace(self, name: str) -> None:
        run("ip", "netns", "add", f"{self._prefix}{name}")
        self._stack.callback(run, "ip", "netns", "del", f"{self._prefix}{name}")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture
def network(require_program: Any) -> Iterator[Network]:
    for program in ("ip", "tc"):
        require_program(program)
    with ExitStack() as stack:
        try:
            made = Network(stack, 3)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield made


def test_one_of_three_hosts_is_throttled(network: Network, tmp_path: Path):
    run(*network.inside(2, "tc", "qdisc", "add", "dev", "veth0", "root", "tbf"), *TBF)
    with ExitStack() as stack:
        nodes = [stack.enter_context(node(network, n, tmp_path)) for n in (0, 1, 2)]
        codes = [command.wait() for command in nodes]
        report = json.loads(nodes[0].stdout)
    found = {host: problem for problem in problems(report) for host in problem["hosts"]}
    assert found["c"]["check"] == "slow-host", report["problems"]
    assert found["c"]["ranks"] == [2]
    assert list(found) == ["c"], report["problems"]
    assert codes == [3, 3, 3]
    assert "slow-host: c sends" in nodes[1].stderr


TBF = ("rate", "40mbit", "burst", "32kb", "latency", "400ms")


def node(network: Network, number: int, folder: Path) -> Launched:
    words: Sequence[str] = (
        "--nnodes",
        "3",
        "--node-rank",
        str(number),
        "--nproc-per-node",
        "1",
        "--hosts",
        "a,b,c",
    )
    where = ("--master-addr", "10.77.0.1", "--run-dir", str(folder))
    command = network.inside(number, *PREFLIGHT, *words, *where)
    return launch(command, env={"GLOO_SOCKET_IFNAME": "veth0"}, timeout=SECONDS)


DISK = "from pathlib import Path; from dtobs.preflight import disk; print(disk.measure(Path({!r})).error)"


@pytest.mark.parametrize(("options", "text"), [("ro", "Read-only file system"), ("size=1m", "No space left on device")])
def test_a_folder_that_cannot_be_written(options: str, text: str, tmp_path: Path, require_program: Any):
    """A mount of its own, in a mount namespace that ends with the command: root writes past permissions."""
    unshare = require_program("unshare")
    words = f'mount -t tmpfs -o {options} tmpfs {tmp_path} && exec "$@"'
    command = [unshare, "--mount", "sh", "-c", words, "sh", sys.executable, "-c", DISK.format(str(tmp_path))]
    with launch(command, timeout=SECONDS) as measured:
        if measured.wait() != 0 and "not permitted" in measured.stderr:
            pytest.skip("mounts are not permitted here")
        assert measured.stdout.strip() == f"cannot be written: {text}", measured.stderr

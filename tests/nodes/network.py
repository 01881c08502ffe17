"""Machines for tests: each a network, a process and a host-name space of its own, joined by a switch.

Nothing of the machine's own network is touched. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import Launched, launch

INTERFACE = "eth0"


def require_namespaces(require_program: Callable[[str], str]) -> None:
    """Skips where machines cannot be made."""
    for name in ("ip", "tc", "unshare"):
        require_program(name)
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    probe = subprocess.run(
        ["unshare", "-n", "-p", "-f", "-u", "--mount-proc", "true"],
        capture_output=True,
        check=False,
        text=True,
    )
    if probe.returncode:
        pytest.skip(f"namespaces are not permitted here: {probe.stderr.strip()}")


class Network:
    """`count` machines at 10.77.0.1, 10.77.0.2, … on one switch."""

    def __init__(self, count: int, folder: Path) -> None:
        self._name = f"dt{uuid.uuid4().hex[:6]}"
        self.folder = folder
        self.count = count
        self._switch = f"{self._name}s"
        # torch looks every peer's name up, and there is no name server on this switch.
        self._hosts = folder / "hosts"
        names = "".join(f"{self.address(n)} host{n}\n" for n in range(count))
        self._hosts.write_text(f"127.0.0.1 localhost\n{names}")
        self._ip("netns", "add", self._switch)
        self._in(self._switch, "ip", "link", "add", "br0", "type", "bridge")
        self._in(self._switch, "ip", "link", "set", "br0", "up")
        for number in range(count):
            self._add(number)

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def run_dir(self, number: int) -> Path:
        """Where that machine records; no other sees it by its own doing."""
        return self.folder / f"disk{number}" / "run"

    def launch(
        self, number: int, command: Sequence[str | Path], env: Mapping[str, str], timeout: float = 180.0
    ) -> Launched:
        """Run a command on a machine, which is off when all that ran there has ended.

        When its first process, a shell, is killed, everything there is.
        """
        words = [
            "ip",
            "netns",
            "exec",
            self._space(number),
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--uts",
        ]
        set_up = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && "$@"; code=$?'
        # A machine goes on when its torchrun has ended, and so does the monitor there. The shell reaps while it sleeps.
        last = "while set -- /proc/[0-9]*; [ $# -gt 1 ]; do sleep 0.1; done; exit $code"
        inside = ["sh", "-c", f"{set_up}; {last}", f"host{number}", str(self._hosts), *map(str, command)]
        return launch([*words, "--mount-proc", "--", *inside], env=env, timeout=timeout)

    def power_off(self, machine: Launched) -> None:
        """Every process of the machine is killed at one instant, by the kernel."""
        (first,) = self._children(machine.pid) or [0]
        assert first, "the machine runs nothing"
        os.kill(first, signal.SIGKILL)

    def cut(self, number: int) -> None:
        """Its cable is out."""
        self._in(self._switch, "ip", "link", "set", f"p{number}", "down")

    def mend(self, number: int) -> None:
        """Its cable is in again."""
        self._in(self._switch, "ip", "link", "set", f"p{number}", "up")

    def degrade(self, number: int) -> str:
        """A bad link to that machine: delay and loss by netem, or where the kernel lacks it a slow, shallow queue."""
        port = ("tc", "qdisc", "add", "dev", f"p{number}", "root")
        try:
            self._in(self._switch, *port, "netem", "delay", "20ms", "5ms", "loss", "1%")
        except subprocess.CalledProcessError:
            # What does not fit into the queue is dropped, what does waits for its turn: loss and delay by congestion.
            self._in(self._switch, *port, "tbf", "rate", "4mbit", "burst", "2kb", "limit", "8kb")
            return "tbf"
        return "netem"

    def restore(self, number: int) -> None:
        """The link is a good one again."""
        self._in(self._switch, "tc", "qdisc", "del", "dev", f"p{number}", "root")

    def dropped(self, number: int) -> int:
        """Packets to that machine that the bad link has lost so far."""
        said = json.loads(self._in(self._switch, "tc", "-json", "-s", "qdisc", "show", "dev", f"p{number}"))
        return sum(int(queue.get("drops", 0)) for queue in said if queue.get("root"))

    def close(self) -> None:
        """Take it all down."""
        for number in range(self.count):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._ip("netns", "del", self._space(number))
        with contextlib.suppress(subprocess.CalledProcessError):
            self._ip("netns", "del", self._switch)

    def _add(self, number: int) -> None:
        space, port = self._space(number), f"p{number}"
        self._ip("netns", "add", space)
        pair = ("type", "veth", "peer", "name", INTERFACE, "netns", space)
        self._in(self._switch, "ip", "link", "add", port, *pair)
        self._in(self._switch, "ip", "link", "set", port, "master", "br0", "up")
        self._in(space, "ip", "address", "add", f"{self.address(number)}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            self._in(space, "ip", "link", "set", device, "up")

    def _space(self, number: int) -> str:
        return f"{self._name}n{number}"

    def _in(self, space: str, *command: str) -> str:
        return self._ip("netns", "exec", space, *command)

    def _ip(self, *arguments: str) -> str:
        program = shutil.which("ip") or "ip"
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    @staticmethod
    def _children(pid: int) -> list[int]:
        """The first process of the machine: the only child of `unshare`, which `ip netns exec` has become."""
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(child) for child in text.split()]


@contextmanager
def network(count: int, folder: Path) -> Iterator[Network]:
    """Machines for the length of a block."""
    made = Network(count, folder)
    try:
        yield made
    finally:
        made.close()

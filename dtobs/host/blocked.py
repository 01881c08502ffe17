"""What the main thread of a process waits for in the kernel: the call it is in, and the thing that the call names.

``/proc/PID/syscall`` has the number of the call and its arguments; who may not trace the process may not read it. A
descriptor among them says which file, lock, pipe or socket, and ``/proc/locks`` who holds a lock.
"""

from __future__ import annotations

import ipaddress
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from dtobs.host.process import kernel_text

_CALLS: dict[str, dict[str, tuple[int, ...]]] = {
    "x86_64": {
        "read": (0, 17, 19, 45, 47),
        "write": (1, 18, 20, 44, 46),
        "connect": (42,),
        "accept": (43, 288),
        "child": (61,),
        "child by kind": (247,),
        "lock": (72, 73),
        "sleep": (35, 230),
        "open": (2,),
        "open at": (257, 437),
    },
    "aarch64": {
        "read": (63, 65, 67, 207, 212),
        "write": (64, 66, 68, 206, 211),
        "connect": (203,),
        "accept": (202, 242),
        "child": (260,),
        "child by kind": (95,),
        "lock": (25, 32),
        "sleep": (101, 115),
        "open at": (56, 437),
    },
}
"""What a system call does, by the machine and its number (Linux, arch/x86/entry/syscalls and asm-generic/unistd.h)."""
_MOST_COMMAND = 60
_MOST_BYTES = 1 << 20
_PAGE = 4096


def waits_for(pid: int, ranks: Mapping[int, int], proc: Path = Path("/proc"), machine: str = "") -> str:
    """What process `pid` waits for: "its child process 71 (sleep 9)", "a lock on /x, which rank 0 (pid 7) holds".

    "" where it runs, waits for nothing that has a name, or may not be read. `ranks` has ranks by process id.
    """
    fields = kernel_text(proc / str(pid) / "syscall").split()
    if len(fields) < 3 or not fields[0].isdigit():
        return ""  # "running", or nothing that may be read
    calls = _CALLS.get(machine or platform.machine(), {})
    does = next((name for name, numbers in calls.items() if int(fields[0]) in numbers), "")
    first, second = int(fields[1], 16), int(fields[2], 16)
    if does in ("child", "child by kind"):
        return _child(pid, first if does == "child" else second, proc)
    if does == "sleep":
        return "a sleep to end"
    if does in ("open", "open at"):
        path = _text_at(pid, first if does == "open" else second, proc)
        return f"the file {path} to open" if path else "a file to open"
    return _descriptor(pid, does, first & 0xFFFFFFFF, ranks, proc) if does else ""


def _text_at(pid: int, address: int, proc: Path) -> str:
    """The text at an address of the process, as far as its page goes; "" where that may not be read."""
    try:
        with (proc / str(pid) / "mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            found = memory.read(_PAGE - address % _PAGE)
    except (OSError, OverflowError, ValueError):
        return ""
    text = found.partition(b"\0")[0].decode(errors="replace")
    return "".join(c if c.isprintable() else " " for c in text)


def _child(pid: int, child: int, proc: Path) -> str:
    children = kernel_text(proc / str(pid) / "task" / str(pid) / "children").split()
    if str(child) not in children:
        child = int(children[0]) if len(children) == 1 else 0  # any of them
    if not child:
        return "a child process to end"
    words = [part for part in kernel_text(proc / str(child) / "cmdline", 4096).split("\0") if part]
    command = "".join(c if c.isprintable() else " " for c in " ".join(words))
    shown = command if len(command) <= _MOST_COMMAND else f"{command[:_MOST_COMMAND]}…"
    return f"its child process {child} ({shown})" if shown else f"its child process {child}"


def _descriptor(pid: int, does: str, number: int, ranks: Mapping[int, int], proc: Path) -> str:
    place = proc / str(pid) / "fd" / str(number)
    try:
        target = str(place.readlink())
    except OSError:
        return ""
    if does == "lock":
        return f"a lock on {target}{_holder(place, pid, ranks, proc)}"
    if target.startswith("socket:["):
        return _socket(pid, does, target[8:-1], proc)
    if target.startswith("pipe:["):
        return "something to come through a pipe" if does == "read" else "somebody to read what it writes to a pipe"
    if target.startswith("/dev/pts/") or target in ("/dev/tty", "/dev/ptmx", "/dev/console"):
        return f"input from the terminal {target}" if does == "read" else f"the terminal {target}"
    return f"the file {target}" if target.startswith("/") else ""


def _holder(place: Path, pid: int, ranks: Mapping[int, int], proc: Path) -> str:
    try:
        status = place.stat()
    except OSError:
        return ""
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in _lines(proc / "locks"):
        fields = line.split()  # 3: POSIX ADVISORY WRITE 4711 fe:00:12 0 EOF; one that waits has "->" after the number
        if len(fields) > 5 and fields[1] != "->" and fields[5] == file and fields[4] not in (str(pid), "-1"):
            rank = ranks.get(int(fields[4]))
            return f", which rank {rank} (pid {fields[4]}) holds" if rank is not None else f", held by pid {fields[4]}"
    return ""


def _socket(pid: int, does: str, inode: str, proc: Path) -> str:
    peer = next((found for name in ("tcp", "tcp6") if (found := _peer(proc / str(pid) / "net" / name, inode))), "")
    if does == "accept":
        return "somebody to connect to it"
    if not peer:
        return "an answer from a socket" if does == "read" else ""
    return {"read": f"an answer from {peer}", "write": f"{peer} to take what it sends"}.get(
        does, f"a connection to {peer}"
    )


def _peer(table: Path, inode: str) -> str:
    """Address and port at the other end of a TCP socket, by its inode; "" where the table does not have it."""
    for line in _lines(table)[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[9] == inode:
            host, _, port = fields[2].partition(":")
            words = (bytes.fromhex(host[n : n + 8])[::-1] for n in range(0, len(host), 8))  # each little-endian
            address = ipaddress.ip_address(b"".join(words))
            mapped = getattr(address, "ipv4_mapped", None)
            return f"{mapped or address}:{int(port, 16)}" if int(port, 16) else ""
    return ""


def _lines(table: Path) -> list[str]:
    """Lines of a table of the kernel's, of which one read brings a page."""
    try:
        with table.open(errors="replace") as file:
            return file.read(_MOST_BYTES).splitlines()
    except OSError:
        return []

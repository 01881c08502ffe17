"""Environment variables that bite: a table of rules, each with why it hurts and what to do.

A rule looks at one rank's variables and at what its machine has, and answers with what is wrong, or "" when nothing
is. It is no rule's business to know whether other ranks have the same: `differences` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtobs.findings import Severity
from dtobs.preflight.model import Facts

_OFF = ("0", "", "false", "no", "off", "n")


@dataclass(frozen=True)
class Setting:
    """What a rule sees of one rank."""

    variables: Mapping[str, str]
    facts: Facts
    nodes: int
    backend: str

    def on(self, name: str) -> bool:
        """Whether a switch is set and not to off."""
        return self.variables.get(name, "").lower() not in _OFF

    def is_off(self, name: str) -> bool:
        """Whether a switch that is on by default was switched off."""
        return name in self.variables and self.variables[name].lower() in _OFF


@dataclass(frozen=True)
class Rule:
    """`wrong` returns what is wrong in a few words, "" when nothing is."""

    name: str
    wrong: Callable[[Setting], str]
    why: str
    what_to_do: str
    severity: Severity = Severity.WARNING


def _switch(name: str, why: str, what_to_do: str, *, off: bool = False) -> Rule:
    """A rule for a switch that should not be set (with `off`: not be switched off)."""

    def wrong(s: Setting) -> str:
        bad = s.is_off(name) if off else s.on(name)
        return f"{name}={s.variables[name]}" if bad else ""

    return Rule(name, wrong, why, what_to_do)


def _interface(name: str, *, exact: bool) -> Rule:
    def wrong(s: Setting) -> str:
        value = s.variables.get(name, "")
        if not value or value.startswith("^"):
            return ""
        names = [part for part in value.removeprefix("=").split(",") if part]
        whole = exact or value.startswith("=")
        absent = [n for n in names if not any(i == n if whole else i.startswith(n) for i in s.facts.interfaces)]
        if len(absent) == len(names):
            return f"{name}={value}, and this host has only {', '.join(s.facts.interfaces)}"
        if s.nodes > 1 and all(n == "lo" for n in names):
            return f"{name}={value} with {s.nodes} nodes"
        return ""

    return Rule(
        name,
        wrong,
        "No connection to another host can be made over an interface that is absent, or over loopback.",
        f"Set {name} to the interface that the other hosts are reached by (ip -br addr), on each host its own.",
        Severity.CRITICAL,
    )


def _threads(s: Setting) -> str:
    value = s.variables.get("OMP_NUM_THREADS", "")
    if not value and (s.facts.local_world == 1 or s.facts.cores == 1):
        return ""
    if not value:
        return f"OMP_NUM_THREADS is not set: {s.facts.local_world} ranks take all {s.facts.cores} cores each"
    threads = int(value) if value.isdecimal() else 0
    if threads < 1:
        return f"OMP_NUM_THREADS={value} is no number of threads"
    asked = threads * s.facts.local_world
    # One thread a rank is the least there is; only more than that is this variable's fault.
    if threads > 1 and asked > s.facts.cores:
        return f"OMP_NUM_THREADS={value}: {s.facts.local_world} ranks want {asked} threads on {s.facts.cores} cores"
    return ""


def _timing(s: Setting) -> str:
    if not s.on("TORCH_NCCL_ENABLE_TIMING"):
        return ""
    serial = s.variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    return "TORCH_NCCL_ENABLE_TIMING=1" + (" with CUDA_DEVICE_MAX_CONNECTIONS=1" if serial else "")


def _debug(s: Setting) -> str:
    detail = s.variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return "TORCH_DISTRIBUTED_DEBUG=DETAIL" if detail else ""


def _chatty(s: Setting) -> str:
    value = s.variables.get("NCCL_DEBUG", "").upper()
    return f"NCCL_DEBUG={value}" if value in ("INFO", "TRACE") else ""


def _forced(s: Setting) -> str:
    names = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_NTHREADS")
    return ", ".join(f"{name}={s.variables[name]}" for name in names if s.variables.get(name))


def _recorder(s: Setting) -> str:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    return next((f"{name}=0" for name in names if s.variables.get(name) == "0"), "")


def _visible(s: Setting) -> str:
    if s.backend != "nccl" or s.facts.devices >= s.facts.local_world:
        return ""
    value = s.variables.get("CUDA_VISIBLE_DEVICES", "not set")
    return f"{s.facts.devices} devices for {s.facts.local_world} ranks (CUDA_VISIBLE_DEVICES is {value})"


def _master(s: Setting) -> str:
    value = s.variables.get("MASTER_ADDR", "")
    local = value == "localhost" or value.startswith("127.")
    return f"MASTER_ADDR={value} with {s.nodes} nodes" if local and s.nodes > 1 else ""


def _gdr(s: Setting) -> str:
    value = s.variables.get("NCCL_NET_GDR_LEVEL", "")
    return f"NCCL_NET_GDR_LEVEL={value}" if value.upper() in ("LOC", "0") and s.facts.infiniband else ""


def _no_infiniband(s: Setting) -> str:
    return "NCCL_IB_DISABLE=1 on a host with InfiniBand" if s.on("NCCL_IB_DISABLE") and s.facts.infiniband else ""


def _gloo_loopback(s: Setting) -> str:
    if s.backend != "gloo" or s.nodes < 2 or s.variables.get("GLOO_SOCKET_IFNAME") or not s.facts.name_is_loopback:
        return ""
    return "GLOO_SOCKET_IFNAME is not set and the host's own name resolves to loopback"


RULES: tuple[Rule, ...] = (
    _interface("GLOO_SOCKET_IFNAME", exact=True),
    _interface("NCCL_SOCKET_IFNAME", exact=False),
    _interface("TP_SOCKET_IFNAME", exact=True),
    Rule(
        "GLOO_SOCKET_IFNAME unset",
        _gloo_loopback,
        "Gloo listens where the host's name points, and the other hosts then try to reach themselves.",
        "Set GLOO_SOCKET_IFNAME to the interface of the network, or correct the host's line in /etc/hosts.",
        Severity.CRITICAL,
    ),
    Rule(
        "MASTER_ADDR",
        _master,
        "Every host but one would look for the rendezvous on itself and wait until its timeout.",
        "Set MASTER_ADDR to a name or address of node 0 that the other hosts reach.",
        Severity.CRITICAL,
    ),
    Rule(
        "CUDA_VISIBLE_DEVICES",
        _visible,
        "Two ranks on one device are refused by NCCL, at the first collective.",
        "Start as many ranks as there are devices, or make more of them visible.",
        Severity.CRITICAL,
    ),
    Rule(
        "OMP_NUM_THREADS",
        _threads,
        "More threads than cores push each other off; every rank becomes slower, and unevenly so.",
        "Set OMP_NUM_THREADS to cores divided by ranks of the host, at least 1.",
    ),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        _debug,
        "Every collective is preceded by one on Gloo that compares shapes: steps take a multiple of their time.",
        "Unset it for long runs; dtobs finds mismatches without it.",
    ),
    Rule(
        "TORCH_NCCL_ENABLE_TIMING",
        _timing,
        "It serialises communication with computation when there is one connection, and has been seen to hang.",
        "Unset it; dtobs measures exposed communication without it.",
    ),
    _switch(
        "TORCH_NCCL_BLOCKING_WAIT",
        "The host blocks in every wait, so that communication no longer overlaps with the host's work.",
        "Unset it; errors are handled asynchronously by default.",
    ),
    _switch(
        "NCCL_BLOCKING_WAIT",
        "The old name of TORCH_NCCL_BLOCKING_WAIT: the host blocks in every wait.",
        "Unset it; errors are handled asynchronously by default.",
    ),
    _switch(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "A collective that fails then hangs its rank for ever instead of ending it.",
        "Unset it: the default tears the process down, and torchrun restarts it.",
        off=True,
    ),
    _switch(
        "NCCL_ASYNC_ERROR_HANDLING",
        "The old name of TORCH_NCCL_ASYNC_ERROR_HANDLING: a failed collective hangs its rank for ever.",
        "Unset it.",
        off=True,
    ),
    _switch(
        "TORCH_NCCL_ENABLE_MONITORING",
        "Nobody then ends a process whose NCCL watchdog itself is stuck.",
        "Unset it, and raise TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC if it ends processes too early.",
        off=True,
    ),
    Rule(
        "TORCH_FR_BUFFER_SIZE",
        _recorder,
        "PyTorch's Flight Recorder is off: after a hang nobody knows which collective was not issued.",
        "Unset it; the default keeps the last 2000 collectives at no measurable cost.",
    ),
    _switch(
        "CUDA_LAUNCH_BLOCKING",
        "Every kernel is waited for: nothing overlaps.",
        "Unset it; it is for finding the line of a device-side assertion.",
    ),
    _switch(
        "NCCL_P2P_DISABLE",
        "Devices of one host exchange through its memory instead of directly.",
        "Unset it unless direct access is broken on this host; then say so beside it.",
    ),
    _switch(
        "NCCL_SHM_DISABLE",
        "Devices of one host that have no direct access exchange through the network stack.",
        "Unset it; where it was a cure for a small /dev/shm, make that larger.",
    ),
    Rule("NCCL_IB_DISABLE", _no_infiniband, "All hosts talk over TCP sockets instead of InfiniBand.", "Unset it."),
    Rule(
        "NCCL_NET_GDR_LEVEL",
        _gdr,
        "Network cards then copy through host memory instead of straight from the device.",
        "Unset it, and let NCCL decide by the distance of card and device.",
    ),
    Rule(
        "NCCL tuning",
        _forced,
        "A choice that was right for one size of one cluster overrides NCCL's own for all sizes.",
        "Unset it, unless it was measured on this very cluster.",
    ),
    Rule(
        "NCCL_DEBUG",
        _chatty,
        "Every rank writes thousands of lines: the one that matters is lost, and the storage of the logs is kept busy.",
        "Set NCCL_DEBUG=WARN for long runs.",
    ),
    _switch("DTOBS_DISABLE", "Nothing of the run would be recorded.", "Unset it."),
)

MAY_DIFFER = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",  # each rank's own where a launcher assigns devices
        "GLOO_SOCKET_IFNAME",  # interfaces are named by each host
        "NCCL_SOCKET_IFNAME",
        "TP_SOCKET_IFNAME",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "TORCHELASTIC_ERROR_FILE",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_LOG_DIRECTORY",
    }
)


def differences(by_rank: Mapping[int, Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Variables that not all ranks have with one value: name → value ("unset" where absent) → ranks."""
    found: dict[str, dict[str, list[int]]] = {}
    for name in sorted({name for variables in by_rank.values() for name in variables} - MAY_DIFFER):
        values: dict[str, list[int]] = {}
        for rank, variables in sorted(by_rank.items()):
            values.setdefault(variables.get(name, "unset"), []).append(rank)
        if len(values) > 1:
            found[name] = values
    return found

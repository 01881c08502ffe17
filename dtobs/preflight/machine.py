"""What one rank knows without asking anybody: versions, limits, shared memory, interfaces, environment."""

from __future__ import annotations

import ipaddress
import os
import platform
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from dtobs.host.process import kernel_text
from dtobs.preflight.model import Disk, Facts

_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "OMP_", "MKL_", "CUDA_", "PYTORCH_", "UCX_", "FI_", "TP_", "DTOBS_")
_NAMES = ("MASTER_ADDR",)
_PRIVATE = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")


def facts(environment: Mapping[str, str], disk: Disk | None, local_world: int) -> Facts:
    """Gather them. Does not raise: what this machine does not have is 0 or empty."""
    shm = _shared_memory()
    return Facts(
        environment=_concerning(environment),
        versions=_versions(),
        cores=len(os.sched_getaffinity(0)),
        local_world=local_world,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        name_is_loopback=_name_is_loopback(),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        infiniband=any(Path("/sys/class/infiniband").glob("*")),
        shm_bytes=shm[0],
        shm_free_bytes=shm[1],
        disk=disk,
    )


def _concerning(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables worth comparing; nothing that may be a secret leaves the rank."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and not any(word in name for word in _PRIVATE)
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = str(torch.version.cuda)
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name(0)
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    driver = kernel_text("/sys/module/nvidia/version").strip()
    if driver:
        found["driver"] = driver
    return found


def _name_is_loopback() -> bool:
    """Gloo without an interface binds to what the host's name resolves to, which Debian makes 127.0.1.1."""
    try:
        address = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    except (OSError, ValueError):
        return True  # a name that does not resolve leaves Gloo with loopback as well


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def _shared_memory() -> tuple[int, int]:
    """(total, free) bytes of /dev/shm; (-1, -1) where there is none."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return -1, -1
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail

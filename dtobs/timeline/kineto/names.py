"""What a kernel's name and a collective's record say: compute, communication or memory, and which operation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any


class KernelKind(IntEnum):
    """What a device is busy with."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY = 2


# Lower case, as they begin after `void ` or after a namespace: NCCL and RCCL (old, new, generic), MSCCL, DeepEP's
# exchanges and those of its forks, NVSHMEM, the all-reduces of symmetric memory and of inference engines, oneCCL, and
# what other makers' libraries are called: HCCL and its tasks (hcom), MCCL, CNCL.
_COMMUNICATION = (
    "nccl",
    "rccl",
    "msccl",
    "intranode::",
    "internode::",
    "internode_ll::",
    "nvshmem",
    "multimem_",
    "one_shot_all_reduce",
    "two_shot_all_reduce",
    "cross_device_reduce",
    "trtllm_allreduce_fusion::",
    "oneccl",
    "hccl",
    "hcom_",
    "mccl",
    "cncl",
)
_MEMORY = ("memcpy", "memset", "dma", "__amd_rocclr_copybuffer", "__amd_rocclr_fillbuffer")
_LOCAL = ("deep_ep::layout", "get_dispatch_layout")  # `cached_notify_…` stays: it holds up until all peers are there

_OPS = (
    ("allreduce", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("crossdevicereduce", "all_reduce"),
    ("dispatch", "dispatch"),
    ("combine", "combine"),
    ("barrier", "barrier"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)
_MANGLED = re.compile(r"_z(?:nk?|l)?(?=\d)")
_LENGTH = re.compile(r"[1-9]\d{0,3}")
_NO_TRANSFER = {"wait", "init", "end", "startcoalescing", "endcoalescing", "abort", "work"}
_BYTES = {
    **dict.fromkeys(("byte", "char", "bool", "int8", "uint8"), 1),
    **dict.fromkeys(("half", "bfloat16", "short", "float16", "int16"), 2),
    **dict.fromkeys(("float", "int", "float32", "int32", "complexhalf"), 4),
    **dict.fromkeys(("double", "long", "float64", "int64", "complexfloat"), 8),
    "complexdouble": 16,
}


@dataclass(frozen=True)
class TracedCall:
    """What a trace says of one call of a collective; "" and 0 where it says nothing."""

    op: str
    group: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0  #: of the group
    nbytes: int = 0  #: the S of nccl-tests: the larger of what goes in and what comes out
    peers: tuple[int, int] | None = None  #: of a message who sends and who receives, -1 for the rank of the trace


@lru_cache(65536)
def kernel_kind(name: str) -> KernelKind:
    """What a kernel of this name does."""
    bare = _function(name)
    if bare.startswith(_MEMORY):
        return KernelKind.MEMORY
    parts = bare.split("::")
    talks = any("::".join(parts[i:]).startswith(_COMMUNICATION) for i in range(len(parts)))
    return KernelKind.COMMUNICATION if talks and not any(word in bare for word in _LOCAL) else KernelKind.COMPUTE


def _function(name: str) -> str:
    """A demangled function's name in lower case, with its namespaces, without result, arguments and templates."""
    bare = name.lower().removeprefix("void ").lstrip().replace("(anonymous namespace)::", "")
    if mangled := _MANGLED.match(bare):
        return _demangled(bare, mangled.end()) or bare
    return bare.split("(", 1)[0].split("<", 1)[0]


def _demangled(name: str, at: int) -> str:
    """The names of a symbol by the Itanium C++ ABI, each behind its length: `_ZN3foo3barEi` is foo::bar."""
    parts = []
    while size := _LENGTH.match(name, at):
        at = size.end() + int(size[0])
        parts.append(name[size.end() : at])
        if not name.startswith("_zn"):
            break  # what follows a name outside any namespace are the types of its arguments
    return "::".join(part for part in parts if part != "_global__n_1")


@lru_cache(65536)
def operation(name: str) -> str:
    """The collective that a kernel or a record names, "" when it names none."""
    bare = _function(name).replace("_", "").replace("-", "")
    return next((op for part, op in _OPS if part in bare), "")


def call_of(args: dict[str, Any]) -> TracedCall | None:
    """The call that the arguments of a kernel or of a `record_param_comms` tell of, or None."""
    name = args.get("Collective name")
    if not isinstance(name, str) or name.strip('"').lower().replace("_", "") in _NO_TRANSFER:
        return None
    op = operation(name.strip('"'))
    if not op:
        return None
    elements = max(whole(args.get("In msg nelems")), whole(args.get("Out msg nelems")))
    width = _BYTES.get(str(args.get("dtype", "")).strip('"').lower(), 1 if "8" in str(args.get("dtype", "")) else 0)
    source, target = whole(args.get("Src Rank"), -1), whole(args.get("Dst Rank"), -1)
    peers = (source, target) if source != target else None  # PyTorch names the other side alone
    ranks = ranks_of(args.get("Process Group Ranks"))
    group = str(args.get("Process Group Name", "")).strip('"')[:200]
    return TracedCall(op, group, ranks, whole(args.get("Group size")) or len(ranks), elements * width, peers)


def ranks_of(value: Any) -> tuple[int, ...]:
    """The ranks of a group: a list or "[0, 1, 2]"; nothing when the trace left some of them out ("...")."""
    if isinstance(value, str):
        if "..." in value or len(value) > 1 << 20:
            return ()
        value = value.strip(' "[]').split(",")
    if not isinstance(value, list):
        return ()
    found = [whole(v, -1) for v in value]
    return tuple(sorted(set(found))) if found and min(found) >= 0 else ()


def whole(value: Any, otherwise: int = 0) -> int:
    """`value` as a number that a trace can mean, `otherwise` where it is none."""
    if type(value) is int:
        return value if 0 <= value < 1 << 60 else otherwise
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return number if 0 <= number < 1 << 60 else otherwise


def bus_factor(op: str, size: int) -> float:
    """What turns S/t into the speed of the links (nccl-tests)."""
    if size < 2:
        return 1.0
    if op == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if op in ("all_gather", "reduce_scatter", "all_to_all") else 1.0

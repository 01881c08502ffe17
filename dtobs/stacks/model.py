"""What the stack of one rank shows: the operation it is in, and the user's line that called it.

The innermost frames say what a rank does: a function of torch.distributed is a collective, `_engine_run_backward` is a
backward, a loader's frame is data. A stack without any of these is the user's own code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from dtobs.host.stacks import Frame, in_library

_SHORT_LIBRARY = re.compile(
    r"(?:torch|lightning|lightning_fabric|pytorch_lightning|accelerate|deepspeed|transformers|megatron|torchtitan|trl|"
    r"numpy|multiprocessing|concurrent|asyncio|importlib|ray)/|<frozen "
    r"|(?:threading|subprocess|socket|selectors|queue|connection|runpy|contextlib|logging|ssl|signal|functools)\.py$"
)
"""Installed code in the short file names that py-spy prints by default."""
_NATIVE = re.compile(r"(?:\.so(?:\.[\d.]{1,20})?|\.(?:c|cc|cpp|cxx|h|hpp|cu|cuh|S)|^python[\d.]{0,8}|^\[?vdso\]?)$")
"""What py-spy --native prints of code that is not Python."""
_C10D = re.compile(
    r"torch/distributed/(?:distributed_c10d|_functional_collectives|c10d_logger|nn/functional|collective_utils)\.py$"
)
_P2P = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}
_PIPELINE_WAITS = {"_wait_batch_p2p": "a send or a receive of the pipeline"}
"""Functions of torch's pipeline schedules (``torch/distributed/pipelining/schedules.py``), and what they wait for."""
_COLLECTIVES = re.compile(
    r"(?:all_reduce|broadcast|reduce|all_gather|gather|scatter|reduce_scatter|all_to_all|barrier|monitored_barrier"
    r"|wait_tensor|_all_gather_base|_reduce_scatter_base)(?:_into_tensor|_tensor|_single|_coalesced|_object|_object_list)?$"
)
_MEETING = {
    "init_process_group",
    "new_group",
    "new_subgroups",
    "split_group",
    "init_device_mesh",
    "_store_based_barrier",
}
_DEVICE = {"synchronize", "_engine_sync", "wait_stream"}


class Doing(StrEnum):
    """What a rank does, by its stack."""

    COLLECTIVE = "collective"
    MESSAGE = "message"  #: a send or a receive
    MEETING = "meeting"  #: makes a process group
    BACKWARD = "backward"
    DEVICE = "device"  #: waits for its device
    DATA = "data"
    CHECKPOINT = "checkpoint"
    CODE = "code"  #: anything else


WAITS = frozenset({Doing.COLLECTIVE, Doing.MESSAGE, Doing.BACKWARD, Doing.DEVICE})
"""What can mean that a rank waits for others."""


@dataclass(frozen=True)
class RankStack:
    """The main thread of one rank, most recent call first, and what is known of the process beside it.

    `still` says whether the stack was the same in every look; None where there was one look.
    """

    rank: int
    frames: tuple[Frame, ...]
    still: bool | None = None
    suspended: bool = False
    holds_lock: bool = False  #: it held Python's lock in every look
    where: str = ""  #: the file or the process it was read from


@dataclass(frozen=True)
class Standing:
    """Where a rank stands: `call` names a collective or a message, `site` is the user's line, `inner` the innermost."""

    doing: Doing
    call: str
    site: Frame | None
    inner: Frame | None

    @property
    def line(self) -> str:
        """``train.py:31 in step``, or nothing."""
        return str(self.site) if self.site is not None else ""

    def words(self) -> str:
        """Where it is, for a sentence: "in all_reduce at train.py:31 in step"."""
        at = f" at {self.line}" if self.line else ""
        return {
            Doing.COLLECTIVE: f"in {self.call}{at}",
            Doing.MESSAGE: f"in {self.call}{at}",
            Doing.MEETING: f"in {self.call}, which makes a process group,{at}",
            Doing.BACKWARD: f"in the backward{at}",
            Doing.DEVICE: f"waiting for the device{at}",
            Doing.DATA: f"in the data loader{at}",
            Doing.CHECKPOINT: f"in a checkpoint{at}",
        }.get(self.doing, at.strip() or "without a Python frame")


def installed(file: str) -> bool:
    """Whether a file is installed code, also by a shortened name."""
    return in_library(file) or _SHORT_LIBRARY.match(file) is not None or _NATIVE.search(file) is not None


def standing(frames: tuple[Frame, ...]) -> Standing:
    """Where a stack stands; the frames have the most recent call first."""
    own = next((frame for frame in frames if not installed(frame.file)), None)
    inner = frames[0] if frames else None
    call = ""
    for frame in frames:
        if not installed(frame.file):
            break
        name = _bare(frame.function)
        if _C10D.search(frame.file) and (_COLLECTIVES.match(name) or name in _P2P or name in _MEETING):
            call = name
        if frame.file.endswith("torch/distributed/pipelining/schedules.py") and name in _PIPELINE_WAITS:
            return Standing(Doing.MESSAGE, _PIPELINE_WAITS[name], own, inner)
    if call:
        doing = Doing.MEETING if call in _MEETING else Doing.MESSAGE if call in _P2P else Doing.COLLECTIVE
        return Standing(doing, call, own, inner)
    return Standing(_doing(frames), "", own, inner)


def _doing(frames: tuple[Frame, ...]) -> Doing:
    """What a stack shows that ends in no call of torch.distributed."""
    leading = []
    for frame in frames:
        if not installed(frame.file):
            break
        leading.append(frame)
    names = {_bare(frame.function) for frame in leading}
    if any("torch/autograd/" in f.file for f in leading) and names & {"_engine_run_backward", "backward", "grad"}:
        return Doing.BACKWARD
    if names & {"init_process_group", "_create_c10d_store", "_tcp_rendezvous_handler", "_env_rendezvous_handler"}:
        return Doing.MEETING
    if any("torch/cuda/" in f.file for f in leading) and names & _DEVICE:
        return Doing.DEVICE
    for frame in frames:
        if "torch/utils/data/" in frame.file:
            return Doing.DATA
        if "torch/serialization.py" in frame.file or "torch/distributed/checkpoint/" in frame.file:
            return Doing.CHECKPOINT
    return Doing.CODE


def _bare(function: str) -> str:
    return function.rpartition(".")[2]

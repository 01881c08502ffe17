"""The vocabulary of a recording: what an event, a step and a current value are, with their schema version.

Every time is ``time.monotonic_ns()`` of the host that wrote it; the page carries the offset to UTC.
Identifiers of groups, operations and call sites are 32-bit hashes of their canonical text (``identify``), so
two ranks that did the same thing wrote the same number; ``meta`` entries say what a number stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

SCHEMA = 6
"""Version of everything below. A reader accepts its own and older ones. 2 added the pipeline fields of a step, 3 how
its numbers fit FP16 and FP8, 5 what its exposed communication and its host's time were spent on, 6 what it compiled."""


class Kind(IntEnum):
    """What an event records."""

    PHASE_BEGIN = 1
    PHASE_END = 2
    STEP_BEGIN = 3
    STEP_END = 4
    COLLECTIVE = 5  #: issued; `seq` counts per group, `value` is bytes
    WAIT_BEGIN = 6  #: the host blocks on a collective (its group and seq when known)
    WAIT_END = 7  #: `value` is the seconds blocked
    P2P = 8  #: a send or a receive was issued; `value` is the peer, `seq` a `message_number`
    POLICY = 9  #: the program declared rules: see the meta entry
    ERROR = 10  #: `site` identifies the meta entry of the exception
    ATTACH = 11
    CLOSE = 12
    NONFINITE_GRADIENT = 13  #: `seq` is the row of the gradient in the parameter table, `value` its square
    UNUSED_PARAMETERS = 14  #: of `value` of them, first row `seq`, a backward under DDP made no gradient


_COUNT_BITS = 32


def message_number(number: int, tag: int) -> int:
    """The `seq` of a message: its number among those of one group, direction and peer, below the tag that it has."""
    return number | (tag & 0x7FFFFFFF) << _COUNT_BITS


def number_of(seq: Any) -> Any:
    """The number in the `seq` of a message, or in an array of them. Those of collectives are as they are."""
    return seq & ((1 << _COUNT_BITS) - 1)


def tag_of(seq: Any) -> Any:
    """The tag in the `seq` of a message, or in an array of them; 0 of collectives."""
    return seq >> _COUNT_BITS


class Phase(IntEnum):
    """Parts of a step and of a run. Names given by a user start at ``FIRST_CUSTOM_PHASE``."""

    NONE = 0
    STARTUP = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    CHECKPOINT = 6
    VALIDATION = 7
    COMPILE = 8
    SHUTDOWN = 9


FIRST_CUSTOM_PHASE = 32
PHASE_BY_NAME: dict[str, Phase] = {phase.name.lower(): phase for phase in Phase}
_NAME_OF_PHASE: dict[int, str] = {int(phase): name for name, phase in PHASE_BY_NAME.items()} | {0: ""}


def phase_name(number: int, custom: Mapping[int, str] | None = None) -> str:
    """The name of a phase, "" outside of any; `custom` has the names that a user gave."""
    name = _NAME_OF_PHASE.get(number)
    return name if name is not None else (custom or {}).get(number, f"phase {number}")


class RankState(IntEnum):
    """What a rank last said of itself. Whether its process lives is another question."""

    UNKNOWN = 0
    STARTING = 1  #: attached, no step seen yet
    RUNNING = 2
    FAILED = 3  #: an exception left the training code
    CLOSED = 4  #: ``close()`` or a normal interpreter exit


class PipelineOp(IntEnum):
    """What a record of a pipeline schedule is about."""

    FORWARD = 1
    BACKWARD = 2  #: input and weight gradients together
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4
    LOSS = 5  #: of the last stage, between its forward and its backward
    SEND_FORWARD = 6  #: issued, until a wait for it returned
    RECV_FORWARD = 7
    SEND_BACKWARD = 8
    RECV_BACKWARD = 9
    WAIT = 10  #: the host blocked; stage and micro-batch are those of the first receive waited for, else send


PIPELINE_COMPUTE = (
    PipelineOp.FORWARD,
    PipelineOp.BACKWARD,
    PipelineOp.BACKWARD_INPUT,
    PipelineOp.BACKWARD_WEIGHT,
    PipelineOp.LOSS,
)
"""Operations that keep a rank busy; the others are communication or waiting for it."""

PIPELINE_DTYPE = np.dtype(
    [
        ("stamp", "<u8"),
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("step", "<u4"),
        ("micro_batch", "<u4"),  # counted over all calls of the schedule in the step
        ("op", "<u2"),
        ("stage", "<u2"),  # of the whole pipeline
        ("chunk", "<u2"),  # virtual stage: which of this rank's stages, in the order of their numbers
        ("peer", "<i2"),  # rank in the pipeline's group that is sent to or received from; -1 none
        ("bytes", "<f8"),
        ("stamp_end", "<u8"),
    ]
)
PIPELINE_FORMAT = "<QqqIIHHHhdQ"


EVENT_DTYPE = np.dtype(
    [
        ("stamp", "<u8"),  # 1-based index of the event, written first
        ("t_ns", "<i8"),
        ("kind", "<u2"),
        ("phase", "<u2"),
        ("step", "<u4"),
        ("group", "<u4"),
        ("op", "<u4"),
        ("site", "<u4"),
        ("thread", "<u4"),
        ("seq", "<u8"),
        ("value", "<f8"),
        ("stamp_end", "<u8"),  # equal to `stamp` when the record is whole
    ]
)
EVENT_FORMAT = "<QqHHIIIIIQdQ"

STEP_PARTS = ("data", "forward", "backward", "exposed", "optimizer", "checkpoint", "validation", "compile", "other")
"""A step's partition: ``<part>_ns`` sum to ``end_ns - begin_ns``. `exposed` is communication the host waited for."""

EXPOSED_ALONG = ("data", "shard", "tensor", "context", "expert", "pipeline")
"""Mesh dimensions: ``exposed_<dimension>_ns`` of a step are parts of its ``exposed_ns``; what is left of it was
waited for in a group of no known dimension."""

FP8_ROLES = ("input", "weight", "gradient")
FORMAT_FIELDS = (
    "gradient_zeros",  # FP16: share of zeros in a sample of gradients
    *(f"fp8_amax_{role}" for role in FP8_ROLES),  # largest absolute value of the sampled layers
    *(f"fp8_saturated_{role}" for role in FP8_ROLES),  # share of elements beyond what the format reaches
    *(f"fp8_flushed_{role}" for role in FP8_ROLES),  # share of elements that the format turns into zero
)
"""How numbers fit a narrow format, as the training reports it in some steps; NaN in the others."""

STEP_DTYPE = np.dtype(
    [
        ("stamp", "<u8"),
        ("step", "<i8"),
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        *[(f"{part}_ns", "<i8") for part in STEP_PARTS],
        *[(f"exposed_{dimension}_ns", "<i8") for dimension in EXPOSED_ALONG],
        ("cpu_ns", "<i8"),  # process CPU time spent in the step
        ("on_core_ns", "<i8"),  # the training thread ran, as the scheduler counts it; 0 when not known
        ("run_delay_ns", "<i8"),  # the training thread could run and waited for a core; 0 also when not known
        ("gc_ns", "<i8"),  # the training thread collected garbage
        ("throttled_ns", "<i8"),  # the control group had used up its processor time; of the last second or so
        ("input_elements", "<i8"),  # of the largest tensor of each micro-batch, added up; 0 when not known
        ("device_marks", "<i8"),  # moments at which it was asked whether a device had work left, and
        ("device_idle_marks", "<i8"),  # those at which it had none: the host is too slow for it
        ("probe_ns", "<i8"),  # of the CPU time, spent by dtobs itself
        ("micro_batches", "<i8"),
        ("optimizers", "<u8"),  # bit n: the n-th optimizer stepped in it (bit 63: any from there on); 0 when not known
        ("tokens", "<f8"),  # this rank, this step; NaN when nobody said
        ("loss", "<f8"),
        ("losses", "<i8"),  # how often a loss was reported in this step: tells a loss of NaN from no report
        ("learning_rate", "<f8"),
        ("local_norm", "<f8"),  # gradient norm before reduction; NaN when not measured
        ("sample_norm", "<f8"),  # the same of a fixed sample of its elements, in every step
        ("reduced_norm", "<f8"),  # after reduction, over the whole model
        # this rank's share of the squared reduced norm: the shares of all ranks add up to it; NaN when not sampled
        ("reduced_square", "<f8"),
        ("nonfinite", "<i8"),  # parameters with a non-finite local gradient; -1 when not measured
        ("nonfinite_param", "<i8"),  # index of the first of them in the parameter table; -1 none
        ("loss_scale", "<f8"),
        ("model_flops", "<f8"),  # of this rank in this step, by the runtime's stated convention
        ("collectives", "<i8"),
        ("collective_bytes", "<f8"),
        ("sync_group", "<u8"),  # the first collective of the step's backward: its group, seq and issue time
        ("sync_seq", "<u8"),
        ("sync_ns", "<i8"),
        ("input_digest", "<u8"),  # of the step's input batches; 0 when not measured
        ("rng_python", "<u8"),
        ("rng_numpy", "<u8"),
        ("rng_torch", "<u8"),
        ("rng_device", "<u8"),
        ("params_digest", "<u8"),  # of all parameters after the step; 0 when not sampled in this step
        ("rss_bytes", "<f8"),
        # resident without mapped files and shared memory; NaN where a device does the work
        ("private_bytes", "<f8"),
        ("device_bytes", "<f8"),
        ("device_peak_bytes", "<f8"),
        # a pipeline schedule on this rank: begin of its first computation, end of its last, sum of all; 0 without one
        ("pipeline_begin_ns", "<i8"),
        ("pipeline_end_ns", "<i8"),
        ("pipeline_compute_ns", "<i8"),
        *[(name, "<f8") for name in FORMAT_FIELDS],
        ("stamp_end", "<u8"),
    ]
)


def walls_ns(steps: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """How long each of these records of ``STEP_DTYPE`` took, in nanoseconds; of the same shape."""
    walls: npt.NDArray[np.int64] = np.subtract(steps["end_ns"], steps["begin_ns"])
    return walls


def identify(text: str) -> int:
    """The number that stands for `text` in every rank's recording: 32 bits, never 0 (0 says "nothing")."""
    return xxhash.xxh32_intdigest(text.encode()) or 1


def phase_number(name: str) -> int:
    """The number of a phase: a `Phase`, or for a name of the user's own the same number on every rank."""
    known = PHASE_BY_NAME.get(name)
    return int(known) if known is not None else FIRST_CUSTOM_PHASE + identify(name) % 60_000


def group_id(name: str, ranks: tuple[int, ...]) -> int:
    """Identify a process group by its name and its global ranks, the same number on each of its ranks."""
    return identify(f"{name}|{','.join(map(str, ranks))}")


def digest_dtype(parameters: int) -> np.dtype[np.void]:
    """One record of per-parameter digests: ``digest`` is u64[parameters], in the order of the parameter table."""
    return np.dtype(
        [
            ("stamp", "<u8"),
            ("step", "<i8"),
            ("t_ns", "<i8"),
            ("digest", "<u8", (parameters,)),
            ("stamp_end", "<u8"),
        ]
    )

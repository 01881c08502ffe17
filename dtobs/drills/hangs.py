"""The hangs and crashes that can be injected, and what `dtobs diagnose` must answer to each.

A `Fault` says where in a job it strikes, the code that names it, and which ranks that code must name. Those without a
code are healthy: nothing may be found in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dtobs.drills import injectors
from dtobs.drills.layouts import LAYOUTS, Layout

Strike = Callable[[], None]
Point = Literal[
    "nowhere",
    "rendezvous",
    "start",
    "loader",
    "forward",
    "branch",
    "checkpoint",
    "validation",
    "end",
    "everywhere",
]


@dataclass(frozen=True)
class Fault:
    """One fault: where it strikes, the code that names it, the ranks to be named, the layouts it applies to.

    `strike` is what the odd rank does; for faults "everywhere" all ranks call `strike_all(odd)`. `pause` seconds in
    every step make a slow job.
    """

    name: str
    point: Point
    code: str | None
    strike: Strike = lambda: None
    strike_all: Callable[[bool], None] = lambda odd: None
    names: Literal["odd", "all"] = "odd"
    needs_stall: bool = True  #: found once nothing has moved for the hang timeout; else at once
    wrappers: tuple[Layout, ...] = LAYOUTS
    pause: float = 0.0
    needs: Literal["", "memory-limit", "packet-filter"] = ""  #: what the machine must permit
    code_under: Mapping[str, str] = field(default_factory=dict)  #: by layout, where it shows under another code


_BY_ONE = (
    Fault("blocked-loader", "loader", "stuck-in-dataloader", injectors.block_in_read),
    Fault("blocked-checkpoint", "checkpoint", "stuck-in-checkpoint", injectors.block_in_read),
    Fault("blocked-validation", "validation", "rank-not-joined", injectors.block_in_read),
    Fault("absent", "forward", "rank-not-joined", injectors.stay_away),
    Fault("absent-at-start", "start", "rank-not-joined", injectors.stay_away, wrappers=("ddp", "by-hand")),
    Fault("no-rendezvous", "rendezvous", "rendezvous-incomplete", injectors.stay_away, wrappers=("by-hand",)),
    Fault("stopped", "forward", "rank-stopped", injectors.stop_process),
    Fault("python-lock", "forward", "gil-held", injectors.hold_python_lock),
    Fault("killed", "forward", "rank-dead", injectors.kill_process, needs_stall=False),
    Fault(
        "out-of-memory",
        "forward",
        "rank-oom-killed",
        injectors.use_up_memory,
        needs_stall=False,
        wrappers=("ddp", "fsdp"),
        needs="memory-limit",
    ),
    Fault("exception", "forward", "uncaught-exception", injectors.raise_exception, needs_stall=False),
    Fault("early-exit", "forward", "rank-exited-early", injectors.leave_early),
    Fault("unused-parameters", "branch", "unused-parameters", needs_stall=False, wrappers=("ddp",)),
    Fault(
        "uneven-inputs",
        "end",
        "collective-mismatch",
        injectors.leave_early,
        names="all",
        code_under={"pp": "p2p-unmatched"},
    ),
)
_BY_ALL = (
    Fault(
        "shape",
        "everywhere",
        "shape-mismatch",
        strike_all=injectors.reduce_other_shape,
        names="all",
        needs_stall=False,
    ),
    Fault(
        "dtype",
        "everywhere",
        "dtype-mismatch",
        strike_all=injectors.reduce_other_dtype,
        names="all",
        needs_stall=False,
    ),
    Fault(
        "order",
        "everywhere",
        "collective-mismatch",
        strike_all=injectors.swap_order,
        names="all",
        needs_stall=False,
    ),
    Fault(
        "reduce-op",
        "everywhere",
        "reduce-op-mismatch",
        strike_all=injectors.reduce_other_operation,
        names="all",
        needs_stall=False,
    ),
    Fault(
        "extra-call",
        "everywhere",
        "call-site-mismatch",
        strike_all=injectors.reduce_once_more,
        needs_stall=False,
        wrappers=("ddp",),  # elsewhere the next call is of another kind, which is a mismatch that backends notice
    ),
    Fault(
        "extra-receive",
        "everywhere",
        "p2p-unmatched",
        strike_all=injectors.receive_once_more,
        names="all",
        wrappers=(
            "ddp",
            "fsdp",
            "tp",
            "by-hand",
        ),  # in a pipeline it takes the next stage's input: other sizes
    ),
    Fault(
        "crossed-groups",
        "everywhere",
        "group-deadlock",
        strike_all=injectors.cross_two_groups,
        names="all",
        wrappers=("ddp", "fsdp", "by-hand"),
    ),
    Fault(
        "skipped-group",
        "everywhere",
        "rendezvous-incomplete",
        strike_all=injectors.skip_a_group,
        wrappers=("ddp", "by-hand"),
    ),
    Fault(
        "dead-link",
        "everywhere",
        "network-stalled",
        strike_all=lambda odd: injectors.drop_what_arrives(),
        names="all",
        needs="packet-filter",
    ),
)
_HEALTHY = (
    Fault("none", "nowhere", None),
    Fault("slow-steps", "nowhere", None, wrappers=("ddp",), pause=1.0),
    Fault("two-groups", "everywhere", None, strike_all=injectors.make_groups, wrappers=("ddp",)),
    Fault("briefly-stopped", "forward", None, injectors.stop_process_briefly, wrappers=("ddp",)),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*_HEALTHY, *_BY_ONE, *_BY_ALL)}
"""Every fault of the family by name, the healthy ones first."""

"""The faults that can be injected, and what `dtobs diagnose` must answer to each.

A `Fault` says where in a job it strikes, the code that names it, and which ranks that code must name. Those without a
code are healthy: nothing may be found in them. `FAULTS` hang or crash a job; of `TROUBLES` nothing raises and nothing
hangs, and only what the detectors read can tell; `LOSSES` cost time and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["ddp", "fsdp", "hsdp", "tp", "pp", "by-hand", "fsdp1", "zero1", "dp-tp", "dp-pp", "dp-cp", "dp-ep"]
"""Ways to spread a model, "fsdp" by `fully_shard` and "fsdp1" by the class before it; the last four over a data
dimension by hand, and over two ranks that split layers, stages, sequences or experts."""
LAYOUTS: tuple[Layout, ...] = ("ddp", "fsdp", "hsdp", "tp", "pp", "by-hand")
Point = Literal[
    "nowhere", "rendezvous", "start", "loader", "forward", "branch", "checkpoint", "validation", "end", "everywhere"
]  # fmt: skip
Need = Literal["", "memory-limit", "packet-filter", "cpu-quota", "spare-memory", "networks", "throttled-network"]
WORLD, ODD = 2, 1
"""The ranks of most drills, and the one that a fault is done to."""
TWIN = "none"
"""The name of the healthy job of each family."""
EXTRA_BYTES = 3 << 29
"""What the odd rank holds that its peers do not, where it holds more memory."""


@dataclass(frozen=True)
class Fault:
    """One fault: where it strikes, the code that names it, the ranks to be named, the layouts it applies to.

    `strike` names what the odd rank does, of `injectors`; for faults "everywhere" all ranks call `strike_all`, told
    whether they are the odd one. `pause` seconds in every step make a slow job.
    """

    name: str
    point: Point
    code: str | None
    strike: str = "do_nothing"
    strike_all: str = "do_nothing"
    names: Literal["odd", "all"] = "odd"
    needs_stall: bool = True  #: found once nothing has moved for the hang timeout; else at once
    wrappers: tuple[Layout, ...] = LAYOUTS
    pause: float = 0.0
    needs: Need = ""  #: what the machine must permit
    code_under: Mapping[str, str] = field(default_factory=dict)  #: by layout, where it shows under another code


_BY_ONE = (
    Fault("blocked-loader", "loader", "stuck-in-dataloader", "block_in_read"),
    Fault("blocked-checkpoint", "checkpoint", "stuck-in-checkpoint", "block_in_read"),
    Fault("blocked-validation", "validation", "rank-not-joined", "block_in_read"),
    Fault("absent", "forward", "rank-not-joined", "stay_away"),
    Fault("absent-at-start", "start", "rank-not-joined", "stay_away", wrappers=("ddp", "by-hand")),
    Fault("no-rendezvous", "rendezvous", "rendezvous-incomplete", "stay_away", wrappers=("by-hand",)),
    Fault("stopped", "forward", "rank-stopped", "stop_process"),
    Fault("python-lock", "forward", "gil-held", "hold_python_lock"),
    Fault("killed", "forward", "rank-dead", "kill_process", needs_stall=False),
    Fault(
        "out-of-memory",
        "forward",
        "rank-oom-killed",
        "use_up_memory",
        needs_stall=False,
        wrappers=("ddp", "fsdp"),
        needs="memory-limit",
    ),
    Fault("exception", "forward", "uncaught-exception", "raise_exception", needs_stall=False),
    Fault("early-exit", "forward", "rank-exited-early", "leave_early"),
    Fault("unused-parameters", "branch", "unused-parameters", needs_stall=False, wrappers=("ddp",)),
    Fault(
        "uneven-inputs", "end", "collective-mismatch", "leave_early", names="all", code_under={"pp": "p2p-unmatched"}
    ),
)


def _by_all(name: str, code: str, strike: str, names: Literal["odd", "all"] = "all", **more: Any) -> Fault:
    """A fault that all ranks take part in."""
    return Fault(name, "everywhere", code, strike_all=strike, names=names, **more)


_BY_ALL = (
    _by_all("shape", "shape-mismatch", "reduce_other_shape", needs_stall=False),
    _by_all("dtype", "dtype-mismatch", "reduce_other_dtype", needs_stall=False),
    _by_all("order", "collective-mismatch", "swap_order", needs_stall=False),
    _by_all("reduce-op", "reduce-op-mismatch", "reduce_other_operation", needs_stall=False),
    # Elsewhere the next call is of another kind, which is a mismatch that backends notice.
    _by_all("extra-call", "call-site-mismatch", "reduce_once_more", "odd", needs_stall=False, wrappers=("ddp",)),
    # In a pipeline it takes the next stage's input: other sizes.
    _by_all("extra-receive", "p2p-unmatched", "receive_once_more", wrappers=("ddp", "fsdp", "tp", "by-hand")),
    _by_all("crossed-groups", "group-deadlock", "cross_two_groups", wrappers=("ddp", "fsdp", "by-hand")),
    _by_all("skipped-group", "rendezvous-incomplete", "skip_a_group", "odd", wrappers=("ddp", "by-hand")),
    _by_all("all-absent", "no-progress", "stay_away_alike"),
    _by_all("dead-link", "network-stalled", "drop_what_arrives", needs="packet-filter"),
)
_HEALTHY = (
    Fault("none", "nowhere", None),
    Fault("slow-steps", "nowhere", None, wrappers=("ddp",), pause=1.0),
    Fault("two-groups", "everywhere", None, strike_all="make_groups", wrappers=("ddp",)),
    Fault("briefly-stopped", "forward", None, "stop_process_briefly", wrappers=("ddp",)),
)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*_HEALTHY, *_BY_ONE, *_BY_ALL)}
"""Every fault of the family by name, the healthy ones first."""


def _trouble(
    name: str,
    code: str | None,
    names: Literal["odd", "all"] = "odd",
    wrappers: tuple[Layout, ...] = ("ddp", "fsdp", "fsdp1"),
) -> Fault:
    return Fault(name, "nowhere", code, names=names, wrappers=wrappers)


_TROUBLES = (
    _trouble("none", None, wrappers=("ddp", "fsdp", "hsdp", "by-hand", "fsdp1")),
    _trouble("declared-seed", "seed-policy"),
    _trouble("initial-parameters", "seed-policy", wrappers=("by-hand", "hsdp")),
    _trouble("equal-dropout", "seed-policy", "all"),
    _trouble("nan", "gradient-nonfinite"),
    _trouble("nan-loss", "loss-nonfinite"),
    _trouble("small-loss", "fp16-underflow", "all"),
    _trouble("loud", "local-gradient-outlier"),
    _trouble("flipped-bit", "replica-divergence", wrappers=("ddp", "hsdp", "by-hand")),
    _trouble("corrupted-message", "corrupted-communication", wrappers=("by-hand",)),
    _trouble("same-data", "data-overlap", "all", ("ddp", "fsdp", "by-hand", "fsdp1")),
    _trouble("uneven", "data-uneven", "all"),  # of two that differ none is accused
    _trouble("unwrapped", "gradients-not-synchronized", "all", wrappers=("ddp",)),
    _trouble("wiped", "accumulation-not-normalized", "all", wrappers=("ddp",)),
    _trouble("reduced-early", "gradients-not-synchronized", "all", wrappers=("fsdp", "ddp")),
    _trouble("stale", "optimizer-stale", "all"),
    _trouble("ignored-rate", "update-mismatch", "all"),
    _trouble("overwritten", "state-changed-at-rest", wrappers=("ddp", "by-hand")),
    _trouble("coarse", "updates-lost", "all"),
    _trouble("rescaled", "gradient-scale-mismatch", "all"),
    _trouble("other-settings", "config-mismatch", "all", ("fsdp", "fsdp1")),  # of two that differ none is accused
    _trouble("other-rate", "learning-rate-mismatch", "all", ("fsdp", "fsdp1")),
    _trouble("rotten-checkpoint", "checkpoint-corrupt", wrappers=("ddp", "by-hand")),
    _trouble("full-disk", "checkpoint-failed", wrappers=("ddp", "by-hand")),
    _trouble("slow", "straggler"),
    _trouble("starved", "data-starved"),
)
TROUBLES: dict[str, Fault] = {trouble.name: trouble for trouble in _TROUBLES}
"""Every silent error, and the slow and the starved rank, by name."""


@dataclass(frozen=True)
class Loss:
    """One way in which a whole job loses time, and the code that names it.

    A micro-batch computes for `compute` seconds and the reduction of its gradients takes `transfer` more;
    `micro_batches` make a step, and `steps` of them the run, as long as the detectors want before they say anything.
    `on_core` keeps a core for the time of `compute`, which is slept otherwise. The odd rank computes `odd` times as
    long.
    """

    name: str
    code: str | None
    compute: float = 0.3
    transfer: float = 0.0
    micro_batches: int = 1
    steps: int = 64
    wrappers: tuple[Layout, ...] = ("ddp",)
    odd: float = 1.0
    on_core: bool = False
    needs: Need = ""
    world: int = WORLD
    twin: str = TWIN  #: the healthy job that is run beside it
    ranks: tuple[int, ...] = tuple(range(WORLD))  #: those that the finding names
    cause: str = ""  #: that the finding names
    checkpoint: float = 0.0  #: seconds that every eighth step saves for
    leak: int = 0  #: bytes that the odd rank keeps of every step; in a healthy job all ranks do, as a cache of data


_LOSSES = (
    Loss("none", None, compute=0.1, transfer=0.06, micro_batches=4, steps=72, wrappers=("ddp", "pp")),
    Loss("slow-reduction", "exposed-communication", compute=0.2, transfer=0.3, steps=44),
    Loss("no-sync-forgotten", "sync-every-microbatch", compute=0.2, transfer=0.06, micro_batches=4, steps=24),
    Loss("garbage", "host-bound", compute=0.2, steps=60),
    Loss("long-sequences", "sequence-imbalance", compute=0.4, steps=50),
    Loss("slower-later", "throughput-drop", compute=0.4, steps=80, ranks=()),
    Loss(
        "slow-stage",
        "stage-imbalance",
        compute=0.05,
        micro_batches=4,
        steps=40,
        wrappers=("pp",),
        odd=4.0,
        ranks=(ODD,),
    ),
    Loss("slow-messages", "pipeline-bubble", compute=0.05, transfer=0.05, micro_batches=4, steps=40, wrappers=("pp",)),
    Loss("ample-quota", None, compute=0.05, on_core=True, steps=320),
    Loss(
        "cpu-quota",
        "straggler",
        compute=0.05,
        on_core=True,
        steps=80,
        needs="cpu-quota",
        twin="ample-quota",
        ranks=(ODD,),
        cause="cpu-quota",
    ),
    Loss("memory-imbalance", "memory-imbalance", compute=0.1, steps=24, needs="spare-memory", ranks=(ODD,)),
    Loss("brief-checkpoints", None, compute=1.0, steps=120, checkpoint=0.5),
    Loss("checkpoint-stall", "checkpoint-stall", compute=1.0, steps=96, checkpoint=6.0, twin="brief-checkpoints"),
    Loss("filling-cache", None, compute=0.08, steps=200, leak=6 << 20, needs="spare-memory"),
    Loss(
        "memory-leak",
        "memory-leak",
        compute=0.08,
        steps=200,
        leak=6 << 20,
        needs="spare-memory",
        twin="filling-cache",
        ranks=(ODD,),
    ),
    # Three groups of two shards each; only the last rank lives beyond the link.
    Loss("ample-link", None, compute=0.8, steps=24, wrappers=("hsdp",), needs="networks", world=6),
    Loss(
        "slow-link",
        "slow-link",
        compute=0.8,
        steps=24,
        wrappers=("hsdp",),
        needs="throttled-network",
        world=6,
        twin="ample-link",
        ranks=(4, 5),
    ),
)
LOSSES: dict[str, Loss] = {loss.name: loss for loss in _LOSSES}
"""Every way in which a whole job loses time, by name."""


@dataclass(frozen=True)
class Drill:
    """A fault to inject: its family decides the job, `expected` is the code that must be found (None: nothing).

    `ranks` are those that the verdict must name; None where only the code counts.
    """

    family: str
    name: str
    wrapper: str
    expected: str | None
    ranks: tuple[int, ...] | None = None
    needs: str = ""  #: what the machine must permit, as in `capabilities`
    world: int = WORLD
    twin: str = TWIN  #: the healthy drill of the same family and layout that belongs to it


def known() -> list[Drill]:
    """Every drill, hangs first; the healthy twins are named "none"."""
    named = {"odd": (ODD,), "all": tuple(range(WORLD))}
    hangs = [
        Drill("hangs", f.name, wrapper, f.code_under.get(wrapper, f.code), named[f.names] if f.code else None, f.needs)
        for f in FAULTS.values()
        for wrapper in f.wrappers
    ]
    silent = [Drill("silent", t.name, wrapper, t.code) for t in TROUBLES.values() for wrapper in t.wrappers]
    lost = [
        Drill("time", loss.name, wrapper, loss.code, needs=loss.needs, world=loss.world, twin=loss.twin)
        for loss in LOSSES.values()
        for wrapper in loss.wrappers
    ]
    return [*hangs, *silent, *lost]

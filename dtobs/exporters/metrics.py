"""The table of metrics: each one's name, type, unit, help, labels and source, in one place.

Names follow Prometheus: prefix ``dtobs_``, base units, ``_total`` on counters. Every metric has the label ``run``;
``rank`` is the only other one with many values. Per-rank values come from the monitor of the rank's node; a histogram
covers all ranks of one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtobs.exporters import bandwidth, noise, pipelines, whatif
from dtobs.exporters import sources as s

Kind = Literal["gauge", "counter", "histogram"]
PREFIX = "dtobs_"
UNITS = ("seconds", "bytes", "ratio", "tokens")


@dataclass(frozen=True)
class Metric:
    """A row of the table. `labels` come after ``run``; `origin` says in words where the value is from."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    origin: str
    source: s.Source | None = None  #: None for the histogram, which `totals` keeps

    @property
    def exposed(self) -> str:
        """The name as Prometheus shows it."""
        return f"{PREFIX}{self.name}" + ("_total" if self.kind == "counter" else "")

    @property
    def unit(self) -> str:
        """The unit that the name ends in, "" for a plain number."""
        return next((unit for unit in UNITS if self.name.endswith(f"_{unit}")), "")


RANK = ("rank",)
STEP_HISTOGRAM = "step_duration_seconds"


def _rank(name: str, kind: Kind, help_: str, field: str) -> Metric:
    """A value a rank, straight from its page; nanoseconds become seconds."""
    scale = 1e-9 if field.endswith("_ns") else 1.0
    return Metric(name, kind, help_, RANK, f"page {field}", s.page(field, scale))


def _run(name: str, kind: Kind, help_: str, field: str) -> Metric:
    """A value of the run that ranks report: the largest counts."""
    return Metric(name, kind, help_, (), f"page {field}", s.run_max(field))


def _own(kind: Kind, help_: str, field: str) -> Metric:
    """A value of the monitor itself."""
    return Metric(f"monitor_{field}", kind, help_, (), "monitor", s.own(field))


TABLE: tuple[Metric, ...] = (
    # the run
    Metric(
        "run_info",
        "gauge",
        "Always 1; the labels say what the run is",
        ("world_size", "torch", "dtobs"),
        "run.json",
        s.run_info,
    ),
    Metric(
        "rank_info",
        "gauge",
        "Always 1; the labels say where a rank is",
        ("rank", "host", "node", "pid", "stage", "mesh"),
        "meta",
        s.rank_info,
    ),
    Metric("attempt", "gauge", "Restarts of the job so far", (), "pages", s.of_run(lambda look: look.view.attempt)),
    Metric("ranks", "gauge", "Ranks by state", ("state",), "pages, /proc", s.ranks_by_state),
    Metric("rank_up", "gauge", "1 while the process of the rank lives", RANK, "/proc", s.rank_up),
    Metric(
        "heartbeat_age_seconds",
        "gauge",
        "Since the rank last published anything; not of closed ranks",
        RANK,
        "page heartbeat_ns",
        s.heartbeat_age,
    ),
    Metric(
        "stalled_seconds",
        "gauge",
        "How long the run has stood still beyond its threshold",
        (),
        "watchdog",
        s.of_run(lambda look: look.stalled_seconds),
    ),
    Metric(
        "run_ended",
        "gauge",
        "1 once no rank of this node trains any more; a monitor that is gone before has died",
        (),
        "pages, /proc",
        s.ended,
    ),
    # progress
    _rank("steps", "counter", "Steps done in this attempt", "steps_done"),
    _rank("step", "gauge", "Number of the step in progress", "step"),
    _rank("tokens", "counter", "Tokens this rank trained on in this attempt", "tokens"),
    _run("global_tokens", "counter", "Tokens all ranks trained on, as the training reports", "global_tokens"),
    _rank("loss", "gauge", "Loss of the last step; absent when it is not a number", "loss"),
    _run("validation_loss", "gauge", "Loss of the last validation", "validation_loss"),
    _run("learning_rate", "gauge", "Learning rate of the last step", "learning_rate"),
    _run("loss_scale", "gauge", "Loss scale of mixed precision", "loss_scale"),
    _rank("gradient_zeros_ratio", "gauge", "FP16: zeros in a sample of the gradients", "gradient_zeros"),
    Metric(
        "fp8_amax",
        "gauge",
        "FP8: largest absolute value in the sampled layers",
        ("rank", "role"),
        "page fp8_amax_*",
        s.by_role("fp8_amax"),
    ),
    Metric(
        "fp8_saturated_ratio",
        "gauge",
        "FP8: elements beyond what the format reaches",
        ("rank", "role"),
        "page fp8_saturated_*",
        s.by_role("fp8_saturated"),
    ),
    Metric(
        "fp8_flushed_ratio",
        "gauge",
        "FP8: elements that the format turns into zero",
        ("rank", "role"),
        "page fp8_flushed_*",
        s.by_role("fp8_flushed"),
    ),
    # time
    _rank("last_step_seconds", "gauge", "Wall time of the last step", "step_ns"),
    Metric(STEP_HISTOGRAM, "histogram", "Wall time of steps, all ranks of the node together", (), "step history"),
    _rank("busy_seconds", "gauge", "Own work in the last step: wall time less exposed communication", "busy_ns"),
    _rank("exposed_communication_seconds", "gauge", "Waiting for communication in the last step", "exposed_ns"),
    _rank("data_wait_seconds", "gauge", "Waiting for data in the last step", "data_ns"),
    Metric("phase_seconds", "counter", "Time by part of the step", ("rank", "phase"), "step history", s.phase_seconds),
    Metric(
        "arrival_skew_seconds",
        "gauge",
        "Arrival at a step's first collective, after the first rank of the host",
        RANK,
        "step history sync_ns",
        s.arrival_skew,
    ),
    Metric(
        "goodput_ratio",
        "gauge",
        "Elapsed time spent in forward, backward and optimizer; mean over the node",
        (),
        "step history",
        s.goodput,
    ),
    Metric(
        "badput_seconds",
        "counter",
        "Time not spent productively, by reason; mean over the node",
        ("reason",),
        "step history of all attempts",
        s.badput,
    ),
    Metric(
        "redone_steps",
        "counter",
        "Steps done again because a restart went back to a checkpoint",
        (),
        "step history of all attempts",
        s.redone_steps,
    ),
    Metric(
        "model_flops_per_second",
        "gauge",
        "Model FLOPs a second, by the training's own convention",
        RANK,
        "page model_flops, step_ns",
        s.model_flops_rate,
    ),
    Metric(
        "mfu_ratio",
        "gauge",
        "Model FLOPs utilisation; needs the device's peak in run.json",
        (),
        "model_flops_per_second, run.json",
        s.mfu,
    ),
    Metric(
        "hfu_ratio",
        "gauge",
        "Hardware FLOPs utilisation: as MFU, with the activations that are computed again",
        (),
        "page hardware_flops, step_ns; run.json",
        s.hfu,
    ),
    # communication
    _rank("collectives", "counter", "Collectives issued", "collectives"),
    _rank("collective_bytes", "counter", "Bytes given to collectives", "collective_bytes"),
    Metric(
        "collective_wait_seconds",
        "counter",
        "Time the host waited for communication",
        RANK,
        "step history exposed_ns",
        s.collective_wait,
    ),
    Metric(
        "exposed_wait_seconds",
        "counter",
        "Waiting for communication, by the mesh dimension it was along",
        ("rank", "dimension"),
        "step history exposed_*_ns",
        s.exposed_along,
    ),
    Metric(
        "bus_bandwidth_bytes_per_second",
        "gauge",
        "Speed of collectives from their last arrival on, as nccl-tests count it; of the slowest group within a host",
        ("op", "group"),
        "events of hosts that block on collectives",
        bandwidth.bus_bandwidth,
    ),
    Metric(
        "pipeline_bubble_ratio",
        "gauge",
        "Idle share of the rank in its pipeline, from the pipeline's first computation to the last",
        RANK,
        "step history pipeline_compute_ns",
        pipelines.measured,
    ),
    Metric(
        "pipeline_bubble_replayed_ratio",
        "gauge",
        "The same of the widest pipeline's last step with communication that costs nothing",
        (),
        "pipeline records, replayed",
        s.of_run(lambda look: look.bubble.replayed if look.bubble is not None else None),
    ),
    Metric(
        "pipeline_bubble_ideal_ratio",
        "gauge",
        "The schedule's own bound, with stages that take equally long",
        (),
        "pipeline meta entry, closed form",
        pipelines.ideal,
    ),
    Metric(
        "slowdown_ratio",
        "gauge",
        "Time of the last steps over that of the same operations made equal (what-if S); 1 is nothing lost",
        (),
        "step history or pipeline records, simulated",
        s.of_run(lambda look: look.whatif.slowdown if look.whatif is not None else None),
    ),
    Metric(
        "slowdown_stage_ratio",
        "gauge",
        "The same where only this stage is as slow as it is",
        ("stage",),
        "step history or pipeline records, simulated",
        whatif.by_stage,
    ),
    Metric(
        "slowdown_returned_ratio",
        "gauge",
        "Share of the time lost that ideal worst_workers, last_stage or communication would return",
        ("fix",),
        "step history or pipeline records, simulated",
        whatif.returned,
    ),
    # numbers
    _rank("local_gradient_norm", "gauge", "Norm of this rank's gradient before reduction", "local_norm"),
    _run("reduced_gradient_norm", "gauge", "Norm of the gradient after reduction", "reduced_norm"),
    Metric(
        "gradient_noise_scale_tokens",
        "gauge",
        "Gradient noise scale B_simple: a larger batch gains little",
        (),
        "step history norms, gradient ledger",
        s.of_run(lambda look: noise.noise_scale(look.view)),
    ),
    _rank(
        "nonfinite_steps",
        "counter",
        "Steps in which this rank's local gradient held NaN or infinity",
        "nonfinite_steps",
    ),
    Metric(
        "replica_mismatched_ranks",
        "gauge",
        "Ranks whose parameters differ from their replicas",
        (),
        "findings",
        s.mismatched_replicas,
    ),
    # memory
    _rank("rss_bytes", "gauge", "Resident host memory", "rss_bytes"),
    _rank("device_memory_bytes", "gauge", "Device memory allocated", "device_bytes"),
    _rank("device_memory_peak_bytes", "gauge", "Most device memory allocated so far", "device_peak_bytes"),
    _rank("device_memory_limit_bytes", "gauge", "Memory of the device", "device_total_bytes"),
    # checkpoints
    _run("checkpoint_seconds", "gauge", "Duration of the last checkpoint", "checkpoint_seconds"),
    _run("checkpoint_bytes", "gauge", "Size of the last checkpoint, as the ranks report it", "checkpoint_bytes"),
    Metric(
        "checkpoint_age_seconds",
        "gauge",
        "Time since the last checkpoint was finished",
        (),
        "page checkpoint_utc",
        s.checkpoint_age,
    ),
    # findings
    Metric("findings", "gauge", "Open findings", ("code", "severity"), "detectors", s.findings),
    Metric(
        "finding_rank",
        "gauge",
        "1 for each rank that an open finding names",
        ("code", "rank"),
        "detectors",
        s.finding_ranks,
    ),
    Metric(
        "comparison_off",
        "gauge",
        "1 for each check that cannot be made in this run, and why",
        ("check", "reason"),
        "meta",
        s.comparison_off,
    ),
    # dtobs itself
    _rank("probe_seconds", "counter", "Time spent by dtobs inside the training process", "probe_ns"),
    _rank("probe_failures", "counter", "Probes that failed and switched themselves off", "probe_failures"),
    Metric(
        "damaged_files",
        "gauge",
        "Recording files that could not be read at the last look",
        (),
        "RunView.damaged",
        s.damaged,
    ),
    _own("counter", "Processor time of the monitor", "cpu_seconds"),
    _own("gauge", "Resident memory of the monitor", "rss_bytes"),
    _own("counter", "Looks of the monitor at the pages", "ticks"),
    _own("counter", "Passes of the detectors", "passes"),
    _own("gauge", "Processor time of the last pass of the detectors", "pass_seconds"),
    _own("counter", "Captures taken of stalls", "captures"),
    Metric(
        "monitor_errors",
        "counter",
        "Failures of the monitor by part; the log says each once",
        ("part",),
        "monitor",
        s.own_errors,
    ),
)

BY_NAME: dict[str, Metric] = {metric.exposed: metric for metric in TABLE}
"""The table by the name that Prometheus shows."""

"""Where each metric's values come from: small functions from a `MonitorSnapshot` to samples.

A sample is (label values without the run, value). A value that nobody reported is left out, not exported as zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dtobs.detectors.comparisons import comparisons_off
from dtobs.events import FP8_ROLES, STEP_PARTS, RankState
from dtobs.exporters.look import MonitorSnapshot
from dtobs.findings import CATALOGUE, Severity
from dtobs.recording.rank import ENDED, State
from dtobs.recording.rundir import setting

Sample = tuple[tuple[str, ...], float]
Source = Callable[[MonitorSnapshot], Iterator[Sample]]

RANK_STATES = (*(state.value for state in State), "missing")


def page(field: str, scale: float = 1.0) -> Source:
    """One value a rank from a field of its page."""

    def source(look: MonitorSnapshot) -> Iterator[Sample]:
        for label, value in zip(look.rank_labels, look.pages[field].tolist(), strict=True):
            if value == value:  # NaN: nobody said
                yield label, float(value) * scale

    return source


def by_role(field: str) -> Source:
    """One value a rank and role of FP8 numbers (input, weight, gradient)."""

    def source(look: MonitorSnapshot) -> Iterator[Sample]:
        for role in FP8_ROLES:
            for (rank,), value in page(f"{field}_{role}")(look):
                yield (rank, role), value

    return source


def run_max(field: str) -> Source:
    """One value of the run: the largest that any rank reported."""

    def source(look: MonitorSnapshot) -> Iterator[Sample]:
        values = look.view.pages[field].astype(np.float64)
        values = values[~np.isnan(values)]
        if look.leads and len(values):
            yield (), float(values.max())

    return source


def of_run(value: Callable[[MonitorSnapshot], float | None]) -> Source:
    """One value of the run, by the monitor that leads; none where it is not known."""

    def source(look: MonitorSnapshot) -> Iterator[Sample]:
        found = value(look) if look.leads else None
        if found is not None:
            yield (), float(found)

    return source


def run_info(look: MonitorSnapshot) -> Iterator[Sample]:
    """The value 1, labelled with what the run is."""
    if look.leads:
        versions: Any = look.view.info.get("versions")
        versions = versions if isinstance(versions, dict) else {}
        yield ((str(look.view.world_size), str(versions.get("torch", "")), str(versions.get("dtobs", ""))), 1.0)


def ranks_by_state(look: MonitorSnapshot) -> Iterator[Sample]:
    """How many ranks are in each state, 0 for the others: a panel and an alert always have data."""
    if look.leads:
        counts = Counter(rank.state.value for rank in look.view.each_rank())
        counts["missing"] = len(look.view.missing_ranks)
        for state in RANK_STATES:
            yield (state,), float(counts[state])


def rank_info(look: MonitorSnapshot) -> Iterator[Sample]:
    """The value 1 of every rank of this node, labelled with where it is."""
    for (label,) in look.rank_labels:
        rank = look.view.rank(int(label))
        place = rank.place
        mesh = ",".join(f"{name}={at}" for name, at in place.items() if name != "stage")
        yield (label, rank.host, str(rank.get("node")), str(rank.pid), str(place.get("stage", "")), mesh), 1.0


def rank_up(look: MonitorSnapshot) -> Iterator[Sample]:
    for row in look.pages:
        process = look.view.process(int(row["rank"]))
        if process is not None:
            yield (str(int(row["rank"])),), float(process.alive)


def heartbeat_age(look: MonitorSnapshot) -> Iterator[Sample]:
    """Only of ranks that are still to move: a closed rank's silence means nothing."""
    pages = look.pages
    ages = np.maximum(0, look.view.now_ns - pages["heartbeat_ns"]) / 1e9
    for label, state, age in zip(look.rank_labels, pages["state"].tolist(), ages.tolist(), strict=True):
        if state != RankState.CLOSED:
            yield label, age


def phase_seconds(look: MonitorSnapshot) -> Iterator[Sample]:
    for rank, totals in sorted(look.totals.ranks.items()):
        for part in STEP_PARTS:
            yield (str(rank), part), totals.parts[part]


def collective_wait(look: MonitorSnapshot) -> Iterator[Sample]:
    for rank, totals in sorted(look.totals.ranks.items()):
        yield (str(rank),), totals.parts["exposed"]


def exposed_along(look: MonitorSnapshot) -> Iterator[Sample]:
    """By dimension of the mesh, those that a rank ever waited in; "other" is what no group's name explains."""
    for rank, totals in sorted(look.totals.ranks.items()):
        rest = round(totals.parts["exposed"] - sum(totals.exposed.values()), 6)
        for along, seconds in (*totals.exposed.items(), ("other", rest)):
            if seconds > 0:
                yield (str(rank), along), seconds


def arrival_skew(look: MonitorSnapshot) -> Iterator[Sample]:
    """How much later than the first each rank reached the first collective of the last step that all have."""
    window = look.view.steps(8).complete()
    if not len(window.steps):
        return
    last = window.records[:, -1]
    if len(np.unique(last["sync_seq"])) > 1 or not last["sync_ns"].all():
        return  # not one and the same collective on all ranks
    # Clocks are compared on one host only.
    here = look.view.pages["node"] == look.node
    first = int(last["sync_ns"][here].min()) if here.any() else 0
    for rank, record, local in zip(look.view.ranks, last, here, strict=True):
        if local:
            yield (str(rank),), (int(record["sync_ns"]) - first) / 1e9


def model_flops_rate(look: MonitorSnapshot) -> Iterator[Sample]:
    return _flops_rate(look, "model_flops")


def _flops_rate(look: MonitorSnapshot, field: str) -> Iterator[Sample]:
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = look.pages[field] / (look.pages["step_ns"] / 1e9)
    for label, rate in zip(look.rank_labels, rates.tolist(), strict=True):
        if math.isfinite(rate):
            yield label, rate


def mfu(look: MonitorSnapshot) -> Iterator[Sample]:
    """Model FLOPs utilisation, where the run says what a device could do (``config.run.peak_flops``).

    Each operation that the model needs counts once, as in the PaLM paper (appendix B); the training says how many.
    """
    return _utilisation(look, "model_flops")


def hfu(look: MonitorSnapshot) -> Iterator[Sample]:
    """Hardware FLOPs utilisation: as `mfu`, with what activation checkpointing computes a second time.

    Only where the training reports `hardware_flops`: nothing of what it computes again can be seen from outside.
    """
    return _utilisation(look, "hardware_flops")


def _utilisation(look: MonitorSnapshot, field: str) -> Iterator[Sample]:
    peak = setting(look.view.info, "run", "peak_flops")
    rates = [value for _, value in _flops_rate(look, field)]
    if look.leads and peak is not None and rates:
        yield (), sum(rates) / len(rates) / peak


def goodput(look: MonitorSnapshot) -> Iterator[Sample]:
    """Productive share of the time since the run began, restarts included, mean over this node's ranks."""
    shares = []
    for row in look.pages:
        totals = look.totals.ranks.get(int(row["rank"]))
        if totals is None:
            continue
        since_ns = totals.last_end_ns or int(row["attach_ns"])
        elapsed = totals.elapsed + max(0, look.view.now_ns - since_ns) / 1e9
        if elapsed > 0:
            shares.append(min(1.0, totals.productive / elapsed))
    if shares:
        yield (), sum(shares) / len(shares)


def badput(look: MonitorSnapshot) -> Iterator[Sample]:
    """Seconds by what they were spent on instead, mean over this node's ranks, up to each rank's last step."""
    here = {int(row["rank"]) for row in look.pages}  # not those that a restart took to another node
    ranks = [totals for rank, totals in look.totals.ranks.items() if rank in here]
    if not ranks:
        return
    reasons = {
        "startup": [r.startup for r in ranks],
        "restart": [r.restart for r in ranks],
        "redone": [sum(r.redone.values()) for r in ranks],
        "hang": [sum(r.hung.values()) for r in ranks],
        "data": [r.first_time("data") for r in ranks],
        "communication": [r.first_time("exposed") for r in ranks],
        "checkpoint": [r.first_time("checkpoint") for r in ranks],
        "validation": [r.first_time("validation") for r in ranks],
        "compile": [r.first_time("compile") for r in ranks],
        "other": [r.first_time("other") for r in ranks],
        # A difference of large sums: rounded, so that its residue does not make a counter go down.
        "between-steps": [round(r.between, 3) for r in ranks],
    }
    for reason, seconds in reasons.items():
        yield (reason,), sum(seconds) / len(seconds)


def redone_steps(look: MonitorSnapshot) -> Iterator[Sample]:
    """The most that any rank of this node did again: all do the same steps."""
    if look.leads and look.totals.ranks:
        yield (), float(max(r.redone_steps for r in look.totals.ranks.values()))


def checkpoint_age(look: MonitorSnapshot) -> Iterator[Sample]:
    for _, written in run_max("checkpoint_utc")(look):
        yield (), max(0.0, look.utc_seconds - written)


def findings(look: MonitorSnapshot) -> Iterator[Sample]:
    """Every code is exported, 0 when it is not there: a panel and an alert always have data."""
    if look.leads:
        open_ = Counter((f.code, f.severity is Severity.NOTE) for f in look.findings)
        for code in CATALOGUE.values():
            yield (code.name, code.severity.value), float(open_[code.name, False])
            if code.expect:
                yield (code.name, Severity.NOTE.value), float(open_[code.name, True])


def finding_ranks(look: MonitorSnapshot) -> Iterator[Sample]:
    if look.leads:
        for code, rank in sorted({(f.code, r) for f in look.findings for r in f.ranks}):
            yield (code, str(rank)), 1.0


def comparison_off(look: MonitorSnapshot) -> Iterator[Sample]:
    if look.leads:
        for off in comparisons_off(look.view):
            yield (off.check, off.reason), 1.0


def mismatched_replicas(look: MonitorSnapshot) -> Iterator[Sample]:
    if look.leads:
        named = {r for f in look.findings if f.code == "replica-divergence" for r in f.ranks}
        yield (), float(len(named))


def ended(look: MonitorSnapshot) -> Iterator[Sample]:
    """1 once no rank of the node trains any more, however it ended."""
    over = [look.view.rank(int(rank)).state in ENDED for rank in look.pages["rank"]]
    yield (), float(bool(over) and all(over))


def damaged(look: MonitorSnapshot) -> Iterator[Sample]:
    yield (), float(len(look.view.damaged))


def own(field: str) -> Source:
    """A value of the monitor itself."""

    def source(look: MonitorSnapshot) -> Iterator[Sample]:
        if look.own is not None:
            yield (), float(getattr(look.own, field))

    return source


ERROR_PARTS = ("recording", "detectors", "watchdog", "capture", "journal", "exits", "http")


def own_errors(look: MonitorSnapshot) -> Iterator[Sample]:
    if look.own is not None:
        for part in sorted({*ERROR_PARTS, *look.own.errors}):
            yield (part,), float(look.own.errors.get(part, 0))

"""What the driver says of devices, as the reason of a slowness that the steps have shown: it accuses nobody by itself.

A device counts as slowed when its clock is `FALL` below that of its peers (or its own before) and the driver says in
most samples that something holds it down: heat, a power limit, a fault. A low clock alone is no reason: a device that
waits lowers it. A device counts as shared when another process computes on it in most samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dtobs.detectors.performance.cause import EXPLAINS, Cause
from dtobs.detectors.performance.window import Times
from dtobs.recording.devices import DeviceSample
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

FALL = 0.9
LEAST_SAMPLES = 3
MOSTLY = 0.5
_HELD = {
    "heat": ("it is too hot", "Look at the cooling of this host, and at what its neighbours do."),
    "power-limit": ("its power is limited", "Compare the power limits of the hosts: nvidia-smi -q -d POWER."),
    "power-brake": ("its host's power supply brakes it", "Have the power supply of this host looked at."),
    "hardware-slowdown": ("its hardware holds it down", "Have this device looked at: heat, power supply, a fault."),
    "application-clocks": ("its application clocks are set low", "Reset them: nvidia-smi -rac."),
}


@dataclass(frozen=True)
class DeviceChange:
    """What changed on the devices of `ranks`: `name` for programs, `words` and `next_step` for people."""

    name: str
    ranks: tuple[int, ...]
    words: str
    next_step: str


def device_cause(view: RunView, times: Times, group: Sequence[int], member: int, excess: float) -> Cause | None:
    """Why the device of `group[member]` takes `excess` seconds a step longer; None where it does not explain that."""
    since = int(times.end_ns[member, 0])
    samples = {rank: [s for s in view.devices.get(rank, ()) if s.at_ns >= since] for rank in group}
    own = samples.pop(group[member])
    peers = [clock for clock in map(_clock, samples.values()) if clock is not None]
    clock, held = _clock(own), _held(own)
    if clock is not None and held is not None and peers and clock <= FALL * statistics.median(peers):
        usual = statistics.median(peers)
        slower = float(np.median(times.busy[member])) * (1 - clock / usual)
        if slower >= EXPLAINS * excess:
            words = f"its device runs at {clock:.0f} MHz where its peers' run at {usual:.0f}: {_said(held, own)}"
            return Cause(f"device-{held}", words, _HELD[held][1], slower)
    others = _others(own)
    if others and not any(_others(theirs) for theirs in samples.values()):
        return Cause("device-shared", f"{_processes(others)} on its device as well", _SHARED, excess)
    return None


def device_change(view: RunView, since_ns: int, lost: float) -> DeviceChange | None:
    """What began on one or more devices when the run lost the share `lost` of its speed; None where nothing did."""
    fell: dict[int, tuple[float, float, str]] = {}
    shared: dict[int, tuple[int, ...]] = {}
    after: dict[int, list[DeviceSample]] = {}
    for rank, samples in view.devices.items():
        before = [s for s in samples if s.at_ns < since_ns]
        after[rank] = [s for s in samples if s.at_ns >= since_ns]
        was, now, held = _clock(before), _clock(after[rank]), _held(after[rank])
        if was and now and held and now <= FALL * was and 1 - now / was >= EXPLAINS * lost:
            fell[rank] = (was, now, held)
        elif len(before) >= LEAST_SAMPLES and not _others(before) and (others := _others(after[rank])):
            shared[rank] = others
    if fell:
        worst = min(fell, key=lambda rank: fell[rank][1] / fell[rank][0])
        was, now, held = fell[worst]
        words = f"the clock of {_devices(fell)} fell ({was:.0f} → {now:.0f} MHz): {_said(held, after[worst])}"
        return DeviceChange(f"device-{held}", tuple(sorted(fell)), words, _HELD[held][1])
    if shared:
        pids = tuple(sorted({pid for others in shared.values() for pid in others}))
        words = f"since then {_processes(pids)} on {_devices(shared)} as well"
        return DeviceChange("device-shared", tuple(sorted(shared)), words, _SHARED)
    return None


_SHARED = "End the other process, or give it another device; `nvidia-smi` shows both."


def _clock(samples: Sequence[DeviceSample]) -> float | None:
    clocks = [s.state.clock_mhz for s in samples if s.state.clock_mhz]
    return statistics.median(clocks) if len(clocks) >= LEAST_SAMPLES else None


def _held(samples: Sequence[DeviceSample]) -> str | None:
    """What holds the device down in more than `MOSTLY` of the samples; the gravest, in the order of `_HELD`."""
    often = [r for r in _HELD if sum(r in s.state.held_by for s in samples) > MOSTLY * len(samples)]
    return often[0] if often else None


def _others(samples: Sequence[DeviceSample]) -> tuple[int, ...]:
    """The processes of others that compute in more than `MOSTLY` of at least `LEAST_SAMPLES` samples."""
    if len(samples) < LEAST_SAMPLES:
        return ()
    pids = {pid for s in samples for pid in s.state.others}
    return tuple(sorted(p for p in pids if sum(p in s.state.others for s in samples) > MOSTLY * len(samples)))


def _said(held: str, samples: Sequence[DeviceSample]) -> str:
    newest = samples[-1].state
    if held == "heat" and newest.temperature_celsius is not None:
        return f"{_HELD[held][0]} ({newest.temperature_celsius:.0f} °C)"
    if held == "power-limit" and newest.power_limit_watts is not None:
        return f"{_HELD[held][0]} to {newest.power_limit_watts:.0f} W"
    return _HELD[held][0]


def _processes(pids: Sequence[int]) -> str:
    named = ", ".join(map(str, pids[:4]))
    return f"process {named} computes" if len(pids) == 1 else f"processes {named} compute"


def _devices(ranks: Iterable[int]) -> str:
    chosen = tuple(sorted(ranks))
    return f"the device{'s' * (len(chosen) > 1)} of {ranks_text(chosen)}"

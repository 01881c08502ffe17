"""The devices of a node's ranks over time, as its monitor saw them: ``nodes/<node>/devices.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dtobs.codec import DecodeError, decode
from dtobs.errors import TargetError
from dtobs.host.nvml import DeviceState
from dtobs.recording.rundir import RunDirectory, read_json, write_json


@dataclass(frozen=True)
class DeviceSample:
    """The device of one rank at one moment."""

    rank: int
    attempt: int
    at_ns: int  #: monotonic
    state: DeviceState


def write_devices(path: Path, samples: Iterable[DeviceSample]) -> None:
    """Replace the file. Raises RecordingDisabled."""
    write_json(path, {"samples": list(samples)})


def read_devices(path: Path) -> tuple[DeviceSample, ...]:
    """What is in the file; nothing where there is none, or where it is damaged."""
    try:
        return decode(tuple[DeviceSample, ...], read_json(path).get("samples", ()))
    except (TargetError, DecodeError):
        return ()


def by_rank(run: RunDirectory, attempt: int, clock: Mapping[int, int]) -> dict[int, tuple[DeviceSample, ...]]:
    """The samples of one attempt by rank, oldest first; `clock` is added to the times of each rank's host."""
    found: dict[int, list[DeviceSample]] = {}
    for node in run.nodes():
        for sample in read_devices(run.devices(node)):
            if sample.attempt == attempt:
                moved = replace(sample, at_ns=sample.at_ns + clock.get(sample.rank, 0))
                found.setdefault(sample.rank, []).append(moved)
    return {rank: tuple(sorted(samples, key=lambda s: s.at_ns)) for rank, samples in found.items()}

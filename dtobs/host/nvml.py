"""What NVIDIA's management library says of a device: its clock and what holds that down, and who else computes on it.

It is asked by the monitor and never by a rank: a driver in trouble may not answer for minutes. `pynvml` comes with the
package nvidia-ml-py (extra `nvml`); without it, and without a driver, nothing is known of devices.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

HELD_BY = {
    0x02: "application-clocks",
    0x04: "power-limit",
    0x08: "hardware-slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "power-brake",
}
"""NVML's clock event reasons that keep a busy device below its clock; an idle device's own (0x01) is none."""
COMPUTES_PERCENT = 5
"""Of the time between two looks: who keeps the multiprocessors busy for less is no competitor."""


@dataclass(frozen=True)
class DeviceState:
    """One device at one moment; None where the driver does not say.

    `held_by` are values of HELD_BY; `others` are processes that compute on it beside those that were asked for.
    """

    clock_mhz: float | None = None  #: of the streaming multiprocessors
    temperature_celsius: float | None = None
    power_limit_watts: float | None = None
    held_by: tuple[str, ...] = ()
    others: tuple[int, ...] = ()


class Nvml:
    """An open library; `library` is the module `pynvml` or one like it (`dtobs.testing.fake_nvml`)."""

    def __init__(self, library: Any) -> None:
        """Raises the library's NVMLError when there is no driver."""
        self._library = library
        self._seen: dict[str, int] = {}  # by device: the newest sample of who computes, its time
        library.nvmlInit()

    def read(self, uuid: str, own: Collection[int]) -> DeviceState | None:
        """The device of that UUID, which the processes `own` use; None when there is none here."""
        library = self._library
        try:
            device = library.nvmlDeviceGetHandleByUUID(uuid)
        except library.NVMLError:
            return None
        held = self._ask(library.nvmlDeviceGetCurrentClocksThrottleReasons, device)
        bits = 0 if held is None else int(held)
        return DeviceState(
            clock_mhz=self._ask(library.nvmlDeviceGetClockInfo, device, library.NVML_CLOCK_SM),
            temperature_celsius=self._ask(library.nvmlDeviceGetTemperature, device, library.NVML_TEMPERATURE_GPU),
            power_limit_watts=_thousandth(self._ask(library.nvmlDeviceGetEnforcedPowerLimit, device)),
            held_by=tuple(dict.fromkeys(reason for bit, reason in HELD_BY.items() if bits & bit)),
            others=self._others(uuid, device, own),
        )

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> float | None:
        try:
            return float(function(*arguments))
        except self._library.NVMLError:
            return None

    def _others(self, uuid: str, device: Any, own: Collection[int]) -> tuple[int, ...]:
        """The other processes that compute on the device. None are told where `own` is not seen either: the driver
        then numbers processes differently, as it does for containers with process ids of their own.
        """
        try:
            samples = self._library.nvmlDeviceGetProcessUtilization(device, self._seen.get(uuid, 0))
        except self._library.NVMLError:  # also when nothing has computed since
            return ()
        shares: dict[int, list[int]] = {}
        for sample in samples:
            shares.setdefault(int(sample.pid), []).append(int(sample.smUtil))
        self._seen[uuid] = max((int(s.timeStamp) for s in samples), default=self._seen.get(uuid, 0))
        if not set(own) & set(shares):
            return ()
        busy = {pid for pid, percents in shares.items() if statistics.fmean(percents) >= COMPUTES_PERCENT}
        return tuple(sorted(busy - set(own) - {0}))


def open_nvml() -> Nvml | None:
    """The library of this host; None without the package or the driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return Nvml(pynvml)
    except pynvml.NVMLError:
        return None


def _thousandth(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value / 1e3

"""A management library without a driver: the part of `pynvml` that `dtobs.host.nvml` uses, for devices made up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class NVMLError(Exception):
    """What the library raises: a device that is not there, a question that the driver refuses."""


@dataclass
class FakeProcess:
    """One sample of what a process keeps busy, as the driver hands it out."""

    pid: int
    smUtil: int
    timeStamp: int = 1


@dataclass
class FakeDevice:
    """A device; what is None, the driver refuses to say. Power is in milliwatts, as in the library."""

    clock_mhz: int | None = 1980
    temperature: int | None = 60
    power_limit: int | None = 700_000
    reasons: int | None = 0
    processes: list[FakeProcess] = field(default_factory=list)


class FakeNvml:
    """`Nvml(FakeNvml({"GPU-…": FakeDevice()}))` reads these devices."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def __init__(self, devices: dict[str, FakeDevice]) -> None:
        self.devices = devices

    def nvmlInit(self) -> None:
        return

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeDevice:
        if uuid not in self.devices:
            raise NVMLError("Not Found")
        return self.devices[uuid]

    def nvmlDeviceGetClockInfo(self, device: FakeDevice, kind: int) -> int:
        return self._said(device.clock_mhz)

    def nvmlDeviceGetTemperature(self, device: FakeDevice, sensor: int) -> int:
        return self._said(device.temperature)

    def nvmlDeviceGetEnforcedPowerLimit(self, device: FakeDevice) -> int:
        return self._said(device.power_limit)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: FakeDevice) -> int:
        return self._said(device.reasons)

    def nvmlDeviceGetProcessUtilization(self, device: FakeDevice, since: int) -> list[Any]:
        newer = [process for process in device.processes if process.timeStamp > since]
        if not newer:
            raise NVMLError("Not Found")
        return newer

    @staticmethod
    def _said(value: int | None) -> int:
        if value is None:
            raise NVMLError("Not Supported")
        return value

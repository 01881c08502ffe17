"""What the management library of a device says, from the driver to the reason of a slowness; no GPU is needed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dtobs.detectors import run_detectors
from dtobs.findings import Finding
from dtobs.host.nvml import DeviceState, Nvml
from dtobs.monitor.devices import Devices
from dtobs.recording.devices import DeviceSample, read_devices, write_devices
from dtobs.recording.page import PAGE_DTYPE
from dtobs.testing.fake_nvml import FakeDevice, FakeNvml, FakeProcess
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import noisy_run

HOT = DeviceState(1005.0, 91.0, 700.0, ("heat",))
COOL = DeviceState(1980.0, 62.0, 700.0, ("power-limit",))
LIMITED = DeviceState(990.0, 60.0, 300.0, ("power-limit",))
WAITING = DeviceState(345.0, 35.0, 700.0)
"""A device that has little to do lowers its clock, and nothing holds it down."""


def test_a_device_that_is_held_down_and_shared():
    device = FakeDevice(1005, 91, 700_000, 0x40 | 0x20, [FakeProcess(7, 60), FakeProcess(8, 30)])
    state = Nvml(FakeNvml({"GPU-a": device})).read("GPU-a", [7])
    assert state == DeviceState(1005.0, 91.0, 700.0, ("heat",), (8,))


@pytest.mark.parametrize(
    "processes",
    [
        [FakeProcess(7, 90)],
        [FakeProcess(7, 90), FakeProcess(8, 0), FakeProcess(8, 4)],  # it holds memory and does nothing
        [FakeProcess(4242, 90), FakeProcess(8, 50)],  # ids of the host, which are not those of this container
        [],
    ],
)
def test_nobody_else_computes(processes: list[FakeProcess]):
    state = Nvml(FakeNvml({"GPU-a": FakeDevice(processes=processes)})).read("GPU-a", [7])
    assert state is not None and state.others == ()


def test_what_the_driver_refuses_is_unknown():
    library = Nvml(FakeNvml({"GPU-a": FakeDevice(None, None, None, None)}))
    assert library.read("GPU-a", [7]) == DeviceState()
    assert library.read("GPU-b", [7]) is None


def test_samples_are_counted_once():
    device = FakeDevice(processes=[FakeProcess(7, 50), FakeProcess(8, 50)])
    library = Nvml(FakeNvml({"GPU-a": device}))
    assert [library.read("GPU-a", [7]).others for _ in range(2)] == [(8,), ()]  # type: ignore[union-attr]


def node(run: FakeRun, **more: int) -> Any:
    pages = np.zeros(len(run.ranks), PAGE_DTYPE)
    pages["rank"], pages["device_total_bytes"] = range(len(run.ranks)), 80 << 30
    watched = [SimpleNamespace(rank=n, pid=os.getpid()) for n in range(len(run.ranks))]
    return SimpleNamespace(pages=pages, watched=watched, attempt=0, **more)


def test_the_monitor_keeps_what_the_driver_says(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    run.ranks[0].meta("process", device_uuid="GPU-a")
    child = FakeProcess(os.getpid(), 40)
    library = Nvml(FakeNvml({"GPU-a": FakeDevice(processes=[child, FakeProcess(1 << 22, 40)])}))
    devices = Devices(run.directory, 0, lambda: library)
    devices.look(node(run))
    devices._asking.join()  # type: ignore[union-attr]
    (sample,) = read_devices(run.directory.devices(0))
    assert (sample.rank, sample.state.clock_mhz, sample.state.others) == (0, 1980.0, (1 << 22,))
    assert run.view().devices[0][0].state == sample.state


def test_a_driver_that_does_not_answer_holds_nobody_up(tmp_path: Path):
    run = FakeRun(tmp_path, 1)
    run.ranks[0].meta("process", device_uuid="GPU-a")
    answer, opened = threading.Event(), []

    def stuck() -> None:
        opened.append(1)
        answer.wait()

    devices = Devices(run.directory, 0, stuck)
    for _ in range(3):
        devices._next = 0.0
        devices.look(node(run))
    assert not run.directory.devices(0).exists()
    answer.set()
    devices._asking.join()  # type: ignore[union-attr]
    assert opened == [1]


def test_a_damaged_file_says_nothing(tmp_path: Path):
    run = FakeRun(tmp_path, 1)
    record(run, {0: [COOL]})
    assert run.view().devices
    run.directory.devices(0).write_text('{"samples": [{"rank": "x"}]}')
    assert run.view().devices == {}


def slow(tmp_path: Path, own: DeviceState, peers: DeviceState, extra: float = 0.25) -> list[Finding]:
    """A run whose rank 1 takes longer, and what the driver said of all devices meanwhile."""

    def change(number: int, step: int) -> dict[str, float]:
        return {"forward": extra} if number == 1 else {"exposed": extra + 0.03}

    run = noisy_run(tmp_path, 3, 40, change)
    record(run, {0: [peers] * 8, 1: [own] * 8, 2: [peers] * 8})
    return run_detectors(run.view(), ("silent", "performance"))


def record(run: FakeRun, states: dict[int, list[DeviceState]]) -> None:
    """Spread the states of each rank evenly over the time of the run."""
    samples = []
    for rank, of_rank in states.items():
        begin, end = run.start_ns, run.ranks[rank].clock_ns
        for number, state in enumerate(of_rank, 1):
            samples.append(DeviceSample(rank, 0, begin + (end - begin) * number // len(of_rank), state))
    write_devices(run.directory.devices(0), samples)


@pytest.mark.parametrize(
    ("state", "cause", "words"),
    [
        (HOT, "device-heat", "runs at 1005 MHz where its peers' run at 1980: it is too hot (91 °C)"),
        (LIMITED, "device-power-limit", "its power is limited to 300 W"),
        (DeviceState(1980.0, 60.0, 700.0, (), (4242,)), "device-shared", "process 4242 computes on its device"),
    ],
)
def test_the_device_of_a_straggler_is_the_reason(tmp_path: Path, state: DeviceState, cause: str, words: str):
    (found,) = slow(tmp_path, state, COOL)
    assert (found.code, found.ranks, found.evidence[-1]["cause"]) == ("straggler", (1,), cause)
    assert words in found.summary and found.next_step


@pytest.mark.parametrize(
    ("own", "peers"),
    [
        (WAITING, COOL),  # slow for another reason: its device waits
        (COOL, COOL),  # all at their power limit, as usual
        (HOT, HOT),  # no hotter than the others
        (DeviceState(1900.0, 91.0, None, ("heat",)), COOL),  # too little to matter
        (DeviceState(1980.0, others=(9,)), DeviceState(1980.0, others=(10,))),  # every device is shared
        (DeviceState(), DeviceState()),
    ],
)
def test_a_device_that_is_no_reason(tmp_path: Path, own: DeviceState, peers: DeviceState):
    (found,) = slow(tmp_path, own, peers)
    assert (found.code, found.ranks) == ("straggler", (1,))
    assert all(evidence["what"] != "cause" for evidence in found.evidence)


def test_hot_and_shared_devices_of_a_job_that_nobody_waits_for_are_not_accused(tmp_path: Path):
    run = noisy_run(tmp_path, 3, 200)
    record(run, {0: [COOL] * 8, 1: [HOT] * 8, 2: [DeviceState(1980.0, others=(4,))] * 8})
    assert run_detectors(run.view(), ("silent", "performance")) == []


def dropped(tmp_path: Path, before: DeviceState, after: DeviceState) -> Finding:
    """A run that is half as fast from step 100 on; the device of rank 1 changes then."""
    run = noisy_run(tmp_path, 2, 300, lambda rank, step: {"forward": 0.3, "exposed": 0.005} if step >= 100 else {})
    ends = [100 * 0.13, run.ranks[0].clock_ns / 1e9 - run.start_ns / 1e9]
    share = ends[0] / ends[1]
    states = [before] * max(4, round(40 * share)) + [after] * round(40 * (1 - share))
    record(run, {0: [COOL] * len(states), 1: states})
    (found,) = run_detectors(run.view(), ("silent", "performance"))
    assert found.code == "throughput-drop"
    return found


def test_a_clock_that_fell_explains_a_drop(tmp_path: Path):
    found = dropped(tmp_path, COOL, HOT)
    assert found.ranks == (1,) and "the clock of the device of rank 1 fell (1980 → 1005 MHz)" in found.summary


def test_a_process_that_came_explains_a_drop(tmp_path: Path):
    found = dropped(tmp_path, COOL, DeviceState(1980.0, others=(4242,)))
    assert "since then process 4242 computes on the device of rank 1 as well" in found.summary


@pytest.mark.parametrize(("before", "after"), [(COOL, COOL), (COOL, WAITING), (HOT, HOT)])
def test_devices_that_explain_no_drop(tmp_path: Path, before: DeviceState, after: DeviceState):
    found = dropped(tmp_path, before, after)
    assert found.ranks == () and "device" not in found.summary

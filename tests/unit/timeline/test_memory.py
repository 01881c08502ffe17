"""`dtobs memory`: what fills a snapshot, in the layouts of old and new torch, and files that are none."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from dtobs.cli import main
from dtobs.timeline.allocation_sites import site
from dtobs.timeline.allocations import devices

MIB = 1 << 20


def frame(filename: str, line: int = 7, name: str = "forward") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def block(size: int, *frames: dict[str, Any], state: str = "active_allocated", old: bool = False) -> dict[str, Any]:
    stack = {"history": [{"frames": list(frames)}]} if old else {"frames": list(frames)}
    return {"size": size * MIB, "requested_size": size * MIB - 1, "state": state, **stack}


def snapshot(old: bool = False) -> dict[str, Any]:
    linear, mine = frame("/x/site-packages/torch/nn/modules/linear.py"), frame("/home/me/model.py", 31)
    adam = frame("/x/site-packages/torch/optim/adam.py", 90, "_init_group")
    first = [
        block(40, linear, mine, old=old),
        block(10, adam, frame("/home/me/train.py", 8, "main"), old=old),
        block(30, state="inactive"),
        block(20, state="active_pending_free"),
    ]
    empty = [block(100, state="inactive")]
    return {
        "segments": [
            {"device": 0, "total_size": 100 * MIB, "blocks": first},
            {"device": 0, "total_size": 100 * MIB, "blocks": empty},
        ],
        "device_traces": [[]],
    }


def write(value: object, path: Path) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


@pytest.mark.parametrize("old", [False, True])
def test_what_fills_it(old: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["memory", str(write(snapshot(old), tmp_path / "s.pickle")), "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["devices"]["0"]
    assert (device["reserved_bytes"], device["allocated_bytes"]) == (200 * MIB, 50 * MIB)
    assert (device["pending_bytes"], device["inactive_bytes"]) == (20 * MIB, 130 * MIB)
    assert (device["fragmentation"], device["largest_free_bytes"]) == (0.15, 100 * MIB)
    assert device["categories"] == {"activations": 40 * MIB, "optimizer": 10 * MIB}
    assert device["frames"][0] == {"frame": "/home/me/model.py:31 forward", "bytes": 40 * MIB}


def test_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["memory", str(write(snapshot(), tmp_path / "s.pickle"))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("device 0: 50 MiB allocated of 200 MiB reserved; 15.0% lost to fragmentation")
    assert "40 MiB  /home/me/model.py:31 forward" in out


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


HOSTILE = [Evil(), {"segments": [Evil()]}, {"segments": 3}, {"segments": [7]}, [], 5, {"a": 1}]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_snapshot_runs_nothing(value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = main(["memory", str(write(value, tmp_path / "s.pickle"))])
    out, err = capsys.readouterr()
    assert code == (0 if value == [] else 1)
    assert "ran" not in out and err.count("\n") == code


def test_odd_values_cost_only_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    value = snapshot()
    value["segments"][0]["blocks"] += [None, {"size": -4, "state": 3}, {"size": "x", "frames": [1, {}]}]
    assert main(["memory", str(write(value, tmp_path / "s")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"]["0"]["allocated_bytes"] == 50 * MIB


def test_what_was_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The last allocation that failed, of each device; the history of a device that is full of nothing counts, too."""
    refused = {"action": "oom", "size": 64 * MIB, "device_free": 3 * MIB, "frames": [frame("/home/me/loss.py", 4)]}
    earlier = {**refused, "size": 5, "frames": []}
    path = write(
        {**snapshot(), "device_traces": [[], [earlier, refused, {"action": "alloc"}], 7]}, tmp_path / "s.pickle"
    )
    assert main(["memory", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]
    told = {"bytes": 64 * MIB, "free_bytes": 3 * MIB, "frame": "/home/me/loss.py:4 forward"}
    assert found["0"]["out_of_memory"] is None
    assert told.items() <= found["1"]["out_of_memory"].items()
    assert main(["memory", str(path)]) == 0
    assert "64 MiB were asked for, 3 MiB were free, at /home/me/loss.py:4 forward" in capsys.readouterr().out


def test_torn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(snapshot(), tmp_path / "s")
    path.write_bytes(path.read_bytes()[:-40])
    assert main(["memory", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


TORCH = "/opt/conda/lib/python3.12/site-packages/torch"
MINE = frame("/home/me/torch/train.py", 50, "main")
CPP = [frame("??", 0, "c10::cuda::CUDACachingAllocator::Native::malloc"), frame("??", 0, "at::native::empty_cuda")]
CALL = frame(f"{TORCH}/nn/modules/module.py", 1773, "_call_impl")
SITES = {
    "a layer's weights": ([frame(f"{TORCH}/nn/modules/linear.py", 101, "__init__"), MINE], "parameters"),
    "moved to the device": ([frame(f"{TORCH}/nn/modules/module.py", 950, "_apply"), MINE], "parameters"),
    "in the user's own forward": ([*CPP, frame("/home/me/model.py", 31), CALL, MINE], "activations"),
    "in a wrapper of FSDP": (
        [*CPP, frame(f"{TORCH}/nn/functional.py"), CALL, frame(f"{TORCH}/distributed/fsdp/api.py"), CALL, MINE],
        "activations",
    ),
    "an operation of a DTensor": (
        [frame(f"{TORCH}/distributed/tensor/_dispatch.py", 5, "dispatch"), frame(f"{TORCH}/nn/functional.py"), MINE],
        "activations",
    ),
    "gathered parameters": (
        [frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 5, "all_gather"), CALL, MINE],
        "communication",
    ),
    "the engine": ([*CPP, frame("??", 0, "torch::autograd::Engine::evaluate_function")], "gradients"),
    "a forward's own C++": ([*CPP, frame("??", 0, "torch::autograd::VariableType::addmm"), CALL, MINE], "activations"),
    "a step, in a folder of that name": (
        [frame(f"{TORCH}/optim/adamw.py", 90, "step"), frame("/w/optimizer/run.py"), MINE],
        "optimizer",
    ),
    "the user's folder is no library": ([frame("/w/optimizer/cache.py", 3, "fill")], "other"),
}


@pytest.mark.parametrize(("frames", "category"), SITES.values(), ids=SITES)
def test_what_a_stack_says_memory_is_for(frames: list[dict[str, Any]], category: str):
    assert site({"frames": frames}).category == category


def test_the_users_line_is_python_and_no_library():
    assert site({"frames": SITES["a forward's own C++"][0]}).place == "/home/me/torch/train.py:50 main"
    lines = ['  File "/opt/lib/python3.12/x.py", line 1, in run\n    f()', '  File "m.py", line 4, in forward\n    y']
    engine = {"frames": SITES["the engine"][0], "forward_frames": lines}
    assert site(engine).place == "backward of m.py:4 forward"


class Allocator:
    """A device's memory without reuse: what it holds, and the events that led there."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.held: dict[int, dict[str, Any]] = {}
        self.next = -(1 << 50)  # some devices have such addresses

    def add(self, action: str, address: int, size: int, *frames: dict[str, Any]) -> None:
        event = {"action": action, "addr": address, "size": size * MIB, "time_us": len(self.events) * 1000}
        self.events.append({**event, **({"frames": list(frames)} if frames else {})})

    def take(self, size: int, *frames: dict[str, Any]) -> int:
        self.next += 1 << 32
        self.add("alloc", self.next, size, *frames)
        self.held[self.next] = {**block(size, *frames), "requested_size": size * MIB, "address": self.next}
        return self.next

    def drop(self, address: int) -> None:
        size = self.held.pop(address)["size"] // MIB
        for action in ("free_requested", "free_completed"):
            self.add(action, address, size)

    def snapshot(self, first: int = 0) -> dict[str, Any]:
        """With the events from `first` on only, as a history of limited length has them."""
        blocks = list(self.held.values())
        segments = [
            {"device": 0, "total_size": b["size"] + 2 * MIB, "address": b["address"], "blocks": [b]} for b in blocks
        ]
        return {"segments": segments, "device_traces": [self.events[first:]]}


LOOP, LOSS, KEPT = frame("/home/me/model.py", 31), frame("/home/me/loss.py", 4), frame("/home/me/eval.py", 19, "log")


def trained(steps: int, kept: int = 0, micro: int = 1, largest: int = 0) -> Allocator:
    """Steps of `micro` micro-batches with six activations of 40 MiB and more in one of them, gradients from the first
    micro-batch to the end of its step, and `kept` MiB that nobody frees."""
    device = Allocator()
    device.take(500, MINE)
    for step in range(steps):
        gradients: list[int] = []
        for number in range(micro):
            size = largest if largest and step == steps // 2 else 40 + (step * 7 + number) % 5
            activations = [device.take(size, LOOP, CALL) for _ in range(6)]
            for activation in activations:
                gradients += [] if number else [device.take(30)]
                device.drop(activation)
        if step == 0:
            device.take(900, frame(f"{TORCH}/optim/adamw.py", 90, "step"), MINE)
        if kept:
            device.take(kept, KEPT)
        for gradient in gradients:
            device.drop(gradient)
    return device


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("steps", [1, 3, 8, 12, 40])
@pytest.mark.parametrize("cut", [0, 0.2, 0.5])
def test_memory_that_is_filled_and_emptied_does_not_grow(steps: int, micro: int, cut: float):
    device = trained(steps, micro=micro)
    assert devices(device.snapshot(int(cut * len(device.events))))[0].history.growth is None


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("cut", [0, 0.2])
def test_what_grows_is_told_with_its_place(micro: int, cut: float):
    device = trained(40, kept=5, micro=micro)
    growth = devices(device.snapshot(int(cut * len(device.events))))[0].history.growth
    assert growth is not None and 0 < growth.begin_s < growth.end_s
    assert [name for name, _ in growth.frames] == ["/home/me/eval.py:19 log"]
    assert growth.frames[0][1] == growth.total and growth.total % (5 * MIB) == 0


@pytest.mark.parametrize("cut", [0, 3, 100])
def test_the_peak_is_counted_back_from_what_is_held(cut: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What the history does not have, because it is too short, is missing in places and not in sums."""
    device = trained(9, largest=400)
    path = write(device.snapshot(cut), tmp_path / "s.pickle")
    assert main(["memory", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]["0"]
    peak = found["peak"]
    assert found["allocated_bytes"] == 1400 * MIB
    assert peak["allocated_bytes"] == (1400 + 6 * 400 + 30) * MIB
    assert peak["frames"][0] == {"frame": "/home/me/model.py:31 forward", "bytes": 2400 * MIB}
    assert peak["categories"]["activations"] == 2400 * MIB
    assert main(["memory", str(path)]) == 0
    out = capsys.readouterr().out
    assert "peak: 3.74 GiB" in out and "2.34 GiB" in out and "(a thread without Python" in out


def refused(stuck: int, expandable: bool = False) -> dict[str, Any]:
    """A loss of 300 MiB is refused, and the activations are gone when the snapshot is taken."""
    device = Allocator()
    activation = device.take(700, LOOP, CALL)
    device.events.append({"action": "oom", "size": 300 * MIB, "device_free": 9 * MIB, "frames": [LOSS]})
    device.drop(activation)
    empty = {"device": 0, "total_size": (700 + stuck) * MIB, "is_expandable": expandable, "blocks": []}
    return {"segments": [empty], "device_traces": [device.events]}


@pytest.mark.parametrize(("stuck", "expandable", "told"), [(310, False, 2), (310, True, 1), (290, False, 0)])
def test_what_was_held_when_an_allocation_was_refused(
    stuck: int, expandable: bool, told: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["memory", str(write(refused(stuck, expandable), tmp_path / "s.pickle"))]) == 0
    out = capsys.readouterr().out
    assert "out of memory: 300 MiB were asked for, 9 MiB were free, at /home/me/loss.py:4 forward" in out
    assert "when refused: activations 700 MiB" in out and "0 B" in out
    assert out.count("310 MiB more") + out.count("expandable_segments:True") == told


def test_devices_without_memory_and_histories_without_allocations_are_left_out():
    """Every device that a process sees has a list of events, and a snapshot is one."""
    value = {**snapshot(), "device_traces": [[{"action": "snapshot", "time_us": 7}]] * 3}
    found = devices(value)
    assert [*found] == [0]
    assert (found[0].history.curve, found[0].history.peak) == ([], None)


def test_a_history_of_odd_events_costs_only_them():
    odd = [
        7,
        {},
        {"action": 3},
        {"action": "alloc", "addr": [], "size": -1},
        {"action": "free", "addr": {}, "size": "x"},
    ]
    device = trained(9)
    whole = devices(device.snapshot())[0].history
    hurt = device.snapshot()
    hurt["device_traces"][0][5:5] = odd
    found = devices(hurt)[0].history
    assert found.peak is not None and whole.peak is not None
    assert found.peak.allocated == whole.peak.allocated

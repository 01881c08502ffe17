"""The same activity of a device, written as other profilers, versions and tools write it: the figures stay the same.

What they must be is counted here on a raster of microseconds, from what the device did and not from the file.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtobs.timeline.kineto.analyse import analyse
from tests.unit.timeline.kineto.traces import Event, Host, random_rank

LENGTH = 200_000
FIGURES = ("span_us", "compute_us", "communication_us", "exposed_us", "memory_us", "idle_us")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def counted(events: list[Event]) -> dict[str, Any]:
    """The figures of what a device did, without any arithmetic of intervals."""
    busy = {kind: np.zeros(LENGTH, bool) for kind in ("compute", "communication", "memory")}
    for event in events:
        if event["cat"] in DEVICE:
            kind = "memory" if "Mem" in event["name"] else "communication" if "nccl" in event["name"] else "compute"
            busy[kind][event["ts"] : event["ts"] + event["dur"]] = True
    compute, communication, memory = busy.values()
    whole = np.flatnonzero(compute | communication | memory)
    span = int(whole[-1] + 1 - whole[0])
    return {
        "span_us": span,
        "compute_us": int(compute.sum()),
        "communication_us": int(communication.sum()),
        "exposed_us": int((communication & ~compute).sum()) if communication.any() else None,
        "memory_us": int(memory.sum()),
        "idle_us": span - len(whole),
    }


def read(path: Path, rank: str = "0") -> dict[str, Any]:
    found = analyse([path]).to_json()["ranks"][rank]
    return {name: found[name] for name in FIGURES}


def plain(events: list[Event], **meta: Any) -> bytes:
    return json.dumps({**meta, "traceEvents": events}).encode()


def first_torch(events: list[Event]) -> bytes:
    """Kineto of torch 1.8 to 1.10: other categories, ids in lower case, text for numbers, nothing beside the events."""
    names = {"kernel": "Kernel", "gpu_memcpy": "Memcpy", "gpu_memset": "Memset", "cuda_runtime": "Runtime"}
    for event in events:
        event["cat"] = names.get(event["cat"], "Operator")
        event["args"] = {k.lower(): str(v) for k, v in event["args"].items()} | {"external id": "7", "device": "0"}
    return plain(events)


def nanoseconds(events: list[Event]) -> bytes:
    """Kineto of torch 2.4 on: times as microseconds with three decimals, counted from a base in nanoseconds."""
    for event in events:
        event["ts"], event["dur"] = event["ts"] + 1_700_000_000.5, float(event["dur"])
    return plain(events, displayTimeUnit="ns", baseTimeNanoseconds=1_699_999_000_000_000_000, schemaVersion=1)


def as_text(events: list[Event]) -> bytes:
    """Times as text and with exponents, as programs that rewrite traces leave them."""
    for number, event in enumerate(events):
        event["ts"] = str(event["ts"]) if number % 2 else event["ts"]
    text = plain(events).decode()
    return re.sub(r'"dur": (\d+)\b', lambda m: f'"dur": {int(m[1])}.0e0', text).encode()


def amd(events: list[Event]) -> bytes:
    """ROCm: calls of HIP, kernels of Tensile, RCCL's one kernel for everything, copies by a kernel of the runtime."""
    names = {"cudaLaunchKernel": "hipExtModuleLaunchKernel", "ampere_sgemm": "Cijk_Ailk_Bljk_SB_MT64x64x16_SE_1LDSB0"}
    for event in events:
        event["cat"] = {"cuda_runtime": "hip_runtime"}.get(event["cat"], event["cat"])
        event["name"] = names.get(event["name"], event["name"])
        if "nccl" in event["name"]:
            event["name"] = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
        elif event["name"].startswith("Memcpy"):
            event["cat"], event["name"] = "kernel", "__amd_rocclr_copyBuffer.kd"
        elif event["name"].startswith("Memset"):
            event["cat"], event["name"] = "kernel", "__amd_rocclr_fillBufferAligned"
    return plain(events)


def bare_list(events: list[Event]) -> bytes:
    """Chrome's other form: a list, that nobody closed."""
    return json.dumps(events).encode()[:-1] + b",\n"


def fields_missing(events: list[Event]) -> bytes:
    """Events without arguments, thread, name or length between the good ones; arrows, counters, instants, names."""
    between: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5},
        {"ph": "X", "cat": "kernel", "name": None, "ts": 5, "dur": 10, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": None, "dur": 10},
        {"ph": "X", "cat": None, "name": "gemm", "ts": 5, "dur": 10},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": -1, "args": None},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 3, "ts": 9, "pid": 0, "tid": 7},
        {"ph": "i", "name": "Iteration Start: PyTorch Profiler", "s": "g", "ts": 4, "pid": 0, "tid": 0},
        {"ph": "C", "name": "[memory]", "ts": 3, "pid": 0, "args": {"Bytes": 7}},
        {
            "ph": "X",
            "cat": "Trace",
            "name": "PyTorch Profiler (0)",
            "ts": 0,
            "dur": 190_000,
            "pid": "Spans",
            "tid": "x",
        },
        {"ph": "X", "cat": "overhead", "name": "CUPTI overhead", "ts": 0, "dur": 190_000, "pid": -1, "tid": 0},
        {"ph": "X", "cat": "cuda_sync", "name": "Stream Sync", "ts": 0, "dur": 190_000, "pid": 0, "tid": 7},
        {
            "ph": "X",
            "cat": "gpu_user_annotation",
            "name": "nccl:all_reduce",
            "ts": 0,
            "dur": 190_000,
            "pid": 0,
            "tid": 7,
        },
    ]
    mixed = []
    for number, event in enumerate(events):
        if number % 3 == 0:
            event.pop("tid")
        mixed += [event, between[number % len(between)]]
    return plain(mixed)


def no_arguments(events: list[Event]) -> bytes:
    """Nothing that says which launch a kernel belongs to, and no ProfilerStep."""
    kept = [event for event in events if not event["name"].startswith("ProfilerStep")]
    for event in kept:
        event.pop("args")
    return plain(kept)


def turned_around(events: list[Event]) -> bytes:
    """Events last to first, their fields too; what stands beside them before and behind, with the same words in it."""
    backwards = [dict(reversed(event.items())) for event in reversed(events)]
    beside = {"deviceProperties": [{"id": 0, "name": '"traceEvents": [{'}], "with_stack": 0, "record_shapes": 1}
    return json.dumps({**beside, "traceEvents": backwards, "traceName": "traceEvents", "end": [{}]}, indent=2).encode()


def carriage_returns(events: list[Event]) -> bytes:
    """Through a machine that ends its lines in another way and marks its files."""
    text = json.dumps({"traceEvents": events}, indent=1, ensure_ascii=True)
    return b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()


def two_devices(events: list[Event]) -> bytes:
    """One process, two devices: every second stream is on the other one."""
    for event in events:
        if "stream" in event["args"]:
            event["pid"] = event["args"]["device"] = event["args"]["stream"] // 4 % 2
    return plain(events)


def intel(events: list[Event]) -> bytes:
    """XPU: calls of its runtime, kernels of oneCCL."""
    for event in events:
        event["cat"] = {"cuda_runtime": "xpu_runtime"}.get(event["cat"], event["cat"])
        event["name"] = event["name"].replace("cudaLaunchKernel", "urEnqueueKernelLaunch")
        if "nccl" in event["name"]:
            event["name"] = "oneccl_allreduce_large_kernel<float>(void*)"
    return plain(events)


WRITERS: list[Callable[[list[Event]], bytes]] = [
    first_torch,
    nanoseconds,
    as_text,
    amd,
    bare_list,
    fields_missing,
    no_arguments,
    turned_around,
    carriage_returns,
    two_devices,
    intel,
]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_figures_do_not_depend_on_who_wrote_the_file(write, packed: bool, tmp_path: Path):
    host = random_rank(11)
    expected = counted(host.events)
    data = write(host.events)
    path = tmp_path / "odd.json"
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read(path) == expected


@pytest.mark.parametrize("write", [w for w in WRITERS if w is not no_arguments], ids=lambda write: write.__name__)
def test_idle_time_has_the_same_causes_whoever_wrote_the_file(write, tmp_path: Path):
    usual = analyse([random_rank(5).write(tmp_path / "usual.json")]).to_json()["ranks"]["0"]
    (tmp_path / "odd.json").write_bytes(write(random_rank(5).events))
    odd = analyse([tmp_path / "odd.json"]).to_json()["ranks"]["0"]
    assert odd["idle"] == pytest.approx(usual["idle"], abs=0.01)
    assert odd["steps"] == usual["steps"]


@pytest.mark.parametrize("share", [0.31, 0.5, 0.83])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_of_a_file_that_is_cut_off_what_is_whole_counts(share: float, packed: bool, tmp_path: Path):
    host = random_rank(3)
    data = json.dumps({"distributedInfo": {"rank": 2}, "traceEvents": host.events}).encode()
    kept = gzip.compress(data, 1)
    if packed:
        kept = kept[: int(share * len(kept))]
        readable = zlib.decompressobj(31).decompress(kept)
    else:
        readable = kept = data[: int(share * len(data))]
    ends = [m.end() for m in re.finditer(rb"\}\}(?=, \{|$)", readable)]
    whole = json.loads(readable[readable.index(b"[{") : ends[-1]] + b"]")
    path = tmp_path / "odd.json"
    path.write_bytes(kept)
    found = analyse([path])
    assert any("cut off" in note for note in found.notes)
    assert read(path, "2") == counted(whole)


def test_a_file_and_its_packed_copy_are_one_rank(tmp_path: Path):
    host = random_rank(7)
    host.write(tmp_path / "rank0.json")
    host.write(tmp_path / "rank0.json.gz")
    (tmp_path / "rank0 (1).json").write_bytes((tmp_path / "rank0.json").read_bytes())
    found = analyse([tmp_path])
    assert list(found.figures) == [0]
    assert sum("left out" in note for note in found.notes) == 2
    assert read(tmp_path) == counted(host.events)


def test_without_profiler_steps_the_window_of_steps_is_the_whole_trace(tmp_path: Path):
    host = random_rank(7)
    host.events = [event for event in host.events if not event["name"].startswith("ProfilerStep")]
    found = analyse([host.write(tmp_path / "odd.json")], "steps")
    assert found.figures[0].span == counted(host.events)["span_us"]
    assert any("fewer than two ProfilerSteps" in note for note in found.notes)


def test_only_the_host_computes(tmp_path: Path):
    """Operators within operators, Gloo beside them; annotations of the user and of the optimizer are no work."""
    host = Host(1, 2)
    host.add("user_annotation", "ProfilerStep#1", 0, 1000)
    host.add("cpu_op", "aten::linear", 100, 200)
    host.add("cpu_op", "aten::addmm", 120, 150)
    host.add("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 300, 100)
    host.add("cpu_op", "aten::mm", 310, 60)
    host.add("user_annotation", "Optimizer.step#SGD.step", 500, 400)
    host.add("cpu_op", "gloo:all_reduce", 250, 100)
    host.events[-1]["tid"] = 99
    found = analyse([host.write(tmp_path / "rank1.json")]).to_json()["ranks"]["1"]
    # 100 to 300 and 310 to 370 computes; 250 to 350 communicates, of it 300 to 310 alone.
    assert (found["compute_us"], found["communication_us"], found["exposed_us"]) == (260, 100, 10)
    assert (found["span_us"], found["idle_us"], found["device"]) == (270, 0, False)

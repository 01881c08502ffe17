"""One rank's device in every form that a trace may legally have: the figures are those of the intervals, worked out
here by marking microseconds.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtobs.timeline.kineto import stream
from dtobs.timeline.kineto.analyse import analyse
from dtobs.timeline.kineto.load import load
from tests.unit.timeline.kineto.test_strangers_elsewhere import straight

Event = dict[str, Any]
Interval = tuple[int, int]
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
CHANCE = random.Random(4)


def at_random(count: int, period: int, late: int, shortest: int, longest: int) -> list[Interval]:
    """Intervals that begin up to `late` after each `period` and do not reach into the next."""
    begins = [1000 + n * period + CHANCE.randint(0, late) for n in range(count)]
    return [(begin, begin + CHANCE.randint(shortest, longest)) for begin in begins]


COMPUTE = at_random(40, 100, 20, 20, 70)
TALK = at_random(20, 200, 60, 40, 130)
MEMORY = at_random(8, 500, 0, 5, 12)


def truth() -> tuple[float, ...]:
    """Span, compute, communication, exposed, memory and idle time, counted microsecond by microsecond."""

    def marked(intervals: Iterable[Interval]) -> set[int]:
        return {tick for begin, end in intervals for tick in range(begin, end)}

    compute, talk, memory = marked(COMPUTE), marked(TALK), marked(MEMORY)
    busy = compute | talk | memory
    span = max(busy) + 1 - min(busy)
    return (span, len(compute), len(talk), len(talk - compute), len(memory), span - len(busy))


def events(
    talk: str = NCCL, compute: str = "ampere_sgemm", kernel: str = "kernel", copy: str = "gpu_memcpy"
) -> list[Event]:
    """The device's events, each kind on a stream of its own."""
    kinds = (
        (kernel, compute, COMPUTE, 7),
        (kernel, talk, TALK, 20),
        (copy, "Memcpy HtoD (Pinned -> Device)", MEMORY, 9),
    )
    return [
        {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": b, "dur": e - b, "args": {"stream": tid}}
        for cat, name, intervals, tid in kinds
        for b, e in intervals
    ]


def file(found: list[Event], **meta: Any) -> bytes:
    return json.dumps({"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": found, **meta}).encode()


def each(change: Callable[[Event], Event]) -> bytes:
    return file([change(event) for event in events()])


def beside(*more: Event) -> bytes:
    return file([*more, *events(), *more])


def in_two() -> bytes:
    data = file(events())
    return gzip.compress(data[:3000]) + gzip.compress(data[3000:])


def windows() -> bytes:
    text = json.dumps(json.loads(file(events())), indent=1)
    return b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()


def begun_and_ended() -> list[Event]:
    found: list[Event] = []
    for event in events():
        begin = {key: value for key, value in event.items() if key != "dur"}
        end = {"ph": "E", "pid": event["pid"], "tid": event["tid"], "ts": event["ts"] + event["dur"]}
        found += [begin | {"ph": "B"}, end]
    return found


def records() -> list[Event]:
    """The host's records of two process groups, none of which leads to a kernel."""
    names = ("allgather", "_reduce_scatter_base")
    common = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "dur": 5}
    return [
        {
            **common,
            "ts": b,
            "args": {"Collective name": names[n % 2], "Process Group Name": str(n % 2), "Group size": 2},
        }
        for n, (b, _) in enumerate(TALK)
    ]


def step(number: int, begin: int, duration: int) -> Event:
    name = f"ProfilerStep#{number}"
    return {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": duration}


BIG = 1_700_000_000_000_000
NO_DURATION = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 5}
NO_TIME = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": 5}
NEGATIVE = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 2000, "dur": -4}
COUNTER = {"ph": "C", "name": "memory", "pid": 0, "ts": 5, "args": {"bytes": 1}}
INSTANT = {"ph": "i", "s": "t", "name": "[memory]", "cat": "kernel", "pid": 0, "tid": 1, "ts": 1}
NESTED = {
    "ph": "X",
    "cat": "python_function",
    "name": "f",
    "pid": 1,
    "tid": 1,
    "ts": 1,
    "dur": 1,
    "args": {"a": [[{}]]},
}
RCCL = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
DEEP_EP = "void deep_ep::internode::dispatch<false, 8, false, 16384, 8>(int4*, float*)"

FORMS: dict[str, bytes] = {
    "as Kineto writes it": file(events()),
    "RCCL's generic kernel": file(events(RCCL, "Cijk_Ailk_Bjlk_BBS_BH_MT128x128x64")),
    "DeepEP": file(events(DEEP_EP)),
    "Intel's": file(events("oneccl_allreduce_ring<half>(void*)", "gemm_kernel[SIMD32 {1; 1; 1} {1; 1; 1}]")),
    "categories of old profilers": file(events(kernel="Kernel", copy="Memcpy")),
    "several categories": each(lambda e: e | {"cat": f"gpu, {e['cat']}"}),
    "times as text": each(lambda e: e | {"ts": str(e["ts"]), "dur": f"{e['dur']}.000"}),
    "nanoseconds shown": file(events(), displayTimeUnit="ns"),
    "times of day": each(lambda e: e | {"ts": e["ts"] + BIG}),
    "a bare list": json.dumps(events()).encode(),
    "a bare list that is not ended": json.dumps(events()).encode()[:-1],
    "a bare list that ends in a comma": json.dumps(events()).encode()[:-1] + b",",
    "begin and end events": file(begun_and_ended()),
    "events without a duration, a time or a span": beside(NO_DURATION, NO_TIME, NEGATIVE, COUNTER, INSTANT),
    "steps inside of steps": beside(step(1, 900, 6000), step(1, 950, 3000), step(2, 1000, 100)),
    "a name that looks like the beginning": file(events(), traceName='a "traceEvents": [ b'),
    "the rest behind the events": json.dumps({"traceEvents": events(), "distributedInfo": {"rank": 0}}).encode(),
    "no arguments": each(lambda e: e | {"args": None}),
    "arguments that are a list": each(lambda e: e | {"args": [1]}),
    "streams as text": each(lambda e: e | {"tid": f"stream {e['tid']} ", "args": {}}),
    "each event twice": file(events() + events()),
    "in no order": file(random.Random(1).sample(events(), len(events()))),
    "keys in another order": each(lambda e: dict(reversed(e.items()))),
    "a byte order mark and Windows' lines": windows(),
    "NaN beside the events": file(events(), weird=float("nan")),
    "two process groups and no correlation": file(events(RCCL) + records()),
    "arguments nested deeply": beside(*[NESTED] * 50),
    "two packed pieces": in_two(),
}  # fmt: skip


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_the_figures_are_those_of_the_intervals(data: bytes, tmp_path: Path):
    (tmp_path / "rank0.json").write_bytes(data)
    assert straight(analyse([tmp_path])) == pytest.approx(truth(), abs=1e-3)


def test_beginnings_without_ends_and_ends_without_beginnings_count_for_nothing(tmp_path: Path):
    loose = [{"ph": "E", "pid": 0, "tid": 7, "ts": 500}, {"ph": "B", "cat": "kernel", "name": "k", "pid": 0, "tid": 8}]
    (tmp_path / "rank0.json").write_bytes(beside(*loose))
    assert straight(analyse([tmp_path])) == pytest.approx(truth(), abs=1e-3)


ODD_EVENTS = (
    '{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": "7.5", "dur": 2, "pid": 1, "tid": 1}',
    '{"ph": "X", "cat": "cpu_op", "name": "aten::mul", "ts": 9, "dur": 1, "pid": 1, "tid": 1, "args": []}',
    '{"ph": "X", "cat": "cpu_op", "name": null, "ts": 9, "dur": 1, "args": null}',
    '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 12, "args": {"a": 1}}',
    '{"ph": "X", "cat": ["kernel"], "name": "aten::mm", "ts": 12, "dur": 3}',
    '{"ph": "B", "cat": "kernel", "name": "gemm", "ts": 20, "pid": 0, "tid": 7,'
    ' "args": {"stream": 7, "correlation": 4}}',
    '{"ph": "E", "ts": 29, "pid": 0, "tid": 7}',
    '{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 1, "tid": 1,'
    ' "args": {"correlation": 4}}',
    '{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ts": 30, "dur": 5, "pid": 0,'
    ' "tid": 8, "args": {"stream": 8, "Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float"}}',
    "17",
)


@pytest.mark.parametrize("odd", ["", ', {"ph": "X", "cat": "cpu_op", "name": "aten::nan", "ts": NaN, "dur": 1}'])
@pytest.mark.parametrize("block", [64, 4 << 20])
def test_odd_events_are_read_alike_with_and_without_the_fast_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str, block: int
):
    path = tmp_path / "rank0.json"
    path.write_text('{"distributedInfo": {"rank": 0}, "traceEvents": [' + ", ".join(ODD_EVENTS) + odd + "]}")
    monkeypatch.setattr(stream, "BLOCK", block)
    ways = [load(path)]
    monkeypatch.setattr(stream, "_PARSE", stream._standard)
    monkeypatch.setattr(stream, "_PARSE_ARGS", json.loads)
    ways.append(load(path))
    for rank in ways:
        assert (rank.rank, rank.damage, len(rank.operators)) == (0, "", 2)
        assert sorted(zip(rank.device.begin, rank.device.end, strict=True)) == [(20, 29), (30, 35)]
        assert sorted(rank.launch[~np.isnan(rank.launch)]) == [1]
        assert [(call.op, call.nbytes) for call in rank.calls] == [("all_reduce", 32)]

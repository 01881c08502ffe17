"""Say what fills a device's memory, from a snapshot of PyTorch's allocator.

SNAPSHOT is a file that `torch.cuda.memory._dump_snapshot` wrote. It is read without running what is in it. Prints what
is allocated, by place in the code and by what it is for, now and at the peak or when an allocation was refused; what
grows from step to step, and what fragmentation costs. Places and times need
`torch.cuda.memory._record_memory_history()` before.

examples:
  dtobs memory snapshot.pickle
  dtobs memory snapshot.pickle --json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from dtobs.cli import Exit
from dtobs.errors import DumpError, TargetError
from dtobs.flight_recorder.decode import read_dump
from dtobs.timeline.allocation_history import Growth, Moment, Refusal
from dtobs.timeline.allocations import SCHEMA, Device, devices
from dtobs.tui.words import sparkline
from dtobs.words import bytes_text, duration_text

_MOST_BYTES = 1 << 32
_SHOWN = 12
_ALIKE = 0.01
"""Two times differ by more than this share, in which blocks are rounded."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("snapshot", type=Path, metavar="SNAPSHOT", help="file of torch.cuda.memory._dump_snapshot")
    parser.add_argument("--json", action="store_true", help=f"print JSON ({SCHEMA})")


def run(args: argparse.Namespace) -> int:
    """Read and print."""
    try:
        found = devices(read_dump(args.snapshot, _MOST_BYTES))
    except (DumpError, TargetError) as error:
        raise TargetError(f"{args.snapshot}: {error}") from error
    if args.json:
        table = {str(number): device.to_json() for number, device in sorted(found.items())}
        print(json.dumps({"schema": SCHEMA, "devices": table}))
    elif not found:
        print("The allocator holds no memory.")
    else:
        print("\n".join(line for number, device in sorted(found.items()) for line in _lines(number, device)))
    return Exit.NOTHING_FOUND


def _lines(number: int, device: Device) -> list[str]:
    past = device.history
    lines = [
        f"device {number}: {bytes_text(device.allocated)} allocated of {bytes_text(device.reserved)} reserved;"
        f" {device.fragmentation:.1%} lost to fragmentation, largest free block {bytes_text(device.largest_free)}"
    ]
    if device.pending:
        lines.append(f"  {bytes_text(device.pending)} freed, and another stream may still use it")
    if device.private:
        lines.append(f"  {bytes_text(device.private)} reserved for pools of their own, as CUDA graphs have")
    if past.curve:
        lines.append(f"  history: {sparkline(past.curve, len(past.curve))}  {duration_text(past.seconds)}")
    lines += _growth(past.growth) if past.growth else []
    lines += _refusal(past.refusal, device) if past.refusal else []
    if past.refusal:
        return lines + _places(device, past.refusal.then, "when refused")
    if past.peak:
        lines.append(f"  peak: {bytes_text(past.peak.allocated)}, {duration_text(past.peak.at_s)} into the history")
    return lines + _places(device, past.peak, "at the peak")


def _growth(growth: Growth) -> list[str]:
    places = ", ".join(f"{bytes_text(size)} at {name}" for name, size in growth.frames)
    return [
        f"  grows: what stays allocated when memory is lowest rose by {bytes_text(growth.total)} from"
        f" {duration_text(growth.begin_s)} to {duration_text(growth.end_s)} of the history: {places}"
    ]


def _refusal(refusal: Refusal, device: Device) -> list[str]:
    lines = [
        f"  out of memory: {bytes_text(refusal.size)} were asked for, {bytes_text(refusal.free)} were free,"
        f" at {refusal.place}"
    ]
    stuck = refusal.then.reserved - refusal.then.allocated
    if stuck >= refusal.size:
        pools = " or in pools of their own" if device.private else ""
        advice = "" if device.expandable else "; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins pieces"
        lines.append(f"  the allocator held {bytes_text(stuck)} more, free in smaller pieces{pools}{advice}")
    return lines


def _places(device: Device, then: Moment | None, title: str) -> list[str]:
    """What memory is for and where it was allocated, now and at another time if that was different."""
    names = {*device.frames, *(then.frames if then else ())}
    if then and sum(abs(then.frames[n] - device.frames[n]) for n in names) <= _ALIKE * device.allocated:
        then, names = None, {*device.frames}
    blocks, largest = Counter[str](), Counter[str]()
    for (size, name), times in device.largest.items():
        blocks[name] += times
        largest[name] = max(largest[name], size)
    lines = [f"  for: {_sizes(device.categories)}"] + ([f"  {title}: {_sizes(then.categories)}"] if then else [])
    lines.append(f"  {'now':>10}{f'{title:>14}' if then else ''}  blocks  the largest  allocated at")
    most = Counter({name: max(device.frames[name], then.frames[name] if then else 0) for name in names})
    for name, _ in most.most_common(_SHOWN):
        before = f"{bytes_text(then.frames[name]):>14}" if then else ""
        of = f"{blocks[name]:>6,}  {bytes_text(largest[name]):>11}" if blocks[name] else " " * 19
        lines.append(f"  {bytes_text(device.frames[name]):>10}{before}  {of}  {name}")
    return lines


def _sizes(sizes: Counter[str]) -> str:
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in sizes.most_common()) or "nothing"

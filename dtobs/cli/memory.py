"""Say what fills a device's memory, from a snapshot of PyTorch's allocator.

SNAPSHOT is a file that `torch.cuda.memory._dump_snapshot` wrote. It is read without running what is in it. Prints what
is allocated, by place in the code and by what it is for, what fragmentation costs, and the largest allocations. Places
need `torch.cuda.memory._record_memory_history()` before.

examples:
  dtobs memory snapshot.pickle
  dtobs memory snapshot.pickle --json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dtobs.cli import Exit
from dtobs.errors import DumpError, TargetError
from dtobs.flight_recorder.decode import read_dump
from dtobs.timeline.allocations import SCHEMA, Device, devices
from dtobs.words import bytes_text

_MOST_BYTES = 1 << 32
_SHOWN = 8


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
    lines = [
        f"device {number}: {bytes_text(device.allocated)} allocated of {bytes_text(device.reserved)} reserved;"
        f" {device.fragmentation:.1%} lost to fragmentation, largest free block {bytes_text(device.largest_free)}"
    ]
    if device.pending:
        lines.append(f"  {bytes_text(device.pending)} freed, and another stream may still use it")
    if device.refused:
        size, free, place = device.refused
        lines.append(f"  out of memory: {bytes_text(size)} were asked for, {bytes_text(free)} were free, at {place}")
    lines.append("  for: " + ", ".join(f"{name} {bytes_text(size)}" for name, size in device.categories.most_common()))
    lines += [f"  {bytes_text(size):>10}  {frame}" for frame, size in device.frames.most_common(_SHOWN)]
    lines.append("  the largest:")
    return lines + [f"  {bytes_text(size):>10}  {frame}" for size, frame in device.largest[:_SHOWN]]

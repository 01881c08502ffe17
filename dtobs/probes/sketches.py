"""Linear sketches of a gradient: a few numbers that add up when gradients do.

A sketch is uᵀ G v with vectors of plus and minus ones that are the same on every rank, so sketches of a sum add up:
who knows what each rank put in and what came out can tell with what weight each rank's share arrived.
Only a window of the tensor is read, which moves from step to step, so a look costs the same whatever the tensor's size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtobs.probes.rotation import place
from dtobs.recording.laws import SKETCHES

ELEMENTS = 1 << 14
"""Of one tensor that one look reads at most."""
COLUMNS = 1 << 13
PARTS = 64
"""Shards of one tensor that are sketched in one step at most."""
FIRST = 256
"""Elements whose mantissa is looked at."""
_SEED = 20_240_607

_signs: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True)
class Window:
    """Where to look: the same `rows` of each shard in `parts`, `columns` of each row.

    A tensor of `length` rows is cut into shards of `chunk` rows, as `torch.chunk` does; unsharded, there is one.
    """

    length: int
    chunk: int
    parts: tuple[int, ...]
    first: int
    rows: int
    first_column: int
    columns: int


def window(shape: Sequence[int], parts: int, step: int) -> Window:
    """The window of `step` into a tensor of `shape` that lies in `parts` shards along its first dimension."""
    length = shape[0] if shape else 1
    width = math.prod(shape[1:])
    columns = min(width, COLUMNS)
    chunk = max(1, -(-length // parts))
    shown = min(parts, PARTS)
    begin = place(step, -(-parts // shown)) * shown
    rows = max(1, min(chunk, ELEMENTS // max(1, columns * shown)))
    if rows > SKETCHES:
        rows -= rows % SKETCHES
    return Window(
        length,
        chunk,
        tuple(range(begin, min(parts, begin + shown))),
        place(step, chunk - rows + 1),
        rows,
        place(step, width - columns + 1),
        columns,
    )


def sketch(gradient: torch.Tensor, at: Window) -> torch.Tensor:
    """float32[parts, 1 + SKETCHES] of a whole gradient: per shard the scale, then the sketches."""
    if len(at.parts) == 1 and at.chunk == at.length:
        return _sketch(gradient, at, at.first, 1)
    begin, end = at.parts[0] * at.chunk + at.first, at.length
    if len(at.parts) * at.chunk + at.parts[0] * at.chunk <= end and at.rows == at.chunk:
        return _sketch(gradient, at, begin, len(at.parts))
    starts = [part * at.chunk + at.first for part in at.parts]
    return torch.cat([_sketch(gradient, at, start, 1) for start in starts])


def sketch_shard(gradient: torch.Tensor, at: Window) -> torch.Tensor:
    """The same of the one shard that this rank holds: float32[1, 1 + SKETCHES]."""
    return _sketch(gradient, at, at.first, 1)


def fine_share(gradient: torch.Tensor) -> torch.Tensor | None:
    """Which share of the first elements that are not zero needs more than BF16's mantissa; NaN where all are zero.

    Products that were computed in BF16 need none of it, whatever format they are kept in. None where it is not FP32.
    """
    if gradient.dtype != torch.float32 or not gradient.is_contiguous():
        return None
    bits = gradient.view(-1)[:FIRST].view(torch.int32)
    return (bits & 0xFFFF).count_nonzero() / bits.count_nonzero()


def _sketch(gradient: torch.Tensor, at: Window, start: int, parts: int) -> torch.Tensor:
    """Of `parts` times `rows` rows from `start` on; rows beyond the end count as zeros."""
    some = gradient if gradient.ndim else gradient.reshape(1)
    wanted = at.rows * parts
    there = max(0, min(wanted, some.shape[0] - start))
    device = gradient.device
    if not there:
        return torch.zeros(parts, 1 + SKETCHES, device=device)
    if there < some.shape[0]:
        some = some.narrow(0, start, there)
    if some.dtype != torch.float32:
        some = some.float()
    if some.ndim == 1:
        product = some
    else:
        matrix = some if some.ndim == 2 else some.reshape(there, -1)
        if at.columns < matrix.shape[1]:
            matrix = matrix.narrow(1, at.first_column, at.columns)
        product = torch.mv(matrix, signs(device, at.columns))
    if there < wanted:
        product = torch.cat([product, product.new_zeros(wanted - there)])
    product = product.view(parts, at.rows)
    found = product.new_zeros(parts, 1 + SKETCHES)
    torch.linalg.vector_norm(product, dim=1, out=found[:, 0])
    signed = product * signs(device, at.rows)
    if at.rows % SKETCHES:
        found[:, 1 : 1 + at.rows] = signed
    else:
        torch.sum(signed.view(parts, SKETCHES, -1), 2, out=found[:, 1:])
    return found


def signs(device: torch.device, count: int) -> torch.Tensor:
    """The first `count` of an endless row of random signs, the same in every process."""
    known = _signs.get(device)
    if known is None or len(known) < count:
        size = max(COLUMNS, 1 << max(1, count - 1).bit_length())
        generator = torch.Generator(device="cpu").manual_seed(_SEED)
        bits = torch.randint(0, 2, (size,), generator=generator, device="cpu")
        known = _signs[device] = (bits * 2 - 1).float().to(device)
    return known[:count]

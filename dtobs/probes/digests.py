"""Digests of tensors: equal where every bit is equal, different (for all practical purposes) where one is not.

On the CPU xxh3 over the tensor's own memory. On a device a sum of its words, each weighted by an odd number of its own,
that stays on the device; of large tensors a two-fold sum, of rows and of columns, each weighted. So swapped, negated
and zeroed elements change it (a plain sum, a norm or an exclusive-or misses those). What the two make is not comparable
with each other; ranks compare like with like.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from dtobs.probes.host_memory import host_memory

_WIDTH = 1024
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_NUMPY = frozenset({torch.int64, torch.int32, torch.float32, torch.float64})
_SMALL = 1 << 16
"""Words of a tensor that is put together with others."""
_TOGETHER, _WORDS_TOGETHER = 64, 1 << 20
"""At most so many tensors, and words, are put together at once."""
_MOST_SEGMENTS = 16
_known: dict[torch.device, torch.Tensor] = {}
_segments: dict[tuple[torch.device, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}
"""By device and sizes of tensors put together: the weights of all their words, and where each ends."""
_TOGETHER_AS_THEY_ARE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
"""Formats of which torch puts tensors together; others are taken as the integers they are made of."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def host_digest(tensor: torch.Tensor) -> int:
    """xxh3 (64 bits) of a CPU tensor's values in logical order; no copy where it is contiguous."""
    if tensor.dtype in _NUMPY and type(tensor) is torch.Tensor and not tensor.requires_grad:
        # The operators of `words` cost more than the hash of something as small as a batch of token numbers.
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(host_memory(tensor)).data)
    held = words(tensor)  # a copy, where it is not contiguous: it has to live until it is read
    return xxhash.xxh3_64_intdigest(host_memory(held).data)


def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """int64 scalar on the tensor's device. Nothing is copied to the host and nothing waits."""
    with torch.no_grad():
        flat = _flat(tensor)
        return (_of_small([flat]) if flat.numel() <= _SMALL else _of_large([words(flat)]))[0]


def device_digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64[N], of each what `device_digest` makes of it, on the device of the first.

    Small tensors, and the sums of rows and of columns of large ones, are put together first: what each costs is the
    host's time to launch kernels for it.
    """
    device = tensors[0].device
    found: dict[int, torch.Tensor] = {}
    small: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    large: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    with torch.no_grad():
        for n, tensor in enumerate(tensors):
            flat = _flat(tensor)
            if flat.numel() <= _SMALL:
                small.setdefault((flat.device, flat.dtype), []).append((n, flat))
            else:
                large.setdefault(flat.device, []).append((n, words(flat)))
        for alike in small.values():
            found |= zip([n for n, _ in alike], _of_small([flat for _, flat in alike]).unbind(), strict=True)
        for alike in large.values():
            found |= zip([n for n, _ in alike], _of_large([flat for _, flat in alike]).unbind(), strict=True)
        digests = [found[n] for n in range(len(tensors))]
        here = all(digest.device == device for digest in digests)
        return torch.stack(digests if here else [digest.to(device, non_blocking=True) for digest in digests])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1) if tensor.dtype in _TOGETHER_AS_THEY_ARE else words(tensor)


def _of_small(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64[N], of tensors of one type and device: of each the sum of its words, each with an odd weight of its own."""
    found, begin = [], 0
    while begin < len(flats):
        ends = itertools.accumulate(flat.numel() for flat in flats[begin : begin + _TOGETHER])
        count = max(1, sum(end <= _WORDS_TOGETHER for end in ends))
        found.append(_weighted_sums(flats[begin : begin + count]))
        begin += count
    return found[0] if len(found) == 1 else torch.cat(found)


def _weighted_sums(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes, device = tuple(flat.numel() for flat in flats), flats[0].device
    if len(flats) == 1:
        return (words(flats[0]) * _weights(sizes[0], device)[: sizes[0]]).sum().view(1)
    known = _segments.get((device, sizes))
    if known is None:
        if len(_segments) >= _MOST_SEGMENTS:
            _segments.clear()
        weights = _weights(max(sizes), device)
        ends = torch.tensor([0, *itertools.accumulate(sizes)], device="cpu").to(device, non_blocking=True)
        known = _segments[device, sizes] = torch.cat([weights[:size] for size in sizes]), ends
    weights, ends = known
    weighted = words(torch.cat(list(flats))) * weights
    sums = torch.cat([weighted.new_zeros(1), weighted.cumsum(0)]).index_select(0, ends)  # wraps around, as all here
    return sums[1:] - sums[:-1]


def _of_large(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64[N], of words on one device: the sums of columns and of rows, with what fills no row, weighted as above."""
    across, down = [], []
    for flat in flats:
        rows, left = divmod(flat.numel(), _WIDTH)
        body = (flat[: rows * _WIDTH] if left else flat).view(rows, _WIDTH)
        across.append(body.sum(0, dtype=torch.int64))
        sums = body.sum(1, dtype=torch.int64)
        down.append(torch.cat([sums, flat[rows * _WIDTH :].to(torch.int64)]) if left else sums)
    columns = (torch.stack(across) * _weights(_WIDTH, flats[0].device)[:_WIDTH]).sum(1)
    return columns * _GOLDEN + _of_small(down)


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat tensor of integers as wide as its elements."""
    held = tensor.detach()
    if held.is_complex():
        held = torch.view_as_real(held)
    flat = held.contiguous().view(-1)
    return flat.view(_WORDS[flat.element_size()])


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """int64[`count` or more], odd and all different, kept for each device."""
    known = _known.get(device)
    if known is None or len(known) < count:
        place = torch.arange(1 << max(10, (count - 1).bit_length()), device=device, dtype=torch.int64)
        known = _known[device] = (place * _GOLDEN) | 1
    return known

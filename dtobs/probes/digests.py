"""Digests of tensors: equal where every bit is equal, different (for all practical purposes) where one is not.

On the CPU xxh3 over the tensor's own memory. On a device a two-fold sum of its words that stays on the device: row
sums and column sums, each weighted by odd numbers, so that swapped, negated and zeroed elements change it (a plain sum,
a norm or an exclusive-or misses those). The two are not comparable with each other; ranks compare like with like.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from dtobs.probes.host_memory import host_memory

_WIDTH = 1024
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_NUMPY = frozenset({torch.int64, torch.int32, torch.float32, torch.float64})
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
    flat = words(tensor)
    rows = flat.numel() // _WIDTH
    body, tail = flat[: rows * _WIDTH].view(rows, _WIDTH), flat[rows * _WIDTH :]
    total = _weighted(body.sum(0, dtype=torch.int64)) + _weighted(tail.to(torch.int64)) * 3
    return total * _GOLDEN + _weighted(body.sum(1, dtype=torch.int64))


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat tensor of integers as wide as its elements."""
    held = tensor.detach()
    if held.is_complex():
        held = torch.view_as_real(held)
    flat = held.contiguous().view(-1)
    return flat.view(_WORDS[flat.element_size()])


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    """Sum of int64[n] with a different odd weight for each place."""
    place = torch.arange(sums.numel(), device=sums.device, dtype=torch.int64)
    return (sums * ((place * _GOLDEN) | 1)).sum()

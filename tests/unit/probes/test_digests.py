"""Digests see every corruption that sums, norms and exclusive-ors miss, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dtobs.probes.digests import device_digest, host_digest

CORRUPTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one bit": lambda t: _changed(t, lambda f: f.view(torch.int32)[5:6].bitwise_xor_(1)),
    "one element": lambda t: _changed(t, lambda f: f[7:8].add_(1e-3)),
    "sign of one": lambda t: _changed(t, lambda f: f[7:8].neg_()),
    "sign of all": lambda t: -t,
    "two swapped": lambda t: _changed(t, lambda f: f[:2].copy_(f[:2].flip(0).clone())),
    "two far apart swapped": lambda t: _changed(t, lambda f: _swap(f, 3, 4000)),
    "rows reversed": lambda t: t.flip(0),
    "columns reversed": lambda t: t.flip(1),
    "rolled": lambda t: t.roll(1, 0),
    "zeroed": lambda t: torch.zeros_like(t),
    "ones": lambda t: torch.ones_like(t),
    "one zeroed": lambda t: _changed(t, lambda f: f[9:10].zero_()),
    "a block zeroed": lambda t: _changed(t, lambda f: f[512:1024].zero_()),
    "moved between two": lambda t: _changed(t, lambda f: (f[0:1].add_(0.5), f[1:2].sub_(0.5))),
    "last element": lambda t: _changed(t, lambda f: f[-1:].mul_(2)),
    "nan": lambda t: _changed(t, lambda f: f[100:101].fill_(float("nan"))),
}


def _changed(tensor: torch.Tensor, change: Callable[[torch.Tensor], object]) -> torch.Tensor:
    copy = tensor.clone()
    change(copy.view(-1))
    return copy


def _swap(flat: torch.Tensor, one: int, other: int) -> None:
    flat[[one, other]] = flat[[other, one]]


DIGESTS = [host_digest, lambda t: int(device_digest(t))]


@pytest.mark.parametrize("digest", DIGESTS, ids=["host", "device"])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruption_is_seen(digest, name: str):
    for shape in ((67, 101), (700, 101), (512, 256)):  # small, of rows that are not full, of full rows
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        assert digest(CORRUPTIONS[name](tensor)) != digest(tensor)


@pytest.mark.parametrize("digest", DIGESTS, ids=["host", "device"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 5), (2048, 2)])
def test_equal_values_are_equal(digest, dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = (torch.rand(shape, generator=torch.Generator().manual_seed(2)) * 100).to(dtype)
    assert digest(tensor) == digest(tensor.clone())
    if tensor.dim() == 2:
        assert digest(tensor.t().contiguous().t()) == digest(tensor)  # other strides, the same values


def test_parameters_and_complex_numbers_are_fine():
    assert host_digest(torch.nn.Parameter(torch.ones(3))) == host_digest(torch.ones(3))
    assert host_digest(torch.ones(2, dtype=torch.complex64)) == host_digest(torch.tensor([1.0, 0.0, 1.0, 0.0]))

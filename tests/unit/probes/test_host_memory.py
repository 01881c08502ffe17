"""Reading a tensor's memory: what it is, and that the tensor can be resized afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dtobs.probes.digests import host_digest
from dtobs.probes.host_memory import KINDS, host_memory
from dtobs.probes.norms import host_square
from dtobs.probes.samples import host_rows


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_it_is_the_tensors_own(kind: torch.dtype) -> None:
    whole = torch.arange(48).to(kind).reshape(6, 8)
    for tensor in (whole, whole[1:, ::2], whole.t(), whole[0, 0], whole[:0], whole.unsqueeze(1).expand(6, 3, 8)):
        assert np.array_equal(host_memory(tensor), tensor.clone().numpy())
    host_memory(whole)[2, 3] = 1
    assert whole[2, 3] == 1


@pytest.mark.parametrize("read", [host_memory, host_digest, host_square, lambda tensor: host_rows([tensor])])
def test_what_was_read_can_still_be_resized(read: object) -> None:
    """FSDP1 does so with its flat parameters; ``Tensor.numpy()`` would forbid it for good."""
    tensor = torch.randn(4, 4)
    read(tensor)  # type: ignore[operator]
    tensor.untyped_storage().resize_(0)
    assert host_memory(tensor).tolist() == [[0.0] * 4] * 4
    tensor.untyped_storage().resize_(64)

"""The memory of a CPU tensor as numpy sees it, without leaving a mark on the tensor.

``Tensor.numpy()`` declares the storage unresizable for good (torch/csrc/utils/tensor_numpy.cpp). FSDP1 frees and fills
its flat parameters by resizing, and a loop may give the batch it has read as the ``out=`` of the next one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

KINDS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.uint8: np.dtype(np.uint8),
}
_at: Any = (ctypes.c_char * (1 << 46)).from_address  # as long as an address space: a type for each length costs more


def host_memory(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The elements of a dense CPU tensor of one of KINDS, in its shape; valid while the tensor keeps its storage.

    Zeros where the storage was freed under the tensor.
    """
    kind, pointer = KINDS[tensor.dtype], tensor.data_ptr()
    if not pointer:
        return np.zeros(tensor.shape, kind)
    strides = None if tensor.is_contiguous() else [tensor.itemsize * step for step in tensor.stride()]
    return np.ndarray(tensor.shape, kind, _at(pointer), 0, strides)

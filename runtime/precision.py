"""Number formats. Master weights, optimizer state and loss stay FP32 in every mode.

fp32   everything FP32
bf16   matrix products in BF16: by autocast where parameters are whole (DDP, one rank), by FSDP2's policy where
       they are gathered, so that the gather moves half the bytes
fp16   the same in FP16, with a loss scale that follows the gradients
fp8    bf16, with the linear layers' products in FP8 (see `float8.py`)

Gradients are averaged over the ranks in FP32, or with `reduce` in BF16: half the bytes, and three digits.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from runtime.config import PrecisionConfig

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def compute_dtype(config: PrecisionConfig) -> torch.dtype:
    """The format of activations between layers."""
    return _COMPUTE[config.compute]


def reduce_dtype(config: PrecisionConfig) -> torch.dtype:
    """The format in which gradients travel between ranks."""
    return _COMPUTE[config.reduce]


def autocast(config: PrecisionConfig, device_type: str) -> contextlib.AbstractContextManager[object]:
    """The context of a forward pass on parameters that are stored whole in FP32."""
    if config.compute == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=compute_dtype(config))


def fsdp_policy(config: PrecisionConfig) -> MixedPrecisionPolicy:
    """FSDP2's policy: gather and compute in the mode's format, reduce in the asked one."""
    compute = None if config.compute == "fp32" else compute_dtype(config)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce_dtype(config))


@dataclass
class LossScale:
    """The factor on the loss that keeps small FP16 gradients from vanishing; 1 and constant in other modes.

    It halves when the global gradient norm is not finite and doubles after `window` good steps. The norm is the same
    number on every rank of every layout, so the ranks agree without talking.
    """

    value: float
    window: int
    good_steps: int = 0
    dynamic: bool = True

    @classmethod
    def of(cls, config: PrecisionConfig) -> LossScale:
        """The scale that `config` asks for."""
        if config.compute != "fp16":
            return cls(value=1.0, window=1, dynamic=False)
        return cls(value=config.loss_scale, window=config.scale_window)

    def update(self, *, finite: bool) -> None:
        """Adapt after one step."""
        if not self.dynamic:
            return
        if not finite:
            self.value, self.good_steps = max(1.0, self.value / 2), 0
            return
        self.good_steps += 1
        if self.good_steps >= self.window:
            self.value, self.good_steps = self.value * 2, 0

"""FP8: the linear layers' products in 8 bits, through torchao's float8 with dynamic scaling.

Inputs and weights go to E4M3 and gradients to E5M2, each scaled so that its largest value just fits: by tensor, or by
row. Parameters stay FP32 and are converted anew each time. Embedding, head, norms, router and experts stay as they
are, and so do layers whose sides are not multiples of 16, which the hardware's products ask for. Where the device has
no FP8 products (a CPU, a GPU before compute capability 8.9) they are emulated: the same numbers, slower.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from runtime.errors import UsageError

_MULTIPLE = 16


def available() -> bool:
    """True where torchao can be imported."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        return False
    return True


def emulated(device: torch.device) -> bool:
    """True where the device has no FP8 matrix products."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)


def converts(module: nn.Module, name: str) -> bool:
    """Whether the linear layer called `name` in its block is converted."""
    if not isinstance(module, nn.Linear) or name.endswith("router"):
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def apply(block: nn.Module, recipe: str, device: torch.device) -> None:
    """Convert the linear layers of one block in place; parameter names do not change.

    `recipe` is "tensorwise" or "rowwise". Raises UsageError where torchao is missing.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError(f"--precision fp8 needs torchao: pip install torchao ({error})") from error
    settings = Float8LinearConfig.from_recipe_name(recipe)
    if emulated(device):
        settings = dataclasses.replace(settings, emulate=True)
    convert_to_float8_training(block, config=settings, module_filter_fn=converts)

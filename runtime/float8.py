"""FP8: the linear layers' products in 8 bits, through torchao's float8 with dynamic scaling.

Inputs and weights go to E4M3 and gradients to E5M2, each scaled so that its largest value just fits: by tensor, or by
row (then gradients go to E4M3 too, and scales are powers of two). Parameters stay FP32 and are converted anew each
time. Embedding, head, norms, router and experts stay as they are, and so do layers whose sides on a rank are not
multiples of 16, which the hardware's products ask for. Where the device has no FP8 products (a CPU, a GPU before
compute capability 8.9) they are emulated: the same numbers, slower.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from runtime.config import PrecisionConfig
from runtime.errors import UsageError

_MULTIPLE = 16
_CUT_BY_ROWS = ("output", "down")  # by tensor parallelism; the others by columns


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


def why_not_converted(name: str, layer: nn.Linear, smallest: int, ranks: int = 1) -> str:
    """Why the linear layer called `name` in its block stays as it is; "" where it is converted.

    `ranks` is how many tensor-parallel ranks cut one of its sides. The hardware's products take multiples of 16.
    """
    if name.endswith("router"):
        return "its numbers decide where tokens go"
    into, out = layer.in_features, layer.out_features
    if name.endswith(_CUT_BY_ROWS):
        into //= ranks
    else:
        out //= ranks
    if into % _MULTIPLE or out % _MULTIPLE:
        return f"{into} x {out} on a rank, not multiples of {_MULTIPLE}"
    return f"{into} x {out} on a rank, a side below {smallest}" if min(into, out) < smallest else ""


def apply(block: nn.Module, config: PrecisionConfig, device: torch.device, *, ranks: int = 1) -> dict[str, str]:
    """Convert the linear layers of one block in place; parameter names do not change.

    Returns the names of its linear layers, each with `why_not_converted`. Raises UsageError where torchao is missing.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UsageError(f"--precision fp8 needs torchao: pip install torchao ({error})") from error
    settings = Float8LinearConfig.from_recipe_name(config.fp8_recipe)
    if emulated(device):
        settings = dataclasses.replace(settings, emulate=True)
    layers = {
        name: why_not_converted(name, layer, config.fp8_smallest, ranks)
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
    }
    convert_to_float8_training(block, config=settings, module_filter_fn=lambda _, name: layers.get(name) == "")
    return layers


def summary(layers: Mapping[str, str]) -> str:
    """One line for the start of a run: which linear layers are FP8, and why the others are not.

    `layers` are names in the model (`layers.3.attention.key`) with why they were not converted.
    """
    left: dict[tuple[str, str], int] = Counter((name.split(".", 2)[2], why) for name, why in layers.items() if why)
    converted = sum(not why for why in layers.values())
    parts = [f"fp8: {converted} of {len(layers)} linear layers in rank 0's blocks; the rest of the model in bf16"]
    parts += [f"{count} x {name} stays in bf16: {why}" for (name, why), count in left.items()]
    return "; ".join(parts)

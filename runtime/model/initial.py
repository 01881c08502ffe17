"""Initial parameters as a pure function of the seed and the parameter's name.

Every layout starts from the same model: each parameter has its own generator, so it does not matter which rank
makes it, in which order, or how it is cut afterwards.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from runtime.config import ModelConfig
from runtime.seeds import derive


def materialize(module: nn.Module, prefix: str, config: ModelConfig, seed: int, device: torch.device) -> None:
    """Give `module` (on the meta device, named `prefix` in the model) memory on `device` and initial values.

    Matrices are normal with a standard deviation of 0.02, those that write to the residual stream smaller by
    √(2·layers) so that its variance does not grow with depth; norm weights are one.
    """
    module.to_empty(device=device)
    for name, parameter in module.named_parameters():
        full_name = f"{prefix}.{name}" if prefix else name
        initialize(parameter, full_name, config, seed)


@torch.no_grad()
def initialize(parameter: nn.Parameter, name: str, config: ModelConfig, seed: int) -> None:
    """Fill one whole parameter."""
    if parameter.ndim < 2:
        parameter.fill_(1.0)
        return
    deviation = 0.02
    if name.endswith(("attention.output.weight", "down.weight", ".down")):
        deviation /= math.sqrt(2 * config.layers)
    generator = torch.Generator(device="cpu").manual_seed(derive(seed, "parameter", name))
    values = torch.empty(parameter.shape, dtype=torch.float32)
    parameter.copy_(values.normal_(0.0, deviation, generator=generator))

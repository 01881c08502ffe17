"""How well the numbers fit a narrow format: measured on a few layers, in every tenth step, so that it costs little.

fp8    of each role (input, weight, gradient) of the sampled linear layers: the largest absolute value (amax), the share
       of elements that the format cannot reach (saturated) and of those it turns into zero (flushed)
fp16   the share of zeros in the gradients of the blocks' matrices: what was too small to survive the backward pass

Nothing here waits for a device: the numbers stay there until the loop fetches them with the loss and the norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime.config import Config
from runtime.optimizers import plain_name

EVERY = 10  # steps
LAYERS = 4
Item = TypeVar("Item")
_LEAST_AMAX = 1e-12  # as torchao: a tensor of zeros is scaled by a number, too


class FormatStatistics:
    """What `config.precision` asks for: nothing in fp32 and bf16."""

    def __init__(self, parts: Iterable[nn.Module], config: Config, converted: Iterable[str] = ()) -> None:
        """`converted` names the FP8 layers. Under torch.compile they are not looked at: hooks would be compiled in."""
        self._fp16 = config.precision.compute == "fp16"
        self._now = False
        self._found: dict[str, tuple[Tensor, Tensor]] = {}  # of a role: amax; elements, saturated, flushed
        names = set(converted) if not config.memory.compile else set()
        layers = [module for part in parts for name, module in part.named_modules() if plain_name(name) in names]
        for layer in _spread(layers, LAYERS):
            layer.register_forward_hook(self._look)

    def begin(self, step: int) -> None:
        """A step begins; the first one is looked at."""
        self._now = step % EVERY == 1
        self._found.clear()

    def collect(self, named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """What the step showed, as scalars on the device by the names they are reported under; often nothing.

        `named` are the parameters with their gradients, by their names in the plain model.
        """
        if not self._now:
            return {}
        if self._fp16:
            return _zeros_of_gradients(named)
        found = {}
        for role, (amax, counts) in self._found.items():
            found[f"fp8_amax_{role}"] = amax
            found[f"fp8_saturated_{role}"] = counts[1] / counts[0]
            found[f"fp8_flushed_{role}"] = counts[2] / counts[0]
        return found

    def _look(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        # Activation checkpointing runs the layer again in the backward pass: the same numbers, and selective
        # checkpointing refuses operations that it has not seen in the forward pass.
        in_backward = torch._C._current_graph_task_id() != -1
        if not self._now or not layer.training or in_backward:
            return
        config: Any = layer.config  # of torchao's Float8Linear
        casts = (config.cast_config_input, config.cast_config_weight, config.cast_config_grad_output)
        weight = layer.weight
        assert isinstance(weight, Tensor)
        self._measure("input", inputs[0], casts[0], config)
        self._measure("weight", weight, casts[1], config)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._measure("gradient", gradient, casts[2], config))

    @torch.no_grad()
    def _measure(self, role: str, x: Tensor, cast: Any, config: Any) -> None:
        by_row = cast.scaling_granularity.value == "axiswise"
        amax, counts = fit(x, cast.target_dtype, by_row=by_row, power_of_2=bool(config.round_scales_to_power_of_2))
        if role in self._found:
            before, counted = self._found[role]
            amax, counts = torch.maximum(amax, before), counts + counted
        self._found[role] = (amax, counts)


def fit(x: Tensor, dtype: torch.dtype, *, by_row: bool, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """How `x` [..., D] fits `dtype` scaled by its largest value, or by each row's: its amax, a scalar, and FP32 [3],
    the numbers of elements, of saturated ones and of those flushed to zero. A DTensor: of the part that is here."""
    values = (x.to_local() if isinstance(x, DTensor) else x).detach().float()
    size = values.abs()
    amax = size.amax(dim=-1, keepdim=True) if by_row else size.amax()
    limit = torch.finfo(dtype).max
    scale = limit / amax.clamp(min=_LEAST_AMAX)
    if power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    # Half a unit beyond the limit still rounds to it; what is not finite does not fit at all.
    unit = limit * torch.finfo(dtype).eps / 2
    saturated = ~(size * scale <= limit + unit / 2)
    flushed = ((values * scale).clamp(-limit, limit).to(dtype).float() == 0) & (values != 0)
    elements = torch.full((), values.numel(), dtype=torch.float32, device=values.device)
    return amax.max(), torch.stack((elements, saturated.sum().float(), flushed.sum().float()))


def _zeros_of_gradients(named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Of matrices that every token passes: an expert without tokens, or an embedding's row, has zeros in any format."""
    passed = [
        parameter.grad
        for name, parameter in named.items()
        if parameter.grad is not None and name.startswith("layers.") and ".experts." not in name
        if parameter.ndim == 2
    ]
    sample = [g.to_local() if isinstance(g, DTensor) else g for g in _spread(passed, LAYERS)]
    sample = [gradient for gradient in sample if gradient.numel()]  # a shard may be empty
    if not sample:
        return {}
    zeros = torch.stack([(gradient == 0).sum() for gradient in sample]).sum().float()
    return {"gradient_zeros": zeros / sum(gradient.numel() for gradient in sample)}


def _spread(items: list[Item], count: int) -> list[Item]:
    """At most `count` of them, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]

"""Proves a layout before step 1: its gradients of one batch are those of one rank on the same weights and samples.

Every parameter is initialised from the seed alone, whatever the layout, and the job reads one sequence of samples, so
rank 0 can do the whole step by itself, without any parallelism, and compare. How far two gradients may be apart is
measured, not guessed: the one rank computes twice, once with weights moved by a rounding error (or, below FP32, in the
format of the layout), and what that does to a parameter's gradient, several times over, is allowed for it. Where a
gradient is a plain multiple of the right one, the factor names the mesh dimension that was summed over or was not.

It costs the memory of the whole model, its gradients and activations on rank 0, and the time of three steps there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from runtime import gradients, loop, plan, seeds
from runtime.config import Config, ParallelConfig
from runtime.data.loader import ShardedLoader
from runtime.data.tokens import TokenFiles
from runtime.errors import ProofError
from runtime.mesh import DIMENSIONS, Layout
from runtime.optimizers import named_parameters
from runtime.parallel import build
from runtime.trainer import make_trainer

MARGIN, LOW_MARGIN = 16.0, 3.0
"""A layout may be off by this many times what a rounding error in the weights does; what a format below FP32 does."""
LEAST_TOLERANCE = 1e-4
_ROUNDING = 2.0**-22
_SHOWN = 4

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """What became of one parameter's gradient. `error` and `tolerance` are relative to the norm of the right one."""

    name: str
    error: float
    tolerance: float
    factor: float | None  #: by which it is too large, where that is all that is wrong
    apart: tuple[int, ...] = ()  #: ranks that hold another gradient than the first rank that has the parameter

    @property
    def right(self) -> bool:
        """Whether it is the gradient that one rank computes, on every rank that has it."""
        return self.error <= self.tolerance and not self.apart


def prove(config: Config, layout: Layout, mesh: DeviceMesh, device: torch.device, tokens: TokenFiles) -> str:
    """Compare; one line that says it is right. Every rank must call it.

    Raises ProofError, on every rank the same, where the layout computes something else.
    """
    config = _without_chance(config)
    found = layout_gradients(config, layout, mesh, device, tokens)
    norms = _norms(found)
    gathered = _on_first_rank(found)
    problem = [""]
    if dist.get_rank() == 0:
        right, moved = reference_gradients(config, layout, mesh, device, tokens)
        margin = MARGIN if config.precision.compute == "fp32" else LOW_MARGIN
        verdicts = judge(gathered, right, moved, norms, margin)
        problem = ["" if all(v.right for v in verdicts) else complaint(verdicts, layout), praise(verdicts, layout)]
    told: list[list[str]] = [problem]
    dist.broadcast_object_list(told, src=0, device=device)
    if told[0][0]:
        raise ProofError(told[0][0])
    return told[0][1]


def layout_gradients(
    config: Config, layout: Layout, mesh: DeviceMesh, device: torch.device, tokens: TokenFiles
) -> Gradients:
    """The whole gradients, on CPU, of the parameters that this rank has a part of, after one step's backward passes."""
    trainer = make_trainer(config, layout, mesh, device, tokens, tokens.folder)
    loop.forward_and_backward(trainer)
    gradients.global_norm(trainer.model.parameters, trainer.model.pipeline_group)  # finishes partial sums
    scale = trainer.loss_scale.value
    named = trainer.model.named_parameters
    return {name: _whole(named[name]) / scale for name in sorted(named)}


def reference_gradients(
    config: Config, layout: Layout, mesh: DeviceMesh, device: torch.device, tokens: TokenFiles
) -> tuple[Gradients, Gradients]:
    """The gradients of one rank in FP32, and the same with the rounding errors that are to be expected."""
    exact = replace(config, precision=replace(config.precision, compute="fp32"))
    right = _alone(exact, config, layout, mesh, device, tokens, moved=0.0)
    rounded = _alone(config, config, layout, mesh, device, tokens, moved=_ROUNDING)
    return right, rounded


def _alone(
    config: Config,
    asked: Config,
    layout: Layout,
    mesh: DeviceMesh,
    device: torch.device,
    tokens: TokenFiles,
    *,
    moved: float,
) -> Gradients:
    """One rank's gradients of the samples that all data ranks of `layout` read in a step."""
    config = replace(config, parallel=ParallelConfig(), memory=replace(config.memory, compile=False))
    seeds.seed_process(config.run.seed)
    count = plan.micro_batches(asked, layout) * layout.data
    model = build.build(config, Layout(), mesh, device, count)
    named = named_parameters(model.parts)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in named.values():
            noise = torch.randn(parameter.shape, generator=generator).to(device)
            parameter.mul_(1 + moved * noise)
    loader = ShardedLoader(
        tokens.training, sequence=config.data.sequence, batch=config.data.batch, seed=config.run.seed, device=device
    )
    model.set_loss_factor(1 / count)
    for _ in range(count):
        loss = model.loss(loader.next()) / count
        torch.autograd.backward(loss)
    return {name: _whole(parameter) for name, parameter in named.items()}


def judge(
    found: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
    rounded: Mapping[str, Tensor],
    norms: Mapping[str, Mapping[int, float]],
    margin: float,
) -> list[Verdict]:
    """A verdict a parameter, in the model's order. `norms` are by parameter and rank.

    Raises ProofError where the layout has other parameters than one rank has.
    """
    if found.keys() != right.keys():
        odd = sorted(found.keys() ^ right.keys())
        raise ProofError(f"the layout and one rank do not train the same parameters: {', '.join(odd[:_SHOWN])}")
    verdicts = []
    for name, wanted in right.items():
        size = float(wanted.double().norm())
        sensitivity = float((rounded[name].double() - wanted.double()).norm())
        tolerance = max(LEAST_TOLERANCE, margin * sensitivity / size if size else 0.0)
        error = float((found[name].double() - wanted.double()).norm()) / size if size else float(found[name].norm() > 0)
        factor = _factor(found[name].double().flatten(), wanted.double().flatten(), tolerance)
        ranks = norms.get(name, {})
        first = next(iter(ranks.values()), 0.0)
        apart = tuple(r for r, norm in ranks.items() if not math.isclose(norm, first, rel_tol=max(tolerance, 1e-6)))
        verdicts.append(Verdict(name, error, tolerance, None if error <= tolerance else factor, apart))
    return verdicts


def complaint(verdicts: list[Verdict], layout: Layout) -> str:
    """What is wrong, one line: how many gradients, which first, by which factor and what the factor is the size of."""
    wrong = [v for v in verdicts if not v.right]
    first = wrong[0]
    if first.factor is not None:
        what = f"that of {first.name} is {first.factor:.4g} times the right one{meaning(first.factor, layout)}"
    elif first.error <= first.tolerance:
        what = f"rank {first.apart[0]} holds another one of {first.name} than the ranks it should equal"
    else:
        what = f"that of {first.name} is off by {first.error:.2g} of its norm (rounding explains {first.tolerance:.1g})"
    more = [v.name for v in wrong[1:_SHOWN]]
    others = f"; also {', '.join(more)}" + (f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
    return (
        f"{layout} does not compute what one rank does: {len(wrong)} of {len(verdicts)} gradients are others; {what}"
        + (others if more else "")
    )


def meaning(factor: float, layout: Layout) -> str:
    """Which mesh dimensions have a size that `factor` is, or one over it."""
    sizes = {name: getattr(layout, name) for name in DIMENSIONS} | {"all data ranks": layout.data}
    near = [name for name, size in sizes.items() if size > 1 and math.isclose(factor, size, rel_tol=0.01)]
    below = [name for name, size in sizes.items() if size > 1 and math.isclose(factor, 1 / size, rel_tol=0.01)]
    if near:
        return f": {factor:.0f} is the size of {' and of '.join(near)}, over which it is summed and not averaged"
    if below:
        return f": 1/{1 / factor:.0f} is one over the size of {' and of '.join(below)}, over which it is not summed"
    return ""


def praise(verdicts: list[Verdict], layout: Layout) -> str:
    """One line for a layout that is right."""
    worst = max(verdicts, key=lambda v: v.error / v.tolerance)
    return (
        f"proof: {layout} computes what one rank does; all {len(verdicts)} gradients agree"
        f" (largest difference {worst.error:.1e} of the norm in {worst.name}, rounding explains {worst.tolerance:.1e})"
    )


def _without_chance(config: Config) -> Config:
    return replace(
        config,
        model=replace(config.model, dropout=0.0),
        data=replace(config.data, validate_every=0, prefetch=0),
        checkpoint=replace(config.checkpoint, background=False),
    )


def _whole(parameter: nn.Parameter) -> Tensor:
    """The gradient of the whole parameter, zeros without one; a collective where it is sharded."""
    gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    return gradient.detach().float().cpu()


def _factor(found: Tensor, wanted: Tensor, tolerance: float) -> float | None:
    square = float(wanted @ wanted)
    times = float(found @ wanted) / square if square else 0.0
    rest = float((found - times * wanted).norm())
    return times if times and rest <= max(tolerance, 1e-3) * float(found.norm()) else None


def _norms(found: Gradients) -> dict[str, dict[int, float]]:
    """By parameter and rank."""
    mine = {name: float(gradient.double().norm()) for name, gradient in found.items()}
    all_ranks: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_ranks, mine)
    table: dict[str, dict[int, float]] = {}
    for rank, norms in enumerate(all_ranks):
        for name, norm in norms.items():
            table.setdefault(name, {})[rank] = norm
    return table


def _on_first_rank(found: Gradients) -> Gradients:
    """All gradients on rank 0, also those of other pipeline stages; elsewhere what the rank has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    names: list[list[str]] = [[] for _ in range(world)]
    dist.all_gather_object(names, list(found))
    known = set(names[0])
    gathered = dict(found)
    for owner in range(1, world):
        new = [name for name in names[owner] if name not in known]
        known.update(new)
        if not new:
            continue
        parcel: list[Gradients | None] = [{name: found[name] for name in new} if rank == owner else None]
        if rank == owner:
            dist.send_object_list(parcel, dst=0)
        elif rank == 0:
            dist.recv_object_list(parcel, src=owner)
            gathered.update(parcel[0] or {})
    return gathered

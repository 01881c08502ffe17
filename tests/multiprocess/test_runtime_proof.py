"""`--prove`: right layouts are proved, and what is planted in each kind of parallelism is found, with its factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from runtime import flags, mesh, plan, prove
from runtime.data.tokens import prepare
from runtime.errors import ProofError
from runtime.parallel import blockwise, expert, fsdp, tensor
from runtime.parallel.build import ParallelModel
from tests.harness import run_ranks
from tests.multiprocess.layouts_of_runtime import CONTEXT, EXPERT, MOE, PIPELINE, SHARD, TENSOR
from tests.multiprocess.runtime_curves import SMALL


def never_synchronised() -> Any:
    right = ParallelModel.gradient_synchronization
    return patch.object(ParallelModel, "gradient_synchronization", lambda self, enabled: right(self, False))


@contextmanager
def summed_over_shards() -> Iterator[None]:
    right = fsdp.shard_unit

    def shard(unit: Any, *args: Any, **kwargs: Any) -> None:
        right(unit, *args, **kwargs)
        unit.set_force_sum_reduction_for_comms(True)  # Gloo has no other
        unit.set_gradient_divide_factor(1.0)

    with patch.object(fsdp, "shard_unit", shard):
        yield


def norms_not_reduced() -> Any:
    """Under sequence parallelism each rank's norms see their own tokens only, and nobody adds their gradients up."""
    right = tensor._block_plan

    def plan_without_norms(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: style for name, style in right(*args, **kwargs).items() if not name.endswith("_norm")}

    return patch.object(tensor, "_block_plan", plan_without_norms)


def only_own_keys() -> Any:
    return patch.object(blockwise, "merge", lambda first, second: (second[0] * 0 + first[0], first[1]))


def experts_not_scaled() -> Any:
    return patch.object(expert, "_ScaleGradient", SimpleNamespace(apply=lambda weight, factor: weight))


def not_divided() -> Any:
    return patch.object(ParallelModel, "set_loss_factor", lambda self, factor: setattr(self, "loss_factor", 1.0))


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[], Any], str]] = {
    "ddp never synchronises": ((), never_synchronised, "replicate 2 does not compute"),
    "fsdp2 sums": (SHARD, summed_over_shards, "2 is the size of shard"),
    "context parallelism lacks the other keys": (CONTEXT, only_own_keys, "context 2 does not compute"),
    "pipeline does not divide": (PIPELINE, not_divided, "times the right one"),
    "experts are summed": ((*MOE, *EXPERT), experts_not_scaled, "2 is the size of expert"),
    "sequence parallel norms": (TENSOR, norms_not_reduced, "tensor 2 does not compute"),
}
RIGHT = {
    "ddp": (),
    "fsdp2": SHARD,
    "tensor": TENSOR,
    "context": CONTEXT,
    "pipeline": PIPELINE,
    "expert": (*MOE, *EXPERT),
    "bf16": (*SHARD, "--precision", "bf16"),
}


def proofs(rank: int, world: int, folder: str) -> dict[str, str]:
    """What the proof says of each case, right ones first."""
    said = {}
    for name, arguments, fault in [
        *((name, arguments, None) for name, arguments in RIGHT.items()),
        *((name, arguments, fault) for name, (arguments, fault, _) in FAULTS.items()),
    ]:
        config = flags.load((*SMALL, "--data.cache", folder, "--data.batch", "2", *arguments), {})
        layout = plan.resolve(config, world)
        tokens = prepare(config)
        made = mesh.build(layout, "cpu")
        try:
            with fault() if fault else patch.dict({}):
                said[name] = prove.prove(config, layout, made, torch.device("cpu"), tokens)
        except ProofError as error:
            said[name] = str(error)
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    first, second = (r.value for r in run_ranks(proofs, 2, str(tmp_path_factory.mktemp("proof")), timeout=240))
    assert first == second
    return first


@pytest.mark.parametrize("layout", RIGHT)
def test_a_right_layout_is_proved(layout: str, said: dict[str, str]):
    assert "computes what one rank does" in said[layout]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, said: dict[str, str]):
    assert FAULTS[fault][2] in said[fault]

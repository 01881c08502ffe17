"""recomputation-mismatch where a region is computed again otherwise; quiet wherever it comes out alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dtobs
from dtobs.detectors.silent.recomputation_mismatch import recomputation_mismatch
from dtobs.findings import Finding
from dtobs.probes import recomputation
from dtobs.probes.recomputation import TRIED
from dtobs.recording.view import RunView, load_run

Run = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = norm(32), nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.1)
        self.noise: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.down(self.noise(self.up(self.norm(x))).relu()))
        return out


class Model(nn.Module):
    def __init__(self, run: Run, **of_block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**of_block) for _ in range(3))
        self.run, self.head = run, nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, Block)
            x = self.run(block, x)
        out: Tensor = self.head(x)
        return out


def kept(block: Callable[[Tensor], Tensor], x: Tensor, **options: bool) -> Tensor:
    out: Tensor = checkpoint(block, x, **{"use_reentrant": False, **options})
    return out


def selective(block: Block, x: Tensor, **options: bool) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    out: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts, **options)
    return out


def nested(block: Block, x: Tensor) -> Tensor:
    return kept(partial(kept, block), x)


def not_at_all(block: Block, x: Tensor) -> Tensor:
    out: Tensor = block(x)
    return out


def train(model: Model, folder: Path, *, autocast: bool = False, micro_batches: int = 1) -> RunView:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(0)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        for _ in range(6):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                inputs = torch.randn(8, 32, requires_grad=True)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(inputs).float().square().mean()
                loss.backward()
            optimizer.step()
    view = load_run(folder)
    assert view.page(0)["probe_failures"] == 0
    return view


def found(view: RunView) -> list[Finding]:
    return recomputation_mismatch(view)


FORGETS = {"preserve_rng_state": False}


@pytest.mark.parametrize(
    "run", [partial(kept, **FORGETS), partial(kept, use_reentrant=True, **FORGETS), partial(selective, **FORGETS)]
)
def test_dropout_that_is_drawn_anew(run: Run, tmp_path: Path):
    (finding,) = found(train(Model(run), tmp_path))
    assert (finding.code, finding.ranks, finding.step) == ("recomputation-mismatch", (0,), 1)
    assert "rank 0 computes blocks." in finding.summary
    assert finding.summary.endswith(
        " again in the backward with other values than in the forward, seen since step 1: checkpoint() is told not to"
        " preserve the state of the random generators"
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_noise_of_a_generator_of_its_own(reentrant: bool, tmp_path: Path):
    model, own = Model(partial(kept, use_reentrant=reentrant)), torch.Generator().manual_seed(1)
    for block in model.blocks:
        block.noise = lambda x: x + torch.randn(x.shape, generator=own)
    (finding,) = found(train(model, tmp_path, micro_batches=2))
    assert finding.summary.endswith("in the forward, seen since step 1")


NAMED: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "blocks.": lambda block, x: kept(partial(block.__call__), x, **FORGETS),
    "blocks. ": lambda block, x: kept(partial(Block.forward, block), x, **FORGETS),  # as transformers does
    f"<lambda> at {__file__}:": lambda block, x: kept(lambda given: block(given), x, **FORGETS),
}


@pytest.mark.parametrize("name", NAMED)
def test_how_a_region_is_named(name: str, tmp_path: Path):
    regions = {each.region for each in train(Model(NAMED[name]), tmp_path).meta(0).recomputed}
    assert regions
    assert all(region.startswith(name.strip()) for region in regions)


def test_something_that_changes_with_each_run(tmp_path: Path):
    model, runs = Model(kept), count(1)
    for block in model.blocks:
        block.noise = lambda x: x * (1 + 0.3 * (next(runs) % 2))
    assert len(found(train(model, tmp_path))) == 1


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize(
    "run", [kept, partial(kept, use_reentrant=True), partial(kept, early_stop=False), selective, nested, not_at_all]
)
def test_what_comes_out_alike(run: Run, norm: type[nn.Module], autocast: bool, tmp_path: Path):
    assert found(train(Model(run, norm=norm), tmp_path, autocast=autocast, micro_batches=2)) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_generators_that_nothing_draws_from(reentrant: bool, tmp_path: Path):
    model = Model(partial(kept, use_reentrant=reentrant, **FORGETS))
    for block in model.blocks:
        block.drop.p = 0.0
    assert found(train(model, tmp_path)) == []


def test_the_losses_are_those_of_a_run_by_itself(tmp_path: Path):
    def trained(folder: Path | None) -> Tensor:
        torch.manual_seed(3)
        model = Model(selective)
        if folder is not None:
            train(model, folder)
            return torch.cat([p.flatten() for p in model.parameters()])
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        torch.manual_seed(0)
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 32, requires_grad=True)).float().square().mean().backward()
            optimizer.step()
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(trained(tmp_path), trained(None))


@pytest.mark.parametrize("name", ["_FRAME", "_WITHOUT_MODES"])
def test_another_torch_has_its_reentrant_regions_compared(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recomputation, name, None)
    assert found(train(Model(partial(kept, **FORGETS)), tmp_path / "a")) == []
    assert len(found(train(Model(partial(kept, use_reentrant=True, **FORGETS)), tmp_path / "b"))) == 1


def test_the_version_tried():
    assert torch.__version__.startswith(TRIED)

"""The loops that are compared, each as its own documentation writes it."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtobs
from dtobs.integrations import runtime as integration
from runtime import loop, mesh, optimizers, phases, plan
from runtime.config import Config
from runtime.data.tokens import TokenFiles
from runtime.model.initial import materialize
from runtime.model.transformer import Transformer, next_token_loss
from runtime.train import watch
from runtime.trainer import make_trainer
from tests.benchmarks.peers.samples import loader


class Contender(ABC):
    """A training that goes on from turn to turn."""

    def __init__(self, config: Config, tokens: TokenFiles) -> None:
        self.config = config
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.make(tokens)

    @abstractmethod
    def make(self, tokens: TokenFiles) -> None:
        """Build model, optimizer and loader."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Whatever belongs to a turn but is not timed."""
        yield

    @abstractmethod
    def train(self, steps: int) -> None:
        """Train so many steps."""

    def weights(self) -> dict[str, Tensor]:
        """All parameters, whole, by their name in the plain model; every rank must call it."""
        named = optimizers.named_parameters([self.model])
        return {name: _whole(parameter) for name, parameter in named.items()}

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def _plain_model(self) -> Transformer:
        with torch.device("meta"):
            model = Transformer(self.config.model, self.config.data.sequence)
        materialize(model, "", self.config.model, self.config.run.seed, torch.device("cpu"))
        return model

    def _plain_optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        settings = self.config.optimizer
        return optimizers.build(optimizers.named_parameters([model]), settings, settings.learning_rate)


class Plain(Contender):
    """A hand-written loop; DDP when there are several ranks."""

    def make(self, tokens: TokenFiles) -> None:
        self.model = self._wrap(self._plain_model())
        self.optimizer = self._plain_optimizer(self.model)
        self.batches = iter(loader(tokens.training, self.config, self.rank, self.ranks))

    def _wrap(self, model: Transformer) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True) if self.ranks > 1 else model

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs_BT, targets_BT = next(self.batches)
            loss = next_token_loss(self.model(inputs_BT), targets_BT)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss.item()


class PlainFSDP2(Plain):
    """The same with `fully_shard` on each block and on the whole."""

    def _wrap(self, model: Transformer) -> nn.Module:
        for block in model.layers.values():
            fully_shard(block)
        return fully_shard(model)


class Accelerate(Contender):
    """Hugging Face Accelerate."""

    def make(self, tokens: TokenFiles) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        model = self._plain_model()
        self.model, self.optimizer, batches = self.accelerator.prepare(
            model, self._plain_optimizer(model), loader(tokens.training, self.config)
        )
        self.batches = iter(batches)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs_BT, targets_BT = next(self.batches)
            loss = next_token_loss(self.model(inputs_BT), targets_BT)
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss.item()


class Fabric(Contender):
    """Lightning Fabric."""

    def make(self, tokens: TokenFiles) -> None:
        import lightning_fabric as lightning

        # As under torchrun, so that it joins these ranks instead of starting its own.
        os.environ.setdefault("TORCHELASTIC_RUN_ID", "benchmark")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
        strategy = "ddp" if self.ranks > 1 else "auto"
        self.fabric = lightning.Fabric(accelerator="cpu", devices=self.ranks, strategy=strategy)
        self.fabric.launch()
        model = self._plain_model()
        self.model, self.optimizer = self.fabric.setup(model, self._plain_optimizer(model))
        own = loader(tokens.training, self.config, self.rank, self.ranks)
        self.batches = iter(self.fabric.setup_dataloaders(own, use_distributed_sampler=False))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs_BT, targets_BT = next(self.batches)
            loss = next_token_loss(self.model(inputs_BT), targets_BT)
            self.fabric.backward(loss)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=self.config.optimizer.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            loss.item()

    def weights(self) -> dict[str, Tensor]:
        return {name.removeprefix("_forward_module."): value for name, value in super().weights().items()}


class Runtime(Contender):
    """`runtime.loop.train`, as `runtime.train` calls it, without dtobs."""

    def make(self, tokens: TokenFiles) -> None:
        self.layout = plan.resolve(self.config, self.ranks)
        self.mesh = mesh.build(self.layout, "cpu")
        self.folder = Path(tempfile.mkdtemp())
        self.trainer = make_trainer(
            self.config, self.layout, self.mesh, torch.device("cpu"), tokens, self.folder / "checkpoints"
        )
        (self.model,) = self.trainer.model.parts

    def train(self, steps: int) -> None:
        last = dataclasses.replace(self.config.run, steps=self.trainer.step + steps)
        self.trainer.config = dataclasses.replace(self.config, run=last)
        loop.train(self.trainer)

    def weights(self) -> dict[str, Tensor]:
        return {name: _whole(value) for name, value in self.trainer.model.named_parameters.items()}


class ObservedRuntime(Runtime):
    """The same with dtobs attached as the command attaches it, all probes on; its monitor is another process."""

    def make(self, tokens: TokenFiles) -> None:
        super().make(tokens)
        self.turns = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.turns += 1
        shared = [str(self.folder / f"run-{self.turns}")]
        dist.broadcast_object_list(shared, src=0)
        with dtobs.attach(
            run_dir=Path(shared[0]), mesh=self.mesh, config=self.config.as_dict(), monitor=False
        ) as session:
            undo = integration.observe(session, phases)
            session.policy(equal={"seed": self.config.run.seed}, generators="differ")
            watch(session, self.trainer)
            yield
            undo()


def _whole(parameter: Tensor) -> Tensor:
    held = parameter.detach()
    return (held.full_tensor() if hasattr(held, "full_tensor") else held).clone()

"""The samples of the runtime's loader, for torch's own DataLoader."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from runtime.config import Config
from runtime.data.loader import epoch_order
from runtime.data.tokens import Tokens


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Sample i of the first epoch in the runtime's order: inputs and targets, each LongTensor [T]."""

    def __init__(self, tokens: Tokens, config: Config) -> None:
        self._tokens, self._sequence = tokens, config.data.sequence
        self._order = epoch_order((len(tokens) - 1) // self._sequence, config.run.seed, 0)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        first = int(self._order[number]) * self._sequence
        window = torch.from_numpy(self._tokens[first : first + self._sequence + 1].astype("int64"))
        return window[:-1], window[1:]


class Batches:
    """A batch sampler: consecutive samples, `batch` at a time; rank r of n takes every n-th batch from the r-th on."""

    def __init__(self, samples: int, batch: int, rank: int = 0, ranks: int = 1) -> None:
        self.batch_size, self.drop_last = batch, True  # Accelerate asks for them
        self._first = range(rank * batch, samples - batch * ranks + 1, batch * ranks)

    def __len__(self) -> int:
        return len(self._first)

    def __iter__(self) -> Iterator[list[int]]:
        for first in self._first:
            yield list(range(first, first + self.batch_size))


def loader(tokens: Tokens, config: Config, rank: int = 0, ranks: int = 1) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches of one rank: inputs and targets, each LongTensor [B, T]."""
    windows = Windows(tokens, config)
    return DataLoader(windows, batch_sampler=Batches(len(windows), config.data.batch, rank, ranks))

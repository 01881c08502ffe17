"""Deals samples out to ranks: disjoint, in an order that is a pure function of (seed, epoch), resumable anywhere.

Sample i is the window tokens[i·T : i·T + T + 1]. The whole job reads one global sequence of samples; micro-batch by
micro-batch, each data rank takes the next B of it. The position is the number of samples the whole job has consumed, so
it means the same at any world size: a resume at another one neither repeats nor skips a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.data.ahead import ReadAhead
from runtime.data.tokens import Tokens
from runtime.errors import DataError

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank. `targets` are the inputs shifted by one token."""

    inputs_BT: Tensor
    targets_BT: Tensor
    sample_ids_B: Tensor  # unique in the run: epoch · samples + sample


def epoch_order(samples: int, seed: int, epoch: int) -> Indices:
    """The order in which epoch `epoch` visits samples 0 … samples − 1; equal on every machine and layout."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(samples)


class ShardedLoader:
    """Micro-batches for one of `data_ranks` ranks.

    `position` (samples consumed by all ranks together) is the whole state; set it to resume or to rewind. With
    `positions_T` a rank gets these positions of each sample only (context parallelism). A thread reads up to `ahead`
    micro-batches before they are asked for; they count as consumed when they are.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence: int,
        batch: int,
        seed: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        device: torch.device | None = None,
        positions_T: Tensor | None = None,
        ahead: int = 0,
    ) -> None:
        if not 0 <= data_rank < data_ranks:
            raise ValueError(f"data rank {data_rank} is not one of {data_ranks}")
        self.samples = (len(tokens) - 1) // sequence
        if self.samples < 1:
            raise DataError(f"{len(tokens)} tokens are too few for one sample of {sequence}")
        self.position = 0
        self._tokens = tokens
        self._sequence = sequence
        self._batch = batch
        self._seed = seed
        self._data_rank = data_rank
        self.device = device or torch.device("cpu")
        self._positions_T = positions_T
        self._orders: dict[int, Indices] = {}
        self._stride = batch * data_ranks
        self._prepared = ReadAhead(self._prepare, self._stride, ahead).take if ahead else self._prepare

    def next(self) -> Batch:
        """This rank's next micro-batch; every data rank must call it equally often."""
        batch = self._prepared(self.position)
        self.position += self._stride
        if self.device.type != "cuda":
            return batch
        # From pinned memory, so that the copy overlaps with what the device computes.
        inputs_BT = batch.inputs_BT.to(self.device, non_blocking=True)
        return Batch(inputs_BT, batch.targets_BT.to(self.device, non_blocking=True), batch.sample_ids_B)

    def _prepare(self, position: int) -> Batch:
        """This rank's micro-batch at `position`, in host memory."""
        first = position + self._data_rank * self._batch
        ids = np.arange(first, first + self._batch, dtype=np.int64)
        windows = np.empty((len(ids), self._sequence + 1), dtype=np.int64)
        for row, (epoch, place) in enumerate(zip(*np.divmod(ids, self.samples), strict=True)):
            sample = int(self._order(int(epoch))[place])
            windows[row] = self._tokens[sample * self._sequence :][: self._sequence + 1]
            ids[row] = epoch * self.samples + sample
        tokens, sample_ids = torch.from_numpy(windows), torch.from_numpy(ids)
        inputs_BT, targets_BT = tokens[:, :-1], tokens[:, 1:]
        if self._positions_T is not None:
            inputs_BT, targets_BT = inputs_BT[:, self._positions_T], targets_BT[:, self._positions_T]
        return Batch(self._pinned(inputs_BT), self._pinned(targets_BT), sample_ids)

    def _pinned(self, tokens_BT: Tensor) -> Tensor:
        tokens_BT = tokens_BT.contiguous()
        if self.device.type != "cuda":
            return tokens_BT
        with torch.cuda.device(self.device):  # a thread starts out on the first device
            return tokens_BT.pin_memory()

    def _order(self, epoch: int) -> Indices:
        if epoch not in self._orders:
            # A micro-batch touches two epochs at most; older orders are not asked for again.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = epoch_order(self.samples, self._seed, epoch)
        return self._orders[epoch]

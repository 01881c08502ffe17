"""The parameter table: names without wrappers, each tensor once, in model order."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dtobs.probes.layout import find_layout, model_tensors
from dtobs.probes.sampling import MAX_PERIOD, period


def names(model: nn.Module) -> list[str]:
    return [t.name for t in model_tensors(model)]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.module = nn.Linear(3, 3)  # a name that DDP uses as well
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_names_are_in_model_order_and_tied_weights_once():
    assert names(Tied()) == ["embed.weight", "module.weight", "module.bias"]


def test_wrappers_leave_no_trace():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    plain = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert names(model) == plain
    assert names(torch.compile(model, backend="eager")) == plain
    assert names(Fabrics(model)) == plain


class Fabrics(nn.Module):
    """As Lightning's Fabric wraps: the model is there twice, with what is around it and without."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = self._original_module = model


def test_counters_of_batch_norm_are_compared_and_running_statistics_are_not():
    assert names(nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))) == [
        "0.weight",
        "1.weight",
        "1.bias",
        "1.num_batches_tracked",
    ]


def test_one_process_holds_all_of_it():
    (weight, _) = model_tensors(nn.Linear(2, 2))
    assert (weight.share, weight.row.shape, weight.row.dtype) == (1.0, (2, 2), "float32")
    layout = find_layout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0)))
    assert (layout.kind, layout.data_ranks, layout.dropout) == ("plain", (), 1)


def test_the_period_grows_with_the_model():
    assert period([torch.zeros(1000)]) == 1
    assert period([torch.zeros(1000, 1000, device="meta")] * 10) == 10
    assert period([torch.zeros(10_000, 10_000, device="meta")] * 10) == MAX_PERIOD

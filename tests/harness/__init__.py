"""Real ranks for tests: started in a tenth of a second, bounded by a deadline, never left behind.

    from tests.harness import run_ranks

    def sum_of_ranks(rank, world_size):
        value = torch.tensor([float(rank)])
        dist.all_reduce(value)
        return value.item()

    def test_sum():
        assert [r.value for r in run_ranks(sum_of_ranks, 2)] == [1.0, 1.0]

`run_ranks` waits for every rank; `start_ranks` gives a handle for ranks that are to hang or die;
`torchrun` launches the real thing; `Gate` and `FileBarrier` synchronise through files.
"""

from __future__ import annotations

from tests.harness.gpu import share_the_gpu
from tests.harness.launch import Launched, launch, terminate, torchrun
from tests.harness.processes import is_alive, processes_with_token, wait_until_gone
from tests.harness.ranks import RankFailure, RankGroup, RankResult, RankTimeout, run_ranks, start_ranks
from tests.harness.sync import FileBarrier, Gate

__all__ = [
    "FileBarrier",
    "Gate",
    "Launched",
    "RankFailure",
    "RankGroup",
    "RankResult",
    "RankTimeout",
    "is_alive",
    "launch",
    "processes_with_token",
    "run_ranks",
    "share_the_gpu",
    "start_ranks",
    "terminate",
    "torchrun",
    "wait_until_gone",
]

"""Ranks that share one GPU: each says that it is a host of its own, so NCCL lets them, and sends over sockets."""

from __future__ import annotations

import os

_ALONE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "2",
}


def share_the_gpu(rank: int) -> None:
    """In each rank, before its first process group."""
    import torch  # what only launches programs needs none

    os.environ.update(_ALONE, NCCL_HOSTID=f"host{rank}")
    torch.cuda.set_device(0)

"""Stacks as they are shown: the user's own lines in full, the rest folded."""

from __future__ import annotations

from dtobs.host.stacks import folded

TRAIN = "/home/me/train.py:12 in step"
TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:4800 in barrier"
OURS = "/venv/lib/python3.11/site-packages/dtobs/probes/patches.py:58 in wrapper"


def test_runs_of_library_frames_are_one_line():
    assert folded([OURS, TORCH, OURS, TRAIN, TORCH]) == ["… 3 frames of dtobs, torch (in barrier)", TRAIN, TORCH]


def test_our_wrappers_alone_say_nothing():
    checkout = "/home/me/dtobs/probes/patches.py:58 in wrapper"
    assert folded([checkout, TRAIN, OURS, OURS, TRAIN]) == [TRAIN, TRAIN]
    assert folded([OURS]) == [OURS]

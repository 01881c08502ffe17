"""What the console says at the end of a run."""

from __future__ import annotations

from runtime.progress import Progress


def test_a_run_that_had_nothing_to_do_says_why() -> None:
    progress = Progress(print, steps=20, peak_flops=0.0)
    assert progress.summary(30) == (
        "0 steps, because the checkpoint is at step 30 already; --steps above 30 trains further"
    )


def test_a_resumed_run_says_what_it_did() -> None:
    progress = Progress(print, steps=5, peak_flops=0.0)
    for step in (4, 5):
        progress.step(step)
        progress.report(global_tokens=128.0)
    assert progress.summary(5).startswith("2 steps after step 3, 256 tokens in ")

"""A background save is written while training goes on; one at a time; neither the end nor a failure loses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime import loop, manifests, phases
from runtime.errors import NonFiniteError
from tests.harness import Gate, run_ranks
from tests.multiprocess import runtime_curves
from tests.multiprocess.runtime_curves import curves
from tests.multiprocess.test_runtime_checkpoints import tail

LAYOUTS = {
    "ddp": (),
    "fsdp2": ("--parallel.shard", "2"),
    "pipeline": ("--parallel.pipeline", "2", "--accumulate", "2"),
}
BACKGROUND = ("--checkpoint.every", "3", "--checkpoint.background")


class Doorkeeper:
    """Lets the writer of step 3 go on when the training reaches a step, or when it waits for the writer."""

    def __init__(self, folder: Path, opens: str) -> None:
        self._folder, self._opens = folder, opens
        self._step = 0
        self.seen: list[str] = []

    def begin(self, name: str) -> None:
        if name == "checkpoint" and self._step > 3:
            self._happens("wait")

    def end(self, name: str) -> None: ...

    def batch(self, **_: Any) -> None: ...

    def report(self, **_: float) -> None: ...

    def step(self, step: int) -> None:
        self._step = step
        self._happens(f"step {step}")

    def _happens(self, what: str) -> None:
        if what == self._opens and not Gate(self._folder / "go").is_open():
            Gate(self._folder / "writing").wait()
            self.seen = [
                f"step {self._step}",
                *sorted(p.name for p in (self._folder / "checkpoints").iterdir()),
            ]
            Gate(self._folder / "go").open()


def train_gated(
    rank: int, world: int, folder: str, arguments: tuple[str, ...], opens: str, breaks: bool
) -> dict[str, Any]:
    """As `runtime_curves.train`; rank 1 cannot seal its shard of step 3 before rank 0's doorkeeper says so.

    With `breaks` every rank finds step 5 not finite.
    """
    seal, update = manifests.seal, loop.update

    def gated(path: Path) -> manifests.FileSeal:
        if rank == 1 and "step-00000003" in str(path):
            Gate(Path(folder) / "writing").open()
            Gate(Path(folder) / "go").wait()
        return seal(path)

    def broken(trainer: Any, step: int, *loss: Any) -> Any:
        if step == 5:
            raise NonFiniteError("gradients were not finite in 8 steps in a row")
        return update(trainer, step, *loss)

    manifests.seal = gated
    doorkeeper = Doorkeeper(Path(folder), opens)
    if rank == 0:
        phases.listen(doorkeeper)
    error = ""
    result: dict[str, Any] = {}
    if breaks:
        loop.update = broken
    try:
        result = runtime_curves.train(rank, world, folder, arguments)
    except NonFiniteError as caught:
        error = str(caught)
    return {**result, "seen": doorkeeper.seen, "error": error}


def gated(folder: Path, *arguments: str, opens: str, breaks: bool = False) -> list[dict[str, Any]]:
    folder.mkdir()
    cache = ("--data.cache", str(folder.parent / "corpora"))
    results = run_ranks(train_gated, 2, str(folder), (*cache, *arguments), opens, breaks, timeout=120)
    return [result.value for result in results]


def complete(folder: Path) -> list[str]:
    root = folder / "checkpoints"
    assert not list(root.glob(".*"))
    return [manifests.verify(path).training["step"] for path in manifests.complete(root)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_steps_are_taken_while_it_is_written(layout: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    # The writer of step 3 goes on in step 6: three steps with their collectives have to happen before.
    unbroken = gated(run, *layout, *BACKGROUND, "--model.dropout", "0.1", opens="step 6")
    first = unbroken[0]
    assert first["seen"] == ["step 6", ".saving-step-00000003"]
    assert complete(run) == [6, 3]
    assert len(first["checkpoint_seconds"]) == len(first["checkpoint_bytes"]) == 2
    again = ("--model.dropout", "0.1", "--resume", str(run / "checkpoints/step-00000003"))
    for before, after in zip(unbroken, curves(2, run, *layout, *again), strict=True):
        assert after["step"] == [4, 5, 6, 7, 8]
        assert tail(after, 5) == tail(before, 5)


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    first, _ = gated(tmp_path / "run", *BACKGROUND, opens="wait")
    assert first["seen"] == ["step 6", ".saving-step-00000003"]
    assert complete(tmp_path / "run") == [6, 3]


def test_the_end_waits_for_it(tmp_path: Path) -> None:
    first, _ = gated(tmp_path / "run", *BACKGROUND, "--steps", "5", opens="wait")
    assert first["seen"] == ["step 5", ".saving-step-00000003"]
    assert complete(tmp_path / "run") == [3]
    assert len(first["checkpoint_seconds"]) == 1


def test_a_training_that_gives_up_still_ends_it(tmp_path: Path) -> None:
    results = gated(tmp_path / "run", *BACKGROUND, opens="wait", breaks=True)
    assert results[0]["seen"] == ["step 5", ".saving-step-00000003"]
    assert all("not finite" in result["error"] for result in results)
    assert complete(tmp_path / "run") == [3]

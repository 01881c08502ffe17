"""SIGKILL in the middle of a save, at every kind of place: no checkpoint that lies, and each next run goes on exactly.

`DTOBS_SAVE_KILLS=100` repeats it as often in one run directory, `DTOBS_SAVE_KILLS_SEED` chooses other places. A place
is one of the save's own operations (making the folder, opening a file, writing a tensor, fsync, rename, removal) on
either rank, or any moment on both at once.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import manifests, phases
from tests.harness import start_ranks, wait_until_gone
from tests.harness.processes import kill_all
from tests.multiprocess import runtime_curves
from tests.multiprocess.runtime_curves import curves

_DEADLINE = 600  # seconds that a busy machine may take until a rank has come to its place
ROUNDS = int(os.environ.get("DTOBS_SAVE_KILLS", "3"))
SEED = int(os.environ.get("DTOBS_SAVE_KILLS_SEED", "2026"))
FLAGS = (
    *("--model.dim", "64", "--model.ffn", "96", "--model.layers", "2", "--model.dropout", "0.1"),
    *("--schedule.kind", "constant", "--checkpoint.keep", "2"),
)
# Operation → the largest count to wait for: about what three saves of this model do of it on a rank.
RANK_0 = {"mkdir": 2, "open": 9, "write": 150, "fsync": 18, "rename": 9, "remove": 12, "rmdir": 2}
RANK_1 = {"open": 3, "write": 150, "fsync": 6}
AUDITED = {
    "open": "open",
    "os.mkdir": "mkdir",
    "os.rename": "rename",
    "os.remove": "remove",
    "os.rmdir": "rmdir",
}


@dataclass(frozen=True)
class Place:
    """Where a rank is to die: before the `count`-th `operation` of its saves. No operation: when the test says so."""

    rank: int
    operation: str | None
    count: int = 0

    @classmethod
    def random(cls, chance: random.Random) -> Place:
        rank = chance.choice([0, 0, 0, 1, 2])
        if rank == 2:
            return cls(0, None)
        operation, most = chance.choice(sorted((RANK_0, RANK_1)[rank].items()))
        return cls(rank, operation, chance.randint(1, most))


def die_at(place: Place, folder: str) -> None:
    """From now on count what the saves of this process do, and end it by SIGKILL at `place`."""
    seen: Counter[str] = Counter()

    def happens(operation: str) -> None:
        seen[operation] += 1
        if operation == place.operation and seen[operation] == place.count:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in AUDITED or (event == "open" and not set(arguments[1] or "") & set("wxa")):
            return
        # What rmtree removes goes by its bare name in an open folder.
        if folder in str(arguments[0]) or "/" not in str(arguments[0]):
            happens(AUDITED[event])

    def counted(function: Callable[..., Any], operation: str) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            happens(operation)
            return function(*arguments, **options)

        return wrapper

    sys.addaudithook(audit)
    os.fsync = counted(os.fsync, "fsync")
    torch.save = counted(torch.save, "write")


class Diary:
    """A listener that writes every step's loss down, where a SIGKILL cannot take it back."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._step = 0

    def begin(self, name: str) -> None: ...

    def end(self, name: str) -> None: ...

    def batch(self, **_: Any) -> None: ...

    def step(self, step: int) -> None:
        self._step = step

    def report(self, **values: float) -> None:
        if "global_loss" in values:
            self._file.write(f"{self._step} {values['global_loss'].hex()}\n")


def train_until_killed(rank: int, world: int, folder: str, arguments: tuple[str, ...], place: Place) -> None:
    """As `runtime_curves.train`, with a diary and an end."""
    if rank == 0:
        phases.listen(Diary(Path(folder) / "diary"))
    if rank == place.rank:
        die_at(place, f"{folder}/checkpoints/")
    runtime_curves.train(rank, world, folder, arguments)


def read_diary(path: Path) -> list[tuple[int, float]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(line.split()[0]), float.fromhex(line.split()[1])) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(2 * _DEADLINE * (ROUNDS + 1))
def test_killed_in_a_save_the_next_run_goes_on_exactly(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    run, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    run.mkdir()
    newest, unfinished, places = 0, 0, Counter[str]()
    arguments = (*FLAGS, "--data.cache", str(tmp_path / "corpora"), "--steps", "100000")
    for number in range(ROUNDS):
        place = Place.random(chance)
        places[f"rank {place.rank} {place.operation}" if place.operation else "any moment"] += 1
        told = len(read_diary(run / "diary"))
        background = ("--checkpoint.background",) if number % 2 else ()
        more = ("--checkpoint.every", "1", "--resume", "auto", *background)
        with start_ranks(train_until_killed, 2, str(run), (*arguments, *more), place, pg_timeout=_DEADLINE) as group:
            if place.operation is None:
                wait_for_steps(run / "diary", told + 2)
                time.sleep(chance.uniform(0, 0.5))
                group.kill(0)
            assert wait_until_gone([group.pids[place.rank]], _DEADLINE) == [], f"{place} never came\n{group.stacks()}"
            kill_all(group.pids)
            assert group.wait(60)
            victim = group.results()[place.rank]
            assert victim.signal == signal.SIGKILL, f"{place}: {victim.exception}"
        unfinished += any(path.name.startswith(".") for path in root.iterdir())
        taken = [step for step, _ in read_diary(run / "diary")[told:]]
        assert taken[:1] == [newest + 1], f"round {number}, {place}: took steps {taken} after a checkpoint of {newest}"
        for folder in manifests.complete(root):
            assert manifests.verify(folder).step <= taken[-1]
        newest = max((manifests.read(folder).step for folder in manifests.complete(root)), default=0)
        print(f"{number}: killed at {place} in step {taken[-1]} or its save; checkpoint of {newest} is whole")
    last = max(step for step, _ in read_diary(run / "diary"))
    (unbroken, _) = curves(2, tmp_path / "unbroken", *FLAGS, "--steps", str(last), timeout=_DEADLINE + last)
    assert all(loss == unbroken["global_loss"][step - 1] for step, loss in read_diary(run / "diary"))
    print(f"{ROUNDS} kills, {unfinished} left an unfinished folder, {last} steps; {dict(sorted(places.items()))}")


def wait_for_steps(diary: Path, count: int) -> None:
    deadline = time.monotonic() + _DEADLINE
    while len(read_diary(diary)) < count:
        assert time.monotonic() < deadline, "the ranks take no steps"
        time.sleep(0.02)

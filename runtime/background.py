"""A save that goes on beside the training: state is copied to host memory at once, written by a thread.

The thread talks over a process group of its own: on the default one its collectives would mix with the training's.
At most one save is under way; the next one waits for it. A thread that still writes does not keep the process alive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from runtime.checkpoint import Saved
from runtime.errors import CheckpointError


class BackgroundSaver:
    """Runs one save at a time on a thread. Every rank makes one, at the same point of the program."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, in host memory; DTensors stay DTensors."""
        return dict(BlockingAsyncStager().stage(tensors))

    def start(self, save: Callable[[], Saved]) -> None:
        """Run `save` on the thread. The one before must be finished."""
        assert self._thread is None

        def run() -> None:
            try:
                self._outcome = save()
            except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
                self._outcome = error

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def under_way(self) -> bool:
        """True where a save was started and its outcome was not taken yet."""
        return self._thread is not None

    @property
    def written(self) -> bool:
        """True where the save under way has ended: `finish` will not wait."""
        return self._thread is not None and not self._thread.is_alive()

    def finish(self) -> Saved | None:
        """Wait for the save under way; what it saved, None where there was none. Raises what it raised."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, outcome, self._outcome = None, self._outcome, None
        if isinstance(outcome, Saved):
            return outcome
        if isinstance(outcome, CheckpointError):
            raise outcome
        raise CheckpointError(f"a background save failed: {outcome!r}") from outcome

"""One program by itself: ``torchrun … -m tests.plain NAME FOLDER`` writes each rank's losses to a file in FOLDER."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.plain.subjects import PROGRAMS


def main() -> None:
    """Run it, as a user's script would."""
    name, folder = sys.argv[1:]
    torch.set_num_threads(1)
    program = PROGRAMS[name]
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if program.group:
        dist.init_process_group("gloo")
    losses = program.function(rank, world, lambda *_, **__: None)
    Path(folder, str(rank)).write_text(json.dumps(losses))
    if program.group:
        dist.barrier()
        time.sleep(0.5)  # Gloo's threads still drop their work, see CONTRIBUTING


if __name__ == "__main__":
    main()

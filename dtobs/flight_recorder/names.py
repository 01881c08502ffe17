"""Which files of a folder are dumps, and of which rank: any names that end in the rank.

``nccl_trace_rank_3``, ``dump_12.pickle``, ``rank3.json``, ``fr-00003.json.gz`` … The rank is the last number before
the extensions.
"""

from __future__ import annotations

import re
from pathlib import Path

from dtobs.errors import TargetError
from dtobs.flight_recorder.model import SourceFile
from dtobs.flight_recorder.operations import MAX_WORLD

_NAME = re.compile(r"(?P<prefix>.*?)(?P<rank>\d{1,8})(?P<suffix>(?:\.[A-Za-z][\w-]*)*)$")
_SUFFIXES = {"", "bin", "dat", "dump", "fr", "gz", "json", "p", "pickle", "pkl", "trace"}


def rank_of(name: str) -> int | None:
    """The rank that a file's name ends in, None when it does not look like a dump's name."""
    match = _NAME.match(name)
    if match is None or not set(match["suffix"].lstrip(".").split(".")) <= _SUFFIXES:
        return None
    rank = int(match["rank"])
    return rank if rank < MAX_WORLD else None


def find_dumps(folder: Path) -> tuple[list[SourceFile], list[str]]:
    """The files to load, one a rank, and what to say about those left out.

    Of several files of one rank a pickle is taken before JSON, which has no call sites, then the newest. Raises
    TargetError when `folder` cannot be listed.
    """
    try:
        paths = sorted(p for p in folder.iterdir() if p.is_file())
    except OSError as error:
        raise TargetError(f"{folder} cannot be listed ({error.strerror}). Give a folder of dumps") from error
    by_rank: dict[int, list[SourceFile]] = {}
    for path in paths:
        rank = rank_of(path.name)
        if rank is not None:
            by_rank.setdefault(rank, []).append(SourceFile(path, rank, path.stat().st_mtime_ns))
    chosen, notes = [], []
    for rank, files in sorted(by_rank.items()):
        files.sort(key=lambda f: (".json" not in f.path.name, f.taken_ns, f.path.name))
        chosen.append(files[-1])
        if len(files) > 1:
            others = ", ".join(f.path.name for f in files[:-1])
            notes.append(f"rank {rank} has several dumps: {files[-1].path.name} is used, not {others}")
    return chosen, notes

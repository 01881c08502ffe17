"""Which files of a folder are dumps, and of which rank: any names that end in the rank.

``nccl_trace_rank_3``, ``dump_12.pickle``, ``rank3.json``, ``fr-00003.json.gz`` … The rank is the last number before
the extensions. Other files end in a number too (``torchrun.log.2``), and dumps often lie among them in /tmp: a name
makes a file a candidate, and only its content makes it a dump.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dtobs.errors import TargetError
from dtobs.flight_recorder.model import SourceFile
from dtobs.flight_recorder.operations import MAX_WORLD

_SUFFIXES = {"", "bin", "dat", "dump", "fr", "gz", "json", "p", "pickle", "pkl", "trace"}
_NAME = re.compile(
    rf"(?P<before>(?:.*?\D)?)(?<!of[_-])(?P<rank>\d{{1,8}})(?:\.(?:{'|'.join(sorted(_SUFFIXES - {''}))}))*"
)
_RANKED = re.compile(r"rank[_-]?\d")
"""What says earlier in the name which rank it is: ``rank_0.host1`` is not rank 1."""
_SERIES = re.compile(r"[^\W\d_]*[\W_]*\Z")
NAMES = (
    "dumps lie in one folder, and the name of each ends in its rank, as nccl_trace_rank_3 and rank3.json do; after it"
    " may come " + ", ".join(f".{suffix}" for suffix in sorted(_SUFFIXES - {""}))
)
"""What is accepted, for people."""


def rank_of(name: str) -> int | None:
    """The rank that a file's name ends in, None when it does not look like a dump's name."""
    found = _parse(name)
    return None if found is None else found[0]


def find_dumps(folder: Path) -> dict[int, list[SourceFile]]:
    """The files named like a dump by the rank they name, ascending; of several of one rank the likeliest first.

    That is one named like the dumps of most ranks; then a pickle before JSON, which has no call sites; then the
    newest. Raises TargetError when `folder` cannot be listed.
    """
    try:
        files = list(_candidates(folder))
    except OSError as error:
        raise TargetError(f"{folder} cannot be listed ({error.strerror}). Give a folder of dumps") from error
    ranks_named = Counter(series for series, _ in {(f.series, f.rank) for f in files})
    files.sort(
        key=lambda f: (ranks_named[f.series], ".json" not in f.path.name, f.taken_ns, f.path.name),
        reverse=True,
    )
    by_rank: dict[int, list[SourceFile]] = {}
    for file in files:
        by_rank.setdefault(file.rank, []).append(file)
    return dict(sorted(by_rank.items()))


def _candidates(folder: Path) -> Iterator[SourceFile]:
    for path in sorted(folder.iterdir()):
        found = _parse(path.name)
        try:
            if found is not None and path.is_file():
                yield SourceFile(path, found[0], path.stat().st_mtime_ns, found[1])
        except FileNotFoundError:  # gone since it was listed, as files in /tmp go
            continue


def _parse(name: str) -> tuple[int, str] | None:
    """The rank in a name and the word before it, which dumps of one job share whatever their hosts are called."""
    match = _NAME.fullmatch(name)
    if match is None or _RANKED.search(match["before"]):
        return None
    rank = int(match["rank"])
    series = _SERIES.search(match["before"])
    assert series is not None
    return (rank, series[0]) if rank < MAX_WORLD else None

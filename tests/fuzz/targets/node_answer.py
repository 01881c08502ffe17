"""What a monitor, or somebody in its place, answers to ``/api/node``: mirrored, judged with our ranks, written down.

Parts get the checksums that belong to them: what they hold is to be tried, not only whether they are torn.
"""

from __future__ import annotations

import json as stdlib_json
import zlib
from random import Random

from dtobs.diagnose import diagnose, gather
from dtobs.errors import DtobsError, ServiceError
from dtobs.host.process import ProcessState
from dtobs.nodes.bundle import MAGIC, encode_bundle
from dtobs.nodes.peer import Peer
from dtobs.nodes.sharing import collect
from dtobs.reports import json, text
from dtobs.testing.fake_run import FakeRun
from tests.fuzz.expect import one_line
from tests.fuzz.mutate import json_mutator, mutate_bytes
from tests.fuzz.scratch import scratch

_FOLDER = scratch("node")
START_NS = 10**15
_PREFIX = len(MAGIC) + 4
_MOST_BYTES = 8 << 20
_OURS = frozenset({0})


def _seed(*, detail: bool) -> bytes:
    """Node 1 with one rank, as it answers the first question."""
    run = FakeRun(_FOLDER / f"there-{detail}" / "run", 2, live=False, ranks_per_node=1, start_ns=START_NS)
    run.rank(1).step().step().collective("all_reduce", wait=True)
    gone = ProcessState(5_000_001, alive=False, exit_code=-9)
    run.directory.exits(1).write_text(stdlib_json.dumps(vars(gone)) + "\n")
    head = {
        "node": 1,
        "run": "run",
        "attempt": 0,
        "host": "there",
        "monotonic_ns": START_NS,
        "clock_offset_ns": 0,
        "processes": {"1": vars(gone)},
        "ending": False,
        "nodes": {"0": "http://127.0.0.1:1"},
        "findings": [],
    }
    return encode_bundle(head, collect(run.directory, 1, {}, detail=detail))


def signed(body: bytes) -> bytes:
    """`body` with the checksums that its parts have; as it is where it is no bundle."""
    length = int.from_bytes(body[len(MAGIC) : _PREFIX], "little")
    try:
        said = stdlib_json.loads(body[_PREFIX : _PREFIX + length])
        at = _PREFIX + length
        for part in said["parts"]:
            part["crc"] = zlib.crc32(body[at : at + part["bytes"]])
            at += part["bytes"]
        return _framed(stdlib_json.dumps(said).encode(), body[_PREFIX + length :])
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError):
        return body


def _framed(head: bytes, rest: bytes) -> bytes:
    return MAGIC + len(head).to_bytes(4, "little") + head + rest


SEEDS = [_seed(detail=True), _seed(detail=False)]
_HERE = FakeRun(_FOLDER / "here/run", 2, live=False, ranks_per_node=1, start_ns=START_NS)
_HERE.rank(0).step().step().collective("all_reduce", wait=True)
_KEPT = frozenset(_HERE.directory.root.rglob("*"))


def _tidy() -> None:
    """Only what was there before the answer stays."""
    for path in sorted(_HERE.directory.root.rglob("*"), reverse=True):
        if path not in _KEPT:
            path.rmdir() if path.is_dir() else path.unlink()


def check(data: bytes) -> bool:
    """The node's recording and a diagnosis of all, or one ServiceError; no file elsewhere, none that is huge."""
    peer = Peer(_HERE.directory, 1, "http://127.0.0.1:1", _HERE.directory.token)
    try:
        try:
            peer.hear(signed(data), _OURS, 1.0)
        except ServiceError as error:
            one_line(error)
            return False
        _check_files()
        try:
            diagnosis = diagnose(gather(_HERE.directory.root))
        except DtobsError as error:
            one_line(error)
            return False
        json.render(diagnosis)
        text.render(diagnosis, 80)
        return True
    finally:
        _tidy()


def _check_files() -> None:
    """What an answer of node 1 may change: its own folder and those of its ranks, within bounds."""
    root = _HERE.directory.root
    for path in set(root.rglob("*")) - _KEPT:
        parts = path.relative_to(root).parts
        assert parts[:2] == ("nodes", "00001") or (parts[0] == "ranks" and parts[1:2] != ("00000",)), path
        assert path.stat().st_blocks * 512 <= _MOST_BYTES, path
    assert {path.name for path in _FOLDER.iterdir()} == {"here", "there-True", "there-False"}


def mutate(data: bytes, random: Random) -> bytes:
    """Its head as JSON, or the bytes of its parts."""
    end = _PREFIX + int.from_bytes(data[len(MAGIC) : _PREFIX], "little")
    if not data.startswith(MAGIC) or end > len(data) or random.random() < 0.1:
        return mutate_bytes(data, random)
    head, rest = data[_PREFIX:end], data[end:]
    if random.random() < 0.5 or not rest:
        return _framed(json_mutator(head, random), rest)
    if random.random() < 0.7:
        at = 8 * random.randrange(len(rest) // 8 + 1)
        value = random.choice((0, 1, 2**31, 2**63 - 1, 2**64 - 1, random.getrandbits(64)))
        changed = rest[:at] + value.to_bytes(8, "little") + rest[at + 8 :]
    else:
        changed = mutate_bytes(rest, random)
    return _framed(head, changed[: len(rest)].ljust(len(rest), b"\0"))

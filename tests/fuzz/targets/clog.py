"""torchcomms' clog, read as a dump and compared with a good one of another rank."""

from __future__ import annotations

from random import Random

from dtobs.errors import DtobsError
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects
from dtobs.flight_recorder.clog import looks_like_clog, read_clog
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.scratch import scratch
from tests.unit.diagnose.test_clog import BROADCAST, HEAD, REDUCE, calls, opened

_HEAD = HEAD.format(rank=0, world=2) + REDUCE.format(count=1024) + BROADCAST
_SPLIT = "split|parent=world|child=a|ranks=0,1\nnew_comm|comm=a|rank=0|world_size=2\n"
_SEND = "C3|sig|send|in_count=8|out_count=0|dtype=bf16|peer=1|async_op=f|comm=a\n"
SEEDS = [
    (_HEAD + calls(4) + opened("C2", 4)).encode(),
    (_HEAD + _SPLIT + _SEND + calls(2) + calls(2, "C3", 2) + opened("C3", 4)).encode(),
]
_PATH, _OTHER = scratch("clog") / "clog_rank0.log", scratch("clog") / "clog_rank1.log"
_OTHER.write_text(HEAD.format(rank=1, world=2) + REDUCE.format(count=1024) + calls(4))


def mutate(data: bytes, random: Random) -> bytes:
    """Change bytes."""
    return mutate_bytes(data, random)


def check(data: bytes) -> bool:
    """Nothing raises but what says why; whether it is taken for a clog."""
    _PATH.write_bytes(data)
    try:
        found = dict([read_clog(_OTHER), read_clog(_PATH)])
        for finding in analyse_dumps(dumps_from_objects(found)).findings:
            finding.to_json()
    except DtobsError:
        pass
    return looks_like_clog(data)

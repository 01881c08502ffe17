"""NCCL Inspector's files, one JSON object a line."""

from __future__ import annotations

from random import Random

from dtobs.logs.inspector import looks_like_inspector, read_inspector
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.scratch import scratch

SEEDS = [
    b'{"header":{"id":"0x7f","rank":2,"n_ranks":4,"nnodes":1},"metadata":{"inspector_output_format_version":"v4.0",'
    b'"dump_timestamp_us":1748030377748202,"hostname":"gpu-1","pid":163},"coll_perf":{"coll":"AllReduce","coll_sn":1407,'
    b'"coll_msg_size_bytes":4096,"coll_exec_time_us":61974,"coll_busbw_gbs":485.1}}\n'
    b'{"coll_perf":{"coll":"AllGather","coll_sn":3,"coll_msg_size_bytes":8,"coll_exec_time_us":1.5}}\n',
]
_PATH = scratch("inspector") / "gpu-1-pid163.log"


def mutate(data: bytes, random: Random) -> bytes:
    """Change bytes."""
    return mutate_bytes(data, random)


def check(data: bytes) -> bool:
    """Nothing raises; whether it is taken for such a file."""
    _PATH.write_bytes(data)
    for finding in read_inspector([_PATH, _PATH])[0]:
        finding.to_json()
    return looks_like_inspector(data)

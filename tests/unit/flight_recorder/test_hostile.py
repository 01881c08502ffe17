"""Damaged and hostile dumps: a typed error that says what, never code that runs, never memory or time without bound."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtobs.cli import main
from dtobs.errors import DumpError, TargetError
from dtobs.flight_recorder import analyse_dumps, dumps_from_objects, load_dumps
from dtobs.flight_recorder.columns import RankColumns, columns_of
from dtobs.flight_recorder.decode import decode, read_dump
from dtobs.flight_recorder.reader import DumpReader
from dtobs.testing.layout import JobLayout
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of

GOOD = dict(dumps_of(SimulatedJob(JobLayout(dp=2, tp=1, pp=1), None, entries=12, steps=4)))
PICKLE = pickle.dumps(GOOD[0], protocol=2)
PICKLE_1 = pickle.dumps(GOOD[1], protocol=2)
JSON = json.dumps(GOOD[0]).encode()


@pytest.fixture(scope="module")
def reader():
    with DumpReader() as child:
        yield child


class Creates:
    """Unpickled by an ordinary unpickler, this creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_no_code_runs(tmp_path: Path):
    proof = tmp_path / "proof"
    attack = pickle.dumps({"entries": [], "version": Creates(proof)}, protocol=2)
    with pytest.raises(DumpError, match=r"asks for posix\.mkdir"):
        decode(attack)
    assert not proof.exists()
    pickle.loads(attack)  # the attack is real
    assert proof.exists()


@pytest.mark.parametrize(
    "attack",
    [
        b"\x80\x02cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02ios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02Pname\n.",
        b"\x80\x02U\x04nameQ.",
        b"\x80\x02cbuiltins\neval\n(X\x04\x00\x00\x001+1 tR.",
        b"\x80\x02(c__main__\nx\no.",
        b"\x80\x02\x82\x01.",
    ],
    ids=["global", "inst", "stack-global", "persid", "binpersid", "eval", "obj", "extension"],
)
def test_opcodes_that_look_something_up_are_refused(attack: bytes):
    with pytest.raises(DumpError):
        decode(attack)


MEMO = b"\x80\x02}r\x00\x00\x00\x06."
"""Puts the dict into the memo at place 100 million: the unpickler makes a table of 1.5 GiB."""
HIGHEST = """
import json, resource, sys
from pathlib import Path
from dtobs.flight_recorder import load_dumps
dumps = load_dumps(Path(sys.argv[1]), children=1)
highest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
print(json.dumps([dumps.rank_numbers.tolist(), [p.message for p in dumps.problems], highest]))
"""


def test_nine_bytes_get_little_memory(tmp_path: Path):
    (tmp_path / "rank0").write_bytes(MEMO)
    (tmp_path / "rank1").write_bytes(PICKLE_1)
    command = [sys.executable, "-c", HIGHEST, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    ranks, (message,), highest = json.loads(result.stdout)
    assert ranks == [1]
    assert "more memory than a dump of its size can" in message
    assert highest < 512 << 20


def test_a_large_dump_is_read_within_its_bound(tmp_path: Path):
    large = dict(dumps_of(SimulatedJob(JobLayout(dp=2, tp=1, pp=1), None, entries=20_000, steps=10_000)))
    for rank, protocol in ((0, 2), (1, 4)):
        (tmp_path / f"rank{rank}").write_bytes(pickle.dumps(large[rank], protocol=protocol))
    assert load_dumps(tmp_path).problems == ()


def test_zip_bomb_is_refused():
    bomb = gzip.compress(bytes(1 << 22))
    with pytest.raises(DumpError, match="unpacks to more than 100000 bytes"):
        decode(bomb, max_bytes=100_000)


def test_file_too_large_is_not_read(tmp_path: Path):
    path = tmp_path / "rank0"
    path.touch()
    os.truncate(path, 1 << 40)  # sparse: no bytes on the disk
    with pytest.raises(DumpError, match="it has 1099511627776 bytes, more than"):
        read_dump(path)


def test_pipe_in_the_place_of_a_file_does_not_block(tmp_path: Path):
    os.mkfifo(tmp_path / "rank0")
    with pytest.raises(DumpError, match="not a regular file"):
        read_dump(tmp_path / "rank0")


def _memory_bomb() -> bytes:
    return b"\x80\x02K\x01r\xff\xff\xff\x7f."  # remember this under number 2³¹


def _nested_tuples() -> bytes:
    """A dict key whose hash visits 2⁶⁰ tuples."""
    body = b")q\x000"  # each is remembered and taken off the stack
    for depth in range(60):
        number = bytes([depth])
        body += b"h" + number + b"h" + number + b"\x86q" + bytes([depth + 1]) + b"0"
    return b"\x80\x02}" + body + b"h\x3cK\x01s."


def _deep_tuple() -> bytes:
    """A dict key nested so deep that its hash leaves the C stack."""
    return b"\x80\x02}K\x01" + b"\x85" * 5_000_000 + b"K\x01s."


def _shared_sizes() -> bytes:
    """A dump whose tensor sizes are lists that hold one another 2⁶⁰ times over."""
    size: list[object] = [1]
    for _ in range(60):
        size = [size, size]
    entry = {**GOOD[0]["entries"][0], "input_sizes": size}
    return pickle.dumps({**GOOD[0], "entries": [entry]}, protocol=2)


def _recursive_dict() -> bytes:
    dump: dict[str, object] = {}
    dump["entries"] = [dump]
    return pickle.dumps(dump, protocol=2)


_HUGE = (1 << 62).to_bytes(8, "little")
BOMBS = {
    "memory": (_memory_bomb(), "memory|no valid pickle"),
    "c-stack": (_deep_tuple(), "ended with -11|no valid pickle|no list of entries"),
    "bytes": (b"\x80\x04\x8e" + _HUGE + b"x.", "cut off|no valid pickle|memory"),
    "bytearray": (b"\x80\x05\x96" + _HUGE + b"x.", "cut off|no valid pickle|memory"),
    "text": (b"\x80\x04\x8d" + _HUGE + b"x.", "cut off|no valid pickle|memory"),
    "frame": (b"\x80\x04\x95" + _HUGE + b"}.", "cut off|no valid pickle|memory"),
    "long-integer": (b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\x01" * 9 + b".", "cut off|no valid pickle|memory"),
    "decimal-integer": (b"\x80\x02L" + b"9" * 1_000_000 + b"L\n.", "no valid pickle"),
    "lists": (b"\x80\x02" + b"]" * 2_000_000 + b"a" * 1_999_999 + b".", "no list of entries"),
    "marks": (b"\x80\x02" + b"(" * 4_000_000 + b".", "no valid pickle|memory"),
    "recursive-dict": (_recursive_dict(), "no record_id"),
    "shared-sizes": (_shared_sizes(), "sizes in it are not lists of whole numbers|not as PyTorch writes"),
    "json-depth": (b'{"entries":' + b"[" * 1_000_000, "no valid JSON"),
    "json-integer": (b'{"entries":[{"record_id":' + b"9" * 1_000_000 + b"}]}", "no valid JSON"),
    "json-float": (re.sub(rb"\"record_id\": [0-9]+", b'"record_id": 1e999', JSON), "of type float, not int"),
    "json-rank": (JSON.replace(b'"ranks": "[0, 1]"', b'"ranks": [' + b"9" * 40 + b"]"), ""),
}


@pytest.mark.parametrize(("bomb", "message"), BOMBS.values(), ids=BOMBS)
def test_bombs_cost_one_error_and_the_reader_goes_on(tmp_path: Path, reader: DumpReader, bomb: bytes, message: str):
    (tmp_path / "rank0").write_bytes(bomb)
    (tmp_path / "rank1").write_bytes(PICKLE)
    if not message:  # nothing in it is asked for: read, and what cannot be believed is left out
        assert len(reader.read(tmp_path / "rank0").entries) == 12
        return
    with pytest.raises(DumpError, match=message) as refused:
        reader.read(tmp_path / "rank0")
    assert "\n" not in str(refused.value)
    assert len(reader.read(tmp_path / "rank1").entries) == 12


def test_a_folder_of_bombs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for rank, name in enumerate(("lists", "bytes", "json-depth")):
        (tmp_path / f"rank{rank}").write_bytes(BOMBS[name][0])
    assert main(["diagnose", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "none of the 3 dumps" in said.err


def test_a_bomb_in_time_is_stopped(tmp_path: Path):
    (tmp_path / "rank0").write_bytes(_nested_tuples())
    remembers = sys.version_info >= (3, 14)  # the hash of a tuple: there it is no bomb
    said = "it holds no list of entries" if remembers else "takes more CPU time than a dump can"
    with DumpReader(cpu_seconds=1) as reader, pytest.raises(DumpError, match=said):
        reader.read(tmp_path / "rank0")


def check(data: bytes) -> None:
    """Whatever the bytes are: columns, which can be analysed, or a DumpError."""
    try:
        columns = columns_of(decode(data))
    except DumpError:
        return
    assert isinstance(columns, RankColumns)
    analyse_dumps(dumps_from_objects({0: decode(data), 1: GOOD[1]}))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, len(PICKLE)))
def test_pickle_cut_anywhere(length: int):
    if length == len(PICKLE):
        check(PICKLE)
        return
    with pytest.raises(DumpError, match=r"cut off|empty|neither"):
        decode(PICKLE[:length])


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(JSON) - 1))
def test_json_cut_anywhere(length: int):
    with pytest.raises(DumpError):
        decode(JSON[:length])


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_bytes_changed_anywhere_in_json(data: st.DataObject):
    mutated = bytearray(JSON)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(mutated))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_bytes_changed_anywhere_in_a_pickle(
    reader: DumpReader, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    """Through the child process: a changed byte may ask an unpickler for gigabytes."""
    mutated = bytearray(PICKLE)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "mutated0"
    path.write_bytes(mutated)
    with contextlib.suppress(DumpError):
        assert reader.read(path).entries.dtype.names


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
_FIELDS = sorted(GOOD[0]["entries"][0])


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 11), st.sampled_from(_FIELDS), _json)
def test_any_value_in_any_field(entry: int, field: str, value: object):
    entries = [dict(e) for e in GOOD[0]["entries"]]
    entries[entry][field] = value
    _analyse({**GOOD[0], "entries": entries})


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(GOOD[0])), _json)
def test_any_value_at_the_top(field: str, value: object):
    _analyse({**GOOD[0], field: value})


def _analyse(dump: object) -> None:
    try:
        dumps = dumps_from_objects({0: dump, 1: GOOD[1]})
    except DumpError:
        return
    analyse_dumps(dumps)


def test_others_are_used_when_one_is_damaged(tmp_path: Path):
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(GOOD[rank], protocol=2))
    (tmp_path / "nccl_trace_rank_2").write_bytes(PICKLE[:100])
    dumps = load_dumps(tmp_path)
    assert [d.rank for d in dumps.ranks] == [0, 1]
    (problem,) = dumps.problems
    assert str(problem) == f"{tmp_path}/nccl_trace_rank_2: it is cut off: the process died while it wrote the dump"
    assert analyse_dumps(dumps).missing_ranks == (2,)


def test_none_usable_is_an_error_that_shows_the_first(tmp_path: Path):
    for rank in (0, 1):
        (tmp_path / f"dump_{rank}.json").write_text("{")
    with pytest.raises(TargetError, match=r"none of the 2 dumps in .* The first: .*dump_0\.json: its JSON is cut off"):
        load_dumps(tmp_path)

"""A run directory in which one file is hostile: loaded, judged by every detector, and written down in every form.

The first byte of the input says which file the rest replaces. Pages get their checksums afterwards: what
a page holds is to be tried, not only whether it is torn.
"""

from __future__ import annotations

import zlib
from json import dumps as json_text
from pathlib import Path
from random import Random

import numpy as np

from dtobs.diagnose import diagnose, gather
from dtobs.errors import DtobsError
from dtobs.findings import Finding
from dtobs.host.process import ProcessState, boot_id
from dtobs.recording.arrivals import Arrival, write_arrival
from dtobs.recording.capture import Capture, RankCapture
from dtobs.recording.contact import Contact, write_contact
from dtobs.recording.journal import Entry
from dtobs.recording.page import HALF_BYTES, HEADER_BYTES, PAGE_DTYPE
from dtobs.recording.plan import Plan
from dtobs.recording.ring import RingWriter, read_ring
from dtobs.recording.uncounted_time import Excused, write_excused
from dtobs.reports import html, json, text
from dtobs.testing.fake_run import FakeRun
from tests.fuzz.expect import one_line
from tests.fuzz.mutate import json_mutator, jsonl_mutator, mutate_bytes
from tests.fuzz.scratch import scratch

_FOLDER = scratch("run")
START_NS = 10**15
_STACK = 'Thread 0x1 (most recent call first):\n  File "/me/train.py", line 33 in batches\n'


def _make(root: Path) -> None:
    run = FakeRun(root, 2, live=False)
    run.start_ns = START_NS
    run.steps(6)
    run.rank(0).phase("backward").collective("all_reduce", wait=True)
    run.rank(1).phase("data")
    run.rank(1).meta("exception", type="ValueError", message="bad sample", t_ns=run.rank(1).clock_ns)
    seen = {
        rank: RankCapture(rank, ProcessState(5_000_000 + rank, alive=True, state="S"), "free", _STACK, {"entries": []})
        for rank in (0, 1)
    }
    Capture(run.rank(0).clock_ns, "20261121T000000Z", "stall", seen).save(root / "captures" / "20261121T000000Z")
    run.directory.exits(0).write_text(json_text(vars(ProcessState(5_000_001, alive=False, exit_code=-9))) + "\n")
    run.rank(0).meta("pipeline", **vars(Plan("Schedule1F1B", 4, (0,), 2, (0, 1))))
    write_contact(run.directory, Contact(1, "http://127.0.0.1:1", "silent", ranks=(1,), why="no route"))
    for rank in (0, 1):
        write_arrival(run.directory, Arrival(rank, 2, state="waiting", pid=5_000_000 + rank, site="train.py:3"))
    write_excused(run.directory.excused(0), boot_id(), [Excused(START_NS, START_NS + 10**9, 0.5)])
    slow = Entry("found", "2026", 5, 0, Finding("straggler", "rank 1 is slow", (1,), step=3))
    run.directory.findings.write_text(json_text(slow.to_json()) + "\n")


def _settle(root: Path) -> None:
    """The same bytes at every start: short rings, and no time of this machine on the pages."""
    for path in root.rglob("*.ring"):
        records = read_ring(path)
        ring = RingWriter(path, records.dtype, 32)
        for record in records[-16:]:
            ring.append(record)
        ring.close()
    for path in root.rglob("pages.bin"):
        data = bytearray(path.read_bytes())
        halves = np.frombuffer(data, np.uint8)[HEADER_BYTES:].reshape(-1, HALF_BYTES)
        pages = halves[:, : PAGE_DTYPE.itemsize].view(PAGE_DTYPE)
        pages["heartbeat_ns"], pages["clock_offset_ns"] = START_NS + 10**9, 0
        path.write_bytes(_signed(data))


def _signed(data: bytes) -> bytes:
    """Page data with the checksums that belong to it."""
    pages = bytearray(data)
    for at in range(HEADER_BYTES, len(pages) - HALF_BYTES + 1, HALF_BYTES):
        crc = zlib.crc32(pages[at + 8 : at + PAGE_DTYPE.itemsize])
        pages[at : at + 8] = crc.to_bytes(8, "little")
    return bytes(pages)


_ROOT = _FOLDER / "20261121T000000Z-fuzz"
_make(_ROOT)
_settle(_ROOT)
FILES = sorted(p.relative_to(_ROOT) for p in _ROOT.rglob("*") if p.is_file() and p.stat().st_size < 20_000)
_GOOD = {path: (_ROOT / path).read_bytes() for path in FILES}
SEEDS = [bytes([number]) + _GOOD[path] for number, path in enumerate(FILES)]


def check(data: bytes) -> bool:
    """A diagnosis in three forms, or one DtobsError. Returns whether it was read."""
    if not data:
        return False
    path = FILES[data[0] % len(FILES)]
    body = data[1:]
    (_ROOT / path).write_bytes(_signed(body) if path.name == "pages.bin" else body)
    try:
        diagnosis = diagnose(gather(_ROOT))
        json.render(diagnosis)
        text.render(diagnosis, 80)
        html.render(diagnosis)
        return True
    except DtobsError as error:
        one_line(error)
        return False
    finally:
        (_ROOT / path).write_bytes(_GOOD[path])


def mutate(data: bytes, random: Random) -> bytes:
    """As the file's own form suggests."""
    if not data:
        return data
    name = FILES[data[0] % len(FILES)].name
    body = data[1:]
    if name.endswith(".jsonl"):
        return data[:1] + jsonl_mutator(body, random)
    if name.endswith(".json"):
        return data[:1] + json_mutator(body, random)
    if name == "pages.bin" and len(body) > HEADER_BYTES and random.random() < 0.8:
        # a whole field of a page, as a number that is not plausible
        at = HEADER_BYTES + 8 * random.randrange((len(body) - HEADER_BYTES) // 8)
        value = random.choice((0, 1, 2**31, 2**63 - 1, 2**64 - 1, random.getrandbits(64), random.getrandbits(8)))
        return data[:1] + body[:at] + value.to_bytes(8, "little") + body[at + 8 :]
    return data[:1] + mutate_bytes(body, random)

"""Every fuzz target on its seeds, on the inputs that once did harm, and on a few hundred changed ones, always the same.

``python -m tests.fuzz TARGET`` goes on from there, guided by coverage. DTOBS_FUZZ_INPUTS: changed inputs a target.
"""

from __future__ import annotations

import os
import resource
from importlib import import_module
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.corpus import as_text, from_text, read_corpus

INPUTS = int(os.environ.get("DTOBS_FUZZ_INPUTS", "400"))
TARGETS = sorted(p.stem for p in Path(__file__).with_name("targets").glob("[a-z]*.py"))
MEMORY_BYTES = 1 << 30


@pytest.fixture
def bounded_memory():
    """What an input asks for is refused by the kernel before it hurts the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def inputs(name: str, count: int):
    """The inputs of a target: seeds, saved ones, and `count` that come of changing them again and again."""
    target = import_module(f"tests.fuzz.targets.{name}")
    known = [*target.SEEDS, *read_corpus(name)]
    yield from known
    random = Random(name)
    data = b""
    for _ in range(count):
        data = target.mutate(data if data and random.random() < 0.5 else random.choice(known), random)
        yield data


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.usefixtures("bounded_memory")
def test_target(name: str):
    check = import_module(f"tests.fuzz.targets.{name}").check
    for data in inputs(name, INPUTS):
        try:
            check(data)
        except Exception:
            print(f"for tests/fuzz/corpus/{name}.txt:\n{as_text(data)}")
            raise


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_good_input(name: str):
    """A target whose seeds are refused at the door would try nothing."""
    target = import_module(f"tests.fuzz.targets.{name}")
    assert all(target.check(data) for data in target.SEEDS)


def test_corpus_lines_are_bytes_again():
    data = bytes(range(256)) + b"\\x23 # \n"
    line = as_text(data)
    assert from_text(line) == data
    assert line.isascii()
    assert "#" not in line
    assert "\n" not in line

"""Fuzzing without coverage, where atheris is not installed: many inputs, changed at random, from one seed number.

    python -m tests.fuzz.blind TARGET RUNS [SEED] [--reader]

Prints what it has done every minute, and ends at the first input that raises what it must not: printed as the line to
add to ``tests/fuzz/corpus/TARGET.txt``. `--reader` leaves out all but the reading, of dumps only, which is much faster.
"""

from __future__ import annotations

import resource
import sys
import time
from importlib import import_module
from random import Random

from dtobs.errors import DumpError
from dtobs.flight_recorder.columns import columns_of
from dtobs.flight_recorder.decode import decode
from tests.fuzz.corpus import as_text, read_corpus
from tests.fuzz.expect import one_line

_TELL_SECONDS = 60.0
_MEMORY_BYTES = 2 << 30
"""As in `tests.fuzz.__main__`: a dump is read by a child with such a limit."""


def read_dump(data: bytes) -> bool:
    """One DumpError, or columns."""
    try:
        columns_of(decode(data))
    except DumpError as error:
        one_line(error)
        return False
    return True


def main(name: str, runs: int, seed: int, reader: bool) -> None:
    """Run a target over so many inputs."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    target = import_module(f"tests.fuzz.targets.{name}")
    check = read_dump if reader else target.check
    seeds = [*target.SEEDS, *read_corpus(name)]
    random = Random(seed)
    told = begun = time.monotonic()
    read, longest = 0, 0.0
    for number in range(1, runs + 1):
        data = random.choice(seeds)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            data = bytes(target.mutate(data, random))
        before = time.process_time()
        try:
            read += bool(check(data))
        except BaseException:
            print(f"\ninput {number}, for tests/fuzz/corpus/{name}.txt:\n{as_text(data)}", file=sys.stderr)
            raise
        longest = max(longest, time.process_time() - before)
        if time.monotonic() - told > _TELL_SECONDS or number == runs:
            told = time.monotonic()
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(
                f"{name}: {number} inputs in {told - begun:.0f} s, {read} of them read,"
                f" the slowest {longest:.3f} CPU s, {memory} MiB",
                flush=True,
            )


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--reader"]
    main(words[0], int(words[1]), int(words[2]) if len(words) > 2 else 1, "--reader" in sys.argv)

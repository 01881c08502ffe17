"""Coverage-guided fuzzing of everything that dtobs reads and did not write itself.

    pip install 'dtobs[fuzz]'
    python -m tests.fuzz TARGET [-runs=100000] [-max_total_time=600] [libFuzzer flags …]

TARGET is a file of ``tests/fuzz/targets``. An input that raises what it must not, takes longer than 20 s or more
memory than 2 GiB ends the run; it is printed as the line to add to ``tests/fuzz/corpus/TARGET.txt``.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import atheris

from tests.fuzz.corpus import as_text, read_corpus

MEMORY_BYTES = 2 << 30


def main() -> None:
    """Fuzz one target; libFuzzer ends the process."""
    names = sorted(p.stem for p in (Path(__file__).parent / "targets").glob("[a-z]*.py"))
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"usage: python -m tests.fuzz TARGET [libFuzzer flags]\ntargets: {', '.join(names)}")
    name = sys.argv[1]
    with atheris.instrument_imports(include=["dtobs"]):
        target = import_module(f"tests.fuzz.targets.{name}")
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    seeds = [*target.SEEDS, *read_corpus(name)]
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)

    def check(data: bytes) -> None:
        try:
            target.check(data)
        except BaseException:
            print(f"\nfor tests/fuzz/corpus/{name}.txt:\n{as_text(data)}", file=sys.stderr)
            raise

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        source = random.Random(seed)
        if source.random() < 0.3:  # a good input reaches nothing new, so that libFuzzer soon forgets it
            data = source.choice(seeds)
        own = source.random() < 0.6
        changed = target.mutate(data, source) if own else atheris.Mutate(data, len(data) or 1)
        return bytes(changed[:max_size])

    flags = [
        f"-artifact_prefix={folder}/",
        "-timeout=20",
        "-rss_limit_mb=4096",
        f"-max_len={_longest(seeds)}",
    ]
    atheris.Setup([sys.argv[0], str(folder), *flags, *sys.argv[2:]], check, custom_mutator=mutate)
    limit_memory()
    atheris.Fuzz()


def _longest(seeds: list[bytes]) -> int:
    return max(4096, 2 * max(map(len, seeds)))


def limit_memory() -> None:
    """From now on this process may take MEMORY_BYTES more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main()

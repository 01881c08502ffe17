"""Console logs: read, judged and rendered, whatever is in them."""

from __future__ import annotations

from random import Random

from dtobs.diagnose.logs import diagnosis_of_logs
from dtobs.logs import LogFile, analyse_logs
from dtobs.reports import html, json, text
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.scratch import scratch
from tests.unit.logs.generator import CASES, table
from tests.unit.logs.pasted import EXCERPTS

SEEDS = [
    "\n".join(
        [
            *(line for lines in case.lines(version, 3, 1).values() for line in lines),
            *(table(case.exits(3, 1), 2) if case.exits else []),
        ]
    ).encode()
    for case in CASES
    for version in (case.versions[0], "2.5")
] + [words.encode() for _, words, wanted in EXCERPTS if wanted is not None]
_PATH = scratch("console_log") / "job.log"


def mutate(data: bytes, random: Random) -> bytes:
    """Change bytes, or put lines of two logs together; mostly of a few lines, a quarter of the cost."""
    if random.random() < 0.7:
        lines = data.splitlines()
        start = random.randrange(len(lines) or 1)
        data = b"\n".join(lines[start : start + random.randint(1, 16)])
    if random.random() < 0.3:
        lines = [*data.splitlines(), *random.choice(SEEDS).splitlines()]
        random.shuffle(lines)
        return b"\n".join(lines[: random.choice((20, 60, 400))])
    return mutate_bytes(data, random)


def check(data: bytes) -> bool:
    """Nothing raises, and every form can be written; whether something is found."""
    _PATH.write_bytes(data)
    diagnosis = diagnosis_of_logs("job.log", analyse_logs([LogFile(_PATH)]))
    text.render(diagnosis)
    json.render(diagnosis)
    html.render(diagnosis)
    return diagnosis.verdict is not None

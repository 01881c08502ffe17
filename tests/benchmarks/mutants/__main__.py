"""Mutants of small training scripts: how many of those that change training are found, and who is accused wrongly.

``python -m tests.benchmarks.mutants [--count 300] [--script ddp] [--json FILE]`` runs each on two real ranks, first
by itself and then observed, and compares both with the original script. It prints a line a mutant as it goes, and
then the table of ``dtobs/README.md``. A mutant that ends in an error or does not end is nothing silent: it is counted
apart. A finding on a mutant that trains as the original does is a false accusation.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.mutants import scripts
from tests.benchmarks.mutants.mutate import mutants
from tests.benchmarks.mutants.run import Verdict, judge, original


def table(verdicts: Iterable[Verdict]) -> str:
    """A row an operator."""
    lines = [
        "| operator | mutants | stopped by themselves | change nothing | of these accused | change training | found |"
        " step and parameter right |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = list(verdicts)
    for operator in (*sorted({v.operator for v in rows}), "all"):
        own = [v for v in rows if operator in (v.operator, "all")]
        count = Counter(v.outcome for v in own)
        quiet = [v for v in own if v.outcome in ("same", "rounding")]
        found = [v for v in own if v.outcome == "changed" and v.codes]
        right = sum(not v.misplaced for v in found)
        lines.append(
            f"| {operator} | {len(own)} | {count['stopped']} | {len(quiet)} | {sum(bool(v.codes) for v in quiet)} | "
            f"{count['changed']} | {len(found)} | {right} |"
        )
    return "\n".join(lines)


def read(file: Path) -> dict[str, list[Verdict]]:
    """What became of the mutants that an earlier run wrote there, by name; two of one line may share a name."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = [Verdict(**{k: tuple(v) if isinstance(v, list) else v for k, v in line.items()}) for line in lines]
    return {name: [v for v in found if v.mutant == name] for name in {v.mutant for v in found}}


def main() -> None:
    """Make the mutants, run them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="how many mutants, drawn over all scripts")
    parser.add_argument("--script", choices=sorted(scripts.SCRIPTS), action="append", help="only mutants of this one")
    parser.add_argument(
        "--json",
        type=Path,
        help="add what became of each mutant here, a JSON object a line; those it holds are not run again",
    )
    given = parser.parse_args()
    chosen = {name: scripts.SCRIPTS[name] for name in given.script or scripts.SCRIPTS}
    every = [mutant for script in chosen.values() for mutant in mutants(script)]
    random.Random(0).shuffle(every)
    done = read(given.json) if given.json and given.json.exists() else {}
    originals, verdicts = {}, []
    for mutant in every[: given.count]:
        if done.get(mutant.name):
            verdicts.append(done[mutant.name].pop(0))
            continue
        if mutant.script not in originals:
            originals[mutant.script] = original(mutant.script)
        verdict = judge(mutant, originals[mutant.script])
        verdicts.append(verdict)
        print(f"{verdict.outcome:8} {mutant.name}: {', '.join(verdict.codes) or 'nothing found'}", flush=True)
        if given.json:
            with given.json.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    print(table(verdicts))


if __name__ == "__main__":
    main()

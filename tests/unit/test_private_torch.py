"""Private names of torch: every file that uses one is in the table of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = {"torch", "dist", "c10d", "distributed_c10d"}


def root_of(node: ast.expr) -> str:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names(path: Path) -> set[str]:
    """Dotted names of torch with a part that starts with one underscore, as they are written in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.Attribute) and root_of(node) in ROOTS:
            found.add(ast.unparse(node))
    return {name for name in found if name.split(".")[0] in ROOTS and re.search(r"\._(?!_)\w", name)}


def listed() -> set[str]:
    """The files named in the table."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = text.split("## Private PyTorch interfaces")[1]
    return set(re.findall(r"`((?:dtobs|runtime)/[\w/]+\.py)`", section))


def test_every_use_is_in_the_table():
    files = [p for folder in ("dtobs", "runtime") for p in (REPOSITORY / folder).rglob("*.py")]
    uses = {p.relative_to(REPOSITORY).as_posix(): sorted(private_names(p)) for p in files}
    assert {path: names for path, names in uses.items() if names and path not in listed()} == {}


def test_every_listed_file_exists():
    assert [path for path in sorted(listed()) if not (REPOSITORY / path).exists()] == []

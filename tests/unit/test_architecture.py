"""The arrows of the design: who may import whom, where torch may appear, how long a file may be.

`MAY_IMPORT` is the design as a table. A part not in it fails the test, so that adding one is a decision.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_LINES = 500

VOCABULARY = {"errors", "events", "codes", "expectations", "silent_codes", "catalogue", "codec", "findings", "words"}
ANALYSIS = VOCABULARY | {"calls", "host", "recording", "flight_recorder", "timeline", "detectors"}
EVERYTHING_READ = ANALYSIS | {"nodes", "diagnose", "exporters"}

# Part of dtobs → the other parts it may import. `__init__` resolves its public names lazily and is checked apart.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "events": {"errors"},
    "codes": set(),
    "expectations": set(),
    "silent_codes": {"codes"},
    "catalogue": {"codes", "silent_codes", "expectations"},
    "findings": {"catalogue", "errors", "events", "expectations"},
    "words": set(),
    "codec": set(),
    "host": VOCABULARY,
    "recording": VOCABULARY | {"host"},
    "nodes": VOCABULARY | {"recording", "host"},
    "testing": VOCABULARY | {"recording", "host"},
    "calls": VOCABULARY,
    "logs": VOCABULARY | {"calls"},
    "ras": VOCABULARY | {"calls"},
    "stacks": VOCABULARY | {"host"},
    "flight_recorder": VOCABULARY | {"calls"},
    "timeline": VOCABULARY | {"recording"},
    "detectors": VOCABULARY | {"calls", "host", "recording", "flight_recorder", "timeline"},
    "compare": VOCABULARY | {"recording", "detectors"},
    "diagnose": ANALYSIS | {"nodes", "logs", "ras", "stacks"},
    "reports": ANALYSIS | {"diagnose"},
    "tui": ANALYSIS | {"nodes", "diagnose"},
    "exporters": ANALYSIS,
    "monitor": EVERYTHING_READ,
    "probes": VOCABULARY | {"recording", "host"},
    "session": VOCABULARY | {"recording", "host", "nodes", "probes"},
    "integrations": VOCABULARY | {"host", "session"},
    "drills": EVERYTHING_READ | {"session", "integrations"},
    "preflight": VOCABULARY | {"host"},
    "cli": EVERYTHING_READ
    | {"compare", "reports", "tui", "monitor", "drills", "preflight", "integrations", "session"}
    | {"mcp"},
    "mcp": EVERYTHING_READ | {"reports"},
    "__main__": {"cli"},
}
TORCH_ALLOWED = {"probes", "session", "drills", "preflight", "integrations"}
# Optional packages, each imported only where it is used, and there only inside functions or the named parts.
OPTIONAL = {
    "textual": {"tui"},
    "rich": {"tui"},
    "pynvml": {"host"},
    "prometheus_client": {"exporters"},
    "opentelemetry": {"exporters"},
    "grafana_api": {"exporters"},
    "mcp": {"mcp"},
}
NEVER_IN_DTOBS = {"runtime", "tests"}
RUNTIME_FILE_THAT_KNOWS_DTOBS = Path("runtime/train.py")


@dataclass(frozen=True)
class Import:
    """One import statement: where, and the dotted name it asks for."""

    path: Path
    line: int
    name: str
    at_top: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


def python_files(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((REPOSITORY / folder).rglob("*.py"))]


def part_of(path: Path) -> str:
    """dtobs/probes/x.py → probes, dtobs/errors.py → errors."""
    return path.parts[1].removesuffix(".py")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[Import]:
    tree = tree_of(path)
    relative = path.relative_to(REPOSITORY)
    package = ".".join(relative.parts[:-1])
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([base] if base else [])])
            # `from dtobs import probes` imports a part as well
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)] if base == "dtobs" else [base]
        else:
            continue
        for name in names:
            yield Import(relative, node.lineno, name, id(node) in top)


@functools.cache
def all_imports(folder: str) -> list[Import]:
    return [found for path in python_files(folder) for found in imports(path)]


def test_every_part_is_in_the_table():
    parts = {part_of(path.relative_to(REPOSITORY)) for path in python_files("dtobs")} - {"__init__"}
    assert parts <= set(MAY_IMPORT)


def test_no_file_imports_itself_through_others():
    graph: dict[str, set[str]] = {}
    for path in python_files("dtobs"):
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = set()
        for node in tree_of(path).body:
            if isinstance(node, ast.ImportFrom):
                graph[name] |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    for name, targets in graph.items():  # of `from package import module` the module counts
        targets.intersection_update(graph)
        targets -= {t for t in targets if any(other.startswith(f"{t}.") for other in targets)} | {name}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_arrows_between_the_parts():
    wrong = []
    for found in all_imports("dtobs"):
        part = part_of(found.path)
        target = found.name.split(".")
        if target[0] != "dtobs" or len(target) < 2 or target[1] not in MAY_IMPORT or part == "__init__":
            continue
        if target[1] != part and target[1] not in MAY_IMPORT[part]:
            wrong.append(str(found))
    assert wrong == []


def test_torch_only_where_it_is_allowed():
    wrong = [
        str(i) for i in all_imports("dtobs") if i.name.split(".")[0] == "torch" and part_of(i.path) not in TORCH_ALLOWED
    ]
    assert wrong == []


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages_stay_in_their_part(package: str):
    found = [i for i in all_imports("dtobs") if i.name.split(".")[0] == package]
    assert [str(i) for i in found if part_of(i.path) not in OPTIONAL[package]] == []


def test_dtobs_does_not_know_the_runtime():
    assert [str(i) for i in all_imports("dtobs") if i.name.split(".")[0] in NEVER_IN_DTOBS] == []


def test_runtime_knows_dtobs_in_one_file_lazily():
    found = [i for i in all_imports("runtime") if i.name.split(".")[0] == "dtobs"]
    assert [str(i) for i in found if i.path != RUNTIME_FILE_THAT_KNOWS_DTOBS or i.at_top] == []


@pytest.mark.parametrize("module", ["dtobs", "dtobs.cli", "dtobs.session"])
def test_importing_is_light(module: str):
    """No torch and no optional package, in a fresh interpreter: the session asks for torch when it is attached."""
    heavy = ["torch", *OPTIONAL]
    code = f"import sys, {module}; print(*[m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_a_public_class_name_stands_for_one_class():
    """A reader who meets a name knows what it is; a name that begins with an underscore is its file's own."""
    found: dict[str, list[str]] = {}
    for path in python_files("dtobs"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_files_are_short():
    lengths = {p: len(p.read_text().splitlines()) for p in python_files("dtobs", "runtime", "tests", "examples")}
    assert {str(p.relative_to(REPOSITORY)): n for p, n in lengths.items() if n > MAX_LINES} == {}


def test_no_path_of_a_machine():
    # Home and working folders, and the one this very checkout is in.
    somewhere = "|".join(["root", "work", "home/(?!me/|user/|you/)[a-z]+"])
    checkout = re.escape(str(REPOSITORY))
    pattern = re.compile(rf"(?<![\w.~}}$])/(?:{somewhere})/|{checkout}/")
    folders = ["dtobs", "runtime", "tests", "examples", "dashboards", "alerts", ".ci"]
    suffixes = {".py", ".md", ".toml", ".json", ".yml", ".yaml", ".txt", ""}
    files = [p for f in folders for p in (REPOSITORY / f).rglob("*") if p.is_file() and p.suffix in suffixes]
    # In a worktree `.git` is a file that names the main checkout.
    files += [p for p in REPOSITORY.iterdir() if p.is_file() and p.suffix in suffixes and p.name != ".git"]
    wrong = [
        f"{path.relative_to(REPOSITORY)}: {match.group()}"
        for path in files
        if "__pycache__" not in path.parts
        for match in pattern.finditer(path.read_text(errors="replace"))
    ]
    assert wrong == []

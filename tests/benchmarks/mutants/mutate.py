"""Mutants of a function: one small change each, made on its syntax tree.

Left alone: what observes (`watch`, `note`), definitions of names that something later reads, and collectives that one
rank alone would skip (that is a hang, which other drills cover).
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
}
_OURS = frozenset({"watch", "note"})
_TOGETHER = ("all_reduce", "broadcast", "backward", "clip_grad_norm_", "fully_shard", "parallelize_module", "mse")
_GROUP_OF = {"all_reduce": "group", "broadcast": "group", "DDP": "process_group"}
"""Calls that take a group, and the keyword they take it by; the mutant gives them a group of one, `ALONE`."""


@dataclass(frozen=True)
class Mutant:
    """One change: of which script, by which operator, where (lines of the script's source, from 1), and the result."""

    script: str
    operator: str
    line: int
    change: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.script}:{self.line} {self.operator}: {self.change}"


def mutants(function: Callable[..., Any]) -> list[Mutant]:
    """All mutants of a function whose source is not that of another one."""
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source)
    seen, made = {ast.unparse(tree)}, []
    for operator, line, change, mutated in _changes(tree):
        text = ast.unparse(ast.fix_missing_locations(mutated))
        if text not in seen:
            seen.add(text)
            made.append(Mutant(function.__name__, operator, line, change, text))
    return made


def _changes(tree: ast.Module) -> Iterator[tuple[str, int, str, ast.Module]]:
    nodes = list(ast.walk(tree))
    ours = {id(part) for node in nodes if isinstance(node, ast.Expr) and _observes(node) for part in ast.walk(node)}
    for number, node in enumerate(nodes):
        if id(node) in ours:
            continue
        for operator, change, apply in _of(node):
            mutated = copy.deepcopy(tree)
            apply(list(ast.walk(mutated))[number])
            yield operator, getattr(node, "lineno", 0), change, mutated
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                for operator, at, change, replacement in _of_block(block):
                    mutated = copy.deepcopy(tree)
                    setattr(list(ast.walk(mutated))[number], field, copy.deepcopy(replacement))
                    yield operator, block[at].lineno, change, mutated


def _of_block(block: list[ast.stmt]) -> Iterator[tuple[str, int, str, list[ast.stmt]]]:
    for at, statement in enumerate(block):
        if _observes(statement) or _is_text(statement):
            continue
        whole = ast.unparse(statement)
        text = whole.splitlines()[0]
        if isinstance(statement, ast.Expr | ast.AugAssign | ast.If | ast.For | ast.With) and "note(" not in whole:
            yield "delete", at, text, [*block[:at], ast.Pass(), *block[at + 1 :]]
        if isinstance(statement, ast.Expr | ast.AugAssign) and not any(name in text for name in _TOGETHER):
            test = ast.parse("rank == 0", mode="eval").body
            yield "rank condition", at, text, [*block[:at], ast.If(test, [statement], []), *block[at + 1 :]]
        if at + 1 < len(block) and not _observes(block[at + 1]) and not _defines(statement) & _reads(block[at + 1]):
            pair = f"{text} / {ast.unparse(block[at + 1]).splitlines()[0]}"
            yield "swap", at, pair, [*block[:at], block[at + 1], statement, *block[at + 2 :]]


def _of(node: ast.AST) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        other = node.value + 1 if isinstance(node.value, int) else 2 * node.value
        yield "number", f"{node.value} -> {other}", lambda n: setattr(n, "value", other)
    if isinstance(node, ast.Name) and node.id == "rank" and isinstance(node.ctx, ast.Load):
        yield "rank", "rank -> 0", lambda n: setattr(n, "id", "ZERO")
        yield "rank", "rank -> 1 - rank", lambda n: setattr(n, "id", "OTHER")
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        yield "operator", ast.unparse(node), lambda n: setattr(n, "op", _SWAPPED[type(n.op)]())
    if isinstance(node, ast.AugAssign) and type(node.op) in _SWAPPED:
        yield "operator", ast.unparse(node), lambda n: setattr(n, "op", _SWAPPED[type(n.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        yield "operator", ast.unparse(node), lambda n: setattr(n, "ops", [_SWAPPED[type(n.ops[0])]()])
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in _OURS:
            return
        for at, keyword in enumerate(node.keywords):
            if keyword.arg == "mesh":
                yield "group", f"{called}(mesh=alone)", lambda n, i=at: setattr(n.keywords[i].value, "id", "ALONE_MESH")
            else:
                yield "keyword", ast.unparse(keyword), lambda n, i=at: n.keywords.pop(i)
        name = called.rpartition(".")[2]
        if name in _GROUP_OF:
            alone = ast.keyword(_GROUP_OF[name], ast.Name("ALONE", ast.Load()))
            yield "group", f"{called}({_GROUP_OF[name]}=alone)", lambda n: n.keywords.append(alone)


def _observes(statement: ast.stmt) -> bool:
    return any(isinstance(n, ast.Call) and ast.unparse(n.func) in _OURS for n in ast.walk(statement)) and isinstance(
        statement, ast.Expr
    )


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _defines(statement: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _reads(statement: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}

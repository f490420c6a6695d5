"""Refuses tests that count what `transform` returns: Spark prunes columns that nobody asks for, and scores nothing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What asks for the columns, and returns no frame.
_COLLECTS = {"collect", "first", "head", "tail", "take", "toArrow", "toLocalIterator", "toPandas"}


def counts_of_nothing(tree: ast.AST) -> list[int]:
    """Returns the lines that count rows of what comes from `.transform(...)`, through whatever calls and variables."""
    return sorted(_in_scope(tree, frozenset()))


def _in_scope(scope: ast.AST, outer: frozenset[str]) -> set[int]:
    nodes = sorted(_nodes(scope), key=lambda node: getattr(node, "lineno", 0))
    scored = set(outer)
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and _is_scored(node.value, scored):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            scored |= {target.id for target in targets if isinstance(target, ast.Name)}
    lines = {node.lineno for node in nodes if isinstance(node, ast.Call) and _counts(node, scored)}
    return lines.union(*(_in_scope(node, frozenset(scored)) for node in nodes if isinstance(node, _FUNCTIONS)))


def _nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields what is in a scope, and the functions that begin others."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _FUNCTIONS):
            yield from _nodes(node)


def _counts(call: ast.Call, scored: set[str]) -> bool:
    if not (isinstance(call.func, ast.Attribute) and _is_scored(call.func.value, scored)):
        return False
    if call.func.attr == "count" and not call.args:  # With an argument, it counts something in a text.
        return True
    return any(_is_count_of_rows(node) for argument in call.args for node in ast.walk(argument))


def _is_count_of_rows(node: ast.AST) -> bool:
    """Whether it is `F.count("*")`, or the like."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "count"):
        return False
    return any(isinstance(argument, ast.Constant) and argument.value in ("*", 1) for argument in node.args)


def _is_scored(node: ast.AST | None, names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, (ast.Attribute, ast.Await, ast.NamedExpr)):
        return _is_scored(node.value, names)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)) or node.func.attr in _COLLECTS:
        return False
    of_arrays = isinstance(node.func.value, ast.Name) and node.func.value.id in ("F", "functions")
    if node.func.attr == "transform" and not of_arrays:  # `F.transform` scores nothing: it changes arrays.
        return True
    return any(_is_scored(part, names) for part in (node.func.value, *node.args))


def main(folder: str) -> int:
    """Prints the places in a folder; returns how many there are."""
    messages = [
        f"{path}:{line}: counts what transform returns, which scores nothing; collect a column of it"
        for path in sorted(Path(folder).rglob("*.py"))
        for line in counts_of_nothing(ast.parse(path.read_text()))
    ]
    print("\n".join(messages), end="\n" if messages else "")
    return len(messages)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1])))

"""Refuses tests that count what `transform` returns: Spark prunes columns that nobody asks for, and scores nothing."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

# What Spark prunes the scores through.
_LETS_THROUGH = {"alias", "coalesce", "drop", "limit", "orderBy", "repartition", "select", "sort", "withColumn"}


def counts_of_nothing(tree: ast.AST) -> list[int]:
    """Returns the lines of `.count()` of what comes from `.transform(...)`, at once or by way of a variable."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return sorted({line for function in functions for line in _in_function(function)})


def _in_function(function: ast.FunctionDef) -> list[int]:
    scored: set[str] = set()
    for node in sorted(ast.walk(function), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Assign) and _is_scored(node.value, scored):
            scored |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr, node.args) == ("count", [])
        and _is_scored(node.func.value, scored)
    ]


def _is_scored(node: ast.expr, names: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in names
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    functions = isinstance(node.func.value, ast.Name) and node.func.value.id in ("F", "functions")  # of arrays
    scores = node.func.attr == "transform" and not functions
    return scores or (node.func.attr in _LETS_THROUGH and _is_scored(node.func.value, names))


def main(folder: str) -> int:
    """Prints the places in a folder; returns how many there are."""
    found = [
        f"{path}:{line}: counts what transform returns, which scores nothing; collect a column of it"
        for path in sorted(Path(folder).rglob("*.py"))
        for line in counts_of_nothing(ast.parse(path.read_text()))
    ]
    print("\n".join(found), end="\n" if found else "")
    return len(found)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1])))

"""Counts what makes code hard to read, and fails where a count is above its bound.

`python scripts/reading.py` prints the counts; with `--list NAME`, where each is; `--check` is in `make lint`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, TESTS = ROOT / "sparktorch", ROOT / "tests"

# These say nothing of what a thing is: a row index, a fitted model, weights, columns.
VAGUE = {
    "found",
    "place",
    "places",
    "own",
    "known",
    "given",
    "each",
    "told",
    "shown",
    "kept",
    "together",
    "that",
    "them",
}
FRAGMENT = re.compile(r"(of|which|that|whose|where|in|on|by|from|with|to|at|as|than|so|it|they|these|those|what|who)\b")
ORDERING = frozenset({"sorted", "max", "min", "sort"})

# Each bound is what was reached; it may only fall. The lines of the package have none: under one, code was crammed.
BOUNDS = {"lambdas": 8, "vague names": 3, "fragments": 0, "lines of the stubs": 900, "lines of the tests": 42_600}


def vague_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the vague names that a file gives to variables, arguments, attributes and functions."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        if name.strip("_") in VAGUE:
            yield getattr(node, "lineno", 0), name


def lambdas(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the lambdas, but for those by which something is sorted."""
    keys = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called in ORDERING:
                keys |= {id(keyword.value) for keyword in node.keywords if keyword.arg == "key"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and id(node) not in keys:
            yield node.lineno, ast.unparse(node)


def fragments(text: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields comments and docstrings that begin with a preposition or a pronoun in lower case."""
    source = ["", *text.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comment, row = token.string.lstrip("#: "), token.start[0]
            goes_on = all(line.lstrip().startswith("#") for line in source[row - 1 : row + 1])
            if FRAGMENT.match(comment) and not goes_on:
                yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            docstring = ast.get_docstring(node)
            if docstring and FRAGMENT.match(docstring):
                yield node.body[0].lineno, docstring.splitlines()[0]


def lines(*paths: Path) -> int:
    """Returns the number of lines of files."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def measured() -> dict[str, list[str] | int]:
    """Returns each count, as a number or as the places that are counted."""
    listed: dict[str, list[str]] = {"lambdas": [], "vague names": [], "fragments": []}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        for name, positions in (
            ("lambdas", lambdas(tree)),
            ("vague names", vague_names(tree)),
            ("fragments", fragments(text, tree)),
        ):
            listed[name] += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in sorted(positions)]
    return {
        **listed,
        "lines of the package": lines(*PACKAGE.rglob("*.py")),
        "lines of the stubs": lines(*PACKAGE.rglob("*.pyi")),
        "lines of the tests": lines(*TESTS.rglob("*.py")),
    }


def main() -> int:
    """Prints the counts, and returns 1 where one is above its bound and the counts are checked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a count is above its bound")
    parser.add_argument("--list", metavar="NAME", help="show where this is counted")
    options = parser.parse_args()
    red = False
    for name, counted in measured().items():
        number = counted if isinstance(counted, int) else len(counted)
        above = name in BOUNDS and number > BOUNDS[name]
        red |= above
        print(f"{name}: {number:,}" + (f", above the bound of {BOUNDS[name]:,}" if above and options.check else ""))
        if options.list == name and isinstance(counted, list):
            print(*counted, sep="\n")
    return int(red and options.check)


if __name__ == "__main__":
    sys.exit(main())

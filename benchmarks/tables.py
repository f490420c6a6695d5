"""Writes the tables of the documentation from the results: between `<!-- results: NAME -->` and `<!-- end -->`.

`NAME ratios` leaves out what the ratios are made of; `NAME TABLE` is a table that the benchmark has printed. `without
settings` is the table of all that were measured so, and `without summary` the one of their numbers
(`benchmarks.without_settings`).

`python -m benchmarks.tables` writes them; with `--check` it changes nothing, and fails if one differs from its result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from typing import Any

from benchmarks.common import ROOT
from benchmarks.without_settings import summary_table, whole_table

_DOCS = (
    "benchmarks",
    "huggingface",
    "model_parallel",
    "ranking",
    "recommend",
    "results",
    "scale",
    "series",
    "strategies",
    "tables",
    "training",
)
PAGES = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _DOCS)]
# The word behind "without" names a table of several results.
OF_SEVERAL = {"settings": whole_table, "summary": summary_table}
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- results: (\w+)(?: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def tables(result: dict[str, Any], *, medians: bool = True) -> str:
    """Returns what was measured, the ratios with the goals of today, and of which commit, as Markdown.

    Args:
        result: What `benchmarks.common.report` has written.
        medians: Whether to show what the ratios are made of.
    """
    lines = []
    goals = getattr(importlib.import_module(f"benchmarks.{result['benchmark']}"), "GOALS", result["goals"])
    if medians:
        lines += ["| | median | least | most |", "|---|---|---|---|"]
        spreads = result["spreads"]
        lines += [
            f"| {name} | {' | '.join(map(number, (value, *spreads[name])))} |"
            for name, value in result["medians"].items()
        ]
        lines.append("")
    lines += ["| ratio | found | goal | |", "|---|---|---|---|"]
    for name, value in result["ratios"].items():
        goal = str(goals.get(name, ""))
        lines.append(f"| {name} | {number(value)} | {goal} | {verdict(value, goal) if goal else ''} |")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    machine = f"{result['cores']} cores, load {result['load']:.1f}"
    lines += ["", f"Commit {result['commit']}, {result['date']}, {machine}, {versions}.", ""]
    return "\n".join(lines)


def number(value: float) -> str:
    """Returns three digits of a number, or all before its point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def verdict(value: float, goal: str) -> str:
    """Returns whether a goal as the results have it, such as "<= 1.03", is met."""
    sign, bound = goal.split()
    return "met" if (value >= float(bound) if sign == ">=" else value <= float(bound)) else "missed"


def written(page: str) -> str:
    """Returns the page with its tables as the results have them."""

    def fill(block: re.Match[str]) -> str:
        head, name, part, end = block.groups()
        if name == "without":
            return f"{head}\n{OF_SEVERAL[part](RESULTS)}\n{end}"
        result = json.loads((RESULTS / f"{name}.json").read_text())
        if part in (None, "ratios"):
            return f"{head}\n{tables(result, medians=part is None)}\n{end}"
        return f"{head}\n```\n{result['printed'][part]}\n```\n\n{end}"

    return BLOCK.sub(fill, page)


def main() -> None:
    """Writes the pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a table differs")
    check = parser.parse_args().check
    for path in PAGES:
        page = path.read_text()
        new = written(page)
        if not check:
            path.write_text(new)
        elif new != page:
            sys.exit(f"{path.relative_to(ROOT)} differs from benchmarks/results: python -m benchmarks.tables")


if __name__ == "__main__":
    main()

"""The table "Results without settings": ours beside the best of the others, from the results of several benchmarks.

A result that belongs in it has, as a fact of `benchmarks.common.report`, what `quality` returns. Each benchmark has a
function in `READERS` that makes rows of its result; one whose result has no such fact yet is left out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["READERS", "Row", "quality", "summary_table", "whole_table"]


class Row(NamedTuple):
    """What all sides reach on one data set with the defaults of their packages.

    Attributes:
        data: The data set.
        measure: What is measured of held-out rows.
        ours: Our value.
        best: The best value of the others.
        side: The name of the other that has it.
        more_is_better: Whether the measure grows with quality; an error does not.
    """

    data: str
    measure: str
    ours: float
    best: float
    side: str
    more_is_better: bool = False

    @property
    def ratio(self) -> float:
        """Our error divided by the best other one, or the best other value divided by ours: below 1, ours is better."""
        above, below = (self.best, self.ours) if self.more_is_better else (self.ours, self.best)
        return above / below if below else math.inf


def quality(
    ours: str, measures: Mapping[str, str], values: Mapping[str, Mapping[str, float]], *, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the fact of a result that this table is made of.

    Args:
        ours: The name of our side.
        measures: What is measured, by data set.
        values: By data set, the value of each side.
        more: The data sets whose measure is better the larger it is.
    """
    rows = {
        data: {"measure": measures[data], "more is better": data in more, "sides": dict(sides)}
        for data, sides in values.items()
    }
    return {"quality": {"ours": ours, "rows": rows}}


def rows_of(result: Mapping[str, Any]) -> list[Row]:
    """Returns a row of each data set of a result; none of a result that does not have the fact of `quality`."""
    fact = result.get("quality", {"ours": "", "rows": {}})
    rows = []
    for data, row in fact["rows"].items():
        others = {side: value for side, value in row["sides"].items() if side != fact["ours"]}
        choose = max if row["more is better"] else min
        side = choose(others, key=lambda name: others[name])
        rows.append(Row(data, row["measure"], row["sides"][fact["ours"]], others[side], side, row["more is better"]))
    return rows


def reported_tables(result: Mapping[str, Any]) -> list[Row]:
    """Returns the rows of `benchmarks.tabular` on which nothing was chosen."""
    from benchmarks.tabular_tables import REPORTED

    return _made_by(REPORTED, result)


def reported_rankings(result: Mapping[str, Any]) -> list[Row]:
    """Returns the rows of `benchmarks.ranking` on which nothing was chosen."""
    from benchmarks.ranking_sets import REPORTED

    return _made_by(REPORTED, result)


def _made_by(makers: Iterable[Callable[..., Any]], result: Mapping[str, Any]) -> list[Row]:
    reported = {make.__name__ for make in makers}
    return [row for row in rows_of(result) if row.data in reported]


def rows_of_mails(result: Mapping[str, Any]) -> list[Row]:
    """Returns a row of each number of mails, of the medians of `benchmarks.texts`."""
    sides: dict[str, dict[str, float]] = {}
    for name, error in result["medians"].items():
        data, _, side = name.removesuffix(", error").partition(": ")
        if name.endswith(", error"):
            sides.setdefault(data, {})[side] = error
    return rows_of(quality("TextClassifier", dict.fromkeys(sides, "share that is wrong"), sides))


READERS: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[Row]]]] = {
    "tabular": ("tables", reported_tables),
    "recommend_quality": ("recommendations", rows_of),
    "series": ("series", rows_of),
    "ranking": ("rankings", reported_rankings),
    "texts": ("texts", rows_of_mails),
}


def results(folder: Path) -> dict[str, tuple[dict[str, Any], list[Row]]]:
    """Returns the results with their rows by kind of data, of the benchmarks that have such."""
    measured = {}
    for name, (kind, read) in READERS.items():
        path = folder / f"{name}.json"
        if path.exists() and (rows := read(result := json.loads(path.read_text()))):
            measured[kind] = result, rows
    return measured


def whole_table(folder: Path) -> str:
    """Returns a line of each data set, as Markdown, and of which commits these are."""
    lines = ["| | data | measure | ours | best other | | ratio |", "|---|---|---|---|---|---|---|"]
    for kind, (_, rows) in results(folder).items():
        for row in rows:
            measure = f"{row.measure}, more is better" if row.more_is_better else row.measure
            values = f"{number(row.ours)} | {number(row.best)} | {row.side} | {row.ratio:.3f}"
            lines.append(f"| {kind} | {row.data} | {measure} | {values} |")
    return _with_sources(lines, folder)


def summary_table(folder: Path) -> str:
    """Returns a line of each kind of data: on how many data sets ours is as good, and the ratios."""
    lines = ["| | data sets | ours is the best, or equal | ratio: median | least | most |", "|---|---|---|---|---|---|"]
    for kind, (_, rows) in results(folder).items():
        ratios = [row.ratio for row in rows]
        equal = sum(ratio <= 1.0 for ratio in ratios)
        figures = " | ".join(f"{figure(ratios):.3f}" for figure in (statistics.median, min, max))
        lines.append(f"| {kind} | {len(rows)} | {equal} | {figures} |")
    return _with_sources(lines, folder)


def _with_sources(lines: list[str], folder: Path) -> str:
    measured = results(folder)
    if not measured:
        return "None of the benchmarks has been run in its present form yet.\n"
    sources = [
        f"`{result['benchmark']}` of commit {result['commit']}, {result['date']}" for result, _ in measured.values()
    ]
    return "\n".join([*lines, "", f"A ratio below 1 says that ours is better. {'; '.join(sources)}.", ""])


def number(value: float) -> str:
    """Returns four digits of a number, or all before its point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

"""The ways from rows to scores that users take, as a table, and the few of them that cover it.

Every pair of values that can meet occurs in a row of `cells.csv`; `KNOWN` holds what has failed
before and always occurs. `python -m tests.paths.cells` writes the file again.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("cells.csv")

MASTERS = ("local", "local-cluster", "connect", "standalone")
SOURCES = (
    *("parquet", "orc", "json", "csv", "partitioned", "view", "join"),
    *("window", "cached", "rows", "stream"),
)
KINDS = ("vectors", "arrays", "ragged", "scalars", "unused", "image", "read")
ACTIONS = ("collect", "limit", "filter", "write", "agg", "sql", "saved", "stream", "fit")  # cheap ones first

_OF_SCALARS = {"scalars", "read"}
_NEVER_STREAMS = {"window", "cached", "rows"}
_ON_STREAMS = {"agg", "filter", "sql", "saved", "stream"}


class Cell(NamedTuple):
    """One way: where Spark runs, where the rows come from, what their input columns are, what is done."""

    master: str
    source: str
    kind: str
    action: str

    @property
    def name(self) -> str:
        """The cell in a word."""
        return "-".join(self)


# What cannot be, and why.
_IMPOSSIBLE = (
    ("a CSV file holds scalars only", lambda cell: cell.source == "csv" and cell.kind not in _OF_SCALARS),
    (
        "Spark collects, cuts off and fits no stream; what writes one is the action `stream`",
        lambda cell: cell.source == "stream" and cell.action not in _ON_STREAMS,
    ),
    (
        "a stream of a Connect session runs without what the session has shipped (Spark 4.3)",
        lambda cell: cell.master == "connect" and "stream" in (cell.source, cell.action),
    ),
    (
        "rows of the driver's, cached ones and numbered ones are no streams",
        lambda cell: cell.source in _NEVER_STREAMS and cell.action == "stream",
    ),
)

# Vectors that Spark hands to Python as the columns of a file have failed in all that runs the UDF above a bare
# scan, and timestamps that `preprocess` takes (`read`) wherever they came from.
_SCANS = ("parquet", "partitioned", "view")
_RUNS_THE_UDF = ("collect", "write", "agg", "filter", "limit", "sql", "saved", "stream")
KNOWN = (
    *(Cell("local", "parquet", kind, action) for kind, action in product(("vectors", "unused"), _RUNS_THE_UDF)),
    *(Cell("local", source, kind, "collect") for source, kind in product(_SCANS, ("vectors", "unused"))),
    *(Cell("connect", "parquet", kind, "collect") for kind in ("vectors", "unused")),
    *(Cell("local", "parquet", "read", action) for action in ("fit", "collect")),
)


def every() -> list[Cell]:
    """Returns all ways that there are."""
    cells = map(Cell._make, product(MASTERS, SOURCES, KINDS, ACTIONS))
    return [cell for cell in cells if not any(holds(cell) for _, holds in _IMPOSSIBLE)]


def pairs(cell: Cell) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yields every two values of a cell, each with the name of its column."""
    yield from combinations(zip(Cell._fields, cell, strict=True), 2)


def cover() -> list[Cell]:
    """Returns what has failed before, and then, again and again, the cell with the most pairs that are missing.

    Of several, it is a cheap one: the first action, and no aggregated stream.
    """
    known = list(dict.fromkeys(KNOWN))
    rest = every()
    missing = {pair for cell in rest for pair in pairs(cell)} - {pair for cell in known for pair in pairs(cell)}
    chosen = known
    while missing:
        best = max(rest, key=lambda cell: (sum(pair in missing for pair in pairs(cell)), *_cheapness(cell)))
        chosen.append(best)
        missing.difference_update(pairs(best))
    return sorted(chosen, key=lambda cell: (MASTERS.index(cell.master), cell[1:]))


def _cheapness(cell: Cell) -> tuple[bool, int]:
    return (cell.source, cell.action) != ("stream", "agg"), -ACTIONS.index(cell.action)


def once(cells: Iterable[Cell]) -> set[Cell]:
    """Returns those that have failed before, and as many more as it takes for each value to occur."""
    cells = list(cells)
    chosen = {cell for cell in cells if cell in KNOWN}
    missing = {value for cell in cells for value in cell} - {value for cell in chosen for value in cell}
    while missing:
        best = max(cells, key=lambda cell: len(missing.intersection(cell)))
        chosen.add(best)
        missing.difference_update(best)
    return chosen


def read() -> list[Cell]:
    """Returns the cells of the file."""
    with FILE.open(newline="") as file:
        rows = csv.reader(file)
        assert tuple(next(rows)) == Cell._fields
        return [Cell._make(row) for row in rows]


def write(cells: Iterable[Cell]) -> None:
    """Writes them to the file."""
    with FILE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Cell._fields, *cells])


if __name__ == "__main__":
    write(cover())

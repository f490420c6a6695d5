"""Every way from a file to scored rows, in sessions with the settings that users have: a master, and nothing else."""

from __future__ import annotations

import pytest

from tests.paths.cells import KNOWN, Cell, every, once, pairs, read
from tests.paths.conftest import Walks

# pyspark 3.5 has no server of Spark Connect in its package, and takes each value of the table, not each pair.
NEWEST = {cell for cell in read() if cell.master == "connect" or cell not in once(read())}

pytestmark = pytest.mark.timeout(3000)  # the first cell of a master waits for all of them


def test_the_table_holds_every_pair_of_values_that_can_meet_and_what_has_failed_before() -> None:
    cells = read()
    assert {pair for cell in every() for pair in pairs(cell)} == {pair for cell in cells for pair in pairs(cell)}
    assert set(KNOWN) <= set(cells)


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.name, marks=[pytest.mark.newest] if cell in NEWEST else []) for cell in read()],
)
def test_what_users_do_with_rows_and_a_model_gives_what_the_plain_module_says(walks: Walks, cell: Cell) -> None:
    error = walks.result(cell.master, "-".join(cell[1:]))
    assert error is None, error

"""Rows with groups, as the ranks receive them, and their samples found by plain loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sparktorch.data.columns import GROUP, KEY, LABEL, ORDER, VALIDATION, WEIGHT, Groups, Window, input_name
from sparktorch.data.sampling.plan import mix_words, rank_of_key
from tests.support.frames import Table


def grouped(
    sizes: list[int],
    *,
    window: Window | None = None,
    weighted: bool = False,
    validated: bool = False,
    seed: int = 0,
) -> Table:
    """Makes groups of those sizes, whose rows arrive in any order; grades 0 to 4 follow from the features.

    A quarter of the groups validates or, with windows, the last quarter of each. Groups weigh 1, 2 or 3.
    """
    random = np.random.default_rng(seed)
    count = sum(sizes)
    table = Table.random(count, seed=seed)
    number = np.repeat(np.arange(len(sizes)), sizes)
    place = np.concatenate([np.arange(size) for size in sizes])
    signal = table.arrays[LABEL] + random.normal(size=count) / 4
    arrays: dict[str, Any] = {
        input_name(0): table.arrays["x0"],
        LABEL: np.digitize(signal, [-0.7, 0, 0.5, 0.9]).astype(np.float32),
        KEY: table.arrays[KEY],
        GROUP: mix_words(number.astype(np.int64)).view(np.int64),
        ORDER: place.astype(np.int64) * 3600,
    }
    columns = replace(table.columns, groups=Groups(group="query", order="at", window=window))
    if weighted:
        arrays[WEIGHT] = (1 + number % 3).astype(np.float32)
        columns = replace(columns, weight=Table.random(1, weighted=True).columns.weight)
    if validated:
        late = place >= 0.75 * np.repeat(sizes, sizes)
        arrays[VALIDATION] = number % 4 == 0 if window is None else late
        columns = replace(columns, validation="held_out")
    return Table(arrays, columns).shuffled(seed)


def parts(table: Table, ranks: int) -> list[Table]:
    """Returns the rows of every rank."""
    rank = rank_of_key(table.arrays[GROUP], ranks)
    return [table.take(rank == r) for r in range(ranks)]


def samples_of(table: Table) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.int64]]]:
    """Returns the row numbers of each training sample, in the order of positions, and of each validation sample."""
    assert table.columns.groups is not None
    window, trained, validated = table.columns.groups.window, [], []
    groups = table.arrays[GROUP].view(np.uint64)
    marks = table.arrays.get(VALIDATION, np.zeros(len(table), bool))
    for group in sorted(set(groups.tolist())):
        rows = np.flatnonzero(groups == group)
        rows = rows[np.argsort(table.arrays[ORDER][rows])]
        if window is None:
            (validated if marks[rows[0]] else trained).append(rows)
            continue
        for end in reversed(range(len(rows), window.rows - 1, -window.step)):
            sample = rows[end - window.rows : end]
            found = marks[sample[window.context :]]
            if found.all():
                validated.append(sample)
            elif not found.any():
                trained.append(sample)
    return trained, validated

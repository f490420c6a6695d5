"""What a table's columns become: indices of categories, standardised numbers, parts of times."""

from __future__ import annotations

from datetime import date, datetime, timezone
from typing import Any

import pyarrow as pa
import pytest
import torch

from sparktorch.data.tables import TableColumns, TableNetwork


def made(table: TableColumns, **columns: pa.Array) -> dict[str, Any]:
    return {name: found.tolist() for name, found in table(columns, epoch=None, generator=None).items()}


@pytest.mark.parametrize(
    ("known", "column", "expected"),
    [
        (["AA", "DL"], pa.array(["DL", None, "AA", "rare", ""]), [3, 1, 2, 0, 0]),
        ([True], pa.array([True, False, None]), [2, 0, 1]),
        ([7, 1 << 60], pa.array([1 << 60, None, 7, (1 << 60) + 1]), [3, 1, 2, 0]),
        ([0.5], pa.array([0.5, float("nan"), None, 1.0], pa.float32()), [2, 1, 1, 0]),
        ([], pa.array([None, "AA"]), [1, 0]),
    ],
)
def test_categories_are_known_unknown_or_null(known: list[Any], column: pa.Array, expected: list[int]) -> None:
    table = TableColumns(categories={"x": known})
    assert made(table, x=column) == {"categories": [[index] for index in expected], "numbers": [[]] * len(expected)}
    assert table.cardinalities == [len(known) + 2]


def test_numbers_are_standardised_and_missing_ones_are_the_mean() -> None:
    table = TableColumns(numbers={"a": [3.0, 2.0], "b": [1.0, 0.0], "c": [0.5, 0.5]})
    a, b = pa.array([7.0, float("nan"), None]), pa.array([1, None, 3], pa.int8())
    found = made(table, a=a, b=b, c=pa.array([True, None, False]))
    assert found == {"categories": [[]] * 3, "numbers": [[2.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 2.0, -1.0]]}


def test_columns_say_where_numbers_are_missing_after_all_the_numbers() -> None:
    table = TableColumns(numbers={"a": [3.0, 2.0], "b": [1.0, 1.0]}, missing=["b"])
    found = made(table, a=pa.array([None, 3.0]), b=pa.array([float("nan"), 2.0]))
    assert found["numbers"] == [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    assert (table.width, TableColumns(numbers=table.numbers).width) == (3, 2)


def test_times_are_parts_in_utc() -> None:
    instant = datetime(2024, 2, 29, 23, 30, tzinfo=timezone.utc)  # a Thursday
    plain = pa.array([instant.replace(tzinfo=None), None], pa.timestamp("us"))
    table = TableColumns(times={"at": ["month", "weekday", "hour"], "day": ["month", "weekday"]})
    for at in (plain, plain.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us", "Asia/Tokyo"))):
        found = made(table, at=at, day=pa.array([date(2024, 3, 4), None]))
        assert found["categories"] == [[2 + 1, 2 + 3, 2 + 23, 2 + 2, 2 + 0], [1, 1, 1, 1, 1]]
    assert table.cardinalities == [14, 9, 26, 14, 9]
    assert list(table.known) == ["at.month", "at.weekday", "at.hour", "day.month", "day.weekday"]


def test_the_network_takes_columns_of_one_kind_alone_and_begins_with_nothing_known_of_the_unknown() -> None:
    torch.manual_seed(0)
    network = TableNetwork(cardinalities=[3, 90], numbers=0, outputs=2, hidden=[4])
    assert [embedding.embedding_dim for embedding in network.embeddings] == [2, 32]
    rows = torch.tensor([[0, 1], [1, 0], [2, 5]])
    unknown, null, known = network(rows, torch.empty(3, 0))
    assert torch.equal(unknown, null)
    assert not torch.equal(unknown, known)
    numbers = TableNetwork(cardinalities=[], numbers=2, outputs=1)
    assert numbers(torch.empty((3, 0), dtype=torch.int64), torch.ones(3, 2)).shape == (3, 1)

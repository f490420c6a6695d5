"""What a table's columns become: indices of categories, standardised numbers, parts of times."""

from __future__ import annotations

from datetime import date, datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sparktorch.tasks.shared.columns import as_doubles
from sparktorch.tasks.tables.network import TableNetwork, network_settings
from sparktorch.tasks.tables.preprocess import TableColumns, scaled_edges


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
    table = TableColumns(numbers={"a": [3.0, 2.0], "b": [1.0, 1.0], "c": [0.5, 0.5]})
    a, b = pa.array([7.0, float("nan"), None]), pa.array([1, None, 3], pa.int8())
    found = made(table, a=a, b=b, c=pa.array([True, None, False]))
    assert found == {"categories": [[]] * 3, "numbers": [[2.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 2.0, -1.0]]}


def test_a_number_that_was_constant_in_all_training_rows_has_no_effect_whatever_its_later_values() -> None:
    for bound in (0.0, 3.0):
        table = TableColumns(numbers={"a": [7.0, 0.0]}, bound=bound)
        assert made(table, a=pa.array([7.0, -1e9, None]))["numbers"] == [[0.0], [0.0], [0.0]]


def test_scaled_numbers_keep_their_order_and_come_near_the_bound_without_exceeding_it() -> None:
    table = TableColumns(numbers={"a": [10.0, 2.0]}, bound=3.0)
    values = [10.0, 10.02, 12.0, 40.0, 50.0, -1e300, 1e300]
    found = [row[0] for row in made(table, a=pa.array(values))["numbers"]]
    assert found[:3] == pytest.approx([0.0, 0.01, 1 / (1 + 1 / 9) ** 0.5], rel=1e-4)
    assert found[2] < found[3] < found[4] < 3.0
    assert found[5:] == pytest.approx([-3.0, 3.0])


def test_times_are_numbers_too_in_seconds_of_utc() -> None:
    instant = datetime(2024, 2, 29, 23, 30, tzinfo=timezone.utc)
    table = TableColumns(numbers={"at": [instant.timestamp() - 60.0, 30.0], "day": [0.0, 86_400.0]})
    naive = pa.array([instant.replace(tzinfo=None), None], pa.timestamp("us"))
    for at in (naive, naive.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("ns", "Asia/Tokyo"))):
        assert made(table, at=at, day=pa.array([date(1970, 1, 3), None]))["numbers"] == [[2.0, 2.0], [0.0, 0.0]]


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
    assert list(table.vocabulary) == ["at.month", "at.weekday", "at.hour", "day.month", "day.weekday"]
    assert TableColumns({"at.month": ["a"]}, times=table.times).cardinalities == [3, *table.cardinalities]


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


def test_a_network_without_edges_and_members_is_that_of_models_saved_before_there_were_any() -> None:
    old = TableNetwork(cardinalities=[3], numbers=2, outputs=1, hidden=[4], scales=[[5.0, 2.0]])
    shapes = {name: list(tensor.shape) for name, tensor in old.state_dict().items()}
    assert shapes == {
        "embeddings.0.weight": [3, 2],
        "layers.0.weight": [4, 4],
        "layers.0.bias": [4],
        "layers.3.weight": [1, 4],
        "layers.3.bias": [1],
    }


SIZES: dict[str, Any] = {"cardinalities": [4], "numbers": 3, "edges": [[-1.0, 0.0, 2.0], [0.0, 1.0]], "hidden": [8, 6]}


def test_members_are_trained_one_by_one_and_score_as_their_mean() -> None:
    torch.manual_seed(0)
    network = TableNetwork(**SIZES, outputs=2, members=3, scales=[[100.0, 10.0], [0.0, 1.0]])
    rows = torch.tensor([[2], [3], [0]]), torch.randn(3, 3)
    every = network(*rows)["members"]
    assert every.shape == (3, 3, 2)
    assert not torch.allclose(every[:, 0], every[:, 1], atol=1e-3)
    torch.testing.assert_close(network.eval()(*rows), every.mean(1))
    assert float(every[..., 0].detach().mean()) == pytest.approx(100.0, abs=20.0)


@pytest.mark.parametrize("members", [1, 3])
def test_amounts_are_never_negative_outside_of_training(members: int) -> None:
    def network(**nonnegative: Any) -> TableNetwork:
        torch.manual_seed(0)
        return TableNetwork(**SIZES, outputs=2, members=members, scales=[[-1.0, 10.0]] * 2, **nonnegative)

    torch.manual_seed(1)
    rows = torch.zeros(500, 1, dtype=torch.int64), 9 * torch.randn(500, 3)
    free, bound = network(), network(nonnegative=[1])
    torch.testing.assert_close(bound(*rows), free(*rows))
    scores, expected = bound.eval()(*rows), free.eval()(*rows)
    assert (expected < 0).any(0).all()
    assert torch.equal(scores[:, 0], expected[:, 0])
    assert torch.equal(scores[:, 1], expected[:, 1].clamp(min=0))


def test_an_embedded_number_is_linear_between_the_edges_of_its_bins() -> None:
    torch.manual_seed(0)
    layer = TableNetwork(**SIZES, outputs=1).numbers
    assert layer is not None
    with torch.no_grad():
        layer.pieces.normal_()
        layer.slopes.zero_()
        layer.bias.fill_(10.0)  # so that the ReLU passes all
    at = torch.tensor([-9.0, -1.0, -0.5, 0.0, 1.0, 2.0, 9.0])
    first = layer(torch.stack([at, at], dim=1))[:, 0]
    left, right = layer.pieces[0, :, 0]
    expected = 10.0 + torch.stack([0 * left, 0 * left, left / 2, left, left + right / 2, left + right, left + right])
    torch.testing.assert_close(first, expected)


def test_the_network_of_members_is_exported_as_a_graph() -> None:
    network = TableNetwork(**SIZES, outputs=2, members=2, dropout=0.1).eval()
    rows = torch.tensor([[2], [3], [0]]), torch.randn(3, 3)
    dynamic = {"categories": {0: torch.export.Dim("rows")}, "numbers": {0: torch.export.Dim("rows")}}
    graph = torch.export.export(network, rows, dynamic_shapes=dynamic)
    five = torch.zeros(5, 1, dtype=torch.int64), torch.randn(5, 3)
    torch.testing.assert_close(graph.module()(*five), network(*five))


def test_many_rows_get_fewer_members_than_few() -> None:
    members = [network_settings(rows)["members"] for rows in (40, 10_000, 100_000, 10_000_000)]
    assert members == sorted(members, reverse=True)
    assert members[0] > members[-1] >= 1


def test_edges_are_scaled_as_the_numbers_are_and_differ_in_the_precision_of_the_network() -> None:
    two = 2 / (13 / 9) ** 0.5
    assert scaled_edges(np.array([0.0, 4.0]), [2.0, 1.0], 3.0) == pytest.approx([-two, two])
    assert scaled_edges(np.array([1.0, 1.0 + 1e-12]), [1.0, 1.0], 3.0) == [0.0, 1.0]
    assert scaled_edges(np.array([5.0]), [5.0, 0.0], 3.0) == [0.0, 1.0]


def test_whole_numbers_and_times_beyond_2_to_the_53_are_rounded_and_not_refused() -> None:
    largest = (1 << 63) - 1
    assert as_doubles(pa.array([largest, -largest, (1 << 53) + 1, 3])).tolist() == [2.0**63, -(2.0**63), 2.0**53, 3.0]
    assert as_doubles(pa.array([date(9999, 12, 31), date(1, 1, 1)])).tolist() == [253_402_214_400.0, -62_135_596_800.0]

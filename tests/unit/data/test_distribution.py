"""The distribution of a column of numbers: its distinct values, quantiles and bins."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sparktorch.data.distribution import MOST_VALUES, DistinctValues, Distribution


def counted(*parts: np.ndarray) -> dict[float, int]:
    """Returns the counts that one `DistinctValues` has of all parts."""
    distinct = DistinctValues()
    for part in parts:
        distinct.add(part)
    return dict(zip(distinct.values.tolist(), distinct.counts.tolist(), strict=True))


def test_the_values_and_their_counts_do_not_depend_on_how_rows_are_divided() -> None:
    draw = np.random.default_rng(0)
    values = np.round(draw.normal(size=20_000), 3)
    whole = counted(values)
    assert len(whole) == MOST_VALUES < len(np.unique(values))
    every = Counter(values.tolist())
    assert whole == {value: every[value] for value in whole}
    for parts in (2, 7, 500):
        assert counted(*np.array_split(draw.permutation(values), parts)) == whole
    assert counted(np.array([0.0, -0.0]), np.empty(0)) == {0.0: 2}


def test_quantiles_of_few_distinct_values_are_those_of_all_rows() -> None:
    values = np.random.default_rng(0).poisson(3.0, 1_000).astype(float)
    shares = np.linspace(0.0, 1.0, 21)
    expected = np.quantile(values, shares, method="inverted_cdf")
    assert Distribution.of(counted(values)).quantiles(shares).tolist() == expected.tolist()


def test_quantiles_of_many_distinct_values_are_near_those_of_all_rows() -> None:
    values = np.random.default_rng(0).normal(size=50_000)
    found = Distribution.of(counted(values)).quantiles(np.array([0.1, 0.25, 0.5, 0.75, 0.9]))
    assert (values[:, None] <= found).mean(0) == pytest.approx([0.1, 0.25, 0.5, 0.75, 0.9], abs=0.05)


def test_centre_and_scale_are_robust_and_the_standard_deviation_where_the_quartiles_are_equal() -> None:
    assert Distribution.of(counted(np.array([1.0, 2.0, 3.0, 4.0, 1e9]))).centre_and_scale(4e8) == (3.0, 2.0)
    flags = np.repeat([0.0, 1.0], [90, 10])
    assert Distribution.of(counted(flags)).centre_and_scale(0.3) == (0.0, 0.3)
    assert Distribution().centre_and_scale(0.0) == (0.0, 0.0)


def test_edges_divide_rows_and_values_or_are_the_few_values_themselves() -> None:
    few = Distribution.of(counted(np.array([3.0, 1.0, 2.0, 1.0])))
    assert few.edges(16).tolist() == [1.0, 2.0, 3.0]
    mostly_zero = Distribution.of(counted(np.concatenate([np.zeros(1_000), np.arange(1.0, 101.0)])))
    edges = mostly_zero.edges(16)
    assert (edges[0], edges[-1]) == (0.0, 100.0)
    assert 8 <= len(edges) <= 17
    assert (np.diff(edges) > 0).all()

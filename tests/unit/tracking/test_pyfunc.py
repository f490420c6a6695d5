"""What a model answers without a column, to rows of any index, and a pipeline to rows that a stage leaves out."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ColumnError
from sparktorch.tracking.pyfunc import PyFuncModel, PyFuncPipeline
from tests.support.models import trained_module


class Sum(nn.Module):
    """Of two columns."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


def stage(column: str, made: str, invalid: str) -> PyFuncModel:
    """A layer that adds an array of three elements to rows that have one."""
    inputs = [TensorSpec(name="x0", column=column, dtype="float32", shape=(3,))]
    trained = trained_module(nn.Linear, params={"in_features": 3, "out_features": 3}, inputs=inputs)
    return PyFuncModel(trained, {"inputs": [column], "outputs": {"prediction": made}, "invalid": invalid}, "cpu")


def test_rows_that_a_stage_leaves_out_are_null_and_do_not_reach_the_next() -> None:
    pipeline = PyFuncPipeline([stage("x", "hidden", "skip"), stage("hidden", "y", "error")])
    rows = [[1.0, 2.0, 3.0], None, [4.0, 5.0, 6.0], [float("nan"), 0.0, 0.0]]
    found = pipeline.predict(pd.DataFrame({"x": rows}))
    assert list(found) == ["hidden", "y"]
    for name in found:
        assert found[name].isna().tolist() == [False, True, False, True]
    good = pipeline.predict(pd.DataFrame({"x": rows[::2]}))
    for name in found:
        np.testing.assert_allclose(np.stack(found[name].dropna()), np.stack(good[name]), atol=1e-6)
    none = pipeline.predict(pd.DataFrame({"x": [None, None]}))
    assert none.isna().all(axis=None)
    assert none.shape == (2, 2)


def test_a_column_that_is_missing_is_named() -> None:
    model = stage("x", "y", "error")
    for rows in (pd.DataFrame({"X": [[1.0, 2.0, 3.0]]}), {"X": np.ones((1, 3))}):
        with pytest.raises(ColumnError, match=r"there is no column 'x'(.|\n)*'X'") as caught:
            model.predict(rows)  # type: ignore[arg-type]
        assert caught.value.where == {"column": "x"}


def test_rows_need_not_name_their_columns_when_they_are_iterated() -> None:
    names = ("a", "b")
    inputs = [TensorSpec(name=f"x{at}", column=name, dtype="float32", shape=()) for at, name in enumerate(names)]
    trained = trained_module(Sum, inputs=inputs)
    model: Any = PyFuncModel(trained, {"inputs": [*names], "outputs": {"prediction": "y"}}, "cpu")
    rows = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]}).astype(np.float32)
    expected = model.predict(rows)
    structured = rows.to_records(index=False).view(np.ndarray)
    for given in (structured, pa.Table.from_pandas(rows)):
        pd.testing.assert_frame_equal(model.predict(given), expected)
    for wrong in (structured[["a"]], pa.Table.from_pandas(rows[["a"]]), rows.to_numpy(), rows["a"].to_numpy().tolist()):
        with pytest.raises(ColumnError, match=r"there is no column '[ab]'"):
            model.predict(wrong)


@pytest.mark.parametrize("index", [[7, 3, 5], ["a", "a", "b"], []])
@pytest.mark.parametrize("invalid", ["error", "keep", "skip"])
def test_rows_keep_the_index_that_they_come_with(invalid: str, index: list[Any]) -> None:
    draw = np.random.default_rng(0).normal(size=(len(index), 3))
    rows = pd.DataFrame({"x": [*draw]}, index=pd.Index(index, name="key"))
    model = stage("x", "y", invalid)
    scored = model.predict(rows)
    pd.testing.assert_index_equal(scored.index, rows.index)
    alone = [model.predict(rows.iloc[[place]])["y"].iloc[0] for place in range(len(rows))]
    for row, expected in zip(scored["y"], alone, strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-6)
    pipeline = PyFuncPipeline([stage("x", "hidden", invalid), stage("hidden", "y", "error")])
    both = pipeline.predict(rows)
    pd.testing.assert_index_equal(both.index, rows.index)
    assert list(both) == ["hidden", "y"]
    assert model.predict({"x": draw}).index.equals(pd.RangeIndex(len(index)))  # type: ignore[arg-type]


@pytest.mark.parametrize("invalid", ["error", "keep"])
@pytest.mark.parametrize(
    "values",
    [
        pd.Series(pd.to_datetime(["2024-01-02", None])),
        pd.Series(pd.to_datetime(["2024-01-02", "2024-01-03"], utc=True)),
        pd.Series(pd.to_timedelta([1, 2], unit="s")),
        pd.Series([date(2024, 1, 2)] * 2),
        pd.Series([1.5, "1"], dtype=object),
        pd.Series(["1", "2"], dtype="string"),
        np.array(["1", "2"]),
        np.array([b"1", b"2"]),
    ],
)
def test_times_and_text_are_no_numbers(values: Any, invalid: str) -> None:
    names = ("a", "b")
    inputs = [TensorSpec(name=f"x{at}", column=name, dtype="float64", shape=()) for at, name in enumerate(names)]
    settings = {"inputs": [*names], "outputs": {"prediction": "y"}, "invalid": invalid}
    model: Any = PyFuncModel(trained_module(Sum, inputs=inputs), settings, "cpu")
    with pytest.raises(ColumnError, match="column 'b' holds no numbers") as refused:
        model.predict({"a": [1.0, 2.0], "b": values})
    assert refused.value.where == {"column": "b"}


def two_columns() -> PyFuncModel:
    inputs = [TensorSpec(name=f"x{at}", column=name, dtype="float64", shape=()) for at, name in enumerate("ab")]
    return PyFuncModel(
        trained_module(Sum, inputs=inputs), {"inputs": ["a", "b"], "outputs": {"prediction": "y"}}, "cpu"
    )


def test_a_pipeline_reads_the_row_that_mlflow_makes_of_a_dict_of_columns() -> None:
    inputs = [TensorSpec(name=f"x{at}", column=name, dtype="float64", shape=()) for at, name in enumerate("yc")]
    settings = {"inputs": ["y", "c"], "outputs": {"prediction": "z"}}
    pipeline = PyFuncPipeline([two_columns(), PyFuncModel(trained_module(Sum, inputs=inputs), settings, "cpu")])
    columns = {"a": [1.0, 2.0], "b": [3.0, 4.0], "c": [5.0, 6.0], "note": "x"}
    scored = pipeline.predict(pd.DataFrame({name: [value] for name, value in columns.items()}))
    assert scored["z"].tolist() == [9.0, 12.0]


def test_a_row_of_lists_that_has_no_column_or_lists_of_several_lengths_is_refused() -> None:
    with pytest.raises(ColumnError, match=r"there is no column 'a'(.|\n)*'A'"):
        two_columns().predict(pd.DataFrame({"A": [1.0], "z": [2.0]}))
    with pytest.raises(ColumnError, match="have different numbers of rows"):
        two_columns().predict(pd.DataFrame({"a": [[1.0, 2.0]], "b": [[3.0]]}))

"""One row in this process: its values are found by the names by which a DataFrame's columns are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pyspark.sql import Row
from torch import nn

from sparktorch import TorchModel
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ColumnError
from sparktorch.ml.scoring.single_row import columns_of
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.dry_run import OutputSpec

NUMBER = TensorSpec(name="x0", column="x", dtype="float32")
FILLED = TensorSpec(name="x0", column="x", dtype="float32", fill=7.0)
LIST = TensorSpec(name="x0", column="x", dtype="float32", shape=(2,))


class Total(nn.Module):
    """Returns the sum of a row's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), -1).sum(1) + self.bias


def model_of(spec: TensorSpec, column: str, **params: Any) -> TorchModel:
    trained = TrainedModule(
        source=Total,
        params={},
        weights=pack_state(Total().state_dict()),
        inputs=(spec,),
        outputs=(OutputSpec("", ()),),
        task="generic",
    )
    return TorchModel()._with(trained, None)._set(featuresCol=column, **params)


@pytest.mark.parametrize(
    ("spec", "column", "row", "expected"),
    [
        (NUMBER, "`a.b`", Row(**{"a.b": 2.0}), 2.0),
        (NUMBER, "`a.b`", {"a.b": 2.0, "a": {"b": 3.0}}, 2.0),
        (NUMBER, "`my col`", {"MY COL": 2.0}, 2.0),
        (NUMBER, "a.b", Row(a=Row(b=2.0)), 2.0),
        (LIST, "items.p", Row(items=[Row(p=1.0, q=5.0), Row(p=2.0, q=5.0)]), 3.0),
        (FILLED, "a.b.c", {"a": {"b": None}}, 7.0),
    ],
)
def test_a_row_is_read_by_the_names_that_fit_takes(spec: TensorSpec, column: str, row: Any, expected: float) -> None:
    assert model_of(spec, column).predict(row) == expected


@pytest.mark.parametrize(
    ("column", "row", "expected"),
    [
        ("Text", {"text": 2.0, "n": 3.0}, {"text": 2.0, "n": 3.0}),
        ("Text", {"Text": {"text": 2.0, "n": 3.0}}, {"text": 2.0, "n": 3.0}),
        ("other", {"OTHER": {"text": 2.0, "n": 3.0}}, {"text": 2.0, "n": 3.0}),
    ],
)
def test_a_struct_is_told_from_a_row_that_has_one(column: str, row: Any, expected: dict[str, Any]) -> None:
    spec = TensorSpec(name="x0", column=column, dtype="float32", kind="any", sql="struct<text:double,n:double>")
    (found,) = columns_of(row, [spec])
    assert found.to_pylist() == [expected]


@pytest.mark.parametrize(
    ("column", "row"),
    [
        ("data", {"data": b"png", "id": 1}),
        ("image", {"image": b"png", "content": "of another column"}),
        ("image", {"content": b"png", "path": "a.png"}),
    ],
)
def test_an_image_is_told_from_a_row_that_has_one(column: str, row: Any) -> None:
    spec = TensorSpec(name="x0", column=column, dtype="uint8", shape=(3, 4, 4), kind="binary", layout="image")
    (found,) = columns_of(row, [spec])
    assert found.to_pylist() == [b"png"]


def test_an_image_of_sparks_source_is_a_struct_whatever_its_column_is_called() -> None:
    spec = TensorSpec(name="x0", column="data", dtype="uint8", shape=(3, 4, 4), kind="binary", layout="image")
    image = {"height": 1, "width": 1, "nChannels": 3, "data": b"abc"}
    assert columns_of({**image, "mode": 16}, [spec])[0].to_pylist() == [image]
    with pytest.raises(ColumnError, match="the row has no column 'data'"):
        columns_of({"height": 1, "id": 3}, [spec])


def test_what_a_null_struct_holds_is_null() -> None:
    assert model_of(NUMBER, "a.b", handleInvalid="keep").predict(Row(a=None)) is None
    with pytest.raises(ColumnError, match="null"):
        model_of(NUMBER, "a.b").predict(Row(a=None))


@pytest.mark.parametrize("row", [{"a": {"c": 1.0}}, {"a": [{"c": 1.0}]}])
def test_a_row_without_the_column_is_refused(row: Any) -> None:
    with pytest.raises(ColumnError, match=r"the row has no column 'a\.b'"):
        model_of(NUMBER, "a.b").predict(row)

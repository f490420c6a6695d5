"""Every kind of column, fitted and scored beside the tensors that it should become, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchRegressor
from sparktorch.data.columns import InputOptions, TensorSpec
from sparktorch.data.fields.kinds import kind_of
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ColumnError
from sparktorch.spark.compat import table_of
from sparktorch.spark.frame.encoding import input_columns
from sparktorch.spark.frame.prepare import prepare
from tests.spark.columns import Flat, Mixed, Padded
from tests.spark.scored import sorted_rows
from tests.support.mlflow import QUIET

pytestmark = QUIET

ROWS, WIDTH = 60, 6

KINDS = ["tinyint", "smallint", "int", "bigint", "float", "double", "decimal(9,2)", "boolean"]


X = torch.from_numpy(np.random.default_rng(3).integers(0, 4, (ROWS, WIDTH)).astype(np.float32))
LENGTHS = torch.from_numpy(np.random.default_rng(1).integers(1, WIDTH + 1, ROWS))
MASK = torch.arange(WIDTH) < LENGTHS[:, None]


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    x = X.numpy()
    table = pd.DataFrame(
        {
            "id": np.arange(ROWS),
            "target": x @ np.linspace(-1, 1, WIDTH, dtype=np.float32),
            "plain": list(x),
            "short": list((X * MASK).numpy()),
            "ragged": [row[:length] for row, length in zip(x, LENGTHS, strict=True)],
            "blob": [row.astype("<f8").tobytes() for row in x],
        }
    )
    schema = "id long, target float, plain array<float>, short array<float>, ragged array<float>, blob binary"
    data = spark.createDataFrame(table, schema)
    vector = F.udf(lambda row, kind: _vector(row, kind), VectorUDT())
    nested = F.transform(F.sequence(F.lit(0), F.lit(2)), lambda i: F.slice("plain", i * 2 + 1, 2))
    numbers = [F.get("plain", F.lit(i)).cast(kind).alias(f"c{i}") for i, kind in enumerate(KINDS[:WIDTH])]
    mixed = F.pmod("id", F.lit(2)).cast("int")
    return data.select(
        "*",
        *numbers,
        (F.get("plain", F.lit(0)) > 1).alias("flag"),
        F.get("plain", F.lit(6 - 1)).cast("decimal(9,2)").alias("exact"),
        vector("plain", F.lit(0)).alias("dense"),
        vector("plain", F.lit(1)).alias("sparse"),
        vector("plain", mixed).alias("mixed"),
        nested.alias("nested"),
        F.transform("ragged", lambda v: v.cast("int")).alias("tokens"),
    ).cache()


def _vector(row: list[float], sparse: int) -> Any:
    return Vectors.sparse(len(row), [(i, v) for i, v in enumerate(row) if v]) if sparse else Vectors.dense(row)


def fit(data: DataFrame, *inputs: str, **params: Any) -> Any:
    given = {"module": Flat, "labelCol": "target", "idCol": "id", "batchSize": 16, "numWorkers": 2, "seed": 5}
    names = {"featuresCol": inputs[0]} if len(inputs) == 1 else {"inputCols": list(inputs)}
    return TorchRegressor(**{**given, **names, "learningRate": 0.1, "progress": False, **params}).fit(data)


def scores(model: Any, data: DataFrame) -> list[float]:
    return [row["prediction"] for row in sorted_rows(model.transform(data).select("id", "prediction"), "id")]


def same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    return all(torch.equal(found, wanted) for found, wanted in pairs)


class Fitted(NamedTuple):
    """A model, and what it scores the rows that it was fitted on."""

    model: Any
    scores: list[float]


def fitted(data: DataFrame, *inputs: str, **params: Any) -> Fitted:
    model = fit(data, *inputs, **params)
    return Fitted(model, scores(model, data))


@pytest.fixture(scope="module")
def models(rows: DataFrame) -> dict[str, Fitted]:
    padded: dict[str, Any] = {"module": Padded, "inputLayouts": {"ragged": "padded"}}
    return {
        "between": fitted(rows, "c0", "short", "c4", "c5", assembleInputs=True, moduleParams={"width": 9}),
        "sparse": fitted(rows, "sparse", moduleParams={"expects": ["float32 2"]}),
        "ragged": fitted(rows, "ragged", moduleParams={"expects": "float32", "pad": 0}, **padded),
    }


def arguments(data: DataFrame, *inputs: str, **options: Any) -> list[torch.Tensor]:
    """What ranks make of all rows."""
    frame = prepare(data, "generic", inputs=inputs, label=None, key="id", options=InputOptions(**options))
    return taken(frame.columns.inputs, sent_as_one(frame.data))


def sent_as_one(data: DataFrame) -> pa.RecordBatch:
    (sent,) = table_of(data).combine_chunks().to_batches()
    return sent


def taken(specs: Sequence[TensorSpec], sent: pa.RecordBatch) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for spec in specs:
        field = kind_of(spec).field(spec, RowStorage())
        field.append(sent.column(spec.name))
        field.finish()
        found += field.take(torch.arange(sent.num_rows))
    return found


SCALARS = tuple(f"c{i}" for i in range(WIDTH))
RAW: dict[str, Any] = {"layouts": {"blob": "raw"}, "dtypes": {"blob": "float64"}, "shapes": {"blob": (2, 3)}}
PADDED_TOKENS: dict[str, Any] = {"layouts": {"tokens": "padded"}, "pads": {"tokens": -9}}
CUT: dict[str, Any] = {"layouts": {"ragged": "padded"}, "limits": {"ragged": 3}}


@pytest.mark.parametrize(
    ("inputs", "options", "expected"),
    [
        pytest.param(SCALARS, {}, [*X[:, :4].long().T, *X[:, 4:].T], id="scalars"),
        pytest.param((*SCALARS[:-1], "exact"), {"assemble": True}, [X], id="scalars in one tensor"),
        pytest.param(("mixed",), {}, [X], id="mixed vectors"),
        pytest.param(("nested",), {}, [X.view(ROWS, 3, 2)], id="nested arrays"),
        pytest.param(("plain",), {"shapes": {"plain": (2, 3, 1)}}, [X.view(ROWS, 2, 3, 1)], id="arrays reshaped"),
        pytest.param(("plain",), {"dtypes": {"plain": "int64"}}, [X.long()], id="other dtypes"),
        pytest.param(("blob",), RAW, [X.double().view(ROWS, 2, 3)], id="raw bytes"),
        pytest.param(("tokens",), PADDED_TOKENS, [X.long().where(MASK, -9), MASK], id="padded rows"),
        pytest.param(("ragged",), CUT, [(X * MASK)[:, :3], MASK[:, :3]], id="rows that are cut off"),
    ],
)
def test_a_column_becomes_the_tensor_made_by_hand(
    rows: DataFrame, inputs: tuple[str, ...], options: dict[str, Any], expected: list[torch.Tensor]
) -> None:
    torch.testing.assert_close(arguments(rows, *inputs, **options), expected, rtol=0, atol=0)


def test_vectors_become_one_sparse_tensor_and_rows_of_unequal_length_one_jagged_tensor(rows: DataFrame) -> None:
    (found,) = arguments(rows, "mixed", layouts={"mixed": "sparse_csr"})
    assert found.layout == torch.sparse_csr
    assert torch.equal(found.to_dense(), X)
    (found,) = arguments(rows, "ragged", layouts={"ragged": "jagged"})
    assert torch.equal(found.offsets().diff(), LENGTHS)  # type: ignore[attr-defined]  # torch's nested
    assert torch.equal(found.values(), X[MASK])


@pytest.mark.parametrize(("name", "by_hand"), [("sparse", "plain"), ("ragged", "short")])
def test_sparse_vectors_and_padded_rows_train_and_score_as_the_tensor_made_by_hand(
    rows: DataFrame, models: dict[str, Fitted], name: str, by_hand: str
) -> None:
    expected = fitted(rows, by_hand)
    assert same_weights(models[name].model, expected.model)
    np.testing.assert_allclose(models[name].scores, expected.scores, atol=1e-5)


def test_a_scorer_makes_of_columns_the_tensors_made_by_hand(rows: DataFrame) -> None:
    found = fitted(
        rows,
        *("mixed", "ragged", "tokens", "blob", "plain"),
        module=Mixed,
        inputLayouts={"mixed": "sparse_csr", "ragged": "jagged", "tokens": "padded", "blob": "raw"},
        maxLengths={"tokens": 3},
        padValues={"tokens": -9},
        inputShapes={"blob": (2, 3), "plain": (3, 2)},
        inputDtypes={"blob": "float64", "plain": "int64"},
    )
    jagged = torch.nested.nested_tensor([row[mask] for row, mask in zip(X, MASK, strict=True)], layout=torch.jagged)
    padded = X.long().where(MASK, -9)[:, :3], MASK[:, :3]
    by_hand = [X.to_sparse_csr(), jagged, *padded, X.double().view(ROWS, 2, 3), X.long().view(ROWS, 3, 2)]
    np.testing.assert_allclose(found.scores, found.model.module(*by_hand).detach()[:, 0], atol=1e-5)


def test_a_model_scores_other_columns_of_the_same_meaning(rows: DataFrame, models: dict[str, Fitted]) -> None:
    sparse = models["sparse"]
    for other in ("dense", "mixed", "plain"):
        np.testing.assert_allclose(scores(sparse.model.copy().setFeaturesCol(other), rows), sparse.scores, atol=1e-5)
    with pytest.raises(ColumnError, match="'nested' is array<array<float>>, but the model was fitted on column"):
        sparse.model.copy().setFeaturesCol("nested").transform(rows)


@pytest.mark.landing
def test_images_are_their_pixels_whichever_of_sparks_sources_reads_them(spark: SparkSession, tmp_path: Path) -> None:
    pixels = np.random.default_rng(7).integers(0, 256, (5, 4, 5, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    files = spark.read.format("binaryFile").load(str(tmp_path)).withColumn("file", F.struct("*"))
    source = spark.read.format("image").load(str(tmp_path)).withColumn("path", F.col("image.origin"))
    name = F.substring_index("path", "/", -1).alias("id")
    data = files.select(name, "content", "file").join(source.select(name, "image"), "id").coalesce(1).sort("id")
    expected = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    as_bytes: dict[str, Any] = {"layouts": {"content": "image"}}
    for column, options in (("content", as_bytes), ("file", {}), ("image", {})):
        torch.testing.assert_close(arguments(data, column, **options), [expected], rtol=0, atol=1e-6)
    # A model that was fitted on bytes scores what the other sources read.
    frame = prepare(data, "generic", inputs=["content"], label=None, key="id", options=InputOptions(**as_bytes))
    for column in ("file", "image"):
        other = data.select(F.col(column).alias("content"))
        sent = sent_as_one(other.select(*input_columns(other, frame.columns.inputs)))
        torch.testing.assert_close(taken(frame.columns.inputs, sent), [expected], rtol=0, atol=1e-6)
    (tmp_path / "broken.png").write_bytes(b"no image")
    broken = spark.read.format("image").load(str(tmp_path))
    found = prepare(broken, "generic", inputs=["image"], label=None, options=InputOptions(drop=True)).data
    assert sorted(row["x0"] is None for row in found.collect()) == [False] * 5 + [True]


def test_several_labels_come_as_one_tensor(rows: DataFrame) -> None:
    model = fit(rows, "plain", labelCol=None, labelCols=["c0", "target"], moduleParams={"outputs": 2})
    both = rows.withColumn("both", F.array(F.col("c0").cast("float"), "target"))
    frames = (prepare(both, "regression", inputs=["plain"], label=of, key="id") for of in (["c0", "target"], "both"))
    assert len({str(frame.data.select("y").collect()) for frame in frames}) == 1
    assert len(model.transform(rows).first()["prediction"]) == 2


# Where the nulls are, and what filling them with 2 makes of the column.
HOLES = {
    "plain": (
        "case when id % 12 = 1 then null when id % 12 = 2 then transform(plain, (x, i) -> if(i = 1, null, x)) "
        "when id % 12 = 3 then transform(plain, (x, i) -> if(i = 1, float('NaN'), x)) else plain end",
        "transform(coalesce(plain, array_repeat(2f, 6)), x -> if(isnull(x) or isnan(x), 2f, x))",
    ),
    "sparse": ("if(id % 12 = 4, null, sparse)", ""),
    "c4": ("if(id % 12 = 5, null, c4)", "coalesce(c4, 2f)"),
}


def test_rows_with_nulls_are_an_error_left_out_or_filled(rows: DataFrame) -> None:
    data = rows.withColumns({name: F.expr(holes) for name, (holes, _) in HOLES.items()})
    more: dict[str, Any] = {"numWorkers": 1, "moduleParams": {"width": 13}}
    with pytest.raises(ColumnError, match=r"column 'plain' has 10 rows with null values; (.|\n)*nullPolicy"):
        fit(data, *HOLES, **more)

    dropped = fit(data, *HOLES, nullPolicy="drop", **more)
    assert (dropped.summary.droppedRows, dropped.summary.rows) == (25, ROWS - 25)
    assert same_weights(dropped, fit(rows.where(~(F.col("id") % 12).isin(1, 2, 3, 4, 5)), *HOLES, **more))

    filled = fit(data, *HOLES, nullPolicy="fill", fillValue=2.0, **more)
    by_hand = data.withColumns({name: _filled(name) for name in HOLES})
    expected = fit(by_hand, *HOLES, **more)
    assert same_weights(filled, expected)
    np.testing.assert_allclose(scores(filled, data), scores(expected, by_hand), atol=1e-5)


def _filled(name: str) -> Column:
    if name != "sparse":
        return F.expr(HOLES[name][1])
    twos = F.array_repeat(F.lit(2.0).cast("float"), WIDTH)
    return F.when(F.col("sparse").isNull(), twos).otherwise(vector_to_array("sparse", "float32"))


def test_vectors_and_arrays_of_the_same_numbers_have_the_same_keys(rows: DataFrame) -> None:
    def keys(column: str) -> list[int]:
        frame = prepare(rows, "generic", inputs=[column], label=None)
        return sorted(row["k"] for row in frame.data.select("k").collect())

    assert keys("dense") == keys("plain")

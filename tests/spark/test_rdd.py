"""RDDs of tensors: what DataFrames become, and the way back; fits on RDDs; partitions with an open group."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.linalg import Vectors
from pyspark.sql import DataFrame, Row, SparkSession

import sparktorch
from sparktorch import RunContext, TorchCrossValidator, TorchRegressor, collective_map, tensor_rdd, to_dataframe
from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ClusterError, ColumnError, ConfigError, RankError
from sparktorch.spark.rdd import _tensors

SCHEMA = "i int, b bigint, d double, f float, t boolean, m decimal(5,2), x array<float>, g array<array<double>>"


@pytest.fixture(scope="module")
def kinds(spark: SparkSession) -> DataFrame:
    rows = [
        (i, 2**40 + i, i / 3, i / 4, i % 2 == 0, Decimal(i), [float(i), 1.0], [[float(i), 2.0, 3.0], [4.0, 5.0, 6.0]])
        for i in range(10)
    ]
    return spark.createDataFrame(rows, SCHEMA).repartition(3, "i").sortWithinPartitions("i")


def test_each_kind_of_column_becomes_a_tensor_of_its_values(kinds: DataFrame) -> None:
    batches = tensor_rdd(kinds, batch_size=3).collect()
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    order = whole["i"].argsort()
    dtypes = {"i": torch.int32, "b": torch.int64, "d": torch.float64, "f": torch.float32, "t": torch.int8}
    dtypes |= {"m": torch.float64, "x": torch.float32, "g": torch.float64}
    assert {name: tensor.dtype for name, tensor in whole.items()} == dtypes
    for name, tensor in whole.items():
        expected = [row[name] for row in sorted(kinds.collect())]
        np.testing.assert_array_equal(tensor[order].numpy(), np.array(expected).astype(tensor.numpy().dtype))
    assert all(len(batch["i"]) <= 3 for batch in batches)
    assert sum(len(batch["i"]) < 3 for batch in batches) <= 3  # the last one of a partition


def test_vectors_and_chosen_dtypes_and_columns(spark: SparkSession) -> None:
    rows = [(Vectors.sparse(3, {1: 2.0}), 1.5), (Vectors.dense([1.0, 2.0, 3.0]), 2.5)]
    data = spark.createDataFrame(rows, ["v", "y"]).coalesce(1)
    (batch,) = tensor_rdd(data, ["v", "y"], dtypes={"v": "float32"}).collect()
    assert torch.equal(batch["v"], torch.tensor([[0.0, 2.0, 0.0], [1.0, 2.0, 3.0]]))
    assert batch["y"].tolist() == [1.5, 2.5]
    assert list(tensor_rdd(data, ["y"]).first()) == ["y"]


def test_tensors_share_the_memory_that_arrow_arrived_in() -> None:
    values = np.arange(12, dtype=np.float32)
    columns = [pa.ListArray.from_arrays(pa.array([0, 4, 8, 12], pa.int32()), pa.array(values))]
    schema = pa.schema([("x0", columns[0].type)])
    message = pa.RecordBatch.from_arrays(columns, schema=schema).serialize().to_pybytes()
    spec = TensorSpec(name="x0", column="x", dtype="float32", shape=(0,))
    start = pa.py_buffer(message).address
    for size in (None, 2):
        batches = list(_tensors([spec], schema, size, [message]))
        assert all(start <= batch["x"].data_ptr() < start + len(message) for batch in batches)
        assert torch.equal(torch.cat([batch["x"] for batch in batches]), torch.arange(12.0).reshape(3, 4))


def test_a_null_and_another_length_are_refused_by_column(spark: SparkSession) -> None:
    null = spark.createDataFrame([(1.0,), (1.0,), (None,)], "y double").coalesce(1)
    ragged = spark.createDataFrame([([1.0, 2.0],), ([3.0, 4.0],), ([1.0],)], "x array<double>").coalesce(1)
    for size in (None, 2):
        with pytest.raises(Exception, match=r"column 'y' has 1 row with null values \[column=y, row=2\]"):
            tensor_rdd(null, batch_size=size).collect()
        with pytest.raises(Exception, match=r"column 'x'.*row=2"):
            tensor_rdd(ragged, batch_size=size).collect()
    with pytest.raises(ColumnError, match="'s'"):
        tensor_rdd(spark.createDataFrame([("a",)], "s string"))
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        tensor_rdd(null, batch_size=0)


def test_a_dataframe_of_tensors_is_the_one_they_came_from(kinds: DataFrame) -> None:
    columns = ["i", "b", "d", "f", "x", "g"]
    back = to_dataframe(tensor_rdd(kinds.select(*columns), batch_size=4))
    assert back.dtypes == kinds.select(*columns).dtypes
    assert sorted(back.collect()) == sorted(kinds.select(*columns).collect())


def test_rows_of_arrays_numbers_and_tuples_become_rows(spark: SparkSession) -> None:
    dicts = spark.sparkContext.parallelize([{"x": np.arange(3.0) + i, "n": i, "s": str(i)} for i in range(2000)], 3)
    frame = to_dataframe(dicts)
    assert frame.dtypes == [("x", "array<double>"), ("n", "bigint"), ("s", "string")]
    assert sorted(row["n"] for row in frame.collect()) == list(range(2000))
    assert frame.filter("n = 1999").first() == Row(x=[1999.0, 2000.0, 2001.0], n=1999, s="1999")
    tuples = spark.sparkContext.parallelize([(np.ones(2), 1), (np.zeros(2), 2)], 2)
    typed = to_dataframe(tuples, "x array<float>, y double")
    assert typed.dtypes == [("x", "array<float>"), ("y", "double")]
    assert sorted(row["y"] for row in typed.collect()) == [1.0, 2.0]
    both = spark.sparkContext.parallelize([{"n": 1}, {"n": 2}, {"n": torch.tensor([3, 4])}, {"n": 5}], 1)
    assert [row["n"] for row in to_dataframe(both, "n int").collect()] == [1, 2, 3, 4, 5]
    vectors = spark.sparkContext.parallelize([{"v": Vectors.dense([1.0, 2.0]), "n": 1}], 1)
    assert to_dataframe(vectors).dtypes == [("v", "vector"), ("n", "bigint")]
    halves = spark.sparkContext.parallelize([{"h": torch.ones(2).half(), "u": torch.tensor([200, 1]).byte()}], 1)
    assert to_dataframe(halves).collect() == [Row(h=1.0, u=200), Row(h=1.0, u=1)]

    other = spark.sparkContext.parallelize([{"x": 1}, {"x": 2, "y": 3}], 1)
    with pytest.raises(Exception, match="an element has 'x', 'y', and the columns are 'x'"):
        to_dataframe(other).collect()
    with pytest.raises(Exception, match="the column has null values, and the schema says NOT NULL"):
        to_dataframe(spark.sparkContext.parallelize([(None,)], 1), "x int NOT NULL").collect()
    uneven = spark.sparkContext.parallelize([{"x": torch.ones(2), "y": torch.ones(3)}], 1)
    with pytest.raises(ColumnError, match=r"other numbers of rows in its columns: \{'x': 2, 'y': 3\}"):
        to_dataframe(uneven)
    for wrong in ("float", "x int, x int"):
        with pytest.raises(ConfigError, match="not one of columns with a name each"):
            to_dataframe(tuples, wrong)
    with pytest.raises(ConfigError, match="pass schema="):
        to_dataframe(tuples)
    with pytest.raises(ConfigError, match="the RDD is empty"):
        to_dataframe(spark.sparkContext.emptyRDD())
    with pytest.raises(Exception, match="an element has 2 values, and the columns are 'x'"):
        to_dataframe(tuples, "x array<float>").collect()


def test_a_fit_and_a_run_on_an_rdd_are_those_on_the_dataframe(frame: DataFrame) -> None:
    regressor = TorchRegressor(
        module="torch.nn:Linear",
        moduleParams={"in_features": 5, "out_features": 1},
        labelCol="target",
        numWorkers=2,
        progress=False,
    )
    expected = regressor.fit(frame).module.state_dict()
    rows = frame.rdd.map(lambda row: {"features": np.float32(row.features), "target": np.float32(row.target)})
    for rdd in (tensor_rdd(frame, ["features", "target"]), rows):
        model = regressor.fit(rdd)
        torch.testing.assert_close(model.module.state_dict(), expected, atol=1e-5, rtol=0)
    scored = [row.prediction for row in model.transform(rows).collect()]
    assert scored == pytest.approx([row.prediction for row in model.transform(frame).collect()], abs=1e-6)
    targets = frame.rdd.map(lambda row: {"features": np.float32(row.features), "target": row.target})
    assert model.setLabelCol("target").evaluate(targets).numInstances == 1001
    search = {"estimator": regressor, "estimatorParamMaps": [{}], "evaluator": RegressionEvaluator(labelCol="target")}
    assert len(TorchCrossValidator(**search, numFolds=2).fit(rows).avgMetrics) == 1
    doors = (model.transform, model.evaluate, regressor.fit, regressor.prepare, regressor.plan)
    for door in (*doors, TorchCrossValidator(**search).fit, lambda data: regressor.fitMultiple(data, [{}])):
        with pytest.raises(ConfigError, match="takes a DataFrame of Spark's, and got numpy's ndarray"):
            door(np.ones((2, 5)))
    hints = {"createDataFrame": frame.limit(2).toPandas(), "pass the rows": None, "agg": frame.groupBy("label")}
    for hint, data in (*hints.items(), ("to_spark", frame.select("label").pandas_api())):
        with pytest.raises(ConfigError) as caught:
            model.evaluate(data)
        assert hint in caught.value.hint

    def counted(context: RunContext) -> int:
        return len(context.dataset)

    assert sum(sparktorch.run(counted, tensor_rdd(frame, ["features"]), numWorkers=2, progress=False)) == 1001


def test_partitions_add_up_with_an_open_group_as_by_tree_aggregate(spark: SparkSession) -> None:
    def squares(elements: Any, context: RunContext, power: int) -> tuple[int, np.ndarray[Any, Any]]:
        own = [np.asarray(element, np.float64) ** power for element in elements]
        return len(own), context.all_reduce(sum(own, np.zeros(2)))

    rdd = spark.sparkContext.parallelize([(i, i + 1) for i in range(5)], 2).union(spark.sparkContext.emptyRDD())
    rdd = rdd.repartition(3) if rdd.getNumPartitions() != 3 else rdd
    results = collective_map(rdd, squares, args=[2])
    expected = rdd.treeAggregate(np.zeros(2), lambda a, b: a + np.square(b), np.add)
    assert sum(count for count, _ in results) == 5
    assert len(results) == rdd.getNumPartitions()
    for _, total in results:
        np.testing.assert_array_equal(total, expected)
    fewer = spark.sparkContext.parallelize([(1, 2), (3, 4), (5, 6)], 3).coalesce(2)  # no barrier stage takes it as is
    parts = fewer.glom().collect()
    assert collective_map(fewer, lambda elements, context: list(elements)) == parts
    assert len(parts) == 2


def test_a_function_of_elements_saves_no_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    def saves(elements: Any, context: RunContext) -> bool:
        context.save({"sum": sum(elements)})
        return context.restored is None

    rdd = spark.sparkContext.parallelize(range(6), 2)
    assert collective_map(rdd, saves, checkpointDir=str(tmp_path / "saved")) == [True, True]
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_partition_that_raises_is_named_and_what_cannot_run_is_refused(spark: SparkSession) -> None:
    def fails(elements: Any, context: RunContext) -> None:
        if context.rank == 1:
            raise ValueError(f"cannot take {next(elements)}")
        context.barrier()

    rdd = spark.sparkContext.parallelize(["a", "b"], 2)
    with pytest.raises(RankError, match="ValueError while running: cannot take b") as caught:
        collective_map(rdd, fails)
    assert caught.value.where["rank"] == 1
    with pytest.raises(ConfigError, match="the RDD has 2 partitions"):
        collective_map(rdd, fails, numWorkers=3)
    with pytest.raises(ConfigError, match="numWorkers must be at least 1"):
        collective_map(spark.sparkContext.emptyRDD(), fails)
    with pytest.raises(ConfigError, match="collective_map takes an RDD"):
        collective_map([1, 2], fails)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="numWorkers=9"):
        collective_map(rdd.repartition(9), fails, startTimeout=1)

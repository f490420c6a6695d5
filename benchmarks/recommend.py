"""Lists of the best items for all users: `recommendForAllUsers` beside that of Spark's `ALSModel`.

100,000 users, 20,000 items, vectors of 10 elements, lists of 10, `local[2]`, one torch thread a task, and two shuffle
partitions, which is best for ALS there. ALS fits vectors to random ratings in one iteration, and our model is made of
them. Each side makes its lists of the same vectors, and ends in the noop sink. Their lists are compared first, which
warms them up, too: each has the same scores, and the same items in the same order, but for items whose scores differ by
rounding alone.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.ml.recommendation import ALS, ALSModel
from pyspark.sql import DataFrame, SparkSession

from benchmarks.common import Goal, arguments, interleave, machine, report, seconds, session, workspace
from sparktorch import RecommenderModel

K, RANK = 10, 10
SCORE_TOLERANCE = 1e-5
ALS_SIDE, OURS = "ALSModel", "RecommenderModel"
GOALS = {"ALSModel / RecommenderModel": Goal(3, at_least=True)}


def fitted(spark: SparkSession, path: Path, users: int, items: int) -> ALSModel:
    """Fits ALS on random ratings in which every user and every item occurs."""
    draw = np.random.default_rng(7)
    user = np.concatenate([np.arange(users)] * 5)
    item = np.concatenate([np.arange(items), draw.integers(0, items, len(user) - items)])
    rating = draw.uniform(1, 5, len(user)).astype(np.float32)
    pq.write_table(pa.table({"user": user.astype(np.int32), "item": item.astype(np.int32), "rating": rating}), path)
    als = ALS(rank=RANK, maxIter=1, regParam=0.1, seed=7)
    return als.fit(spark.read.parquet(str(path)))


def same(recommended: DataFrame, expected: DataFrame) -> tuple[int, float]:
    """Compares lists; returns the number of items in another place, and the largest difference of scores by place.

    Raises:
        RuntimeError: Users, lengths or scores differ.
    """
    ours, theirs = (frame.orderBy("user").toArrow() for frame in (recommended, expected))
    if not ours["user"].equals(theirs["user"]):
        raise RuntimeError("the lists are of other users")
    columns = []
    for table in (ours, theirs):
        pairs = table["recommendations"].combine_chunks().flatten()
        if len(pairs) != K * len(table):
            raise RuntimeError(f"{len(pairs)} recommendations for {len(table)} users")
        columns.append([field.to_numpy(zero_copy_only=False).reshape(-1, K) for field in pairs.flatten()])
    (items, scores), (expected_items, expected_scores) = columns
    gap = float(np.abs(scores - expected_scores).max())
    if gap > SCORE_TOLERANCE * float(np.abs(scores).max()):
        raise RuntimeError(f"scores at the same place differ by {gap:g}")
    return int((items != expected_items).sum()), gap


def main() -> None:
    """Measures, and prints the report."""
    options = arguments(__doc__ or "")
    users, items, rounds = (4_000, 2_000, 1) if options.quick else (100_000, 20_000, 5)
    with workspace() as work, session(work, spark__sql__shuffle__partitions="2") as spark:
        als = fitted(spark, work / "ratings.parquet", users, items)
        ours = RecommenderModel.fromFactors(als.userFactors, als.itemFactors)
        swapped, gap = same(ours.recommendForAllUsers(K), als.recommendForAllUsers(K))

        def listed(model: ALSModel | RecommenderModel) -> float:
            return seconds(lambda: model.recommendForAllUsers(K).write.format("noop").mode("overwrite").save())

        sides = {ALS_SIDE: lambda: listed(als), OURS: lambda: listed(ours)}
        samples = interleave(sides, rounds)
    ratio = statistics.median(a / o for a, o in zip(samples[ALS_SIDE], samples[OURS], strict=True))
    facts = machine("torch", "pyspark", "numpy", "pyarrow")
    report(
        "recommend",
        samples={f"{name}, s": values for name, values in samples.items()},
        ratios={"ALSModel / RecommenderModel": ratio},
        goals=GOALS,
        facts={"items in another place": swapped, "largest difference of scores": gap, **facts},
        path=options.json,
    )


if __name__ == "__main__":
    main()

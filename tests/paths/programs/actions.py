"""What users do with rows and a model; each action compares what came of it with what the plain module says."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from kinds import ROWS, Kind
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

_SECONDS = 120


@dataclass
class Way:
    """A model, the rows that it is to score, and a folder to write to."""

    kind: Kind
    model: Any
    rows: DataFrame
    folder: Path
    names: itertools.count[int] = field(default_factory=itertools.count)

    @cached_property
    def expected(self) -> dict[int, dict[str, Any]]:
        """What the plain module says of each row, by `id`."""
        return self.kind.expected(self.model.module)

    @property
    def scored(self) -> DataFrame:
        """The rows with their scores."""
        data: DataFrame = self.model.transform(self.rows)
        return data

    def path(self) -> str:
        """A path that is free."""
        return str(self.folder / f"{next(self.names)}")

    def collected(self, data: DataFrame) -> list[Mapping[str, Any]]:
        """Returns the rows of a query, by way of the files that it writes if it is a stream."""
        if not data.isStreaming:
            return [row.asDict() for row in data.collect()]
        sink = self.path()
        writer = data.writeStream.format("parquet").option("checkpointLocation", self.path())
        _finish(writer.trigger(availableNow=True).start(sink))
        return [row.asDict() for row in data.sparkSession.read.parquet(sink).collect()]


def _finish(query: Any) -> None:
    assert query.awaitTermination(_SECONDS), "the stream has not ended"
    assert query.exception() is None, query.exception()


def compare(found: Iterable[Mapping[str, Any]], expected: Mapping[int, Mapping[str, Any]]) -> None:
    """Fails unless rows with `id` and scores hold what is expected of just these rows, each once."""
    rows = list(found)
    assert sorted(row["id"] for row in rows) == sorted(expected), [row["id"] for row in rows]
    for row in rows:
        for name, value in expected[row["id"]].items():
            score = row[name].toArray() if hasattr(row[name], "toArray") else row[name]
            np.testing.assert_allclose(score, value, atol=1e-5, err_msg=f"{name} of row {row['id']}")


def fit(way: Way) -> None:
    fitted = way.kind.estimator().fit(way.rows)
    assert fitted.summary.rows == ROWS
    found, wanted = fitted.module.state_dict(), way.model.module.state_dict()
    assert all(found[name].equal(wanted[name]) for name in wanted), "other weights than from files, on local"


def collect(way: Way) -> None:
    compare(way.collected(way.scored), way.expected)


def write(way: Way) -> None:
    path = way.path()
    way.scored.write.parquet(path)
    compare(way.collected(way.rows.sparkSession.read.parquet(path)), way.expected)


def agg(way: Way) -> None:
    query = way.scored.groupBy("bucket").agg(F.sum("prediction").alias("total"), F.count("*").alias("rows"))
    if query.isStreaming:
        name = f"totals_{next(way.names)}"
        _finish(
            query.writeStream.format("memory")
            .queryName(name)
            .outputMode("complete")
            .option("checkpointLocation", way.path())
            .trigger(availableNow=True)
            .start()
        )
        query = way.rows.sparkSession.table(name)
    totals: dict[int, float] = defaultdict(float)
    for i, scores in way.expected.items():
        totals[i % 3] += scores["prediction"]
    found = {row["bucket"]: row for row in query.collect()}
    assert {bucket: row["rows"] for bucket, row in found.items()} == dict.fromkeys(totals, ROWS // 3)
    for bucket, total in totals.items():
        np.testing.assert_allclose(found[bucket]["total"], total, rtol=1e-5, atol=1e-4)


def filtered(way: Way) -> None:
    values = sorted({scores["prediction"] for scores in way.expected.values()})
    assert len(values) > 1
    threshold = (values[len(values) // 2 - 1] + values[len(values) // 2]) / 2
    wanted = {i: scores for i, scores in way.expected.items() if scores["prediction"] > threshold}
    compare(way.collected(way.scored.where(F.col("prediction") > threshold)), wanted)


def limit(way: Way) -> None:
    found = way.scored.limit(5).toPandas().to_dict("records")
    assert len(found) == 5
    compare(found, {row["id"]: way.expected[row["id"]] for row in found})


def sql(way: Way) -> None:
    name = f"score_{next(way.names)}"
    way.model.registerUDF(name)
    way.rows.createOrReplaceTempView(f"rows_{name}")
    call = f"{name}({', '.join(way.kind.inputs)})"
    spark = way.rows.sparkSession
    found = way.collected(spark.sql(f"select id, {call} as prediction from rows_{name}"))
    spark.conf.unset("spark.sql.execution.arrow.pythonUDF.columnarInput.enabled")  # `registerUDF` may have set it
    compare(found, {i: {"prediction": scores["prediction"]} for i, scores in way.expected.items()})


def saved(way: Way) -> None:
    path = way.path()
    way.model.save(path)
    loaded = type(way.model).load(path)
    assert loaded.summary == way.model.summary
    compare(way.collected(loaded.transform(way.rows)), way.expected)


ACTIONS = {
    **{"fit": fit, "collect": collect, "write": write, "agg": agg, "filter": filtered, "limit": limit},
    **{"sql": sql, "saved": saved, "stream": collect},
}

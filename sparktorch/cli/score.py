"""Scores rows with a model from MLflow, and writes the scored rows.

The rows are those in the job file's `score.data`, or those that its training held out. An older output is replaced once
all rows are scored. The command also prints how good the predictions are, or why this is not known. Under spark-submit
(jobs/score.py) the session is the submission's.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from sparktorch.base.imports import mlflow
from sparktorch.cli.job_file import JobConfig, read_job
from sparktorch.cli.session import add_session_arguments, session
from sparktorch.errors import ColumnError, ConfigError, counted
from sparktorch.ml.model import TorchModelBase

__all__ = ["HELP", "add_arguments", "run", "score"]

HELP = "score rows with a model from MLflow"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_session_arguments(parser, job=True)
    parser.add_argument("--model", help="URI of the model in MLflow (default: the newest version of the job's)")
    parser.add_argument("--stream", action="store_true", help="score what has arrived since the last time, then stop")
    parser.add_argument("--every", metavar="INTERVAL", help="with --stream: go on, looking this often ('10 seconds')")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns 0."""
    started = time.perf_counter()
    if options.every and not options.stream:
        raise ConfigError("--every goes with --stream")
    job = read_job(options.job)
    # A section or a library that is missing is refused before a session starts.
    if options.stream:
        _ = job.scoring
    else:
        job.to_score()
    mlflow()
    with session(options, f"score {job.name}") as spark:
        score(spark, job, options.model, streamed=options.stream, every=options.every)
    print(f"scoring job: {time.perf_counter() - started:.1f} s")
    return 0


def score(
    spark: SparkSession, job: JobConfig, model_uri: str | None = None, *, streamed: bool, every: str | None = None
) -> None:
    """Scores the job's rows, all at once or `streamed` as they arrive, and prints how many rows were scored.

    If they are not streamed, the rows are scored and evaluated before they replace an older output; a `ColumnError`
    says that there are no rows.
    """
    from sparktorch.tracking import load_model

    job.tracking.connect()
    uri = model_uri or job.scoring.model or f"models:/{job.registered_name}/latest"
    model = load_model(uri)
    if streamed:
        rows = _stream(model.transform((job.scoring.data or job.data).stream(spark)), job, every)
        quality = ""
    else:
        section = job.to_score()
        to_score = section.load(spark) if section else job.rows(spark)[1]
        # The rows are kept on disk, so that they are scored once, and then counted, evaluated and written.
        scored = model.transform(to_score).persist(StorageLevel.DISK_ONLY)
        try:
            rows, quality = evaluated(model, scored, job.label)
            if not rows:
                hint = "what was there is still there; check the path, the filter, or data.holdout"
                raise ColumnError("there are no rows to score", hint=hint, code="ST-NO-ROWS")
            writer = scored.write.mode("overwrite").format(job.scoring.format).options(**job.scoring.options)
            writer.save(job.scoring.output)
        finally:
            scored.unpersist()
    if quality:
        print(quality)
    print(f"scored {rows} rows with {uri} into {job.scoring.output}")


def _stream(scored: DataFrame, job: JobConfig, every: str | None) -> int:
    """Appends scored rows to the output, each exactly once, also after failures; returns the number of rows."""
    # The number is a sum over all progress reports, and by default Spark keeps only the last 100 reports.
    scored.sparkSession.conf.set("spark.sql.streaming.numRecentProgressUpdates", 100_000)
    writer = scored.writeStream.format(job.scoring.format).options(**job.scoring.options)
    writer = writer.option("checkpointLocation", f"{job.scoring.output}.checkpoint")
    writer = writer.trigger(processingTime=every) if every else writer.trigger(availableNow=True)
    query = writer.start(job.scoring.output)
    query.awaitTermination()
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def evaluated(model: Any, scored: DataFrame, label: str) -> tuple[int, str]:
    """Returns the number of scored rows, and a line with a metric of their predictions, or why there is none."""
    rows = scored.count()
    if not rows:
        return 0, ""
    try:
        if not isinstance(model, TorchModelBase):
            raise ConfigError(f"the model is a {type(model).__name__}, whose predictions are not known")
        if not label and model._scores_by_row:
            raise ConfigError("choices are no ratings, with which predictions are compared")
        name, compared, value = model._quality(scored, label)
    except (ColumnError, ConfigError) as error:
        return rows, f"not evaluated: {error.what}"
    if not compared:
        return rows, f"not evaluated: no row has both a prediction and a label in column {label!r}"
    scope = "" if compared == rows else f", of {counted(compared, 'row', 'rows')} with a label and a prediction"
    return rows, f"held-out {name}: {value:.4f}{scope}"

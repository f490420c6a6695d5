"""Scores rows with a model from MLflow, and writes them: those of a job file's `score.data`, or those it held out.

Where the rows have labels, it also prints how good the predictions are. Under spark-submit (jobs/score.py) the
session is the submission's.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.sql import DataFrame, SparkSession

from sparktorch.base.imports import mlflow
from sparktorch.cli.job_file import JobConfig, read_job
from sparktorch.cli.session import add_session_arguments, session
from sparktorch.errors import ConfigError

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
    _ = job.scoring, mlflow()  # what is missing shows before a session starts
    with session(options, f"score {job.name}") as spark:
        score(spark, job, options.model, streamed=options.stream, every=options.every)
    print(f"scoring job: {time.perf_counter() - started:.1f} s")
    return 0


def score(
    spark: SparkSession, job: JobConfig, model_uri: str | None = None, *, streamed: bool, every: str | None = None
) -> None:
    """Scores the job's rows as a whole, or as they arrive, and prints how many there were."""
    from sparktorch.tracking import load_model

    job.tracking.connect()
    uri = model_uri or job.scoring.model or f"models:/{job.tracking.model}/latest"
    model = load_model(uri)
    if streamed:
        rows = _stream(model.transform((job.scoring.data or job.data).stream(spark)), job, every)
    else:
        held_out = job.scoring.data.load(spark) if job.scoring.data else job.data.split(job.data.load(spark))[1]
        scored = _batch(model.transform(held_out), job)
        rows = scored.count()
        if job.label in scored.columns:
            _evaluate(scored, job, model.getPredictionCol())
    print(f"scored {rows} rows with {uri} into {job.scoring.output}")


def _batch(scored: DataFrame, job: JobConfig) -> DataFrame:
    """Writes scored rows in place of what was there; returns them as they were written."""
    scored.write.mode("overwrite").format(job.scoring.format).options(**job.scoring.options).save(job.scoring.output)
    reader = scored.sparkSession.read.format(job.scoring.format).options(**job.scoring.options)
    return reader.schema(scored.schema).load(job.scoring.output)


def _stream(scored: DataFrame, job: JobConfig, every: str | None) -> int:
    """Appends scored rows to the output, each once, whatever happens in between; returns how many there were."""
    scored.sparkSession.conf.set("spark.sql.streaming.numRecentProgressUpdates", 100_000)  # all are counted
    writer = scored.writeStream.format(job.scoring.format).options(**job.scoring.options)
    writer = writer.option("checkpointLocation", f"{job.scoring.output}.checkpoint")
    writer = writer.trigger(processingTime=every) if every else writer.trigger(availableNow=True)
    query = writer.start(job.scoring.output)
    query.awaitTermination()
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def _evaluate(scored: DataFrame, job: JobConfig, prediction: str) -> None:
    """Prints how good the predictions are."""
    columns: dict[str, Any] = {"labelCol": job.label, "predictionCol": prediction}
    if job.estimator.kind == "TorchClassifier":
        accuracy = MulticlassClassificationEvaluator(metricName="accuracy", **columns).evaluate(scored)
        print(f"held-out accuracy: {accuracy:.4f}")
    else:
        rmse = RegressionEvaluator(metricName="rmse", **columns).evaluate(scored)
        print(f"held-out rmse: {rmse:.4f}")

"""Scores rows with a model from MLflow and writes them: those of a job file's `score.data`, or those it held out.

spark-submit --py-files dist/sparktorch.zip,jobs/models.py jobs/score.py --config conf/digits.yaml [--stream]
"""

import argparse
import logging
import time

from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.sql import DataFrame, SparkSession

from sparktorch.cli.job_file import JobConfig, read_job
from sparktorch.tracking import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a job file, see conf/")
    parser.add_argument("--model", help="URI of the model in MLflow; default: the newest version of the job's")
    parser.add_argument("--stream", action="store_true", help="score what has arrived since the last time, then stop")
    parser.add_argument("--every", metavar="INTERVAL", help="with --stream: go on, looking this often ('10 seconds')")
    arguments = parser.parse_args()
    if arguments.every and not arguments.stream:
        parser.error("--every goes with --stream")
    job = read_job(arguments.config)
    _ = job.scoring  # a file without it is refused before a session starts

    started = time.perf_counter()
    spark = SparkSession.builder.appName(f"score {job.name}").getOrCreate()
    run(spark, job, arguments.model, streamed=arguments.stream, every=arguments.every)
    print(f"scoring job: {time.perf_counter() - started:.1f} s")
    spark.stop()


def run(
    spark: SparkSession, job: JobConfig, model_uri: str | None = None, *, streamed: bool, every: str | None = None
) -> None:
    """Scores the job's rows as a whole, or as they arrive, and prints how many there were."""
    job.tracking.connect()
    uri = model_uri or job.scoring.model or f"models:/{job.tracking.model}/latest"
    model = load_model(uri)
    if streamed:
        rows = stream(model.transform((job.scoring.data or job.data).stream(spark)), job, every)
    else:
        held_out = job.scoring.data.load(spark) if job.scoring.data else job.data.split(job.data.load(spark))[1]
        scored = batch(model.transform(held_out), job)
        rows = scored.count()
        if job.label in scored.columns:
            evaluate(scored, job, model.getPredictionCol())
    print(f"scored {rows} rows with {uri} into {job.scoring.output}")


def batch(scored: DataFrame, job: JobConfig) -> DataFrame:
    """Writes scored rows in place of what was there; returns them as they were written."""
    scored.write.mode("overwrite").format(job.scoring.format).options(**job.scoring.options).save(job.scoring.output)
    reader = scored.sparkSession.read.format(job.scoring.format).options(**job.scoring.options)
    return reader.schema(scored.schema).load(job.scoring.output)


def stream(scored: DataFrame, job: JobConfig, every: str | None) -> int:
    """Appends scored rows to the output, each once, whatever happens in between; returns how many there were."""
    scored.sparkSession.conf.set("spark.sql.streaming.numRecentProgressUpdates", 100_000)  # all are counted
    writer = scored.writeStream.format(job.scoring.format).options(**job.scoring.options)
    writer = writer.option("checkpointLocation", f"{job.scoring.output}.checkpoint")
    writer = writer.trigger(processingTime=every) if every else writer.trigger(availableNow=True)
    query = writer.start(job.scoring.output)
    query.awaitTermination()
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def evaluate(scored: DataFrame, job: JobConfig, prediction: str) -> None:
    """Prints how good the predictions are."""
    columns = {"labelCol": job.label, "predictionCol": prediction}
    if job.estimator.kind == "TorchClassifier":
        accuracy = MulticlassClassificationEvaluator(metricName="accuracy", **columns).evaluate(scored)
        print(f"held-out accuracy: {accuracy:.4f}")
    else:
        rmse = RegressionEvaluator(metricName="rmse", **columns).evaluate(scored)
        print(f"held-out rmse: {rmse:.4f}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()

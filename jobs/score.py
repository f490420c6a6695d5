"""Scores the held-out rows of a job file with a model from MLflow, and writes them.

spark-submit --py-files dist/sparktorch.zip,jobs/models.py jobs/score.py --config conf/digits.yaml
"""

import argparse
import logging
import time

from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.sql import SparkSession

from sparktorch.job import read_job
from sparktorch.tracking import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a job file, see conf/")
    parser.add_argument("--model", help="URI of the model in MLflow; default: the newest version of the job's")
    arguments = parser.parse_args()
    job = read_job(arguments.config)

    started = time.perf_counter()
    spark = SparkSession.builder.appName(f"score {job.name}").getOrCreate()
    job.tracking.connect()
    uri = arguments.model or job.score.model or f"models:/{job.tracking.model}/latest"
    model = load_model(uri)
    _, held_out = job.data.split(job.data.load(spark))
    model.transform(held_out).write.mode("overwrite").format(job.score.format).save(job.score.output)

    scored = spark.read.format(job.score.format).load(job.score.output)
    columns = {"labelCol": job.label, "predictionCol": model.getPredictionCol()}
    print(f"scored {scored.count()} rows with {uri} into {job.score.output}")
    if job.estimator.kind == "TorchClassifier":
        accuracy = MulticlassClassificationEvaluator(metricName="accuracy", **columns).evaluate(scored)
        print(f"held-out accuracy: {accuracy:.4f}")
    else:
        rmse = RegressionEvaluator(metricName="rmse", **columns).evaluate(scored)
        print(f"held-out rmse: {rmse:.4f}")
    print(f"scoring job: {time.perf_counter() - started:.1f} s")
    spark.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()

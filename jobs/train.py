"""Trains the model of a job file and logs it to MLflow.

spark-submit --py-files dist/sparktorch.zip,jobs/models.py jobs/train.py --config conf/digits.yaml
"""

import argparse
import logging
import time

import mlflow
from pyspark.sql import SparkSession

from sparktorch.cli.job_file import read_job
from sparktorch.tracking import log_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a job file, see conf/")
    job = read_job(parser.parse_args().config)  # a mistake in it shows before Spark starts
    estimator = job.estimator.build()

    started = time.perf_counter()
    spark = SparkSession.builder.appName(f"train {job.name}").getOrCreate()
    training, _ = job.data.split(job.data.load(spark))
    job.tracking.connect()
    with mlflow.start_run(run_name=job.name) as run:
        model = estimator.fit(training)
        info = log_model(model, registered_model_name=job.tracking.model)

    for record in model.summary.history[-1:]:
        print("last epoch:", ", ".join(f"{name} {value:.4g}" for name, value in record.items()))
    print(f"trained on {model.summary.rows} rows by {model.summary.numWorkers} workers")
    print(f"run: {run.info.run_id}")
    print(f"model: models:/{job.tracking.model}/{info.registered_model_version}")
    print(f"training job: {time.perf_counter() - started:.1f} s")
    spark.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()

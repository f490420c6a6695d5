"""Trains the model of a job file, and logs it to MLflow.

Prints the last epoch, and the run and the version of the model in MLflow. The job file's modules must be on the Python
path. Under spark-submit (jobs/train.py) the session is the submission's.
"""

from __future__ import annotations

import argparse
import time

from sparktorch.base.imports import mlflow
from sparktorch.cli.job_file import read_job
from sparktorch.cli.session import add_session_arguments, session

__all__ = ["HELP", "add_arguments", "run"]

HELP = "train the model of a job file, and log it to MLflow"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_session_arguments(parser, job=True)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns 0."""
    started = time.perf_counter()
    # A mistake in the job file, and a missing library, are refused before Spark starts.
    job = read_job(options.job)
    estimator = job.estimator.build()
    runs = mlflow()
    from sparktorch.tracking import log_model

    with session(options, f"train {job.name}") as spark:
        training, _ = job.rows(spark)
        job.tracking.connect()
        with runs.start_run(run_name=job.name) as logged:
            model = estimator.fit(training)
            info = log_model(model, registered_model_name=job.registered_name)
        for record in model.summary.history[-1:]:
            numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
            print("last epoch:", ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
        print(f"trained on {model.summary.rows} rows by {model.summary.numWorkers} workers")
        print(f"run: {logged.info.run_id}")
        print(f"model: models:/{job.registered_name}/{info.registered_model_version}")
        print(f"training job: {time.perf_counter() - started:.1f} s")
    return 0

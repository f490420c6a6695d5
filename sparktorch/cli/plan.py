"""Says what each strategy would need from a worker, for the training of a job file.

Prints the table from `estimator.plan(df)`: memory, and bytes sent in a step. Reads the first row, and trains nothing.
The job file's modules must be on the Python path.
"""

from __future__ import annotations

import argparse
import sys

from sparktorch.cli.job_file import read_job
from sparktorch.cli.session import add_session_arguments, session

__all__ = ["HELP", "add_arguments", "run"]

HELP = "say what each strategy would need from a worker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_session_arguments(parser, job=True)
    parser.add_argument(
        "--workers",
        "--num-workers",
        type=int,
        metavar="N",
        help="number of workers (default: numWorkers of the job file)",
    )
    parser.add_argument("--memory", type=float, metavar="MB", help="what a worker has, to say which strategies fit")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns 0 if a strategy is possible and fits, else 1."""
    job = read_job(options.job)
    more = {} if options.workers is None else {"numWorkers": options.workers}
    estimator = job.estimator.build(planned=True, **more)
    with session(options, "sparktorch plan", quiet=True) as spark:
        training, _ = job.rows(spark)
        table = estimator.plan(training, memory=options.memory)
    print(table)
    if table.fitting:
        return 0
    print("no strategy fits: try more workers, smaller batches or accumulationSteps", file=sys.stderr)
    return 1

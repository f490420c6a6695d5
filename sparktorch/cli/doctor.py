"""Says whether a cluster can run a fit.

Starts a Spark session and checks its settings and, by one short job, its executors. Under spark-submit
(jobs/doctor.py) it is the submission's session. The exit status is 0 if nothing was found that would fail, 1 if
something was.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import pyspark

import sparktorch
from sparktorch.cli.session import NoSessionError, add_session_arguments, session
from sparktorch.cli.table import print_table
from sparktorch.spark.checks.doctor import check_all
from sparktorch.spark.checks.findings import worst
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.spark.session import setting

__all__ = ["HELP", "add_arguments", "run"]

HELP = "check whether a cluster can run a fit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    add_session_arguments(parser)
    parser.add_argument(
        "--num-workers",
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="workers that a fit would have (default: 1)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "xpu"), default="auto", help="what they would train on"
    )
    parser.add_argument("--rendezvous", choices=("auto", "driver", "rank0"), default="auto", help="who hosts the store")
    parser.add_argument("--checkpoint-dir", metavar="URL", help="where a fit would keep its checkpoints")
    parser.add_argument(
        "--timeout", type=float, default=120, metavar="SECONDS", help="how long executors get to answer (default: 120)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns 0 if no check failed, else 1."""
    settings = dict(options.conf)
    launch = Launch(world_size=options.num_workers, device=options.device, rendezvous=options.rendezvous)
    master = options.master or options.remote or settings.get("spark.master", "")
    about = {"sparktorch": sparktorch.__version__, "spark": pyspark.__version__, "master": master}
    try:
        with session(options, "sparktorch doctor", quiet=True) as spark:
            about["master"] = setting(spark, "spark.master", master)
            findings = check_all(spark, launch, options.checkpoint_dir, options.timeout)
    except NoSessionError as error:
        findings = [error.finding]
    if options.json:
        report = {**about, "status": worst(findings), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        print_table(findings, f"sparktorch {about['sparktorch']} on Spark {about['spark']}, {about['master']}")
    return 1 if worst(findings) == "failure" else 0

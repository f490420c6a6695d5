"""Says whether a cluster can run a fit.

Starts a Spark session and checks its settings and, by one short job, its executors. Under spark-submit
(jobs/doctor.py) it is the submission's session. The exit status is 0 if nothing was found that would fail, 1 if
something was.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pyspark
from pyspark.sql import SparkSession

import sparktorch
from sparktorch.cli.table import print_table
from sparktorch.spark.checks.check_result import Finding, worst
from sparktorch.spark.checks.doctor import check_all
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.spark.session import is_connect, setting

__all__ = ["HELP", "add_arguments", "run"]

HELP = "check whether a cluster can run a fit"

_LONGEST = 300  # characters of Spark's message that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--master", metavar="URL", help="master of the cluster, as spark-submit takes it")
    place.add_argument("--remote", metavar="URL", help="Spark Connect server, such as sc://host:15002")
    parser.add_argument(
        "--conf",
        action="append",
        type=_pair,
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the session; may be repeated",
    )
    parser.add_argument(
        "--num-workers", type=_workers, default=1, metavar="N", help="workers that a fit would have (default: 1)"
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


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return name.strip(), value.strip()


def _workers(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return count


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns 0 if no check failed, else 1."""
    settings = dict(options.conf)
    launch = Launch(world_size=options.num_workers, device=options.device, rendezvous=options.rendezvous)
    master = options.master or options.remote or settings.get("spark.master", "")
    about = {"sparktorch": sparktorch.__version__, "spark": pyspark.__version__, "master": master}
    try:
        with _session(options, settings) as spark:
            about["master"] = setting(spark, "spark.master", master)
            findings = check_all(spark, launch, options.checkpoint_dir, options.timeout)
    except _NoSessionError as error:
        findings = [error.finding]
    if options.json:
        report = {**about, "status": worst(findings), "findings": [finding.to_dict() for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        print_table(findings, f"sparktorch {about['sparktorch']} on Spark {about['spark']}, {about['master']}")
    return 1 if worst(findings) == "failure" else 0


class _NoSessionError(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found)
        self.finding = finding


@contextmanager
def _session(options: argparse.Namespace, settings: dict[str, str]) -> Iterator[SparkSession]:
    """Starts a session with the settings, and stops it when the block ends.

    Raises:
        _NoSessionError: The session cannot be started.
    """
    builder = SparkSession.builder.appName("sparktorch doctor")
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    for name, value in {**({} if options.remote else quiet), **settings}.items():
        builder = builder.config(name, value)
    if options.master:
        builder = builder.master(options.master)
    if options.remote:
        builder = builder.remote(options.remote)
    try:
        _knock(options.remote or "")
        spark = builder.getOrCreate()
    except Exception as error:  # from py4j, gRPC or an import
        raise _NoSessionError(_about_session(options, error)) from error
    if not is_connect(spark):
        spark.sparkContext.setLogLevel("OFF")  # the findings report problems
    try:
        yield spark
    finally:
        with suppress(Exception):  # it may have ended by itself
            spark.stop()


def _knock(url: str) -> None:
    """Connects once to the server of an `sc://` URL. A Connect client would retry for minutes.

    Raises:
        OSError: The server does not answer.
    """
    place = urlsplit(url)
    if place.scheme == "sc" and place.hostname:
        with socket.create_connection((place.hostname, place.port or 15002), timeout=10):
            pass


def _about_session(options: argparse.Namespace, error: Exception) -> Finding:
    text = " ".join(str(error).split()) or type(error).__name__
    if "stopped SparkContext" in text:  # Spark's only message after a minute of retries
        text = "the master does not answer, or refuses the application"
    return Finding(
        check="session",
        status="failure",
        found=f"no session: {text[:_LONGEST]}",
        setting="spark.remote" if options.remote else "spark.master",
        value="the URL of a server or master that runs",
        hint="is it the URL of a server that runs, and are the settings right? Spark's own log says more",
    )

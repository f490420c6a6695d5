"""The Spark session of a command, and the arguments that describe it."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from sparktorch.errors import ClusterError
from sparktorch.spark.checks.findings import Finding
from sparktorch.spark.session import is_connect

__all__ = ["NoSessionError", "add_session_arguments", "session"]

_LONGEST = 300  # A finding has at most so many characters of Spark's message.


def add_session_arguments(parser: argparse.ArgumentParser, *, job: bool = False) -> None:
    """Declares the arguments of `session`, and the `job` file."""
    if job:
        parser.add_argument("job", help="a job file, such as conf/digits.yaml")
    cluster = parser.add_mutually_exclusive_group()
    cluster.add_argument("--master", metavar="URL", help="master of the cluster, as spark-submit takes it")
    cluster.add_argument("--remote", metavar="URL", help="Spark Connect server, such as sc://host:15002")
    parser.add_argument(
        "--conf",
        action="append",
        type=_pair,
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the session; may be repeated",
    )


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return name.strip(), value.strip()


class NoSessionError(ClusterError):
    """No session could be started; `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.found, hint=finding.advice)
        self.finding = finding


@contextmanager
def session(options: argparse.Namespace, name: str, *, quiet: bool = False) -> Iterator[SparkSession]:
    """Starts a session with the settings of the arguments, or raises a `NoSessionError`; stops it after the block.

    `name` is the name of the application; `quiet` turns off Spark's log and its UI.
    """
    builder = SparkSession.builder.appName(name)
    settings = dict(options.conf)
    if quiet and not options.remote:
        settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", **settings}
    for key, value in settings.items():
        builder = builder.config(key, value)
    if options.master:
        builder = builder.master(options.master)
    if options.remote:
        builder = builder.remote(options.remote)
    try:
        _check_server_answers(options.remote or "")
        spark = builder.getOrCreate()
    except Exception as error:  # py4j, gRPC and imports have errors of their own.
        raise NoSessionError(_about_session(options, error)) from error
    if quiet and not is_connect(spark):
        spark.sparkContext.setLogLevel("OFF")  # The findings report problems.
    try:
        yield spark
    finally:
        with suppress(Exception):  # The session may have ended by itself.
            spark.stop()


def _check_server_answers(url: str) -> None:
    """Connects once to the server of an `sc://` URL: a Connect client would retry for minutes."""
    server = urlsplit(url)
    if server.scheme == "sc" and server.hostname:
        with socket.create_connection((server.hostname, server.port or 15002), timeout=10):
            pass


def _about_session(options: argparse.Namespace, error: Exception) -> Finding:
    text = " ".join(str(error).split()) or type(error).__name__
    if "stopped SparkContext" in text:  # After a minute of retries, Spark says no more than this.
        text = "the master does not answer, or refuses the application"
    return Finding(
        check="session",
        status="failure",
        found=f"no session: {text[:_LONGEST]}",
        setting="spark.remote" if options.remote else "spark.master",
        value="the URL of a server or master that runs",
        hint="is it the URL of a server that runs, and are the settings right? Spark's own log says more",
    )

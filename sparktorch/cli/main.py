"""The command line: `python -m sparktorch doctor` says whether a cluster can run a fit."""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any
from urllib.parse import urlsplit

import pyspark
from pyspark.sql import SparkSession

import sparktorch
from sparktorch.base.config import at_least
from sparktorch.errors import ConfigError
from sparktorch.spark.checks.check_result import Finding, worst
from sparktorch.spark.checks.doctor import check_all
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.spark.session import is_connect, setting

__all__ = ["main", "print_table"]

_NARROWEST = 140  # columns, where the output is no terminal
_LONGEST = 300  # characters of what Spark says
_FEW = 3  # places that are listed
_COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}
_SUMMARIES = {
    "ok": "Nothing was found that would fail.",
    "warning": "Nothing was found that would fail; see the warnings.",
    "failure": "A fit would fail.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status.

    Args:
        arguments: Those of the command line if `None`.

    Returns:
        0 if nothing was found that would fail, 1 if something was. Arguments that cannot be read
        end the process with 2.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        at_least("--num-workers", options.num_workers, 1)
        settings = dict(_pair(text) for text in options.conf)
    except ConfigError as error:
        parser.error(str(error))
    return _doctor(options, settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sparktorch", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sparktorch {sparktorch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="check whether a cluster can run a fit",
        description="Starts a Spark session and checks its settings and, by one short job, its executors. Under "
        "spark-submit (jobs/doctor.py) it is the submission's session. The exit status is 0 if nothing was found that "
        "would fail, 1 if something was.",
    )
    place = doctor.add_mutually_exclusive_group()
    place.add_argument("--master", metavar="URL", help="master of the cluster, as spark-submit takes it")
    place.add_argument("--remote", metavar="URL", help="Spark Connect server, such as sc://host:15002")
    doctor.add_argument(
        "--conf", action="append", default=[], metavar="KEY=VALUE", help="a setting of the session; may be repeated"
    )
    doctor.add_argument(
        "--num-workers", type=int, default=1, metavar="N", help="workers that a fit would have (default: 1)"
    )
    doctor.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "xpu"), default="auto", help="what they would train on"
    )
    doctor.add_argument("--rendezvous", choices=("auto", "driver", "rank0"), default="auto", help="who hosts the store")
    doctor.add_argument("--checkpoint-dir", metavar="URL", help="where a fit would keep its checkpoints")
    doctor.add_argument(
        "--timeout", type=float, default=120, metavar="SECONDS", help="how long executors get to answer (default: 120)"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON in place of a table")
    return parser


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--conf takes KEY=VALUE, got {text!r}")
    return name.strip(), value.strip()


def _doctor(options: argparse.Namespace, settings: dict[str, str]) -> int:
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
    """A session with the settings, stopped in the end.

    Raises:
        _NoSessionError: It cannot be started.
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
    except Exception as error:  # of py4j's, gRPC's, or what an import raises
        raise _NoSessionError(_about_session(options, error)) from error
    if not is_connect(spark):
        spark.sparkContext.setLogLevel("OFF")  # what goes wrong is in the findings
    try:
        yield spark
    finally:
        with suppress(Exception):  # it may have ended by itself
            spark.stop()


def _knock(url: str) -> None:
    """Connects to the server of an `sc://` URL once: a client would try again for minutes.

    Raises:
        OSError: Nobody answers there.
    """
    place = urlsplit(url)
    if place.scheme == "sc" and place.hostname:
        with socket.create_connection((place.hostname, place.port or 15002), timeout=10):
            pass


def _about_session(options: argparse.Namespace, error: Exception) -> Finding:
    text = " ".join(str(error).split()) or type(error).__name__
    if "stopped SparkContext" in text:  # all that is left of it after a minute of trying
        text = "the master does not answer, or refuses the application"
    return Finding(
        check="session",
        status="failure",
        found=f"no session: {text[:_LONGEST]}",
        setting="spark.remote" if options.remote else "spark.master",
        value="the URL of a server or master that runs",
        hint="is it the URL of a server that runs, and are the settings right? Spark's own log says more",
    )


def print_table(findings: Sequence[Finding], title: str, file: IO[str] | None = None) -> None:
    """Prints findings for a person to read, those that are the same in several places as one.

    Args:
        findings: What to print.
        title: The line above.
        file: Where to; standard output if `None`.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    file = file or sys.stdout
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="")
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    for name in ("where", "found", "what to do"):
        table.add_column(name, overflow="fold")
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.status, finding.check, finding.found, finding.advice), []).append(finding)
    for (status, check, found, advice), same in groups.items():
        colour = _COLOURS[status]
        table.add_row(f"[{colour}]{status}[/]", check, _plain(_places(same)), _plain(found), _plain(advice))
    console.print(table)
    console.print(_SUMMARIES[worst(findings)])


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)  # square brackets in it are no markup


def _places(findings: Sequence[Finding]) -> str:
    """Returns where the findings were made, a line each, of many the first few."""
    places = list(dict.fromkeys(_place(finding.where) for finding in findings))
    more = [f"and {len(places) - _FEW} more"] if len(places) > _FEW else []
    return "\n".join(places[:_FEW] + more)


def _place(where: dict[str, Any]) -> str:
    parts = [f"rank {where['rank']} on"] if "rank" in where else []
    parts += [str(where[name]) for name in ("executor", "host", "param") if name in where][:1]
    return " ".join(parts)

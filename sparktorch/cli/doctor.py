"""Says whether a cluster can run a fit.

Starts a Spark session and checks its settings and, by one short job, its executors. Under spark-submit
(jobs/doctor.py) it is the submission's session.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyspark

import sparktorch
from sparktorch.cli.session import NoSessionError, add_session_arguments, session
from sparktorch.spark.checks.doctor import check_all
from sparktorch.spark.checks.findings import Finding, worst
from sparktorch.spark.launch.barrier_job import Launch
from sparktorch.spark.session import setting

__all__ = ["HELP", "add_arguments", "print_table", "run"]

HELP = "check whether a cluster can run a fit"

_NARROWEST = 140  # If the output is not a terminal, the table is at least so many characters wide.
_MOST_LOCATIONS = 3  # A row lists at most so many executors, hosts or Params.
_COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}
_SUMMARIES = {
    "ok": "Nothing was found that would fail.",
    "warning": "Nothing was found that would fail; see the warnings.",
    "failure": "A fit would fail.",
}


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
    facts = {"sparktorch": sparktorch.__version__, "spark": pyspark.__version__, "master": master}
    try:
        with session(options, "sparktorch doctor", quiet=True) as spark:
            facts["master"] = setting(spark, "spark.master", master)
            findings = check_all(spark, launch, options.checkpoint_dir, options.timeout)
    except NoSessionError as error:
        findings = [error.finding]
    if options.json:
        report = {**facts, "status": worst(findings), "findings": [asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        print_table(findings, f"sparktorch {facts['sparktorch']} on Spark {facts['spark']}, {facts['master']}")
    return 1 if worst(findings) == "failure" else 0


def print_table(findings: Sequence[Finding], title: str) -> None:
    """Prints findings as a table below a title; equal findings share a row."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
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
    for (status, check, text, advice), equal in groups.items():
        colour = _COLOURS[status]
        table.add_row(f"[{colour}]{status}[/]", check, _plain(_locations(equal)), _plain(text), _plain(advice))
    console.print(table)
    console.print(_SUMMARIES[worst(findings)])


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)  # A `str` would have its square brackets parsed as markup.


def _locations(findings: Sequence[Finding]) -> str:
    """Returns the locations of the findings, one per line: the first few and the number of others."""
    locations = list(dict.fromkeys(_location(finding.where) for finding in findings))
    lines = locations[:_MOST_LOCATIONS]
    if len(locations) > _MOST_LOCATIONS:
        lines.append(f"and {len(locations) - _MOST_LOCATIONS} more")
    return "\n".join(lines)


def _location(where: dict[str, Any]) -> str:
    parts = [f"rank {where['rank']} on"] if "rank" in where else []
    parts += [str(where[name]) for name in ("executor", "host", "param") if name in where][:1]
    return " ".join(parts)

"""Runs a script in the tasks of a barrier job, as torchrun runs it in processes.

Each task has the environment variables that torchrun gives, so a script that torchrun can start runs as it is. The
options below may stand before or after the script. All other options are the script's own, and so is all that follows
"--". Under spark-submit (jobs/run.py) the session is the submission's.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from sparktorch.cli.session import add_session_arguments, session
from sparktorch.ml.fit.run import run_script

__all__ = ["HELP", "add_arguments", "run"]

HELP = "run a script, as torchrun would, in the tasks of a barrier job"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    _add_options(parser)
    parser.add_argument("script", help="path of the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns 0."""
    arguments = options.arguments
    end = arguments.index("--") if "--" in arguments else len(arguments)
    # argparse has left all that follows the script as it is. A second parser takes our options from there.
    later = argparse.ArgumentParser(prog="sparktorch run", add_help=False, allow_abbrev=False)
    _add_options(later)
    options, script_arguments = later.parse_known_args(arguments[:end], options)
    if not os.path.isfile(options.script):
        later.error(f"there is no script {options.script!r} on this machine")
    _print_lines_of_ranks()
    with session(options, options.script) as spark:
        run_script(
            options.script,
            [*script_arguments, *arguments[end + 1 :]],
            spark=spark,
            numWorkers=options.workers,
            device=options.device,
            maxRestarts=options.max_restarts,
            stallTimeout=options.stall_timeout,
            logLevel=options.log_level,
        )
    return 0


def _print_lines_of_ranks() -> None:
    """Writes the lines that ranks print to standard output, with the number of the rank."""
    logger = logging.getLogger("sparktorch.ranks")
    logger.handlers = [logging.StreamHandler(sys.stdout)]
    logger.propagate = False
    logger.setLevel(logging.DEBUG)  # `--log-level` has left out lines in the ranks already.


def _workers(text: str) -> int | tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(":"))
    return numbers[0] if len(numbers) == 1 else numbers


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_session_arguments(parser)
    parser.add_argument(
        "--workers", type=_workers, default=1, metavar="N", help="number of ranks (default: 1), or MIN:MAX"
    )
    parser.add_argument("--device", default="auto", help="'auto' (default), 'cpu' or a type of accelerator")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restarts after a lost rank (default: 0)"
    )
    parser.add_argument(
        "--stall-timeout", type=float, default=600.0, metavar="SECONDS", help="how long a rank may stand still"
    )
    parser.add_argument(
        "--log-level", default="INFO", help="from which level on ranks' output is shown; prints are INFO (default)"
    )

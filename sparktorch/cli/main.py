"""The command line, `sparktorch COMMAND`. A command is a module here and an entry in `COMMANDS`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

from pyspark.errors import AnalysisException, IllegalArgumentException, PySparkException

import sparktorch
from sparktorch.cli import doctor, plan, run, score, train
from sparktorch.errors import SparkTorchError

__all__ = ["COMMANDS", "main", "parser"]

_LOG = logging.getLogger(__name__)
_NO_FORMAT = "[DATA_SOURCE_NOT_FOUND]"  # in Spark's message about a format that it does not have

COMMANDS = {"doctor": doctor, "plan": plan, "run": run, "train": train, "score": score}
_STATUS = (
    "Exit status: 0 if all is done; 1 if it failed, or the answer is no: a check of the doctor failed, or no strategy "
    "fits; 2 if what was given cannot work: arguments, a job file, columns, options, a module."
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(prog="sparktorch", description="sparktorch, from the command line", epilog=_STATUS)
    made.add_argument("--version", action="version", version=f"sparktorch {sparktorch.__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command with arguments, by default those of the process, and returns its exit status.

    0 is success, 1 failure, and 2 says that what was given cannot work. Invalid arguments end the process. With those
    of the process, modules of the working folder are found as `python -m` finds them.
    """
    if arguments is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except Exception as error:
        said = _said(error)
        if said is None:
            raise
        print(said, file=sys.stderr)
        _LOG.debug("the command has ended with an error", exc_info=True)
        refused = isinstance(error, ValueError | AnalysisException | IllegalArgumentException)
        return 2 if refused or _NO_FORMAT in said else 1
    return status


def _said(error: Exception) -> str | None:
    """Returns what an error says to the user of a command; `None` for one of the user's code, or of ours."""
    kind = type(error).__name__
    if kind == "Py4JJavaError":  # Java's, of which pyspark makes none of its own
        return str(cast(Any, error).java_exception.toString()).partition("\n")[0]
    return str(error) if isinstance(error, SparkTorchError | PySparkException) or kind == "MlflowException" else None

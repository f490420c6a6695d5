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
_NO_FORMAT = "[DATA_SOURCE_NOT_FOUND]"  # Spark's message about an unknown format begins so.

COMMANDS = {"doctor": doctor, "plan": plan, "run": run, "train": train, "score": score}
_STATUS = (
    "Exit status: 0 if all is done; 1 if it failed, or the answer is no: a check of the doctor failed, or no strategy "
    "fits; 2 if what was given cannot work: arguments, a job file, columns, options, a module."
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    main_parser = argparse.ArgumentParser(
        prog="sparktorch", description="sparktorch, from the command line", epilog=_STATUS
    )
    main_parser.add_argument("--version", action="version", version=f"sparktorch {sparktorch.__version__}")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command with arguments, by default the arguments of the process, and returns the exit status.

    The status 0 is success, 1 failure, and 2 says that the input cannot work. Invalid arguments end the process. With
    the arguments of the process, modules in the working folder can be imported, as with `python -m`.
    """
    if arguments is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except Exception as error:
        message = _message(error)
        if message is None:
            raise
        print(message, file=sys.stderr)
        _LOG.debug("the command has ended with an error", exc_info=True)
        refused = isinstance(error, ValueError | AnalysisException | IllegalArgumentException)
        return 2 if refused or _NO_FORMAT in message else 1
    return status


def _message(error: Exception) -> str | None:
    """Returns the message of an error for the user of a command; `None` for errors in the user's code, or in ours."""
    kind = type(error).__name__
    if kind == "Py4JJavaError":  # pyspark has no class for this exception of Java's.
        return str(cast(Any, error).java_exception.toString()).partition("\n")[0]
    return str(error) if isinstance(error, SparkTorchError | PySparkException) or kind == "MlflowException" else None

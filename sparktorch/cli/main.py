"""The command line, `sparktorch COMMAND`. A command is a module here and an entry in `COMMANDS`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import sparktorch
from sparktorch.cli import doctor, plan, run, score, train

__all__ = ["COMMANDS", "main", "parser"]

COMMANDS = {"doctor": doctor, "plan": plan, "run": run, "train": train, "score": score}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(prog="sparktorch", description="sparktorch, from the command line")
    made.add_argument("--version", action="version", version=f"sparktorch {sparktorch.__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command with arguments, by default those of the process, and returns its exit status.

    0 is success; invalid arguments end the process with status 2. With those of the process, modules of the working
    folder are found as `python -m` finds them.
    """
    if arguments is None and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    options = parser().parse_args(arguments)
    status: int = options.run(options)
    return status

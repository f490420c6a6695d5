"""The command line, `python -m sparktorch COMMAND`. A command is a module here and an entry in `_COMMANDS`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import sparktorch
from sparktorch.cli import doctor, plan, run

__all__ = ["main"]

_COMMANDS = {"doctor": doctor, "plan": plan, "run": run}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command with arguments, by default those of the process, and returns its exit status.

    0 is success; invalid arguments end the process with status 2.
    """
    parser = argparse.ArgumentParser(prog="python -m sparktorch", description="sparktorch, from the command line")
    parser.add_argument("--version", action="version", version=f"sparktorch {sparktorch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status

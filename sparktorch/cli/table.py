"""Prints findings as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, Any

from sparktorch.spark.checks.findings import Finding, worst

__all__ = ["print_table"]

_NARROWEST = 140  # characters, if the output is not a terminal
_FEW = 3  # places listed per row
_COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}
_SUMMARIES = {
    "ok": "Nothing was found that would fail.",
    "warning": "Nothing was found that would fail; see the warnings.",
    "failure": "A fit would fail.",
}


def print_table(findings: Sequence[Finding], title: str, file: IO[str] | None = None) -> None:
    """Prints findings as a table below a title, by default on standard output; equal findings share a row."""
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

    return Text(text)  # rich must not parse its square brackets as markup


def _places(findings: Sequence[Finding]) -> str:
    """Returns the places of the findings, one per line: the first few and the number of others."""
    places = list(dict.fromkeys(_place(finding.where) for finding in findings))
    more = [f"and {len(places) - _FEW} more"] if len(places) > _FEW else []
    return "\n".join(places[:_FEW] + more)


def _place(where: dict[str, Any]) -> str:
    parts = [f"rank {where['rank']} on"] if "rank" in where else []
    parts += [str(where[name]) for name in ("executor", "host", "param") if name in where][:1]
    return " ".join(parts)

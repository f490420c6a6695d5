"""The check result: a value to print, to log, or to raise as an error."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sparktorch.errors import ClusterError

__all__ = ["Finding", "Status", "refuse", "worst"]

_LOG = logging.getLogger(__name__)

Status = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check in one place.

    Attributes:
        check: Name of the check, stable between versions.
        status: `"failure"` if it would end a fit, `"warning"` if it might end or slow it, otherwise `"ok"`.
        found: The observation: one sentence without a full stop, the same text in every place.
        where: `host`, `executor`, `rank` or `param`; empty if it concerns the session.
        setting: The setting to change; empty if none.
        value: Its new value, or a description of it.
        hint: What to do, if more than changing `setting`.
    """

    check: str
    status: Status
    found: str
    where: dict[str, Any] = field(default_factory=dict)
    setting: str = ""
    value: str = ""
    hint: str = ""

    @property
    def advice(self) -> str:
        """What the user should do; empty if nothing."""
        return self.hint or (f"set {self.setting}={self.value}" if self.setting else "")

    def error(self) -> ClusterError:
        """Returns the finding as the error that ends a fit."""
        return ClusterError(self.found, hint=self.advice, **self.where)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form, always with all keys."""
        return asdict(self)


def worst(findings: Iterable[Finding]) -> Status:
    """Returns the worst status; `"ok"` without findings."""
    found = {finding.status for finding in findings}
    return "failure" if "failure" in found else "warning" if "warning" in found else "ok"


def refuse(findings: Iterable[Finding]) -> None:
    """Logs the warnings and raises the first failure.

    Raises:
        ClusterError: There is a failure.
    """
    for finding in findings:
        if finding.status == "failure":
            raise finding.error()
        if finding.status == "warning":
            _LOG.warning("%s", finding.error())

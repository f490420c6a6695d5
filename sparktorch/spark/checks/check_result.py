"""What a check of the cluster found: a value to print, to log, or to raise."""

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
        check: Name of the check, the same in every version.
        status: `"failure"` for what would end a fit, `"warning"` for what might, or would slow it.
        found: What is there, one sentence without its full stop, the same wherever it is found.
        where: `host`, `executor`, `rank` or `param`; empty for what holds for the session.
        setting: What to set; empty where nothing needs to be.
        value: What to set it to: a value, or what it must be in words.
        hint: What to do, where that is more than to set `setting`.
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
        """What to do about it, for a person; empty where all is well."""
        return self.hint or (f"set {self.setting}={self.value}" if self.setting else "")

    def error(self) -> ClusterError:
        """Returns the finding as the error that ends a fit."""
        return ClusterError(self.found, hint=self.advice, **self.where)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form; every key is always there."""
        return asdict(self)


def worst(findings: Iterable[Finding]) -> Status:
    """Returns the gravest status; `"ok"` of none."""
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

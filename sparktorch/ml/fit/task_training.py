"""What the estimator of a task says of its training besides its Params."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparktorch.data.columns import Window

__all__ = ["TaskTraining"]


@dataclass(frozen=True, kw_only=True)
class TaskTraining:
    """What a task's training has that no Param says. The default is that of tasks whose samples are rows.

    Attributes:
        group: A column that the estimator adds, whose rows with the same value are a sample; Params may name another.
        window: The windows of a series that are samples.
        graded: Whether samples are groups of rows whose labels are grades, >= 0.
        loss: The loss of whole groups, or its import path, in place of the Param `loss`.
        metrics: What a validation measures of whole groups.
        validates_untrained: Whether the weights from before the first step are validated, too.
    """

    group: str | None = None
    window: Window | None = None
    graded: bool = False
    loss: Any = None
    metrics: Callable[..., Any] | None = None
    validates_untrained: bool = False

"""The figures of a run: loss curve and confusion matrix."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

__all__ = ["confusion_matrix", "loss_curve", "preload"]

_MOST_NUMBERS = 20  # classes up to which the counts in cells are legible
_SHORT = 4  # characters of a label that fit below a cell


def preload(*, classes: bool) -> None:
    """Imports the drawing libraries. The first import takes seconds, so do it while the ranks train."""
    importlib.import_module("matplotlib.figure")
    if classes:
        importlib.import_module("sklearn.metrics")


def loss_curve(history: list[dict[str, Any]]) -> Figure:
    """Draws the losses of training and validation by epoch, from `TrainingSummary.history`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    for name, label in (("loss", "training"), ("val_loss", "validation")):
        known = [record for record in history if name in record]  # not every epoch is validated
        if known:
            epochs, losses = zip(*((record["epoch"], record[name]) for record in known), strict=True)
            axes.plot(epochs, losses, marker=".", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="epoch", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def confusion_matrix(counts: list[list[int]], labels: Sequence[str] = ()) -> Figure:
    """Draws validation rows by class (row) and predicted class (column); without labels, classes have numbers."""
    import numpy as np
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    classes = len(counts)
    side = 2.5 + 0.45 * min(classes, _MOST_NUMBERS)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    legible = classes <= _MOST_NUMBERS
    display = ConfusionMatrixDisplay(np.array(counts))
    display.plot(ax=axes, cmap="Blues", include_values=legible, values_format="d", colorbar=not legible)
    ticks = list(range(0, classes, -(-classes // _MOST_NUMBERS)))
    names = [labels[tick] if labels else str(tick) for tick in ticks]
    axes.set_xticks(ticks, labels=names, rotation=90 if any(len(name) > _SHORT for name in names) else 0)
    axes.set_yticks(ticks, labels=names)
    axes.set(xlabel="predicted class", ylabel="class")
    return figure

"""Figures of a training and of its result: curves by epoch, and confusion matrices. They need matplotlib."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from sparktorch.base.imports import matplotlib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["confusion_matrix", "curves", "loss_curve", "picture"]

_MOST_NUMBERS = 20  # With more classes, counts in cells are not legible.
_SHORT = 4  # So many characters of a label fit below a cell.
_GRAY = "#808080"  # This gray is legible on white and on black.


def loss_curve(history: Sequence[dict[str, Any]]) -> Figure:
    """Draws the losses of training and validation by epoch, from `TrainingSummary.history`."""
    figure = _figure(6.4, 4.0)
    _draw(figure.subplots(), history, {"loss": "training", "val_loss": "validation"}, "loss")
    return figure


def curves(history: Sequence[dict[str, Any]]) -> Figure:
    """Draws losses, metrics and learning rates by epoch, side by side, as far as the history has them."""
    names = list(dict.fromkeys(name for record in history for name in record))
    metrics = {
        name: name.removeprefix("val_") for name in names if name.startswith(("val_", "train_")) and name != "val_loss"
    }
    rates = {record.get("learning_rate") for record in history}
    # A panel is a pair: a label for each curve, by the curve's column, and the panel's title.
    panels: list[tuple[dict[str, str], str]] = [({"loss": "training", "val_loss": "validation"}, "loss")]
    if metrics:
        panels.append((metrics, "metrics of validation"))
    if len(rates) > 1:
        panels.append(({"learning_rate": ""}, "learning rate"))
    figure = _figure(4.4 * len(panels), 3.2)
    for axes, (labels, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, history, labels, title)
    return figure


def confusion_matrix(counts: Sequence[Sequence[float]], labels: Sequence[str] = ()) -> Figure:
    """Draws the weight of the rows by class (row) and predicted class (column).

    Without labels, classes have their numbers as names.
    """
    classes = len(counts)
    side = 2.5 + 0.45 * min(classes, _MOST_NUMBERS)
    figure = _figure(side, side)
    axes = figure.subplots()
    image = axes.imshow(counts, cmap="Blues")
    if classes > _MOST_NUMBERS:
        figure.colorbar(image, ax=axes, shrink=0.7)
    else:
        middle = max(max(row) for row in counts) / 2
        for row, counts_in_row in enumerate(counts):
            for column, count in enumerate(counts_in_row):
                color = "white" if count > middle else "black"
                axes.text(column, row, f"{count:.6g}", ha="center", va="center", color=color)
    ticks = list(range(0, classes, math.ceil(classes / _MOST_NUMBERS)))
    names = [labels[tick] if labels else str(tick) for tick in ticks]
    axes.set_xticks(ticks, labels=names, rotation=90 if any(len(name) > _SHORT for name in names) else 0)
    axes.set_yticks(ticks, labels=names)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # A name may have dollars, between which matplotlib would set formulas.
    axes.set(xlabel="predicted class", ylabel="class")
    return figure


def picture(figure: Figure) -> bytes:
    """Returns a figure as PNG, without a background, in gray for light and dark pages."""
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        axes.tick_params(colors=_GRAY)
        axes.xaxis.label.set_color(_GRAY)
        axes.yaxis.label.set_color(_GRAY)
        for spine in axes.spines.values():
            spine.set_color(_GRAY)
        legend = axes.get_legend()
        if legend is not None:
            legend.get_frame().set_alpha(0)
            for text in legend.get_texts():
                text.set_color(_GRAY)
    return _png(figure)


def _figure(width: float, height: float) -> Figure:
    """Returns a figure of this size in inches; notebooks show it without pyplot, which would show it twice."""
    kind: Any = type("Figure", (matplotlib().Figure,), {"_repr_png_": _png})
    figure: Figure = kind(figsize=(width, height), layout="constrained")
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(axes: Axes, history: Sequence[dict[str, Any]], labels: dict[str, str], title: str) -> None:
    """Draws columns of a history, each under its label, over the epochs that have them."""
    from matplotlib.ticker import MaxNLocator

    for name, label in labels.items():
        records = [record for record in history if name in record]  # Not every epoch is validated.
        if records:
            epochs = [record["epoch"] for record in records]
            values = [record[name] for record in records]
            axes.plot(epochs, values, marker=".", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="epoch", ylabel=title)
    axes.grid(alpha=0.3)
    if any(labels.values()):
        axes.legend()

"""Figures of a training and of its result: curves by epoch, and confusion matrices. They need matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from sparktorch.base.imports import matplotlib

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["confusion_matrix", "curves", "loss_curve", "picture"]

_MOST_NUMBERS = 20  # classes up to which the counts in cells are legible
_SHORT = 4  # characters of a label that fit below a cell
_GRAY = "#808080"  # legible on white and on black


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
    panels: list[tuple[dict[str, str], str]] = [({"loss": "training", "val_loss": "validation"}, "loss")]
    panels += [(metrics, "metrics of validation")] if metrics else []
    panels += [({"learning_rate": ""}, "learning rate")] if len(rates) > 1 else []
    figure = _figure(4.4 * len(panels), 3.2)
    for axes, (shown, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, history, shown, title)
    return figure


def confusion_matrix(counts: Sequence[Sequence[float]], labels: Sequence[str] = ()) -> Figure:
    """Draws the weight of rows by class (row) and predicted class (column); without labels, classes have numbers."""
    classes = len(counts)
    side = 2.5 + 0.45 * min(classes, _MOST_NUMBERS)
    figure = _figure(side, side)
    axes = figure.subplots()
    image = axes.imshow(counts, cmap="Blues")
    if classes > _MOST_NUMBERS:
        figure.colorbar(image, ax=axes, shrink=0.7)
    else:
        middle = max(max(row) for row in counts) / 2
        for row, of_class in enumerate(counts):
            for column, count in enumerate(of_class):
                color = "white" if count > middle else "black"
                axes.text(column, row, f"{count:.6g}", ha="center", va="center", color=color)
    ticks = list(range(0, classes, -(-classes // _MOST_NUMBERS)))
    names = [labels[tick] if labels else str(tick) for tick in ticks]
    axes.set_xticks(ticks, labels=names, rotation=90 if any(len(name) > _SHORT for name in names) else 0)
    axes.set_yticks(ticks, labels=names)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # a name may have dollars
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
    """Makes a figure of so many inches that notebooks show without pyplot, which would show it twice."""
    kind: Any = type("Figure", (matplotlib().Figure,), {"_repr_png_": _png})
    figure: Figure = kind(figsize=(width, height), layout="constrained")
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(axes: Axes, history: Sequence[dict[str, Any]], shown: dict[str, str], title: str) -> None:
    """Draws columns of a history, each under its label, over the epochs that have them."""
    from matplotlib.ticker import MaxNLocator

    for name, label in shown.items():
        known = [record for record in history if name in record]  # not every epoch is validated
        if known:
            epochs, values = zip(*((record["epoch"], record[name]) for record in known), strict=True)
            axes.plot(epochs, values, marker=".", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="epoch", ylabel=title)
    axes.grid(alpha=0.3)
    if any(shown.values()):
        axes.legend()

"""What the figures of a training show."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from matplotlib.axes import Axes

from sparktorch.errors import ConfigError
from sparktorch.ml.scoring.figures import confusion_matrix, curves, picture
from tests.unit.ml.test_html import summary

HISTORY = [
    {"epoch": 1, "loss": 3.0, "learning_rate": 0.1, "seconds": 1.0},
    {"epoch": 2, "loss": 2.0, "val_loss": 2.5, "val_accuracy": 0.7, "learning_rate": 0.05, "seconds": 1.0},
]


def lines(axes: Axes) -> dict[str, list[list[float]]]:
    """Returns the points of each line, by its label."""
    return {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axes.lines}


def test_dollars_in_names_of_classes_are_dollars() -> None:
    figure = confusion_matrix([[3, 1], [0, 2]], ["$0_$10", "<$10_a$"])
    assert picture(figure).startswith(b"\x89PNG")
    (axes,) = figure.axes
    labels = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    assert not any(label.get_parse_math() for label in labels)


def test_classes_have_their_names_where_labels_have() -> None:
    counts, labels = [[3, 1], [0, 2]], ["benign", "malignant"]
    for figure, names in (
        (confusion_matrix(counts), ["0", "1"]),
        (confusion_matrix(counts, labels), labels),
        (
            summary(HISTORY, confusionMatrix=counts, labels=["benign", "malignant"]).plotConfusion(),
            ["benign", "malignant"],
        ),
    ):
        (axes,) = figure.axes
        assert [label.get_text() for label in axes.get_xticklabels()] == names
        assert [label.get_text() for label in axes.get_yticklabels()] == names
        assert [text.get_text() for text in axes.texts] == ["3", "1", "0", "2"]


def test_many_classes_have_colors_in_place_of_counts() -> None:
    axes, colors = confusion_matrix(np.eye(30).tolist()).axes
    assert not axes.texts
    assert colors.get_ylim() == (0, 1)


def test_a_training_without_a_matrix_says_where_one_is() -> None:
    with pytest.raises(ConfigError, match="validationIndicatorCol"):
        summary(HISTORY).plotConfusion()


def test_a_plot_has_the_losses_the_metrics_and_a_learning_rate_that_changes() -> None:
    losses, metrics, rate = summary(HISTORY).plot().axes
    assert lines(losses) == {"training": [[1, 3], [2, 2]], "validation": [[2, 2.5]]}
    assert lines(metrics) == {"accuracy": [[2, 0.7]]}
    assert list(lines(rate).values()) == [[[1, 0.1], [2, 0.05]]]
    (alone,) = curves(HISTORY[:1]).axes
    assert list(lines(alone)) == ["training"]


def test_a_notebook_shows_a_plot_once_without_pyplot() -> None:
    import matplotlib.pyplot as plt

    figure = cast(Any, summary(HISTORY).plot())
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert not plt.get_fignums()

"""What notebooks show of estimators and summaries, and what the figures of a training show."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from matplotlib.axes import Axes
from torch import nn

from sparktorch import TorchClassifier
from sparktorch.base.imports import matplotlib
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.summary import TrainingSummary
from sparktorch.ml.scoring import html
from sparktorch.ml.scoring.figures import confusion_matrix, curves, picture


def summary(history: list[dict[str, Any]], **more: Any) -> TrainingSummary:
    values: Mapping[str, Any] = {"rows": 1000, "validationRows": 200, "stepsPerEpoch": 5, "numWorkers": 2}
    return TrainingSummary(history=history, fingerprint="", ranks=[], **{**values, "seconds": {}, **more})


def test_an_estimator_shows_the_params_that_are_set_and_no_others() -> None:
    estimator = TorchClassifier(module=nn.Linear, epochs=20, batchSize=None)
    assert repr(estimator) == "TorchClassifier(module=Linear, epochs=20)"
    html = estimator._repr_html_()
    assert estimator.uid in html
    assert "epochs" in html
    assert "batchSize" not in html
    assert repr(TorchClassifier()) == "TorchClassifier()"
    assert "<table" not in TorchClassifier()._repr_html_()


def test_values_are_escaped_and_short_and_secrets_are_not_shown() -> None:
    options = {"hf_token": "hf_abc", "text": "<b>", "long": list(range(1000))}
    estimator = TorchClassifier(module=nn.Sequential(nn.Linear(2, 1)), moduleParams=options)
    for shown in (repr(estimator), estimator._repr_html_()):
        assert "hf_abc" not in shown
        assert "999" not in shown
    assert "&lt;b&gt;" in estimator._repr_html_()
    assert "<b>" not in estimator._repr_html_()
    assert repr(estimator).startswith("TorchClassifier(module=Sequential, moduleParams={'hf_token': '***',")


def test_a_summary_shows_the_first_the_best_and_the_last_epochs() -> None:
    losses = [9.0, 1.0, *(float(number) for number in range(2, 20))]
    history = [
        {"epoch": number, "loss": 1.0 / number, "val_loss": loss, "seconds": 0.25, "rows_per_second": 3.0}
        for number, loss in enumerate(losses, 1)
    ]
    found = summary(history, seconds={"prepare": 1.0, "job": 21.5, "rank0.train": 5.0})
    html = found._repr_html_()
    assert "1,000, and 200 of validation" in html
    assert "20 in 5.0 s, of 22.5 s of the fit" in html
    assert repr(found) == (
        "TrainingSummary(rows=1,000, validationRows=200, numWorkers=2, epochs=20, loss=0.05, val_loss=19)"
    )
    best = summary(history, best={"epoch": 2, "val_loss": 1.0})
    assert repr(best).endswith("epochs=20, loss=0.05, val_loss=19, bestEpoch=2, best_val_loss=1)")
    cells = [part.split("</td>")[0].rpartition(">")[2] for part in html.split("<tr>")[5:]]
    assert cells == ["1", "2", "…", *map(str, range(14, 21))]
    (best,) = [part for part in html.split("<tr>") if "lowest val_loss" in part]
    assert [cell.rpartition(">")[2] for cell in best.split("</td>")[:3]] == ["2", "0.5", "1"]
    assert "rows_per_second" not in html
    history[0]["val_loss"] = math.nan
    (best,) = [part for part in summary(history)._repr_html_().split("<tr>") if "lowest val_loss" in part]
    assert best.split("</td>")[0].rpartition(">")[2] == "2"
    assert "data:image/png;base64," in html


def test_a_models_sizes_are_those_that_are_known() -> None:
    assert html.sizes(SimpleNamespace(numFeatures=-1)) == {}
    assert html.sizes(SimpleNamespace(numFeatures=-1, numClasses=3)) == {"numClasses": 3}


def test_without_matplotlib_tables_are_there_and_plots_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = summary([{"epoch": 1, "loss": 1.0, "seconds": 0.1}])
    assert "<table" in found._repr_html_()
    assert "image" not in found._repr_html_()
    for draw in (found.plot, matplotlib):
        with pytest.raises(ValueError, match="pip install matplotlib"):
            draw()


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

"""What the figures of a run show."""

from __future__ import annotations

from sparktorch.tracking.figures import confusion_matrix


def test_classes_have_their_names_where_labels_have() -> None:
    counts = [[3, 1], [0, 2]]
    for figure, names in (
        (confusion_matrix(counts), ["0", "1"]),
        (confusion_matrix(counts, ["benign", "malignant"]), ["benign", "malignant"]),
    ):
        (axes,) = figure.axes
        assert [label.get_text() for label in axes.get_xticklabels()] == names
        assert [label.get_text() for label in axes.get_yticklabels()] == names

"""What MLflow is told of validations by step, and of epochs that were not validated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from sparktorch.ml.scoring.figures import loss_curve
from sparktorch.tracking.async_logger import Sample
from sparktorch.tracking.listener import MLflowListener


class Box:
    """Keeps the metrics that would be sent."""

    def __init__(self) -> None:
        self.sent: set[tuple[str, float, int]] = set()

    def metrics(self, samples: Iterable[Sample]) -> None:
        self.sent |= {(sample.name, sample.value, sample.step) for sample in samples}


def test_validations_are_logged_at_their_steps_and_epochs_at_their_numbers() -> None:
    listener, box = object.__new__(MLflowListener), Box()
    listener._outbox, listener._names = cast(Any, box), {}
    validations = [{"step": 12, "val_loss": 0.5}, {"step": 14, "val_loss": 0.25}]
    listener.epoch({"epoch": 2, "loss": 0.75, "val_loss": 0.25, "steps": 7, "validations": validations})
    assert box.sent == {
        ("step_val_loss", 0.5, 12),
        ("step_val_loss", 0.25, 14),
        ("loss", 0.75, 2),
        ("val_loss", 0.25, 2),
    }


def test_a_metric_has_a_name_of_its_own_that_mlflow_takes_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener, box = object.__new__(MLflowListener), Box()
    listener._outbox, listener._names = cast(Any, box), {}
    for epoch in (1, 2):
        listener.epoch({"epoch": epoch, "loss": 0.75, "top@5": 0.5, "top#5": 0.25})
    values = {"loss": 0.75, "top_5": 0.5, "top_5_": 0.25}
    assert box.sent == {(name, value, epoch) for name, value in values.items() for epoch in (1, 2)}
    told = [record.getMessage().split(", which")[0] for record in caplog.records]
    assert told == ["the metric 'top@5' is 'top_5' in MLflow", "the metric 'top#5' is 'top_5_' in MLflow"]


def test_the_curve_of_the_validation_shows_the_epochs_that_had_one() -> None:
    history = [{"epoch": 1, "loss": 3.0}, {"epoch": 2, "loss": 2.0, "val_loss": 2.5}, {"epoch": 3, "loss": 1.0}]
    training, validation = loss_curve(cast(Any, history)).axes[0].lines
    assert [list(map(float, cast(Any, data))) for data in training.get_data()] == [[1, 2, 3], [3, 2, 1]]
    assert [list(map(float, cast(Any, data))) for data in validation.get_data()] == [[2], [2.5]]
    for epochs in (1, 3):
        ticks = loss_curve(cast(Any, history[:epochs])).axes[0].get_xticks()
        assert all(float(tick).is_integer() for tick in ticks), "an epoch is a whole number"

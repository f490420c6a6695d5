"""What "auto" stands for: plain numbers, by the number of samples; which windows are held out; why a training ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparktorch import Forecaster, Ranker, Recommender, TabularClassifier, TextClassifier, TorchClassifier
from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import Window
from sparktorch.ml.fit.summary import best_validation, ending, majority
from sparktorch.ml.fit.translate import translate
from sparktorch.ml.fit.values import Values
from sparktorch.tasks.images.estimator import IMAGES, NEW_IMAGES
from sparktorch.tasks.ranking.estimator import RANKING
from sparktorch.tasks.recommender.estimator import ROW_SAMPLES, USER_SAMPLES
from sparktorch.tasks.series.estimator import SERIES
from sparktorch.tasks.series.held_out import windows_held_out
from sparktorch.tasks.shared.held_out import Sample, too_few
from sparktorch.tasks.shared.params import AUTOMATIC
from sparktorch.tasks.shared.settings import TaskSettings, automatic_settings
from sparktorch.tasks.tables.estimator import TABLES
from sparktorch.tasks.texts.estimator import NEW_TEXTS, TEXTS

TASKS = (USER_SAMPLES, TABLES, SERIES, ROW_SAMPLES, RANKING, TEXTS, IMAGES, NEW_TEXTS, NEW_IMAGES)
ROWS = (1, 7, 50, 109, 2_000, 6_300, 44_000, 500_000, 10**7, 10**9)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("rows", ROWS)
def test_a_training_has_the_fewest_steps_before_patience_may_end_it(task: TaskSettings, rows: int) -> None:
    found = automatic_settings(rows, task, validates=True)
    steps = -(-rows // found.batch_size)
    between = found.validation_interval * (steps if found.validation_unit == "epoch" else 1)
    assert found.patience is not None
    assert found.patience * between >= task.least_steps
    assert found.epochs * steps >= task.least_steps
    assert task.smallest_batch <= found.batch_size <= task.largest_batch
    assert found.batch_size & (found.batch_size - 1) == 0


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (USER_SAMPLES, {50: 150, 2_000: 16, 20_000: 16, 1_000_000: 16}),
        (TABLES, {50: 200, 2_000: 7, 20_000: 6, 1_000_000: 1}),
        (SERIES, {50: 1, 500: 10, 2_000: 16, 20_000: 13, 1_000_000: 1}),
        (ROW_SAMPLES, {50: 50, 2_000: 8, 20_000: 8, 1_000_000: 8}),
        (RANKING, {50: 100, 2_000: 7, 20_000: 3, 1_000_000: 1}),
        (TEXTS, {50: 25, 2_000: 3, 20_000: 3, 1_000_000: 3}),
        (IMAGES, {50: 100, 2_000: 4, 20_000: 3, 1_000_000: 3}),
        (NEW_TEXTS, {50: 25, 2_000: 5, 20_000: 5, 1_000_000: 5}),
        (NEW_IMAGES, {50: 200, 2_000: 8, 20_000: 8, 1_000_000: 8}),
    ],
    ids=["choices", "tables", "series", "ratings", "ranking", "texts", "images", "new texts", "new images"],
)
def test_without_validation_a_training_has_these_epochs(task: TaskSettings, expected: dict[int, int]) -> None:
    found = {rows: automatic_settings(rows, task, validates=False) for rows in expected}
    assert {rows: settings.epochs for rows, settings in found.items()} == expected
    assert {settings.patience for settings in found.values()} == {None}


def test_the_rate_of_a_training_without_validation_rises_over_a_tenth_of_its_steps() -> None:
    found = automatic_settings(2_000, NEW_TEXTS, validates=False)
    assert (found.epochs, found.batch_size, found.warmup_steps) == (5, 16, 62)  # of 625


def test_a_billion_rows_may_end_within_a_hundredth_of_an_epoch() -> None:
    found = automatic_settings(10**9, TABLES, validates=True)
    assert (found.validation_unit, found.epochs) == ("step", 1)
    assert found.patience is not None
    assert found.patience * found.validation_interval < 10**9 / found.batch_size / 100


def test_a_batch_is_the_users_and_has_a_row_for_each_worker() -> None:
    assert automatic_settings(10_000, TABLES, validates=True, batch_size=10).batch_size == 10
    assert automatic_settings(100, TABLES, validates=True, least_batch=48).batch_size == 64


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("rows", [0, 35, 36, 60, 109, 144, 1_000])
@pytest.mark.parametrize("step", [1, 3, 20])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_windows_are_held_out_as_ranks_find_them_and_share_no_forecast_row(
    rows: int, step: int, share: float, few: bool
) -> None:
    window = Window(context=24, horizon=12, step=step)
    trained, held_out, marked = windows_held_out(rows, window, share, few=few)
    ends = range(rows, window.rows - 1, -step)
    horizons = [range(end - window.horizon, end) for end in ends]
    assert trained == sum(horizon[-1] < rows - marked for horizon in horizons)
    assert held_out == sum(horizon[0] >= rows - marked for horizon in horizons) * (marked > 0)
    assert 2 * trained >= len(horizons)


@pytest.mark.parametrize(("windows", "share", "held_out"), [(119, 0.1, 0), (120, 0.1, 12), (60, 0.5, 12), (30, 0.5, 0)])
def test_fewer_windows_than_a_horizon_has_rows_are_not_held_out_as_they_forecast_the_same(
    windows: int, share: float, held_out: int
) -> None:
    window = Window(context=24, horizon=12)
    assert windows_held_out(windows + 35, window, share)[1] == held_out


@pytest.mark.parametrize(("windows", "share", "held_out"), [(37, 0.1, 3), (37, 0.9, 1), (24, 0.1, 1), (22, 0.1, 0)])
def test_few_windows_are_held_out_where_a_user_asks_for_validation(windows: int, share: float, held_out: int) -> None:
    assert windows_held_out(windows + 35, Window(context=24, horizon=12), share, few=True)[1] == held_out


def test_of_many_series_each_holds_out_the_fewer_windows() -> None:
    window = Window(context=24, horizon=12)
    assert [windows_held_out(155, window, 0.1, most)[1] for most in (1.0, 0.05, 1e-9)] == [12, 6, 1]


def test_few_windows_train_random_weights_for_all_steps_and_the_seasonal_network_for_few() -> None:
    named = {"orderCol": "day", "labelCol": "sold", "context": 3, "horizon": 2}
    for params, epochs in (({}, 1), ({"module": "torch.nn:Linear"}, 500)):
        forecaster = Forecaster(**named, **params)
        assert automatic_settings(50, forecaster._task_settings, validates=False).epochs == epochs


def test_few_samples_are_all_trained() -> None:
    assert too_few(49, 10, TABLES)
    assert too_few(1_000, 0, TABLES)
    assert too_few(1_000, 1_001, TABLES)
    assert not too_few(90, 10, TABLES)
    assert too_few(449, 50, TEXTS)
    assert not too_few(450, 50, TEXTS)
    assert not too_few(10, 1, SERIES)


@pytest.mark.parametrize(
    "estimator",
    [
        TabularClassifier(),
        Recommender(),
        Forecaster(orderCol="day", labelCol="sold", context=3, horizon=2),
        Ranker(module="torch.nn:Linear", moduleParams={"in_features": 1, "out_features": 1}, groupCol="query"),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_nothing_below_the_estimators_sees_auto(estimator: Any) -> None:
    request = translate(estimator, estimator._task)
    assert "auto" not in (request.job.config.epochs, request.job.config.batch_size, request.job.recipe.learning_rate)
    assert request.columns["validation"] == "_held_out"
    estimator = estimator.copy()
    estimator._sample, estimator._marks = Sample(trained=900, held_out=100, chosen_by="a hash"), "_held_out"
    estimator._set(validationIndicatorCol="_held_out")
    done = estimator.completed()
    values = Values(done)
    assert "auto" not in [values[name] for name in AUTOMATIC]
    assert not any(done.isSet(name) for name in AUTOMATIC)
    assert done.completed().getEpochs() == done.getEpochs() > 1


def test_what_is_set_stays_as_it_is() -> None:
    estimator = TabularClassifier(batchSize=40, earlyStoppingPatience=3, learningRate=0.5)
    config = translate(estimator, "classification").job.config
    assert (config.batch_size, config.patience) == (40, 3)


def test_with_epochs_a_fit_holds_out_nothing_unless_a_share_is_set() -> None:
    config = translate(TabularClassifier(epochs=7), "classification").job.config
    assert (config.epochs, config.batch_size, config.patience, config.validation_unit) == (7, 256, None, "epoch")
    assert not TabularClassifier(epochs=7)._holds_out
    assert not TabularClassifier(validationFraction=0.0)._holds_out
    assert not TabularClassifier(validationIndicatorCol="late")._holds_out
    assert TabularClassifier(epochs=7, validationFraction=0.2)._holds_out


def test_estimators_of_any_module_have_no_auto() -> None:
    with pytest.raises(TypeError, match="epochs"):
        TorchClassifier(epochs="auto")
    assert TorchClassifier().getEpochs() == 1
    assert TextClassifier().getEpochs() == "auto"
    assert "default: auto" in TextClassifier().explainParam("epochs")


def records(*losses: float) -> list[dict[str, Any]]:
    return [{"epoch": place, "val_loss": loss} for place, loss in enumerate(losses, 1)]


def test_a_summary_says_why_the_training_ended_and_which_validation_was_the_best() -> None:
    config = TrainConfig(epochs=4, patience=2)
    assert ending(records(3.0, 1.0, 2.0, 2.0), config) == "patience: 2 validations without a better val_loss"
    assert ending(records(4.0, 3.0, 2.0, 1.0), config) == "all epochs"
    assert ending(records(4.0, 3.0), config) == "stopped by a callback or a search"
    timed = replace(config, max_minutes=1.5)
    assert ending(records(4.0, 3.0), timed, out_of_time=True) == "time: 1.5 minutes are over"
    assert best_validation(records(3.0, 1.0, 2.0), config) == {"epoch": 2, "val_loss": 1.0}
    by_step = [{"epoch": 1, "validations": [{"step": 5, "val_loss": 1.0}, {"step": 10, "val_loss": 0.5}]}]
    assert best_validation(by_step, config) == {"epoch": 1, "step": 10, "val_loss": 0.5}
    assert best_validation([{"epoch": 1, "loss": 1.0}], config) == {}


def test_the_baseline_of_a_classifier_is_its_most_frequent_class() -> None:
    assert majority([[3, 3], [1, 1]]) == {"val_accuracy": 0.75}
    assert majority(None) == {}


def test_texts_train_a_few_epochs_and_their_rate_rises_over_a_tenth_of_the_steps() -> None:
    few = automatic_settings(200, TEXTS, validates=False)
    many = automatic_settings(1_800, TEXTS, validates=True)
    assert (few.epochs, few.batch_size, few.warmup_steps) == (8, 16, 10)
    assert (many.epochs, many.batch_size, many.warmup_steps) == (3, 16, 34)
    assert automatic_settings(100_000, TEXTS, validates=True).epochs == 3
    assert automatic_settings(1_800, TABLES, validates=True).warmup_steps is None

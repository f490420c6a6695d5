"""Several settings of Params are trained on rows that are read once, and Spark's own tools make use of it."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.tuning import CrossValidator
from pyspark.sql import DataFrame, SparkSession

from sparktorch import TorchRegressor
from sparktorch.errors import ConfigError, ModuleError
from tests.spark.ml.test_prepare import ROWS, regressor, same
from tests.support.faults import Fault
from tests.support.waiting import until
from tests.support.witness import Witness

# pyspark's tuning does not close its pools of threads.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")


@pytest.fixture
def witness(frame: DataFrame, tmp_path: Path) -> Witness:
    return Witness(frame, tmp_path / "seen")


def rates(estimator: TorchRegressor, *values: float) -> list[dict[Any, Any]]:
    return [{estimator.learningRate: value} for value in values]


def within(seconds: float, call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"not within {seconds} s"
    return found[0]


def test_settings_that_need_other_rows_get_a_job_of_their_own(witness: Witness) -> None:
    estimator = regressor()
    maps = [
        {estimator.numWorkers: 1},
        *rates(estimator, 0.1, 0.01),
        {estimator.weightCol: "weight"},
        {estimator.numWorkers: 1, estimator.learningRate: 0.5},
    ]
    models = dict(estimator.fitMultiple(witness.rows, maps))
    assert 3 * ROWS <= witness.count() < 6 * ROWS
    assert all(same(models[index], estimator.fit(witness.rows, values)) for index, values in enumerate(maps))
    assert [len(models[index].summary.ranks) for index in range(5)] == [1, 2, 2, 2, 1]


def test_nothing_runs_until_the_first_model_is_asked_for(witness: Witness) -> None:
    estimator = regressor()
    models = estimator.fitMultiple(witness.rows, rates(estimator, 0.1, 0.01))
    assert witness.count() == 0
    assert next(models)[0] == 0
    assert next(models)[0] == 1
    with pytest.raises(StopIteration):
        next(models)


def test_a_setting_that_fails_is_told_in_its_turn_and_the_others_are_trained(frame: DataFrame) -> None:
    estimator = regressor(optimizer="SGD")
    models = estimator.fitMultiple(frame, rates(estimator, 0.1, 1e30, 0.01))
    assert next(models)[0] == 0
    with pytest.raises(ModuleError, match=r"loss is (nan|inf)"):
        next(models)
    assert next(models)[0] == 2


def test_rows_that_cannot_be_held_are_read_for_each_setting(witness: Witness) -> None:
    estimator = regressor(validationIndicatorCol=None)
    folds = {estimator.strategy: "independent", estimator.strategyParams: {"folds": True}}
    models = dict(within(120, lambda: list(estimator.fitMultiple(witness.rows, [folds, {}, folds, {}]))))
    assert "val_loss" in models[0].summary.history[0]
    assert "val_loss" not in models[1].summary.history[0]
    assert same(models[0], models[2])
    assert same(models[1], models[3])


def test_models_that_nobody_can_take_are_not_trained(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    estimator = regressor(numWorkers=3)
    slow = Fault("slow", tmp_path / "marks", seconds=1.0)
    models = estimator.fitMultiple(frame, [{}, {estimator.callbacks: [slow], estimator.epochs: 100}, {}])
    next(models)
    until(lambda: (tmp_path / "marks" / "pids").exists(), seconds=20, what="the second fit began")
    del models
    gc.collect()
    assert within(30, lambda: spark.range(3).count()) == 3


def test_an_interrupt_of_who_waits_for_a_model_ends_the_fits(frame: DataFrame, tmp_path: Path) -> None:
    estimator = regressor(numWorkers=3)
    faults = [Fault("slow", tmp_path / name, seconds=1.0) for name in ("first", "second")]
    models = estimator.fitMultiple(frame, [{estimator.callbacks: [each], estimator.epochs: 100} for each in faults])

    def interrupt() -> None:
        until(lambda: (tmp_path / "first" / "pids").exists(), seconds=40, what="the first fit began")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        next(models)
    thread.join()
    until(models._work._over.is_set, seconds=60, what="the fits are over")
    # PySpark's own handler of interrupts has ended the job of the first one.
    assert not (tmp_path / "second" / "pids").exists()


def test_models_that_nobody_takes_fill_no_more_than_a_limit(
    frame: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparktorch.ml.fit.multiple._MOST_BYTES", 1)
    estimator = regressor(numWorkers=3)  # all slots, which scoring needs, too
    marks = [tmp_path / str(number) for number in range(3)]
    models = estimator.fitMultiple(frame, [{estimator.callbacks: [Fault("slow", one, seconds=0.0)]} for one in marks])
    _, first = next(models)
    until(lambda: (marks[1] / "pids").exists(), seconds=30, what="the second one is trained")
    assert within(30, lambda: first.transform(frame).toPandas())["prediction"].notna().all()
    assert not (marks[2] / "pids").exists()
    assert len(list(models)) == 2


def test_cross_validation_that_scores_with_slots_that_train_ends(frame: DataFrame) -> None:
    estimator, parallelism = regressor(numWorkers=3), 3  # all slots of the session
    tool = CrossValidator(
        estimator=estimator,
        estimatorParamMaps=rates(estimator, 1e-5, 0.1, 0.01),
        evaluator=RegressionEvaluator(labelCol="target"),
        numFolds=2,
        parallelism=parallelism,
        collectSubModels=True,
        seed=3,
    )
    model = within(120, lambda: tool.fit(frame))
    assert model.avgMetrics[1] < model.avgMetrics[0]
    assert same(model.bestModel, estimator.fit(frame, {estimator.learningRate: 0.1}))
    assert len(model.subModels) == 2
    assert len(model.subModels[0]) == 3


def test_what_cannot_work_is_refused_before_any_job(witness: Witness, tmp_path: Path) -> None:
    estimator = regressor(checkpointDir=str(tmp_path / "checkpoints"))
    with pytest.raises(ConfigError, match="a training of its own"):
        estimator.fitMultiple(witness.rows, rates(estimator, 0.1, 0.01))
    estimator = regressor()
    with pytest.raises(ConfigError, match="learningRate must be above 0"):
        estimator.fitMultiple(witness.rows, rates(estimator, 0.1, -1.0))
    with pytest.raises(ConfigError, match="takes a DataFrame"):
        estimator.fitMultiple([1, 2], rates(estimator, 0.1))  # type: ignore[arg-type]
    assert witness.count() == 0
    own = [{estimator.checkpointDir: str(tmp_path / str(number))} for number in range(2)]
    assert len(list(estimator.fitMultiple(witness.rows, own))) == 2

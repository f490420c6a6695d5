"""A search trains trials on groups of ranks, prunes them, outlives their failures, and gives the model of the best."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import mlflow
import optuna
import pytest
from optuna.distributions import FloatDistribution
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import DataFrame, SparkSession

from sparktorch import Callback, TorchRegressionModel, TorchRegressor, TorchTuner
from sparktorch.errors import ConfigError
from sparktorch.train.callbacks import FitContext
from tests.spark.modules import MLP
from tests.spark.scored import same_weights
from tests.support.mlflow import QUIET

if TYPE_CHECKING:
    from mlflow import MlflowClient

pytestmark = QUIET  # Optuna's storage is SQLAlchemy, too

RAISES, KILLED, BAD = 0.5, 0.25, 1e-9  # learning rates


class Marks(Callback):
    """Notes the process of every epoch; raises or kills itself at some learning rates."""

    ranks = "all"

    def __init__(self, marks: Path) -> None:
        self._marks = marks

    def on_step_end(self, context: FitContext) -> None:
        rate = context.optimizer.param_groups[0]["lr"]
        if rate == RAISES and context.epoch == 2:
            raise ArithmeticError("planted at this rate")
        if rate == KILLED and context.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        with self._marks.open("a") as file:
            file.write(f"{os.getpid()}\n")


class Interrupts(Callback):
    """Interrupts the main thread once, when two trials have ended an epoch."""

    trials: set[int] = set()

    def on_driver_epoch(self, record: dict[str, Any]) -> None:
        before = len(self.trials)
        self.trials.add(threading.get_ident())
        if (before, len(self.trials)) == (1, 2):
            _thread.interrupt_main()


class Meets(Callback):
    """Waits on the driver until two trials are in their first epoch at once."""

    both = threading.Barrier(2)
    met: list[int] = []

    def on_driver_epoch(self, record: dict[str, Any]) -> None:
        if record["epoch"] == 1:
            self.met.append(self.both.wait(60))


def regressor(**params: Any) -> TorchRegressor:
    values = {"batchSize": 64, "epochs": 4, "seed": 3, "labelCol": "target", "progress": False} | params
    return TorchRegressor(module=MLP, **values)


def tuner(rates: list[float], *, estimator: TorchRegressor | None = None, **arguments: Any) -> TorchTuner:
    grid = optuna.samplers.GridSampler({"learningRate": rates}, seed=1)
    values = {"trials": len(rates), "sampler": grid, "pruner": None, "workersPerTrial": 1} | arguments
    return TorchTuner(estimator=estimator or regressor(), space={"learningRate": rates}, **values)


def states(model: Any) -> dict[float, tuple[str, int]]:
    table = model.trials
    return dict(zip(table["params_learningRate"], zip(table["state"], table["epochs"], strict=True), strict=True))


def test_the_best_model_has_the_bits_of_a_fit_with_its_params_alone(frame: DataFrame) -> None:
    space = {"learningRate": FloatDistribution(1e-3, 0.1, log=True), "moduleParams.hidden": [8, 16]}
    base = regressor(epochs=2, moduleParams={"outputs": 1})
    model = TorchTuner(estimator=base, space=space, trials=4, pruner=None, workersPerTrial=2).fit(frame)
    table = model.trials
    assert list(table["state"]) == ["COMPLETE"] * 4
    best = table.loc[table["value"].idxmin()]
    assert best["params_learningRate"] == model.bestParams["learningRate"]
    assert best["value"] == model.bestModel.summary.history[-1]["loss"]
    hidden = {"outputs": 1, "hidden": model.bestParams["moduleParams.hidden"]}
    alone = regressor(epochs=2, moduleParams=hidden, learningRate=model.bestParams["learningRate"], numWorkers=2).fit(
        frame
    )
    assert model.bestModel.summary.numWorkers == 2
    assert same_weights(model.bestModel, alone)


def test_a_pruned_trial_trains_no_further_epoch(frame: DataFrame, tmp_path: Path) -> None:
    pruner = optuna.pruners.ThresholdPruner(upper=12.0, n_warmup_steps=2)  # the bad rate stays above
    estimator = regressor(callbacks=[Marks(tmp_path / "marks")])
    model = tuner([BAD, 0.05], estimator=estimator, pruner=pruner, parallelism=1).fit(frame)
    assert states(model) == {BAD: ("PRUNED", 2), 0.05: ("COMPLETE", 4)}
    assert len((tmp_path / "marks").read_text().split()) == 6


def test_an_error_or_a_rank_that_dies_costs_its_trial_alone(frame: DataFrame, tmp_path: Path) -> None:
    estimator = regressor(callbacks=[Marks(tmp_path / "marks")])
    model = tuner([RAISES, KILLED, 0.01, 0.02, 0.03], estimator=estimator, parallelism=2).fit(frame)
    done = dict.fromkeys((0.01, 0.02, 0.03), ("COMPLETE", 4))
    assert states(model) == {RAISES: ("FAIL", 1), KILLED: ("FAIL", 1), **done}
    failed = model.trials[model.trials["state"] == "FAIL"].set_index("params_learningRate")
    assert failed["cause"][RAISES].startswith("RankError: ")
    assert "planted at this rate" in failed["cause"][RAISES]
    assert failed["cause"][KILLED].startswith("RankLostError: ")
    assert failed["value"].isna().all()


def test_groups_of_ranks_train_trials_side_by_side(frame: DataFrame, tmp_path: Path) -> None:
    estimator = regressor(callbacks=[Marks(tmp_path / "marks"), Meets()])
    model = tuner([0.01, 0.02], estimator=estimator, parallelism=2).fit(frame)
    assert set(states(model).values()) == {("COMPLETE", 4)}
    assert len(set((tmp_path / "marks").read_text().split())) == 2
    assert sorted(Meets.met) == [0, 1]


def test_a_study_is_resumed_and_its_best_trial_fitted_again(
    frame: DataFrame, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = {"storage": f"sqlite:///{tmp_path}/study.db", "studyName": "rates"}
    rates = [0.05, BAD]
    first = tuner(rates, **stored, trials=1).fit(frame)
    assert first.bestParams == {"learningRate": 0.05}
    with caplog.at_level("INFO", logger="sparktorch"):
        again = tuner(rates, **stored, trials=1).fit(frame)
        assert "trial 0 of an earlier run is the best" in caplog.text
        assert again.trials.equals(first.trials)
        assert same_weights(again.bestModel, first.bestModel)
        worse = tuner(rates, **stored).fit(frame)
        assert states(worse) == {0.05: ("COMPLETE", 4), BAD: ("COMPLETE", 4)}
        assert same_weights(worse.bestModel, first.bestModel)
        assert "other Params than" not in caplog.text
        tuner(rates, **stored, estimator=regressor(epochs=1)).fit(frame)
        assert "has other Params than then" in caplog.text
    with pytest.raises(ConfigError, match="chose from another space"):
        tuner([0.05], **stored).fit(frame)
    with pytest.raises(ConfigError, match="to minimize 'loss', and this search to maximize 'rows_per_second'"):
        tuner(rates, **stored, metric="rows_per_second").fit(frame)


def test_a_metric_that_no_record_has_ends_the_search(frame: DataFrame) -> None:
    kept = {"storage": optuna.storages.InMemoryStorage(), "studyName": "it"}
    with pytest.raises(ConfigError, match="no metric 'los'") as raised:
        tuner([0.01, 0.02], metric="los", direction="minimize", parallelism=1, **kept).fit(frame)
    assert "did you mean 'loss'?" in raised.value.hint
    (trial,) = optuna.load_study(study_name="it", storage=kept["storage"]).trials
    assert trial.user_attrs["sparktorch.epochs"] == 1


def test_an_interrupt_cancels_all_trials_and_frees_their_slots(frame: DataFrame) -> None:
    storage = optuna.storages.InMemoryStorage()
    estimator = regressor(epochs=100_000, callbacks=[Interrupts()])
    search = tuner([0.01, 0.02, 0.03], estimator=estimator, parallelism=2, storage=storage, studyName="it")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pyspark's own cancels all jobs
    try:
        with pytest.raises(KeyboardInterrupt):
            search.fit(frame)
    finally:
        signal.signal(signal.SIGINT, before)
    study = optuna.load_study(study_name="it", storage=storage)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL"]
    assert {trial.user_attrs["sparktorch.cause"] for trial in study.trials} == {"the search was interrupted"}
    regressor(numWorkers=3, epochs=1).fit(frame)


def test_each_trial_is_a_nested_run(frame: DataFrame, store: MlflowClient) -> None:
    with mlflow.start_run() as run:
        tuner([0.01, 0.02], estimator=regressor(epochs=1)).fit(frame)
    (experiment,) = {run.info.experiment_id}
    trials = store.search_runs([experiment], f"tags.mlflow.parentRunId = '{run.info.run_id}'")
    assert {trial.info.run_name for trial in trials} == {"trial 0", "trial 1"}
    assert {trial.data.params["learningRate"] for trial in trials} == {"0.01", "0.02"}
    assert "loss" not in store.get_run(run.info.run_id).data.metrics
    before = len(store.search_runs([experiment]))
    tuner([0.01], estimator=regressor(epochs=1)).fit(frame)
    assert len(store.search_runs([experiment])) == before


def test_a_tuner_is_a_stage_and_its_model_saves_the_best(frame: DataFrame, tmp_path: Path) -> None:
    mpl.use("Agg")
    fitted = Pipeline(stages=[tuner([0.01, 0.02], estimator=regressor(epochs=1))]).fit(frame)
    (model,) = fitted.stages
    assert model.plotHistory() is not None
    assert model.plotEpochs() is not None
    assert model.plotParams() is not None
    fitted.save(str(tmp_path / "pipeline"))
    (loaded,) = PipelineModel.load(str(tmp_path / "pipeline")).stages
    assert isinstance(loaded, TorchRegressionModel)
    assert same_weights(loaded, model.bestModel)
    assert loaded.transform(frame).collect() == model.transform(frame).collect()


def test_more_workers_than_the_cluster_has_are_refused_before_any_job(spark: SparkSession, frame: DataFrame) -> None:
    spark.sparkContext.setJobGroup("refused", "")
    try:
        for workers, parallelism, param in ((4, None, "workersPerTrial"), (2, 2, "parallelism")):
            with pytest.raises(ConfigError) as raised:
                tuner([0.1, 0.2], workersPerTrial=workers, parallelism=parallelism).fit(frame)
            assert raised.value.where["param"] == param
        assert not spark.sparkContext.statusTracker().getJobIdsForGroup("refused")
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)

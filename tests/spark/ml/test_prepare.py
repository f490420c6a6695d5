"""Rows that ranks hold: read once, trained as often as one likes, and read again when ranks are lost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparktorch import TorchClassifier, TorchRegressor
from sparktorch.errors import ConfigError, ModuleError, RankLostError, RankStalledError
from sparktorch.ml.model import TorchModelBase
from tests.spark.modules import Dies
from tests.spark.scored import same_weights
from tests.support.faults import Fault
from tests.support.nets import Mlp
from tests.support.programs import run_python
from tests.support.waiting import until
from tests.support.witness import Witness

ROWS = 1001


def same(one: TorchModelBase, other: TorchModelBase) -> bool:
    losses = [[record["loss"] for record in model.summary.history] for model in (one, other)]
    return losses[0] == losses[1] and same_weights(one, other)


def regressor(**params: Any) -> TorchRegressor:
    values = {"module": "torch.nn:Linear", "moduleParams": {"in_features": 5, "out_features": 1}, "labelCol": "target"}
    return TorchRegressor(**{**values, "batchSize": 64, "epochs": 2, "numWorkers": 2, "progress": False, **params})


@pytest.fixture
def witness(frame: DataFrame, tmp_path: Path) -> Witness:
    return Witness(frame, tmp_path / "seen")


def test_the_second_fit_reads_nothing_and_trains_the_same(witness: Witness) -> None:
    estimator = regressor()
    alone = [estimator.fit(witness.rows, {estimator.learningRate: rate}) for rate in (0.1, 0.01)]
    witness.count()
    with estimator.prepare(witness.rows) as prepared:
        assert repr(prepared) == "PreparedData(no slots held)"
        assert witness.count() == 0
        first = estimator.fit(prepared, {estimator.learningRate: 0.1})
        assert ROWS <= witness.count() < 2 * ROWS  # and those of the partition that the sample row comes from
        second = estimator.fit(prepared, {estimator.learningRate: 0.01})
        assert witness.count() == 0
        assert repr(prepared).startswith("PreparedData(2 slots held, 1,001 rows, ")
    assert repr(prepared) == "PreparedData(closed)"
    assert same(first, alone[0])
    assert same(second, alone[1])
    assert "rank0.load" in first.summary.seconds
    assert "rank0.load" not in second.summary.seconds


# Whatever a fit changes in ranks, and in their rows, the next one finds as the first did.
SETTINGS: dict[str, dict[str, Any]] = {
    "other class weights": {"classWeights": [1.0, 3.0, 0.5]},
    "none": {},
    "other module": {"moduleParams": {"hidden": 7}},
    "other batches": {"batchSize": 100, "seed": 5, "shuffle": False},
    "average": {"emaDecay": 0.9, "warmupSteps": 3},
    "zero3": {"strategy": "zero3", "strategyParams": {"min_parameters": 1}},
    "bf16": {"precision": "bf16", "deterministic": True},
    "parameterServer": {"strategy": "parameterServer", "strategyParams": {"staleness": 0}},
    "none again": {},
}
_OF_ROWS = ("other class weights", "none", "other batches", "none again")  # what changes how rows are taken


def classifier(**params: Any) -> TorchClassifier:
    return TorchClassifier(
        module=Mlp,
        moduleParams={"hidden": 4},
        batchSize=64,
        epochs=2,
        numWorkers=2,
        weightCol="weight",
        validationIndicatorCol="held_out",
        shuffleBlock=32,  # as from disk: rows are in the same order in memory then
        progress=False,
        **params,
    )


def set_on(estimator: TorchClassifier, name: str) -> dict[Any, Any]:
    return {estimator.getParam(param): value for param, value in SETTINGS[name].items()}


@pytest.fixture(scope="module")
def marked(frame: DataFrame) -> DataFrame:
    return frame.withColumn("held_out", F.expr("label = 1 and weight < 1"))


@pytest.fixture(scope="module")
def alone(marked: DataFrame) -> dict[str, TorchModelBase]:
    estimator = classifier()
    fits = {name: estimator.fit(marked, set_on(estimator, name)) for name in SETTINGS if name != "none again"}
    return {**fits, "none again": fits["none"]}


@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_a_fit_leaves_no_trace_in_the_next(marked: DataFrame, alone: dict[str, TorchModelBase], storage: str) -> None:
    estimator = classifier(storage=storage, memoryBudget=1 if storage == "disk" else None)
    names = _OF_ROWS if storage == "disk" else SETTINGS
    with estimator.prepare(marked) as prepared:
        found = {name: estimator.fit(prepared, set_on(estimator, name)) for name in names}
    assert not [name for name, model in found.items() if not same(model, alone[name])]


def test_who_needs_other_rows_or_comes_too_late_is_refused(frame: DataFrame) -> None:
    estimator = regressor()
    with estimator.prepare(frame) as prepared:
        with pytest.raises(ConfigError, match=r"differs in numWorkers \["):
            regressor(numWorkers=1).fit(prepared)
        with pytest.raises(ConfigError, match=r"differs in weightCol \["):
            regressor(weightCol="weight").fit(prepared)
        folds = {estimator.strategy: "independent", estimator.strategyParams: {"folds": True}}
        with pytest.raises(ConfigError, match=r"differs in strategyParams.folds \["):
            estimator.fit(prepared, folds)
        with pytest.raises(ConfigError, match="labels have another type"):
            TorchClassifier(module=Mlp, labelCol="target", numWorkers=2, progress=False).fit(prepared)
    with pytest.raises(ConfigError, match="prepare the DataFrame again"):
        estimator.fit(prepared)
    with pytest.raises(ConfigError, match="which they do not reach"):
        regressor(rendezvous="rank0").prepare(frame)
    with pytest.raises(ConfigError, match="idleTimeout must be above 0"):
        estimator.prepare(frame, idleTimeout=0)


def test_a_fit_that_fails_leaves_the_rows_to_the_next(witness: Witness) -> None:
    estimator = regressor()
    alone = estimator.fit(witness.rows)
    with estimator.prepare(witness.rows) as prepared:
        estimator.fit(prepared)
        witness.count()
        with pytest.raises(ModuleError, match=r"loss is (nan|inf)"):
            estimator.fit(prepared, {estimator.learningRate: 1e30, estimator.optimizer: "SGD"})
        assert same(estimator.fit(prepared), alone)
        assert witness.count() == 0


def test_idle_ranks_let_go_of_their_slots_and_the_next_fit_reads_again(spark: SparkSession, witness: Witness) -> None:
    estimator = regressor(numWorkers=3)
    with estimator.prepare(witness.rows, idleTimeout=1.0) as prepared:
        first = estimator.fit(prepared)
        until(lambda: repr(prepared) == "PreparedData(no slots held)", seconds=20, what="the slots are free")
        assert spark.range(3).count() == 3
        witness.count()
        assert same(estimator.fit(prepared), first)
        assert witness.count() == ROWS


def test_idle_ranks_give_way_to_a_fit_and_to_scoring_that_need_their_slots(
    frame: DataFrame, caplog: pytest.LogCaptureFixture
) -> None:
    estimator = regressor(numWorkers=3)  # all slots of the session
    with estimator.prepare(frame) as first, estimator.prepare(frame.where("weight > 1")) as second:
        model = estimator.fit(first)
        estimator.fit(second)
        assert repr(first) == "PreparedData(no slots held)"
        assert model.transform(frame).agg(F.sum("prediction")).first() is not None
        assert repr(second) == "PreparedData(no slots held)"
        assert same(estimator.fit(first), model)
    assert caplog.text.count("gives way") == 2


def test_a_killed_rank_costs_its_fit_and_the_next_reads_again(witness: Witness, tmp_path: Path) -> None:
    estimator = regressor()
    with estimator.prepare(witness.rows) as prepared:
        first = estimator.fit(prepared)
        witness.count()
        with pytest.raises(RankLostError, match="rank 1 died while training"):
            estimator.fit(prepared, {estimator.callbacks: [Dies(tmp_path / "once", rank=1, step=3)]})
        assert same(estimator.fit(prepared), first)
        assert witness.count() == ROWS
        killer = Dies(tmp_path / "again", rank=0, step=20)
        restarted = estimator.fit(prepared, {estimator.callbacks: [killer], estimator.maxRestarts: 1})
        assert same(restarted, first)
        assert witness.count() == ROWS


def test_a_stalled_rank_is_named_and_its_slots_are_freed(frame: DataFrame, tmp_path: Path) -> None:
    estimator = regressor(numWorkers=3, stallTimeout=2.0)
    with estimator.prepare(frame) as prepared:
        first = estimator.fit(prepared)
        with pytest.raises(RankStalledError, match="rank 1 stands still") as stalled:
            estimator.fit(prepared, {estimator.callbacks: [Fault("hang", tmp_path / "marks", step=3)]})
        assert "pyspark/worker" not in str(stalled.value)
        assert same(estimator.fit(prepared), first)


class Interrupts(Fault):
    """Interrupts the caller in the middle of a fit; pyspark's own handler of Ctrl-C would cancel all jobs besides."""

    def on_driver_progress(self, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_ends_the_fit_and_frees_the_slots(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    slow = Interrupts("slow", tmp_path / "marks", seconds=0.2)
    estimator = regressor(numWorkers=3, callbacks=[slow], epochs=50)
    with estimator.prepare(frame) as prepared:
        with pytest.raises(KeyboardInterrupt):
            estimator.fit(prepared)
        assert repr(prepared) == "PreparedData(no slots held)"
        started = time.monotonic()
        assert spark.range(3).count() == 3
        assert time.monotonic() - started < 20


def test_rows_of_a_stopped_session_are_refused_by_every_way_to_use_them(tmp_path: Path) -> None:
    said = json.loads(run_python(tmp_path, "-m", "tests.spark.programs.stopped", str(tmp_path)).splitlines()[-1])
    assert len(said) == 4
    assert set(said.values()) == {"the Spark session of the rows has been stopped"}

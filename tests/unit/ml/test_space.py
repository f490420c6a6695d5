"""A space names Params, and says where their values come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402
from pyspark.ml import Pipeline  # noqa: E402

from sparktorch import TabularClassifier, TorchEstimator, TorchRegressor  # noqa: E402
from sparktorch.base.config import TrainConfig  # noqa: E402
from sparktorch.errors import ConfigError, ModuleError  # noqa: E402
from sparktorch.ml.fit.translate import translate  # noqa: E402
from sparktorch.ml.tuning import example, tuner  # noqa: E402
from sparktorch.ml.tuning.example import valid_example  # noqa: E402
from sparktorch.ml.tuning.search import value_of  # noqa: E402
from sparktorch.ml.tuning.space import Space, applied  # noqa: E402
from sparktorch.ml.tuning.tuner import _space_of, direction_of  # noqa: E402
from sparktorch.tasks.recommender.estimator import Recommender  # noqa: E402
from sparktorch.tasks.shared.settings import fixed_settings  # noqa: E402
from sparktorch.tasks.tables.estimator import TABLES  # noqa: E402

ESTIMATOR = TorchRegressor(module="torch.nn:Linear", moduleParams={"in_features": 1}, optimizerParams={"eps": 1e-6})


@pytest.fixture
def study() -> Any:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))


def test_distributions_and_lists_of_choices_become_values(study: Any) -> None:
    given = {
        "learningRate": FloatDistribution(1e-4, 0.1, log=True),
        "batchSize": [16, 32],
        "optimizer": CategoricalDistribution(["SGD", "Adam"]),
        "moduleParams.out_features": IntDistribution(1, 3),
    }
    space = Space(given, ESTIMATOR)
    trial = study.ask()
    values = space.values(trial)
    assert values == trial.params
    assert list(values) == list(given)
    study.tell(trial, 1.0)
    assert space.values(study.trials[0]) == values
    assert {name: ESTIMATOR.copy().hasParam(name.partition(".")[0]) for name in values} == dict.fromkeys(values, True)


def test_values_are_set_in_a_copy_and_entries_join_their_dict() -> None:
    values = {"epochs": 7, "moduleParams.out_features": 2, "optimizerParams.eps": 1e-3, "seed": None}
    changed = applied(ESTIMATOR, values)
    assert changed.getEpochs() == 7
    assert changed.getModuleParams() == {"in_features": 1, "out_features": 2}
    assert changed.getOptimizerParams() == {"eps": 1e-3}
    assert ESTIMATOR.getModuleParams() == {"in_features": 1}
    assert ESTIMATOR.getEpochs() != 7
    whole = applied(ESTIMATOR, {"moduleParams.a": 1, "moduleParams": {"b": 2}})
    assert whole.getModuleParams() == {"a": 1, "b": 2}
    with pytest.raises(TypeError):
        applied(ESTIMATOR, {"epochs": "many"})


def test_choices_that_no_storage_keeps_are_chosen_by_their_text(study: Any) -> None:
    space = Space({"moduleParams.widths": [[8], [8, 4]], "module": [dict, "torch.nn:Linear"]}, ESTIMATOR)
    trial = study.ask()
    values = space.values(trial)
    assert trial.params["moduleParams.widths"] in ("[8]", "[8, 4]")
    assert values["moduleParams.widths"] in ([8], [8, 4])
    assert values["module"] in (dict, "torch.nn:Linear")
    with pytest.raises(ConfigError, match="read the same"):
        Space({"module": [[1], [1]]}, ESTIMATOR)


def test_a_function_gives_the_same_values_again_for_a_finished_trial(study: Any) -> None:
    space = Space(lambda trial: {"epochs": 2 * trial.suggest_int("half", 1, 50)}, ESTIMATOR)
    trial = study.ask()
    values = space.values(trial)
    assert values == {"epochs": 2 * trial.params["half"]}
    study.tell(trial, 0.0)
    assert space.values(study.trials[0]) == values


def test_samples_are_trials_that_no_study_counts() -> None:
    for given in ({"epochs": [1, 2, 3]}, lambda trial: {"epochs": trial.suggest_int("epochs", 1, 3)}):
        assert {sample["epochs"] for sample in Space(given, ESTIMATOR).samples()} == {1, 2, 3}


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "the space is {}"),
        ([1], r"the space is \[1\]"),
        ({"batchSize": []}, r"the space of 'batchSize' is \[\]"),
        ({"batchSize": "many"}, "the space of 'batchSize' is 'many'"),
        ({"batchsize": [1]}, "no Param 'batchsize'"),
        ({"moduleparams.a": [1]}, "no Param 'moduleparams'"),
        ({"epochs.a": [1]}, "epochs is no dict"),
    ],
)
def test_what_is_no_space_is_refused(given: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Space(given, ESTIMATOR)


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({"optimizer": ["Adam", "Adamm"]}, r"optimizer 'Adamm' is unknown(?s:.*)did you mean 'Adam'"),
        ({"precision": ["fp32", "bf61"]}, "precision 'bf61' is unknown"),
        ({"batchSize": [16, "many"]}, 'param "batchSize"'),
        ({"epochs": [*range(1, 99), 0]}, "epochs must be at least 1, got 0"),
        (lambda trial: {"optimizer": trial.suggest_categorical("it", ["adam"])}, "optimizer 'adam' is unknown"),
    ],
)
def test_a_choice_that_its_param_does_not_take_is_refused_before_any_trial(space: Any, says: str) -> None:
    with pytest.raises((ConfigError, ModuleError), match=says):
        valid_example(ESTIMATOR, Space(space, ESTIMATOR), "loss")


@pytest.mark.parametrize(
    ("space", "says"),
    [
        ({"alpha": [0.5, 2.0]}, "they differ in alpha"),
        ({"numNegatives": [4, 8]}, "set numNegatives of the estimator as well"),
    ],
)
def test_a_space_whose_trials_learn_something_else_of_the_rows_is_refused(space: Any, says: str) -> None:
    base = Recommender(implicitPrefs=True)
    with pytest.raises(ConfigError, match=says):
        valid_example(base, Space(space, base), "loss")
    drawn = Recommender(implicitPrefs=True, numNegatives=4)
    valid_example(drawn, Space({"numNegatives": [4, 8]}, drawn), "loss")


def test_a_choice_that_works_only_with_another_one_is_left_to_its_trials() -> None:
    given = {"strategy": ["ddp", "localSGD"], "strategyParams": [{}, {"period": 4}], "validationInterval": [1, 2]}
    estimator, _ = valid_example(ESTIMATOR, Space(given, ESTIMATOR), "loss")
    assert estimator.getModule() == "torch.nn:Linear"


@pytest.mark.parametrize(
    ("base", "space"),
    [
        (TorchRegressor(batchSize=64), {"module": ["torch.nn:Linear"], "microBatchSize": [8, 16]}),
        (TorchRegressor(), {"module": ["torch.nn:Linear"], "accumulationSteps": [2, 4]}),
        (TorchEstimator(module="torch.nn:Linear"), {"loss": ["MSELoss", "L1Loss"], "microBatchSize": [8, 16]}),
    ],
    ids=["micro batches", "accumulation", "loss"],
)
def test_what_trials_need_is_compared_with_whole_trials_if_the_base_is_incomplete(
    base: Any, space: dict[str, Any]
) -> None:
    estimator, _ = valid_example(base, Space(space, base), "loss")
    assert all(estimator.isSet(name) for name in space)


@pytest.mark.parametrize("error", [TypeError("of a user's code"), ZeroDivisionError()], ids=["type", "division"])
def test_an_error_that_is_no_refusal_is_that_of_its_trial(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def translated(estimator: Any, task: Any) -> Any:
        if estimator.getEpochs() == 2:
            raise error
        return translate(estimator, task)

    monkeypatch.setattr(example, "translate", translated)
    estimator, _ = valid_example(ESTIMATOR, Space({"epochs": [1, 2, 3]}, ESTIMATOR), "loss")
    assert estimator.getEpochs() != 2


def test_a_metrics_name_says_whether_smaller_is_better_unless_the_user_does() -> None:
    found = [direction_of(name, None) for name in ("val_loss", "val_f1", "rows_per_second")]
    assert found == ["minimize", "maximize", "maximize"]
    assert direction_of("val_loss", "maximize") == "maximize"
    with pytest.raises(ConfigError, match="metric 'val_answer' does not say"):
        direction_of("val_answer", None)


def test_a_trial_counts_with_the_epoch_whose_weights_it_has() -> None:
    history = [{"val_loss": 2.0, "val_f1": 0.1}, {"val_loss": 1.0, "val_f1": 0.2}, {"val_loss": 3.0, "val_f1": 0.3}]
    best = TrainConfig(patience=2)
    assert value_of(history, "val_f1", TrainConfig()) == 0.3
    assert value_of(history, "val_f1", best) == 0.2
    assert value_of(history, "val_loss", replace(best, best_metric="val_f1")) == 3.0
    assert value_of(history, "val_f1", replace(best, best_delta=1.0)) == 0.1
    assert value_of([{"val_loss": float("nan"), "val_f1": 0.1}, *history], "val_f1", best) == 0.2
    within = [
        {"loss": 1.0, "val_loss": 3.0, "validations": [{"step": 1, "val_loss": 0.5}, {"step": 2, "val_loss": 3.0}]}
    ]
    assert value_of(within, "val_loss", best) == 0.5
    assert value_of(history, "val_auc", best) is None


def test_an_estimators_space_begins_with_its_defaults_and_leaves_out_what_the_user_has_set(study: Any) -> None:
    space = _space_of(TabularClassifier(labelCol="y"))
    study.enqueue_trial(space.defaults)
    assert space.values(study.ask()) == {}
    drawn = [space.values(study.ask()) for _ in range(20)]
    assert {"learningRate", "moduleParams.hidden"} <= {name for values in drawn for name in values}
    assert all(value is not None for values in drawn for value in values.values())
    some = TabularClassifier(labelCol="y", learningRate=0.1, moduleParams={"hidden": [8]}, optimizer="SGD")
    assert "moduleParams.dropout" in some._search_space()
    assert not {"learningRate", "moduleParams.hidden", "optimizerParams.weight_decay"} & some._search_space().keys()
    assert not any("moduleParams" in name for name in some.copy().setParams(module=torch.nn.Linear)._search_space())
    explicit = TabularClassifier(labelCol="y", learningRate="auto", epochs=3)
    usual, rates = fixed_settings(TABLES).learning_rate, explicit._search_space()["learningRate"]
    assert rates[0] is None
    assert min(rates[1:]) < usual < max(rates[1:])


def test_an_estimator_without_a_space_of_its_own_wants_one() -> None:
    with pytest.raises(ConfigError, match="TorchRegressor has no space of its own") as refused:
        _space_of(ESTIMATOR)
    assert refused.value.where == {"param": "space"}


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"space": lambda trial: {"lerningRate": 1}}, "lerningRate"),
        ({"space": {"numWorkers": [1, 2]}}, "numWorkers"),
        ({"space": {"labelCol": ["target", "label"]}}, "labelCol"),
        ({"metric": "val_loss"}, "metric"),
        ({"estimator": ESTIMATOR.copy().setParams(checkpointDir="/nowhere")}, "checkpointDir"),
        ({"estimator": Pipeline()}, "estimator"),
        ({"pruner": "best"}, "pruner"),
        ({"storage": "sqlite:///x.db"}, "studyName"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),  # uids would differ between processes
)
def test_a_search_that_cannot_work_is_refused_before_its_rows_are_looked_at(
    changed: dict[str, Any], param: str
) -> None:
    given = {"estimator": ESTIMATOR, "space": {"learningRate": [0.1]}, "trials": 2} | changed
    with pytest.raises(ConfigError) as raised:
        tuner.TorchTuner(**given)._fit(None)  # type: ignore[arg-type]
    assert raised.value.where["param"] == param

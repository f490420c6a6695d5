"""Params and their one translation to configuration; no JVM is needed for either."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from pyspark.ml.param import Params

from sparktorch import (
    TorchClassificationModel,
    TorchClassifier,
    TorchEstimator,
    TorchModel,
    TorchRegressionModel,
    TorchRegressor,
)
from sparktorch.data.columns import InputOptions
from sparktorch.errors import ConfigError
from sparktorch.ml.fit.translate import translate
from tests.support.nets import Mlp

ESTIMATORS = [TorchClassifier, TorchRegressor, TorchEstimator]
MODELS = [TorchClassificationModel, TorchRegressionModel, TorchModel]


def signature_of(kind: type) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(kind.__init__).parameters)  # type: ignore[misc]
    del parameters["self"]
    return parameters


def value_of(instance: Any, param: Any) -> Any:
    return instance.getOrDefault(param) if instance.isDefined(param) else None


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_constructor_shows_every_param_with_its_default(kind: Any) -> None:
    estimator, parameters = kind(), signature_of(kind)
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert parameters.keys() == {param.name for param in estimator.params}
    shown = {name: parameter.default for name, parameter in parameters.items()}
    actual = {param.name: value_of(estimator, param) for param in estimator.params}
    plain = {name: value for name, value in actual.items() if not isinstance(value, dict | list)}
    assert shown == {**dict.fromkeys(actual), **plain}  # a signature cannot show what is empty and may change
    assert all(type(shown[name]) is type(value) for name, value in plain.items())


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_nothing_is_set_that_was_not_given(kind: Any) -> None:
    assert not kind()._paramMap
    assert {param.name for param in kind(epochs=1, weightCol=None)._paramMap} == {"epochs"}


@pytest.mark.parametrize("kind", [*ESTIMATORS, *MODELS])
def test_every_param_has_a_doc_a_getter_and_a_setter(kind: Any) -> None:
    instance = kind()
    for param in instance.params:
        name = param.name[0].upper() + param.name[1:]
        assert param.doc
        assert callable(getattr(instance, f"set{name}"))
        assert not instance.isDefined(param) or getattr(instance, f"get{name}")() == instance.getOrDefault(param)
    assert instance.setPredictionCol("p") is instance
    assert instance.getPredictionCol() == "p"


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_set_params_reads_as_the_constructor_does(kind: Any) -> None:
    first = kind(epochs=3, warmupSteps=2)
    second = first.copy()
    assert second.setParams(learningRate=0.5, warmupSteps=None, inputCols=("a", "b")) is second
    given = {param.name: value for param, value in second._paramMap.items()}
    assert given == {"epochs": 3, "learningRate": 0.5, "inputCols": ["a", "b"]}
    assert (first.getWarmupSteps(), first.getLearningRate()) == (2, 0.001)
    with pytest.raises(ConfigError, match="has no Param 'epoch'") as caught:
        second.setParams(epochs=5, epoch=4)
    assert "did you mean 'epochs'?" in caught.value.hint
    assert second.getEpochs() == 3
    with pytest.raises(TypeError, match="epochs"):
        second.setParams(epochs="three")


@pytest.mark.parametrize(("name", "value"), [("epochs", "three"), ("moduleParams", [1]), ("module_params", {})])
def test_a_wrong_type_or_name_is_a_type_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        TorchClassifier(**{name: value})


def test_the_defaults_take_the_features_column_and_no_label_column_means_no_label() -> None:
    request = translate(TorchEstimator(module=Mlp, loss="MSELoss", labelCol=""), "generic")
    assert request.columns == {
        "inputs": ["features"],
        "label": None,
        "weight": None,
        "validation": None,
        "key": None,
        "options": InputOptions(),
        "preprocess": None,
        "keyed": True,
        "groups": None,
        "grades": False,
    }


@pytest.mark.parametrize(
    ("params", "workers"),
    [
        ({"numWorkers": 3}, (3, 3)),
        ({"numWorkers": (2, 4)}, (2, 4)),
        ({"numWorkers": [2, 4]}, (2, 4)),  # as job files have it
        ({"numWorkers": 4, "minWorkers": 2}, (2, 4)),
    ],
)
def test_the_number_of_workers_is_one_or_from_a_least_to_a_most(params: Any, workers: tuple[int, int]) -> None:
    request = translate(TorchRegressor(module=Mlp, **params), "regression")
    assert (request.workers, request.launch.world_size) == (workers, workers[1])


@pytest.mark.parametrize("value", [(2,), (1, 2, 3), "2", (1, "2")])
def test_other_numbers_of_workers_are_type_errors(value: Any) -> None:
    with pytest.raises(TypeError, match="numWorkers"):
        TorchRegressor(numWorkers=value)


def test_what_is_asked_of_the_inputs_travels_together() -> None:
    asked = {
        "inputShapes": {"image": [4, 2]},
        "inputLayouts": {"tokens": "padded"},
        "inputDtypes": {"age": "float32"},
        "maxLengths": {"tokens": 9},
        "padValues": {"tokens": -1},
    }
    estimator = TorchRegressor(module=Mlp, assembleInputs=True, nullPolicy="fill", fillValue=2, **asked)  # type: ignore[arg-type]
    assert translate(estimator, "regression").columns["options"] == InputOptions(
        shapes={"image": (4, 2)},
        layouts={"tokens": "padded"},
        dtypes={"age": "float32"},
        limits={"tokens": 9},
        pads={"tokens": -1.0},
        assemble=True,
        fill=2.0,
    )
    assert translate(TorchRegressor(module=Mlp, nullPolicy="drop"), "regression").columns["options"].drop
    assert translate(TorchRegressor(module=Mlp, labelCols=["a", "b"]), "regression").columns["label"] == ["a", "b"]


def test_a_preprocess_of_none_is_none() -> None:
    estimator = TorchRegressor(module=Mlp).setPreprocess(None)
    assert translate(estimator, "regression").columns["options"] == InputOptions()


def test_there_are_as_many_class_weights_as_classes_and_some_count() -> None:
    for refused in ([1.0, -0.5], [0.0, 0.0], ["a", "b"], "balance", {0: 1.0, 1: 9.0}, {1.0, 9.0}):
        with pytest.raises(ConfigError, match="param=classWeights"):
            translate(TorchClassifier(module=Mlp, classWeights=refused), "classification")
    for weights in ([1.0, 2.0, 0.0], "balanced"):
        translate(TorchClassifier(module=Mlp, classWeights=weights), "classification").job.config.check_classes(3)
    config = translate(TorchClassifier(module=Mlp, classWeights=[1.0, 2.0]), "classification").job.config
    with pytest.raises(ConfigError, match="classWeights holds 2 weights, and the module tells 3 classes apart"):
        config.check_classes(3)
    with pytest.raises(ConfigError, match="the labels are no classes"):
        replace(config, task="regression")


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_was_made_by_hand_says_so(kind: Any) -> None:
    model = kind()
    assert not model.hasSummary
    for name in ("module", "trained", "summary"):
        with pytest.raises(ConfigError, match=r"holds no module|has no training summary"):
            getattr(model, name)


def test_what_is_appended_to_a_default_is_no_other_estimators() -> None:
    one = TorchRegressor()
    copied = one.copy()
    one.getCallbacks().append(object())
    one.getModuleParams()["hidden"] = 3
    for other in (copied, TorchRegressor(), TorchClassifier()):
        assert other.getCallbacks() == []
        assert other.getModuleParams() == {}


def test_a_copy_has_its_own_nested_dicts_and_lists() -> None:
    given = {"sizes": {"hidden": [8]}}
    one = TorchRegressor(moduleParams=given)
    copied = one.copy()
    given["sizes"]["hidden"].append(1)
    one.getModuleParams()["sizes"]["hidden"].append(2)
    assert (copied.getModuleParams(), one.getModuleParams()["sizes"]) == (
        {"sizes": {"hidden": [8]}},
        {"hidden": [8, 2]},
    )


@pytest.mark.parametrize("kind", [*ESTIMATORS, *MODELS])
def test_an_instance_can_be_pickled(kind: Any) -> None:
    one = kind()
    again = pickle.loads(pickle.dumps(one))
    assert (again.uid, again.extractParamMap()) == (one.uid, one.extractParamMap())


def test_a_constructor_takes_known_names_alone_and_says_which_is_wrong() -> None:
    by_name = r"^TorchClassifier\(\) takes Params by name, such as module=\.\.\., and not by"
    with pytest.raises(TypeError, match=by_name):
        TorchClassifier(Mlp)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^TorchModel\(\) takes no arguments$"):
        TorchModel(Mlp)  # type: ignore[call-arg]
    unknown: Any = {"epoch": 3, "batchsize": 4}
    for names in (["epoch", "batchsize"], ["batchsize", "epoch"]):  # the first as written
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{names[0]}': did you mean"):
            TorchClassifier(**{name: unknown[name] for name in names})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'epochs'$"):
        TorchModel(epochs=3)  # type: ignore[call-arg]


def test_a_subclass_may_have_defaults_and_a_constructor_of_its_own() -> None:
    shared: list[Any] = []

    class Mine(TorchRegressor):
        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            self._setDefault(epochs=7, callbacks=shared)

    mine = Mine(batchSize=3)
    mine.getCallbacks().append(object())
    assert (mine.getEpochs(), mine.getBatchSize(), mine._input_kwargs) == (7, 3, {"batchSize": 3})
    assert shared == []


def test_accessors_have_types_and_can_be_pickled() -> None:
    assert get_type_hints(TorchClassifier.__init__)["batchSize"] is int
    assert get_type_hints(TorchClassifier.getMaxLengths)["return"] == dict[str, int]
    assert pickle.loads(pickle.dumps(TorchClassifier.setEpochs)) is TorchClassifier.setEpochs


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_params_are_explained_as_pyspark_explains_them_also_where_a_value_is_a_tuple(kind: Any) -> None:
    estimator = kind(numWorkers=(2, 8), epochs=3, weightCol="weight")
    lines = {line.partition(":")[0]: line for line in estimator.explainParams().splitlines()}
    assert lines["numWorkers"].endswith("(default: 1, current: (2, 8))")
    for name in ("epochs", "weightCol", "loss", "modelDir"):
        assert lines[name] == Params.explainParam(estimator, name)

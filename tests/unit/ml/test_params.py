"""Params and their one translation to configuration; no JVM is needed for either."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau

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
from tests.support.callbacks import Locked, Misspelt, Stops
from tests.support.nets import Mlp

ESTIMATORS = [TorchClassifier, TorchRegressor, TorchEstimator]
MODELS = [TorchClassificationModel, TorchRegressionModel, TorchModel]
# Mutable defaults, which a signature cannot show.
EMPTY: dict[str, Any] = {
    **{name: {} for name in ("moduleParams", "lossParams", "optimizerParams", "schedulerParams")},
    **{name: {} for name in ("strategyParams", "metrics")},
    **{name: {} for name in ("inputShapes", "inputLayouts", "inputDtypes", "maxLengths", "padValues")},
    **{name: [] for name in ("parameterGroups", "freeze", "callbacks")},
}
BY_COLUMN = {"inputShapes": {"a": [2, 3]}, "inputLayouts": {"a": "padded"}, "inputDtypes": {"a": "float32"}}
# Numbers without a default.
NUMBERS = {"gradientClipNorm": 0.5, "gradientClipValue": 0.5, "emaDecay": 0.5} | dict.fromkeys(
    (
        *("microBatchSize", "validationBatchSize", "warmupSteps", "referenceBatchSize"),
        *("earlyStoppingPatience", "minWorkers", "shuffleBlock"),
    ),
    3,
)


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
    assert {**shown, **EMPTY} == actual
    assert all(type(shown[name]) is type(actual[name]) for name in shown.keys() - EMPTY.keys())


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_nothing_is_set_that_was_not_given(kind: Any) -> None:
    assert not kind()._paramMap
    assert {param.name for param in kind(epochs=1, weightCol=None)._paramMap} == {"epochs"}


@pytest.mark.parametrize("kind", [*ESTIMATORS, *MODELS])
def test_every_param_has_a_doc_a_getter_and_a_setter(kind: Any) -> None:
    values: dict[type, Any] = {int: 3, float: 0.5, str: "a", bool: False, dict: {"a": 1}, type(None): "a", list: ["a"]}
    lists = {"inputCols": ["a"], "outputCols": ["a"], "labelCols": ["a"], "thresholds": [0.5]}
    instance = kind()
    for param in instance.params:
        assert param.doc
        name = param.name[0].upper() + param.name[1:]
        value = lists.get(param.name) or values[type(value_of(instance, param))]
        value = {**NUMBERS, "parameterGroups": [{"params": "a"}], **BY_COLUMN}.get(param.name, value)
        assert getattr(instance, f"set{name}")(value) is instance
        assert getattr(instance, f"get{name}")() == value


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_copies_do_not_share_their_values(kind: Any) -> None:
    first = kind(epochs=3)
    second = first.copy({first.epochs: 5})
    assert (first.getEpochs(), second.getEpochs()) == (3, 5)
    assert second.uid == first.uid


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


def test_params_become_configuration() -> None:
    request = translate(
        TorchClassifier(
            module=Mlp,
            moduleParams={"hidden": 4},
            inputCols=["a", "b"],
            weightCol="w",
            validationIndicatorCol="v",
            idCol="id",
            lossParams={"label_smoothing": 0.1},
            optimizer="SGD",
            optimizerParams={"momentum": 0.9},
            learningRate=0.5,
            scheduler="StepLR",
            schedulerParams={"step_size": 2},
            schedulerInterval="step",
            warmupSteps=5,
            referenceBatchSize=32,
            batchSize=64,
            microBatchSize=16,
            gradientClipNorm=1.5,
            gradientClipValue=0.25,
            precision="bf16",
            epochs=3,
            validationInterval=2,
            validationBatchSize=77,
            earlyStoppingPatience=4,
            shuffle=False,
            seed=7,
            numWorkers=2,
            device="cpu",
            rendezvous="rank0",
        ),
        "classification",
    )
    assert request.columns == {
        "inputs": ["a", "b"],
        "label": "label",
        "weight": "w",
        "validation": "v",
        "key": "id",
        "options": InputOptions(),
        "preprocess": None,
        "keyed": True,
    }
    recipe, config, launch = request.recipe, request.config, request.launch
    assert (recipe.module, recipe.module_params, recipe.loss) == (Mlp, {"hidden": 4}, "CrossEntropyLoss")
    assert (recipe.loss_params, recipe.learning_rate) == ({"label_smoothing": 0.1}, 0.5)
    assert (recipe.optimizer, recipe.optimizer_params) == ("SGD", {"momentum": 0.9})
    assert (recipe.scheduler, recipe.scheduler_params) == ("StepLR", {"step_size": 2})
    assert (config.schedule_interval, config.warmup_steps, config.reference_batch_size) == ("step", 5, 32)
    assert (config.micro_batch_size, config.accumulation_steps, config.precision) == (16, 1, "bf16")
    assert (config.clip_norm, config.clip_value, config.validation_interval, config.patience) == (1.5, 0.25, 2, 4)
    assert (config.task, config.batch_size, config.epochs) == ("classification", 64, 3)
    assert config.validation_batch_size == 77
    assert (config.seed, config.shuffle, config.strategy) == (7, False, "ddp")
    assert (launch.world_size, launch.device, launch.rendezvous) == (2, "cpu", "rank0")


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
    }


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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"nullPolicy": "skip"}, "nullPolicy 'skip' is unknown"),
        ({"fillValue": 1.0}, "fillValue is set, and nullPolicy is 'error'"),
        ({"inputShapes": {"a": [2, 0]}}, r"inputShapes\['a'\] is \[2, 0\]"),
        ({"inputShapes": {"a": []}}, r"inputShapes\['a'\] is \[\]"),
        ({"inputLayouts": {"a": "pad"}}, r"inputLayouts\['a'\] 'pad' is unknown"),
        ({"inputDtypes": {"a": "float"}}, r"inputDtypes\['a'\] 'float' is unknown"),
        ({"maxLengths": {"a": 0}}, r"maxLengths\['a'\] must be at least 1, got 0"),
        ({"labelCols": ["a"], "labelCol": "b"}, "labelCol and labelCols are both set"),
        ({"labelCols": []}, "labelCols is empty"),
    ],
)
def test_what_is_asked_of_columns_is_checked_before_there_are_any(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(TorchRegressor(module=Mlp, **params), "regression")


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"module": None}, "module", "module is not set"),
        ({"loss": None}, "loss", "loss is not set"),
        ({"gradientClipNorm": 0.0}, "gradientClipNorm", "gradientClipNorm must be above 0, got 0.0"),
        ({"accumulationSteps": 0}, "accumulationSteps", "accumulationSteps must be at least 1, got 0"),
        (
            {"accumulationSteps": 2, "microBatchSize": 8},
            "microBatchSize",
            "accumulationSteps and microBatchSize are both set",
        ),
        (
            {"scheduler": "ReduceLROnPlateau", "schedulerInterval": "step"},
            "schedulerInterval",
            "ReduceLROnPlateau looks at the loss of an epoch, and schedulerInterval is 'step'",
        ),
        (
            {"scheduler": "torch.optim.lr_scheduler:ReduceLROnPlateau", "schedulerInterval": "step"},
            "schedulerInterval",
            "ReduceLROnPlateau looks at the loss of an epoch, and schedulerInterval is 'step'",
        ),
        (
            {"scheduler": ReduceLROnPlateau},
            "scheduler",
            "ReduceLROnPlateau looks at the loss of validation rows, and there are none",
        ),
        ({"schedulerParams": {"gamma": 0.5}}, "schedulerParams", "schedulerParams are given, but no scheduler"),
        ({"batchSize": 3, "numWorkers": 4}, "batchSize", "batchSize is 3, to be shared by 4 workers"),
        (
            {"batchSize": 16, "numWorkers": 3, "accumulationSteps": 6},
            "accumulationSteps",
            "accumulationSteps is 6, and each of 3 workers has 5.33 rows of a batch",
        ),
        (
            {"trainingStep": "tests.support.nets:mean_output_error"},
            "trainingStep",
            "trainingStep computes the loss, and loss or lossParams are set",
        ),
        ({"nonFiniteLoss": "ignore"}, "nonFiniteLoss", "nonFiniteLoss 'ignore' is unknown"),
        ({"strategyParams": {"bucket_mb": 1}}, None, "unknown key strategyParams.bucket_mb"),
        (
            {"earlyStoppingPatience": 2},
            "earlyStoppingPatience",
            "earlyStoppingPatience looks at a metric of validation rows, and there are none",
        ),
        (
            {"earlyStoppingMetric": "val_mae"},
            "earlyStoppingMetric",
            "earlyStoppingMetric looks at a metric of validation rows, and there are none",
        ),
        (
            {"earlyStoppingMetric": "val_accuracy", "validationIndicatorCol": "v", "metrics": {"r2": "R2Score"}},
            "earlyStoppingMetric",
            "earlyStoppingMetric is 'val_accuracy', which no validation of this fit has",
        ),
        (
            {"earlyStoppingMetric": "loss", "validationIndicatorCol": "v", "earlyStoppingPatience": 1},
            "earlyStoppingMetric",
            "earlyStoppingMetric is 'loss', which no validation of this fit has",
        ),
        ({"earlyStoppingMode": "least"}, "earlyStoppingMode", "earlyStoppingMode 'least' is unknown"),
        (
            {"earlyStoppingMinDelta": -0.1},
            "earlyStoppingMinDelta",
            "earlyStoppingMinDelta must be at least 0, got -0.1",
        ),
        (
            {"strategy": "zero1", "optimizer": "tests.support.nets:mean_output_error"},
            "optimizer",
            "strategy 'zero1' builds an optimizer for each worker's share, and optimizer is no class",
        ),
        (
            {"strategy": "zero1", "optimizer": lambda parameters, lr: None},
            "optimizer",
            "strategy 'zero1' builds an optimizer for each worker's share, and optimizer is no class",
        ),
        (
            {"metrics": {"r2": "R2Score"}},
            "metrics",
            "metrics are those of validation rows, and there are none",
        ),
        ({"callbacks": [3]}, "callbacks", "callbacks holds a int"),
        ({"callbacks": [Stops]}, "callbacks", "callbacks holds the class Stops"),
        ({"callbacks": [Misspelt()]}, "ranks of Misspelt", "ranks of Misspelt 'mian' is unknown"),
        (
            {"callbacks": [Locked()]},
            "callbacks",
            "Locked cannot be shipped to the ranks: cannot pickle '_thread.lock' object",
        ),
        (
            {"syncBatchNorm": True, "microBatchSize": 8},
            "syncBatchNorm",
            "syncBatchNorm takes the rows of all workers together, and micro-batches keep them apart",
        ),
        (
            {"syncBatchNorm": True, "strategy": "localSGD"},
            "syncBatchNorm",
            "strategy 'localSGD' lets each worker train by itself, and syncBatchNorm joins them in every step",
        ),
        (
            {"channelsLast": True, "strategy": "zero3"},
            "channelsLast",
            "channelsLast lays out weights in a way that strategy 'zero3' cannot divide",
        ),
        ({"emaDecay": 1.0}, "emaDecay", "emaDecay must be between 0 and 1, got 1.0"),
        ({"validationBatchSize": 0}, "validationBatchSize", "validationBatchSize must be at least 1, got 0"),
        ({"validationUnit": "steps"}, "validationUnit", "validationUnit 'steps' is unknown"),
        ({"precision": "half"}, "precision", "precision 'half' is unknown"),
        ({"schedulerInterval": "batch"}, "schedulerInterval", "schedulerInterval 'batch' is unknown"),
        ({"learningRate": 0.0}, "learningRate", "learningRate must be above 0, got 0.0"),
        ({"learningRate": float("nan")}, "learningRate", "learningRate must be above 0, got nan"),
        ({"batchSize": 0}, "batchSize", "batchSize must be at least 1, got 0"),
        ({"epochs": 0}, "epochs", "epochs must be at least 1, got 0"),
        ({"numWorkers": 0}, "numWorkers", "numWorkers must be at least 1, got 0"),
        ({"predictBatchSize": 0}, "predictBatchSize", "predictBatchSize must be at least 1, got 0"),
        ({"predictBatchSize": "64"}, "predictBatchSize", "predictBatchSize is '64'"),
        ({"microBatchSize": 0}, "microBatchSize", "microBatchSize must be at least 1, got 0"),
        ({"microBatchSize": "Auto"}, "microBatchSize", "microBatchSize is 'Auto'"),
        (
            {"microBatchSize": "auto", "strategy": "zero2"},
            "microBatchSize",
            "microBatchSize is 'auto', and under strategy 'zero2' workers wait within a step for one that has no "
            "memory for it",
        ),
        (
            {"syncBatchNorm": True, "microBatchSize": "auto"},
            "syncBatchNorm",
            "syncBatchNorm takes the rows of all workers together, and micro-batches keep them apart",
        ),
        ({"device": "gpu"}, "device", "device 'gpu' is unknown"),
        ({"preflight": "half"}, "preflight", "preflight 'half' is unknown"),
        ({"rendezvous": "rank1"}, "rendezvous", "rendezvous 'rank1' is unknown"),
        ({"strategy": "fsdp"}, "strategy", "strategy 'fsdp' is unknown"),
        ({"optimizerParams": {"lr": 1}}, "optimizerParams", "optimizerParams holds 'lr'"),
        ({"inputCols": []}, "inputCols", "inputCols is empty"),
        ({"inputCols": ["a"], "featuresCol": "b"}, "inputCols", "featuresCol and inputCols are both set"),
    ],
)
def test_a_param_that_cannot_work_is_refused_by_name(params: dict[str, Any], param: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(TorchEstimator(**{"module": Mlp, "loss": "MSELoss", **params}), "generic")
    assert caught.value.what == message
    assert caught.value.where == ({"param": param} if param else {"section": "strategyParams"})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -0.5], "classWeights must be at least 0, got -0.5"),
        ([1.0, float("nan")], "classWeights must be at least 0, got nan"),
        ([0.0, 0.0], "classWeights are all zero"),
        ("even", "classWeights must be 'balanced' or a list, got 'even'"),
        (["a", "b"], "classWeights are no numbers: could not convert string to float: 'a'"),
    ],
)
def test_class_weights_that_cannot_work_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(TorchClassifier(module=Mlp, classWeights=weights), "classification")
    assert caught.value.what == message
    assert caught.value.where == {"param": "classWeights"}


def test_there_are_as_many_class_weights_as_classes() -> None:
    for weights in ([1.0, 2.0, 0.0], "balanced"):
        translate(TorchClassifier(module=Mlp, classWeights=weights), "classification").config.check_classes(3)
    config = translate(TorchClassifier(module=Mlp, classWeights=[1.0, 2.0]), "classification").config
    with pytest.raises(ConfigError, match="classWeights holds 2 weights, and the module tells 3 classes apart"):
        config.check_classes(3)
    with pytest.raises(ConfigError, match="the labels are no classes"):
        replace(config, task="regression")


@pytest.mark.parametrize("kind", [TorchClassifier, TorchRegressor, TorchEstimator])
def test_a_training_step_takes_the_place_of_the_loss(kind: Any) -> None:
    step = "tests.support.nets:mean_output_error"
    groups = [{"params": "*.bias", "lr": 0.5}]
    request = translate(kind(module=Mlp, trainingStep=step, freeze=["a.*"], parameterGroups=groups), "generic")
    assert (request.recipe.training_step, request.recipe.loss) == (step, None)
    assert (request.recipe.freeze, request.recipe.parameter_groups) == (("a.*",), tuple(groups))


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
    with pytest.raises(TypeError, match=r"^TorchClassifier\(\) takes keyword arguments only$"):
        TorchClassifier(Mlp)  # type: ignore[misc]
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

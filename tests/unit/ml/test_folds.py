"""A cross-validation: groups are whole in folds, and ranks that train side by side."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from pyspark.ml.evaluation import Evaluator

from sparktorch import Forecaster, Ranker, TorchCrossValidator, TorchEstimator
from sparktorch.errors import ConfigError
from sparktorch.ml.tuning import cross_validator, search
from tests.support.waiting import until

LINEAR = {"module": "torch.nn:Linear", "moduleParams": {"in_features": 1, "out_features": 1}}


class Nothing(Evaluator):
    """Measures nothing."""

    def _evaluate(self, dataset: Any) -> float:
        return 0.0


@pytest.mark.parametrize(
    "estimator",
    [
        Ranker(**LINEAR, groupCol="query", labelCol="grade"),
        TorchEstimator(**LINEAR, groupCol="bag", loss=lambda output, label, sizes: output),
        Forecaster(orderCol="day", labelCol="sold", context=3, horizon=2),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_folds_that_are_drawn_row_by_row_are_refused_for_groups(estimator: Any) -> None:
    given = {"estimator": estimator, "estimatorParamMaps": [{}], "evaluator": Nothing()}
    with pytest.raises(ConfigError, match="foldCol is not set, and folds drawn row by row would divide the groups"):
        TorchCrossValidator(**given)._check()
    TorchCrossValidator(**given, foldCol="fold")._check()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"estimator": None}, "estimator is not set"),
        ({"evaluator": None}, "evaluator is not set"),
        ({"estimatorParamMaps": None}, "estimatorParamMaps is not set"),
        ({"estimatorParamMaps": []}, "estimatorParamMaps is empty"),
        ({"estimatorParamMaps": ()}, "estimatorParamMaps is empty"),
    ],
)
def test_what_is_not_set_is_refused(more: dict[str, Any], says: str) -> None:
    given = {"estimator": Ranker(**LINEAR), "estimatorParamMaps": [{}], "evaluator": Nothing()}
    validator = TorchCrossValidator()
    validator._set(**{name: value for name, value in {**given, **more}.items() if value is not None})
    for name, value in more.items():
        if value is None:
            validator._paramMap[validator.getParam(name)] = None
    with pytest.raises(ConfigError, match=says):
        validator._check()


def test_folds_and_param_maps_that_cannot_work_are_refused_by_name() -> None:
    ours, other = TorchEstimator(**LINEAR, loss="MSELoss"), TorchEstimator(**LINEAR)
    for more, param in (
        ({"numFolds": 1}, "numFolds"),
        ({"estimatorParamMaps": [{other.learningRate: 0.1}]}, "learningRate"),
        ({"estimatorParamMaps": [{ours.checkpointDir: "/nowhere"}]}, "checkpointDir"),
        ({"estimatorParamMaps": [{ours.learningRate: rate} for rate in (0.1, -1.0)]}, "learningRate"),
    ):
        given = {"estimator": ours, "estimatorParamMaps": [{}], "evaluator": Nothing(), **more}
        with pytest.raises(ConfigError) as caught:
            TorchCrossValidator(**given)._check()
        assert caught.value.where == {"param": param}


class Rows:
    """Stands for rows that ranks hold; `train` is what a fit calls with the group and the fold."""

    dataset = MagicMock()

    def __init__(self, train: Any, number: int) -> None:
        self.train, self.number, self.closed = train, number, threading.Event()

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed.set()

    def cancel(self) -> None: ...

    def score(self, *asked: Any) -> None: ...

    def fit(self, estimator: Any, *, without: int | None, title: str) -> Any:
        self.train(self, without)
        return SimpleNamespace(fold=without, copy=lambda extra: None)


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that validates two folds on two groups, and the models that were discarded."""
    discarded: list[Any] = []

    def validate(train: Any, **params: Any) -> None:
        groups = [Rows(train, number) for number in range(2)]
        made = iter(groups)
        given = {"estimator": MagicMock(), "estimatorParamMaps": [{}], "evaluator": Nothing(), "numFolds": 2, **params}
        validator = TorchCrossValidator(parallelism=2)
        validator._set(**given)
        monkeypatch.setattr(cross_validator, "FoldedRows", lambda *_, **__: next(made))
        monkeypatch.setattr(validator, "_group_count", lambda *_: len(groups))
        validator._in_one_pass(MagicMock(), [MagicMock()])

    metrics = MagicMock()
    metrics.return_value.__enter__.return_value.all.return_value = [[0.0], [0.0]]
    monkeypatch.setattr(TorchCrossValidator, "_carried", lambda *_: ())
    for name, value in (("FoldMetrics", metrics), ("weight_of", MagicMock()), ("results_for", MagicMock())):
        monkeypatch.setattr(cross_validator, name, value)
    monkeypatch.setattr(cross_validator, "discard", discarded.append)
    monkeypatch.setattr(search, "inheriting", lambda spark, target: target)
    return validate, discarded


def test_the_ranks_that_end_last_train_the_model_and_the_others_end_before(validated: Any) -> None:
    validate, _ = validated
    both, held, refitted = threading.Barrier(2), dict[int, Rows](), list[tuple[int, bool]]()

    def train(rows: Rows, fold: int | None) -> None:
        if fold is None:
            refitted.append((rows.number, rows.closed.is_set()))
            return
        held[rows.number] = rows
        both.wait(10)
        if rows.number == 1:
            assert held[0].closed.wait(10)

    validate(train)
    assert refitted == [(1, False)]


def test_a_model_that_a_thread_makes_after_the_end_is_discarded(
    validated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate, discarded = validated
    both, ended = threading.Barrier(2), threading.Event()
    monkeypatch.setattr(search, "_END_SECONDS", 0.1)

    def train(rows: Rows, fold: int | None) -> None:
        both.wait(10)
        if fold == 0:
            raise ArithmeticError("planted")
        assert ended.wait(10)

    with pytest.raises(ArithmeticError, match="planted"):
        validate(train, collectSubModels=True)
    assert discarded == []
    ended.set()
    until(lambda: [model.fold for model in discarded] == [1], seconds=10, what="the model is there")

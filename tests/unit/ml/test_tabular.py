"""What the estimators of tables and rankings decide by Params, types and figures, before and after rows are seen."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import types as T
from torch import nn

from sparktorch import Ranker, RankingModel, TabularClassifier, TabularRegressionModel, TabularRegressor
from sparktorch.data.distribution import Distribution
from sparktorch.errors import ColumnError, ConflictError
from sparktorch.ml.fit.values import Values
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.column_names import ColumnNames
from sparktorch.tasks.shared.column_statistics import Figures
from sparktorch.tasks.shared.held_out import Sample
from sparktorch.tasks.tables.learned import LearnedTable, check_numbers_to_predict, integer_categories
from sparktorch.tasks.tables.network import TableNetwork
from sparktorch.tasks.tables.preprocess import TableColumns

PATH = "sparktorch.tasks.tables.network:TableNetwork"
LINEAR: dict[str, Any] = {"module": "torch.nn:Linear", "moduleParams": {"in_features": 1, "out_features": 1}}


def names(**kinds: T.DataType) -> ColumnNames:
    return ColumnNames(T.StructType([T.StructField(name, kind) for name, kind in kinds.items()]), lambda: False)


def figures(*values: int) -> Figures:
    counts = dict.fromkeys(map(float, values), 100)
    smallest, largest = float(min(values)), float(max(values))
    return Figures(100 * len(values), 0.0, 1.0, smallest, largest, Distribution.of(counts))


def test_integers_beyond_2_to_the_53_are_numbers_alone_and_a_hash_column_does_not_fail() -> None:
    columns = {
        "hash": figures(-(1 << 63), 5, (1 << 63) - 1),
        "snowflake": figures(1 << 60, (1 << 60) + 256, (1 << 60) + 512),
        "wide": figures(-(10**15), 0, 10**15),
        "month": figures(1, 12),
    }
    kinds = names(**dict.fromkeys(columns, T.LongType()))
    assert integer_categories(columns, kinds, 500, 30) == {"wide": [-(10**15), 0, 10**15], "month": list(range(1, 13))}


def test_integers_that_repeat_are_categories_and_numbers_that_hardly_do_are_measured() -> None:
    columns = {
        "identifier": [3] * 1000,
        "price": [1] * 900 + [2] * 100,
        "code": [1, 2, 50, 50],
    }
    figures_of = {}
    for name, counts in columns.items():
        values = {float(100 * value): count for value, count in enumerate(counts)}
        figures_of[name] = Figures(sum(counts), 0.0, 1.0, 0.0, max(values), Distribution.of(values))
    kinds = names(**dict.fromkeys(columns, T.LongType()))
    identifiers = {"identifier": [100 * value for value in range(1000)]}
    assert integer_categories(figures_of, kinds, 4_000, 2) == {**identifiers, "code": [100, 200, 300]}
    assert integer_categories(figures_of, kinds, 999, 2) == {"code": [100, 200, 300]}
    assert integer_categories(figures_of, kinds, 0, 2) == {}


def seen(rows: int = 1000, deviation: float = 1.0) -> LearnedTable:
    """Returns what was learned of a text, of a month, which is a number, too, and of the parts of a date."""
    categories = {"text": ["a", "b"], "month": list(range(1, 13))}
    table = TableColumns(categories, {"day": ["weekday"]}, {"month": [6.0, 3.0], "day": [0.0, 1.0]})
    return LearnedTable(table, ["text", "month", "day"], 2, [], [[0.0, deviation]], [[0.0, 1.0]] * 2, rows=rows)


def test_vectors_of_categories_are_pulled_to_zero_more_where_rows_are_few_and_where_there_is_a_number_too() -> None:
    def decays(rows: int, deviation: float = 1.0, kind: Any = TabularRegressor, **params: Any) -> dict[str, float]:
        estimator = kind(epochs=1, **params)
        estimator._learned = seen(rows, deviation)
        groups = Values(estimator.completed())["parameterGroups"]
        assert all(group["decoupled_weight_decay"] is False for group in groups)
        return {group["params"][0]: group["weight_decay"] for group in groups}

    def times(factor: float, decays: dict[str, float]) -> Any:
        return pytest.approx({name: factor * decay for name, decay in decays.items()})

    few = decays(1_000)
    assert list(few) == ["embeddings.1.*", "embeddings.*"]
    assert few["embeddings.1.*"] > few["embeddings.*"] > 0
    assert few == times(100, decays(100_000))
    assert decays(1_000, deviation=10.0) == times(100, few)
    assert decays(1_000, deviation=10.0, loss="L1Loss") == times(10, few)
    assert decays(1_000, deviation=10.0, kind=TabularClassifier) == times(1, few)


@pytest.mark.parametrize(
    "params",
    [
        {"optimizer": "AdamW"},
        {"parameterGroups": [{"params": "*", "lr": 0.1}]},
        {"freeze": ["embeddings.*"]},
        {"gradientClipNorm": 1.0},  # It would clip the gradients of the loss, and not those of the penalty.
        {"gradientClipValue": 1.0},
        LINEAR,
    ],
)
def test_an_optimizer_groups_frozen_or_clipped_parameters_and_a_module_of_the_users_stay_as_they_are(
    params: Any,
) -> None:
    regressor = TabularRegressor(epochs=1, **params)
    regressor._learned = seen()
    p = Values(regressor.completed())
    assert p["optimizer"] == "AdamW"
    assert p["parameterGroups"] == params.get("parameterGroups", [])


@pytest.mark.parametrize("source", [TableNetwork, PATH])
def test_a_fitted_network_for_tables_keeps_its_penalty_where_the_rows_are_counted(source: Any) -> None:
    params = {"cardinalities": [4], "numbers": 0, "outputs": 1, "scales": [[0.0, 10.0]]}
    made: dict[str, Any] = {"source": source, "params": params, "preprocess": seen().table, "weights": b""}
    fitted = TabularRegressionModel()._with(TrainedModule(inputs=(), outputs=(), task="regression", **made), None)
    regressor = TabularRegressor(module=fitted)
    regressor._learned = seen(rows=0)._replace(scales=[])  # It goes on with what the model knows.
    regressor._sample = Sample(trained=1_000)
    groups, anew = Values(regressor.completed())["parameterGroups"], TabularRegressor(epochs=1)
    anew._learned = seen(1_000, deviation=10.0)
    assert groups == Values(anew.completed())["parameterGroups"]


def decay_of(estimator: Any, of: LearnedTable, sample: Sample | None = None) -> float:
    """Returns the weight decay of texts."""
    estimator._learned, estimator._sample = of, sample
    return float(Values(estimator.completed())["parameterGroups"][-1]["weight_decay"])


def test_the_penalty_is_one_of_the_rows_of_each_model() -> None:
    alone = decay_of(TabularRegressor(epochs=1, numWorkers=4, strategy="independent"), seen(1_000))
    folds = {"strategy": "independent", "strategyParams": {"folds": True}}
    assert alone == decay_of(TabularRegressor(epochs=1), seen(250))
    assert decay_of(TabularRegressor(epochs=1, numWorkers=4, **folds), seen(1_000)) == pytest.approx(alone / 4)


def test_the_penalty_of_a_ranker_is_one_of_its_groups_whatever_the_size_of_grades() -> None:
    for params in ({}, {"epochs": 1}):
        assert Ranker(groupCol="query", **params)._needs_count
        ranker = Ranker(groupCol="query", **params)
        assert decay_of(ranker, seen(1_000, deviation=100.0), Sample(trained=50)) == 2 / 50


@pytest.mark.parametrize("loss", ["torch.nn:MSELoss", nn.MSELoss, nn.MSELoss()])
def test_the_penalty_knows_squared_errors_by_any_name(loss: Any) -> None:
    assert decay_of(TabularRegressor(epochs=1, loss=loss), seen(deviation=10.0)) == decay_of(
        TabularRegressor(epochs=1), seen(deviation=10.0)
    )


@pytest.mark.parametrize(
    ("estimator", "decay"),
    [
        (TabularRegressor(), 0.99),
        (TabularRegressor(emaDecay=0.9), 0.9),
        (TabularRegressor(epochs=3), None),
        (TabularRegressor(**LINEAR), None),
        (TabularRegressor(strategy="parameterServer"), None),
        (TabularRegressor(strategy="parameterServer", strategyParams={"staleness": 0}), 0.99),
        (Ranker(groupCol="query"), None),
    ],
)
def test_weights_are_averaged_in_automatic_trainings_of_the_network_for_tables(estimator: Any, decay: Any) -> None:
    estimator._learned, estimator._sample = seen(), Sample(trained=900, held_out=100)
    assert Values(estimator.completed())["emaDecay"] == decay


def test_pixels_are_no_categories_but_codes_of_few_values_are() -> None:
    columns = {f"pixel{index}": figures(*range(0, 256)) for index in range(101)} | {"code": figures(0, 100, 200)}
    kinds = names(**dict.fromkeys(columns, T.LongType()))
    assert integer_categories(columns, kinds, 4_000, 2) == {"code": [0, 100, 200]}
    del columns["pixel0"], columns["pixel1"]
    assert len(integer_categories(columns, kinds, 4_000, 2)) == 100


@pytest.mark.parametrize(("params", "decay"), [({}, 0.01), ({"optimizerParams": {"weight_decay": 0.1}}, 0.1)])
def test_other_weights_have_the_decay_of_adamw_or_that_of_the_user(params: Any, decay: float) -> None:
    regressor = TabularRegressor(epochs=1, **params)
    regressor._learned = seen()
    options = {"weight_decay": decay, "decoupled_weight_decay": True}
    assert Values(regressor.completed())["optimizerParams"] == options


class Unhashable:
    """A loss that is equal to others, and so has no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)

    def __call__(self, scores: Any, labels: Any, sizes: Any) -> Any:
        return (scores - labels).square().mean()


def test_a_label_of_text_is_refused_in_the_name_of_the_estimator_with_a_hint_that_suits_it() -> None:
    columns = names(grade=T.StringType())
    with pytest.raises(ColumnError, match="a number for TabularRegressor") as of_regressor:
        check_numbers_to_predict(columns, ["grade"], TabularRegressor())
    with pytest.raises(ColumnError, match="a number for Ranker") as of_ranker:
        check_numbers_to_predict(columns, ["grade"], Ranker(groupCol="query"))
    assert "TabularClassifier" in str(of_regressor.value)
    assert "Tabular" not in str(of_ranker.value)
    assert "cast(`grade` as double)" in str(of_ranker.value)


def test_a_ranker_leaves_out_the_rows_that_its_fit_drops() -> None:
    columns = names(query=T.StringType(), label=T.DoubleType(), features=T.DoubleType())
    assert Ranker(groupCol="query")._required_columns(columns) == ["label", "query"]
    assert Ranker(groupCol="query", **LINEAR)._required_columns(columns) == ["features", "label", "query"]
    assert Ranker(groupCol="query", inputCols=["a", "b"], **LINEAR)._required_columns(columns) == [
        "a",
        "b",
        "label",
        "query",
    ]
    takes_nulls = Ranker(groupCol="query", preprocess=TableColumns(), **LINEAR)
    assert takes_nulls._required_columns(columns) == ["label", "query"]


@pytest.mark.parametrize("module", [TableNetwork, PATH, None])
def test_a_ranker_takes_a_table_for_its_network_by_whatever_name(module: Any) -> None:
    assert Ranker(groupCol="query", **({} if module is None else {"module": module}))._takes_table
    assert not Ranker(groupCol="query", **LINEAR)._takes_table


@pytest.mark.parametrize(("loss", "members"), [("ranknet", 4), (Unhashable(), 1), ("package.module:loss", 1)])
def test_the_network_of_a_ranker_has_one_member_for_a_loss_of_ones_own(loss: Any, members: int) -> None:
    ranker = Ranker(groupCol="query", loss=loss)
    ranker._learned = LearnedTable(TableColumns(), [], 1, [], [[0.0, 1.0]], [], rows=100)
    assert ranker._network_arguments["members"] == members


def _own_step(module: nn.Module, batch: Any) -> Any:
    """A step whose output may be the logarithm of the label."""


@pytest.mark.parametrize(
    ("loss", "nonnegative"),
    [
        ("MSELoss", [0]),
        (nn.L1Loss(), [0]),
        (nn.HuberLoss, [0]),
        ("torch.nn.modules.loss:SmoothL1Loss", [0]),
        ("elsewhere.losses:MSELoss", None),
        ("PoissonNLLLoss", None),
        (Unhashable(), None),
    ],
)
def test_predictions_of_amounts_are_never_negative_where_the_loss_compares_them_with_the_label(
    loss: Any, nonnegative: list[int] | None
) -> None:
    learned = LearnedTable(TableColumns(), [], 1, [], [[3.0, 1.0]], [], rows=100, nonnegative=(0,))
    regressor, ranker = TabularRegressor(loss=loss), Ranker(groupCol="query", loss="MSELoss")
    regressor._learned = ranker._learned = learned
    assert regressor._network_arguments.get("nonnegative") == nonnegative
    assert "nonnegative" not in ranker._network_arguments
    assert "nonnegative" not in regressor.setTrainingStep(_own_step)._network_arguments


@pytest.mark.parametrize("source", [TableNetwork, PATH])
def test_a_loss_of_ones_own_is_refused_where_a_fitted_model_has_several_members(source: Any) -> None:
    def fitted(members: int) -> RankingModel:
        params = {"cardinalities": [], "numbers": 1, "outputs": 1, "members": members}
        made: dict[str, Any] = {"source": source, "params": params, "preprocess": TableColumns(), "weights": b""}
        trained = TrainedModule(inputs=(), outputs=(), task="regression", **made)
        return RankingModel()._with(trained, None)

    def ranker(members: int, loss: Any) -> Ranker:
        return Ranker(groupCol="query", module=fitted(members), loss=loss)

    with pytest.raises(ConflictError, match="the network of the fitted model has several members"):
        ranker(4, Unhashable()).completed()
    for members, loss in ((1, Unhashable()), (4, "lambdarank")):
        assert ranker(members, loss).completed()._takes_table

"""Batches without room or without rows, options of scoring in files, and the best of many scores."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from sparktorch.base.config import Invalid, Task
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.errors import ModuleError
from sparktorch.model.scorer import Scorer, Scoring
from sparktorch.model.trained_module import TrainedModule
from sparktorch.tasks.recommender.top_k import NOTHING, block_rows, top_k
from sparktorch.tracking.pyfunc import PyFuncModel
from sparktorch.train.recipe.dry_run import OutputSpec
from tests.support.models import trained_module
from tests.support.nets import Score

X = np.random.default_rng(0).normal(size=(50, 5)).astype(np.float32)


class Cramped(Score):
    """Has memory for some rows at a time."""

    calls: ClassVar[list[int]] = []
    room: ClassVar[int] = 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        if len(x) > self.room:
            raise torch.OutOfMemoryError("planted")
        return super().forward(x)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> TrainedModule:
    made = trained_module(Cramped, task="regression")
    monkeypatch.setattr(Cramped, "calls", [])
    return made


def expected_of(trained: TrainedModule) -> Any:
    return Scorer(trained, Scoring(batch_size=10)).score([to_arrow(X)])["prediction"]


def test_batches_are_halved_until_they_fit_and_stay_so(trained: TrainedModule) -> None:
    expected = expected_of(trained)
    Cramped.calls.clear()
    scorer = Scorer(trained, Scoring(batch_size="auto"))
    np.testing.assert_allclose(scorer.score([to_arrow(X)])["prediction"], expected, atol=1e-6)
    assert Cramped.calls == [50, 25, *[10] * 5]
    Cramped.calls.clear()
    found = scorer.score_tensors([torch.from_numpy(X)])["prediction"]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert Cramped.calls == [10] * 5


def test_memory_that_runs_out_in_a_later_batch_costs_no_row(
    trained: TrainedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_of(trained)
    scorer = Scorer(trained, Scoring(batch_size="auto"))
    scorer.score([to_arrow(X[:10])])
    monkeypatch.setattr(Cramped, "room", 3)
    np.testing.assert_allclose(scorer.score([to_arrow(X)])["prediction"], expected, atol=1e-6)


def test_a_number_is_kept_and_one_row_that_does_not_fit_is_an_error(
    trained: TrainedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        Scorer(trained, Scoring(batch_size=20)).score([to_arrow(X)])
    assert Cramped.calls == [17]
    monkeypatch.setattr(Cramped, "room", 0)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        Scorer(trained, Scoring(batch_size="auto")).score([to_arrow(X[:1])])


def test_models_of_mlflow_halve_their_batches(trained: TrainedModule) -> None:
    settings = {"inputs": ["features"], "outputs": {"prediction": "prediction"}}
    scored = PyFuncModel(trained, settings, "cpu").predict({"features": X})  # type: ignore[arg-type]  # as MLflow may
    np.testing.assert_allclose(scored["prediction"], expected_of(trained), atol=1e-6)


@pytest.mark.parametrize(("shape", "task"), [((1,), "regression"), ((3,), "classification"), ((2, 3), "generic")])
def test_where_no_row_can_be_scored_the_module_is_not_called(
    trained: TrainedModule, shape: tuple[int, ...], task: Task
) -> None:
    class Shaped(Cramped):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).view(-1, *[1] * len(shape)).expand(len(x), *shape)

    trained = replace(trained, source=Shaped, outputs=(OutputSpec("", shape),), task=task)
    names = ["scores", "probability", "prediction"] if task == "classification" else ["prediction"]
    types = [column.type for column in Scorer(trained).score_arrow([to_arrow(X[:2])], names)]
    scorer = Scorer(trained, Scoring(invalid="skip"))
    Cramped.calls.clear()
    nulls = scorer.score_arrow([to_arrow(np.full_like(X[:2], np.nan))], names)
    assert Cramped.calls == []
    assert [column.type for column in nulls] == types
    assert [column.null_count for column in nulls] == [2] * len(names)


def test_a_module_whose_batch_of_one_row_loses_its_rows_is_told(trained: TrainedModule) -> None:
    class Squeezing(Score):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).squeeze()

    scorer = Scorer(replace(trained, source=Squeezing))
    assert len(scorer.score([to_arrow(X[:2])])["prediction"]) == 2
    with pytest.raises(ModuleError, match=r"forward returned a scalar for 1 row(?s:.*)squeeze\(-1\)"):
        scorer.score([to_arrow(X[:1])])


def test_what_results_depend_on_comes_back_from_the_json_of_a_saved_model() -> None:
    scoring = Scoring(batch_size="auto", invalid="skip", thresholds=(0.2, 0.8), layers=(("pooled", "head.0"),))
    assert Scoring.from_dict({"inputs": ["x"], **json.loads(json.dumps(scoring.to_dict()))}) == scoring


@pytest.mark.parametrize(("form", "invalid"), [({"keep_null": True}, "keep"), ({"keep_null": False}, "error")])
def test_models_of_older_versions_say_whether_a_row_with_a_null_gets_null_results(
    form: dict[str, Any], invalid: str
) -> None:
    assert Scoring.from_dict({**form, "thresholds": None}) == Scoring(batch_size="auto", invalid=cast(Invalid, invalid))


@pytest.mark.parametrize("columns", [1, 5, 63, 64, 65, 1_000])
@pytest.mark.parametrize("k", [1, 10, 200])
def test_lists_are_those_of_a_stable_sort_however_many_scores_are_equal(columns: int, k: int) -> None:
    draw = torch.Generator().manual_seed(columns)
    for scores in (
        torch.randn(20, columns, generator=draw),
        torch.randint(-2, 3, (20, columns), generator=draw).float() * -0.0,
        torch.randint(-2, 3, (20, columns), generator=draw).float(),
        torch.full((20, columns), NOTHING),
    ):
        expected = np.argsort(-scores.numpy(), axis=1, kind="stable")[:, :k]
        found, places = top_k(scores, k)
        np.testing.assert_array_equal(places, expected)
        np.testing.assert_array_equal(found, np.take_along_axis(scores.numpy(), expected, 1))


def test_a_block_has_a_row_at_least() -> None:
    assert block_rows(10**9) == 1
    assert block_rows(1_000) * 1_000 * 4 <= 2 << 20

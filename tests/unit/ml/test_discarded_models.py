"""Searches run as many trials as asked for, and delete models that they do not return, if nothing else names them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.base.world import World
from sparktorch.ml.model import TorchModelBase
from sparktorch.ml.tuning import search, tuned_model
from sparktorch.ml.tuning.search import Search
from sparktorch.train.loop.model_folder import ModelFolder
from tests.support.mlflow import QUIET

pytestmark = QUIET  # Optuna's storage is SQLAlchemy


class Group:
    """Stands for rows that ranks hold."""

    title, bar_stays, gives_way, dataset, estimator = "", False, False, MagicMock(), None

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def cancel(self) -> None: ...


class Estimator(SimpleNamespace):
    """Its models have these losses, one after another; a function is called, and returns one."""

    losses: list[float | Callable[[], float]]

    def _knowing(self, other: Any) -> Any:
        return self

    def getOrDefault(self, name: str) -> Any:  # noqa: N802
        return None

    def _fit_on(self, group: Group, judge: Any) -> Any:
        found = self.losses.pop(0)
        loss = found() if callable(found) else found
        return SimpleNamespace(summary=SimpleNamespace(history=[{"epoch": 1, "loss": loss}]), loss=loss)


@pytest.fixture
def discarded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(search, "applied", lambda estimator, values: estimator)
    monkeypatch.setattr(search, "inheriting", lambda spark, target: target)
    monkeypatch.setattr(search, "config_of", lambda estimator: TrainConfig())
    monkeypatch.setattr(search, "discard", found.append)
    return found


def searching(*losses: float | Callable[[], float]) -> Search:
    optuna = pytest.importorskip("optuna")
    space: Any = SimpleNamespace(values=lambda trial: {})
    estimator = Estimator(losses=list(losses))
    return Search(estimator, space, optuna.create_study(), metric="loss", trials=len(losses), named=False)


def run(found: Search, groups: int = 1) -> None:
    found.run([Group() for _ in range(groups)], timeout=None, show=False)  # type: ignore[misc]


def interrupted() -> float:
    raise KeyboardInterrupt


def test_a_search_keeps_the_best_model_and_deletes_the_others_without_its_lock(
    discarded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def free() -> None:
        with found._lock:
            done.set()

    def discard(model: Any) -> None:
        threading.Thread(target=free, daemon=True).start()
        assert done.wait(10)
        done.clear()
        discarded.append(model)

    done = threading.Event()
    monkeypatch.setattr(search, "discard", discard)
    found = searching(3.0, 1.0, 2.0)
    run(found)
    (best,) = found.models.values()
    assert best.bestModel.loss == 1.0  # type: ignore[attr-defined]
    assert [model.loss for model in discarded] == [3.0, 2.0]


def test_a_search_that_ends_by_an_error_deletes_the_best_model(discarded: list[Any]) -> None:
    found = searching(3.0, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(found)
    assert found.models == {}
    assert [model.loss for model in discarded] == [3.0]


def test_a_trial_that_ends_after_its_search_leaves_no_model(discarded: list[Any]) -> None:
    found = searching(interrupted, 1.0)
    with pytest.raises(KeyboardInterrupt):
        run(found)
    found._work(Group(), None)  # type: ignore[arg-type]
    assert found.models == {}
    assert [model.loss for model in discarded] == [1.0]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_together_run_as_many_trials_as_asked_for(discarded: list[Any], groups: int) -> None:
    found = searching(*(float(loss) for loss in range(7)))
    run(found, groups)
    assert [trial.state.name for trial in found._study.trials] == ["COMPLETE"] * 7
    assert [model.bestModel.loss for model in found.models.values()] == [0.0]  # type: ignore[attr-defined]
    assert sorted(model.loss for model in discarded) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.usefixtures("discarded")
@pytest.mark.parametrize(("trials", "tried"), [(2, 2), (9, 5)])
def test_a_search_ends_with_the_first_cause_if_its_first_five_trials_fail_or_all(trials: int, tried: int) -> None:
    def fails() -> float:
        raise ArithmeticError("planted")

    found = searching(*[fails] * trials)
    with pytest.raises(ArithmeticError, match="planted"):
        run(found)
    assert [trial.state.name for trial in found._study.trials] == ["FAIL"] * tried


class Model:
    """What `discard` looks at."""

    def __init__(self, weights: WeightsFolder | bytes) -> None:
        self.trained: Any = self
        self.weights = weights

    def deleteWeights(self) -> None:  # noqa: N802
        TorchModelBase.deleteWeights(self)  # type: ignore[arg-type]


def test_a_folder_is_deleted_unless_mlflow_logs_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = ModelFolder(str(tmp_path / "model"), World()).write({"x": torch.ones(2)})
    logged, plain, gone = Model(written), Model(written), Model(WeightsFolder(str(tmp_path / "gone"), "gone"))
    logged._mlflow_logged = True  # type: ignore[attr-defined]
    plain._mlflow_run_id = "1"  # type: ignore[attr-defined]  # its metrics are logged, and not the model
    tuned_model.discard(logged)  # type: ignore[arg-type]
    assert written["x"].tolist() == [1.0, 1.0]
    tuned_model.discard(plain)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    tuned_model.discard(Model(b""))  # type: ignore[arg-type]
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        tuned_model.discard(gone)  # type: ignore[arg-type]
    assert "does not return stays" in caplog.text

"""A trained module as plain files: it predicts the same to the last bit, and runs nobody else's code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from sparktorch.adapters.huggingface.preprocess import Tokens
from sparktorch.adapters.neuralforecast import NeuralForecastNetwork
from sparktorch.base.config import Task
from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.errors import ColumnError, PersistenceError, SparkTorchError
from sparktorch.model.export import Program
from sparktorch.model.scorer import Scorer, Scoring
from sparktorch.model.trained_module import FORMAT_VERSION, TrainedModule
from sparktorch.tracking.pyfunc import PyFuncModel
from tests.support.models import FEATURES, trained_module
from tests.support.nets import Fourier, Logit, Mlp, NamedPair, Pair, Score

X = np.random.default_rng(0).normal(size=(50, 5)).astype(np.float32)
SCALE = np.linspace(0, 2, 50, dtype=np.float32)
SCALES = TensorSpec(name="x1", column="scale", dtype="float32")


def trained(source: Any, task: Task = "generic", params: dict[str, Any] | None = None, seed: int = 0) -> TrainedModule:
    inputs = (FEATURES, SCALES) if source in (Pair, NamedPair) else (FEATURES,)
    return trained_module(source, task=task, params=params, seed=seed, inputs=inputs)


def scored(model: TrainedModule) -> dict[str, Any]:
    return Scorer(model).score([to_arrow(X), to_arrow(SCALE)][: len(model.inputs)])


class Activated(nn.Linear):
    """Takes a function as a parameter."""

    def __init__(self, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(5, 3)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(super().forward(x))


def planted(directory: Path, **entry: Any) -> None:
    form = json.loads((directory / "module.json").read_text())
    (directory / "module.json").write_text(json.dumps({**form, "module": entry}))


class Planted:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.path.write_text, ("ran",)


@pytest.mark.parametrize(
    ("source", "params", "task"),
    [
        (Mlp, {"hidden": 4}, "classification"),
        ("tests.support.nets:Mlp", {}, "classification"),
        (Score, {}, "regression"),
        (Pair, {}, "generic"),
        (NamedPair, {"width": 5}, "generic"),
    ],
)
def test_a_saved_module_predicts_the_same_to_the_last_bit(
    source: Any, params: dict[str, Any], task: Task, tmp_path: Path
) -> None:
    before = trained(source, task, params)
    before.save(tmp_path)
    after = TrainedModule.load(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"weights.safetensors", "module.json"}
    assert (after.inputs, after.outputs) == (before.inputs, before.outputs)
    assert (after.task, dict(after.params)) == (task, params)
    first, second = scored(before), scored(after)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_what_a_module_draws_besides_its_weights_is_drawn_again_with_the_seed_of_its_training(tmp_path: Path) -> None:
    before = replace(trained(Fourier, seed=5), seed=5)
    torch.manual_seed(5)
    with torch.no_grad():
        wanted = Fourier()(torch.from_numpy(X)).numpy()
    before.save(tmp_path)
    for found in (before, TrainedModule.load(tmp_path)):
        assert np.array_equal(scored(found)["prediction"], wanted)
    form = json.loads((tmp_path / "module.json").read_text())
    del form["seed"]  # as in files of earlier versions
    (tmp_path / "module.json").write_text(json.dumps(form))
    assert TrainedModule.load(tmp_path).seed == 0


def test_code_without_an_import_path_is_pickled_only_where_that_is_allowed(tmp_path: Path) -> None:
    class Branching(Mlp):
        """Whose graph depends on the values that it sees."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = super().forward(x)
            return scores if scores.sum() > 0 else -scores

    before = trained(Branching(), "classification")
    with pytest.raises(
        PersistenceError, match=r"the module .*Branching has no import path .* cannot capture(.|\n)*allowPickle"
    ):
        before.save(tmp_path)
    before.save(tmp_path, allow_pickle=True)
    with pytest.raises(PersistenceError, match=r"loading a pickle runs whatever is in it(.|\n)*allowPickle"):
        TrainedModule.load(tmp_path)
    after = TrainedModule.load(tmp_path, allow_pickle=True)
    assert np.array_equal(scored(before)["scores"], scored(after)["scores"])


def test_thresholds_decide_in_a_pyfunc_too() -> None:
    classifier = trained(Mlp, "classification")
    settings = {"inputs": ["features"], "outputs": {"probability": "p", "prediction": "class"}}
    usual = PyFuncModel(classifier, settings, "cpu").predict(X)
    assert (usual["class"] == np.argmax(np.stack(usual["p"]), axis=1)).all()
    thresholds = [0.1] + [0.9] * (usual["p"][0].size - 1)
    found = PyFuncModel(classifier, {**settings, "thresholds": thresholds}, "cpu").predict(X)
    assert (found["class"] == np.argmax(np.stack(found["p"]) / thresholds, axis=1)).all()
    assert (found["class"] != usual["class"]).any()


def test_code_that_an_earlier_version_has_pickled_is_loaded_from_where_it_has_moved_to(tmp_path: Path) -> None:
    trained(Mlp).save(tmp_path)
    old = b"csparktorch.model.series.neuralforecast\nNeuralForecastNetwork\n"
    (tmp_path / "module.pkl").write_bytes(b"(" + old + b"(dt.")
    planted(tmp_path, pickle="module.pkl")
    assert TrainedModule.load(tmp_path, allow_pickle=True).source is NeuralForecastNetwork


def test_a_planted_pickle_is_not_run(tmp_path: Path) -> None:
    trained(Mlp, "classification").save(tmp_path)
    witness = tmp_path / "witness"
    (tmp_path / "module.pkl").write_bytes(pickle.dumps(Planted(witness)))
    TrainedModule.load(tmp_path).build()
    planted(tmp_path, pickle="module.pkl")
    with pytest.raises(PersistenceError):
        TrainedModule.load(tmp_path)
    planted(tmp_path, path="tests.support.nets:Mlp", params={})
    (tmp_path / "weights.safetensors").write_bytes((tmp_path / "module.pkl").read_bytes())
    with pytest.raises(Exception, match=r"(?i)header"):
        TrainedModule.load(tmp_path).build()
    assert not witness.exists()
    pickle.loads((tmp_path / "module.pkl").read_bytes())
    assert witness.exists(), "the planted pickle would have left its mark"


def test_a_planted_import_path_calls_nothing_but_a_module(tmp_path: Path) -> None:
    trained(Mlp, "classification").save(tmp_path)
    witness = tmp_path / "witness"
    planted(tmp_path, path="os:system", params={"command": f"touch {witness}"})
    with pytest.raises(SparkTorchError):
        TrainedModule.load(tmp_path).build()
    assert not witness.exists()


def test_a_preprocess_of_plain_fields_is_saved_as_these_and_loads_as_it_was_saved_before(tmp_path: Path) -> None:
    tokens = Tokens(folder="/models/bert", max_length=8, arguments=("input_ids",))
    replace(trained(Mlp), preprocess=tokens).save(tmp_path)
    assert TrainedModule.load(tmp_path).preprocess == tokens
    form = json.loads((tmp_path / "module.json").read_text())
    form["preprocess"]["path"] = "sparktorch.data.pretrained:Tokens"
    form["preprocess"]["params"]["arguments"] = ["input_ids"]
    (tmp_path / "module.json").write_text(json.dumps(form))
    assert type(TrainedModule.load(tmp_path).preprocess) is Tokens
    form["preprocess"] = {"path": "sparktorch.data.columns:Columns", "params": {"inputs": []}}
    (tmp_path / "module.json").write_text(json.dumps(form))
    with pytest.raises(SparkTorchError, match="does not take the epoch"):
        TrainedModule.load(tmp_path)


def test_parameters_that_are_no_json_leave_the_graph(tmp_path: Path) -> None:
    before = trained(Activated, params={"activation": torch.tanh})
    before.save(tmp_path)
    after = TrainedModule.load(tmp_path)
    assert isinstance(after.source, Program)
    assert np.array_equal(scored(before)["prediction"], scored(after)["prediction"])


def test_what_is_no_model_or_of_a_later_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PersistenceError, match=r"module\.json is missing"):
        TrainedModule.load(tmp_path)
    trained(Mlp).save(tmp_path)
    form = json.loads((tmp_path / "module.json").read_text())
    (tmp_path / "module.json").write_text(json.dumps({**form, "format": FORMAT_VERSION + 1}))
    with pytest.raises(PersistenceError, match=rf"saved in format {FORMAT_VERSION + 1}(.|\n)*upgrade"):
        TrainedModule.load(tmp_path)


def test_tied_and_integer_weights_survive(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5))
    tied[1].weight = tied[0].weight
    before = trained(tied)
    before.save(tmp_path, allow_pickle=True)
    after = TrainedModule.load(tmp_path, allow_pickle=True)
    expected = before.build().state_dict()
    found = after.build().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) and found[n].dtype == expected[n].dtype for n in expected)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_scores_do_not_depend_on_the_batches(batch_size: int) -> None:
    model = trained(NamedPair)
    parts = Scorer(model, Scoring(batch_size=batch_size)).score([to_arrow(X), to_arrow(SCALE)])
    for name, whole in scored(model).items():
        np.testing.assert_allclose(parts[name], whole, rtol=1e-5, atol=1e-6)


def test_a_classifier_gives_scores_probabilities_and_the_best_class() -> None:
    result = scored(trained(Mlp, "classification"))
    assert {name: (a.shape, a.dtype.name) for name, a in result.items()} == {
        "scores": ((50, 3), "float64"),
        "probability": ((50, 3), "float64"),
        "prediction": ((50,), "float64"),
    }
    np.testing.assert_allclose(result["probability"].sum(1), 1, atol=1e-12)
    assert np.array_equal(result["prediction"], result["scores"].argmax(1))


@pytest.mark.parametrize("source", [Logit, Score])
def test_one_logit_is_a_classifier_of_two(source: Any) -> None:
    model = trained(source, "classification")
    result = scored(model)
    with torch.no_grad():
        logit = model.build()(torch.from_numpy(X)).double().reshape(-1).numpy()
    assert np.array_equal(result["scores"], np.stack([-logit, logit], 1))
    np.testing.assert_allclose(result["probability"][:, 1], 1 / (1 + np.exp(-logit)), rtol=1e-12)
    assert np.array_equal(result["prediction"], logit > 0)


def test_two_scores_are_centred_which_changes_neither_probabilities_nor_predictions() -> None:
    model = trained(nn.Linear, "classification", {"in_features": 5, "out_features": 2})
    result = scored(model)
    with torch.no_grad():
        logits = model.build()(torch.from_numpy(X)).double()
    np.testing.assert_allclose(result["scores"], logits - logits.mean(1, keepdim=True), rtol=1e-12)
    assert np.array_equal(result["probability"], logits.softmax(1))
    assert np.array_equal(result["prediction"], logits.argmax(1))


@pytest.mark.parametrize("column", [pa.array(["a", "b"]), pa.array([1.0, 2.0])])
def test_columns_that_an_sql_function_was_not_made_for_are_named(column: pa.Array) -> None:
    with pytest.raises(ColumnError, match=f"column 'features' is {column.type}, but the model was fitted on"):
        Scorer(trained(Mlp)).score([column])


@pytest.mark.parametrize("thresholds", [None, (0.1, 0.5, 0.9)])
def test_a_row_whose_scores_are_nan_is_of_no_class(thresholds: tuple[float, ...] | None) -> None:
    rows = X.copy()
    rows[1, 0] = np.nan
    found = Scorer(trained(Mlp, "classification"), Scoring(thresholds=thresholds)).score([to_arrow(rows)])["prediction"]
    assert np.flatnonzero(np.isnan(found)).tolist() == [1]


class Layered(Mlp):
    """Takes its sizes as a tuple."""

    def __init__(self, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
        super().__init__(5, *sizes)
        assert type(sizes) is tuple
        assert options == {"kernel": (3, [1, (2,)])}


def test_tuples_among_the_parameters_of_a_module_are_tuples_after_loading(tmp_path: Path) -> None:
    params = {"sizes": (3, 8), "options": {"kernel": (3, [1, (2,)])}}
    trained(Layered, "classification", params).save(tmp_path)
    found = TrainedModule.load(tmp_path)
    assert dict(found.params) == params
    scored(found)
    assert json.loads((tmp_path / "module.json").read_text())["format"] == FORMAT_VERSION, "earlier versions refuse it"

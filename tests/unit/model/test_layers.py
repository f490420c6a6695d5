"""What layers of a module return, beside its predictions: the same as a hook of torch's sees."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from sparktorch.base.config import Task
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.errors import ModuleError
from sparktorch.model.scorer import Scorer, Scoring
from sparktorch.model.trained_module import TrainedModule
from sparktorch.tracking.pyfunc import PyFuncModel
from tests.support.models import FEATURES, trained_module

X = np.random.default_rng(0).normal(size=(50, 1, 4, 6)).astype(np.float32)
WANTED = {"image": "conv", "sequence": "lstm", "pooled": "head.0"}


class Net(nn.Module):
    """Layers that return an image, a tuple whose first tensor is a sequence, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.lstm = nn.LSTM(12, 5, batch_first=True)
        self.head = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.unused = nn.Linear(1, 1)
        self.mean = Mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean(x)
        images = self.conv(x)
        out: torch.Tensor = self.head(self.lstm(images.transpose(1, 2).flatten(2))[0][:, -1])
        return out


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


class InPlace(nn.Module):
    """Changes what its first layer has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(24, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.first(x.flatten(1)))
        hidden += 1
        out: torch.Tensor = self.last(hidden)
        return out


def trained(task: Task = "classification", source: type[nn.Module] = Net) -> TrainedModule:
    return trained_module(source, task=task, inputs=[replace(FEATURES, shape=X.shape[1:])])


def hooked(module: nn.Module) -> dict[str, Any]:
    """Returns what torch's own hooks see, flattened to a row of values for each row."""
    seen: dict[str, Any] = {}
    for name, layer in WANTED.items():
        first = (lambda output: output[0]) if name == "sequence" else (lambda output: output)
        module.get_submodule(layer).register_forward_hook(
            lambda module, args, output, name=name, first=first: seen.update({name: first(output)})
        )
    with torch.no_grad():
        module(torch.from_numpy(X))
    return {name: value.flatten(1).numpy() for name, value in seen.items()}


@pytest.mark.parametrize(("task", "batch"), [("classification", 50), ("generic", 7)])
def test_layers_return_what_a_hook_sees_beside_the_predictions(task: Task, batch: int) -> None:
    model = trained(task)
    found = Scorer(model, Scoring(batch_size=batch, layers=tuple(WANTED.items()))).score([to_arrow(X)])
    plain = Scorer(model, Scoring(batch_size=batch)).score([to_arrow(X)])
    assert set(found) == {*plain, *WANTED}
    for name, values in {**plain, **hooked(model.build())}.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6)
    assert found["image"].shape == (50, 2 * 4 * 6)


def test_layers_of_a_compiled_module_return_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # Hooks are a matter of the graph that is captured, which takes a second; its code takes half a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = trained()
    found = Scorer(model, Scoring(compiled=True, layers=tuple(WANTED.items()))).score([to_arrow(X)])
    for name, values in hooked(model.build()).items():
        np.testing.assert_allclose(found[name], values, atol=1e-5)


def test_a_layer_returns_what_it_did_before_it_was_changed_in_place() -> None:
    model = trained(source=InPlace)
    found = Scorer(model, Scoring(layers=(("first", "first"), ("relu", "relu")))).score([to_arrow(X)])
    module: Any = model.build()
    with torch.no_grad():
        first = module.first(torch.from_numpy(X).flatten(1))
    np.testing.assert_allclose(found["first"], first, atol=1e-6)
    np.testing.assert_allclose(found["relu"], first.relu(), atol=1e-6)


def test_threads_that_share_a_scorer_get_the_layers_of_their_own_rows() -> None:
    scorer = Scorer(trained(), Scoring(layers=tuple(WANTED.items())))
    alone = [scorer.score([to_arrow(X[row : row + 1])])["pooled"] for row in range(50)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda row: scorer.score([to_arrow(X[row % 50 : row % 50 + 1])])["pooled"], range(400)))
    np.testing.assert_allclose(np.stack(found), np.stack(alone * 8), atol=1e-6)


def test_rows_that_are_left_out_have_null_layers() -> None:
    rows = to_arrow(X).to_pylist()
    column = pd.Series([None, rows[0], None])
    model = PyFuncModel(
        trained(), {"inputs": ["features"], "outputs": {"pooled": "p"}, "invalid": "keep", "layers": WANTED}, "cpu"
    )
    found = model.predict(pd.DataFrame({"features": column}))["p"]
    assert found.isna().tolist() == [True, False, True]
    assert model.predict(pd.DataFrame({"features": [None]}))["p"].isna().all()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("unused", "forward does not call the layer 'unused'"),
        ("mean", r"the layer 'mean' returns a tensor of shape \(\) for 50 rows"),
    ],
)
def test_layers_that_return_no_row_for_each_row_are_refused(layer: str, message: str) -> None:
    with pytest.raises(ModuleError, match=message):
        Scorer(trained(), Scoring(layers=(("x", layer),))).score([to_arrow(X)])

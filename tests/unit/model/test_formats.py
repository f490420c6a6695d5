"""Modules written for other programs compute what scoring computes, for any number of rows."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sparktorch import TorchClassificationModel, TorchModel
from sparktorch.base.imports import load_object
from sparktorch.data.columns import TensorSpec
from sparktorch.data.convert.tensors import to_arrow
from sparktorch.errors import PersistenceError
from sparktorch.model.formats import write_as
from sparktorch.model.scorer import Scorer
from sparktorch.model.trained_module import TrainedModule
from tests.support.models import FEATURES, trained_module
from tests.support.nets import Mlp

onnxruntime: Any = pytest.importorskip("onnxruntime")

X = np.random.default_rng(0).normal(size=(50, 5)).astype(np.float32)


class Words(nn.Module):
    """Padded words and a number; a dict of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.out = nn.Linear(5, 2)

    def forward(self, words: torch.Tensor, mask: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = self.embed(words) * mask[..., None]
        pooled = kept.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        return {"scores": self.out(torch.cat([pooled, number[:, None]], 1)), "pooled": pooled}


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


class Special(nn.Linear):
    """Uses an operator that ONNX has not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.special.bessel_j0(x))


def linear(kind: type[nn.Linear]) -> TrainedModule:
    return trained_module(kind, params={"in_features": 5, "out_features": 3})


def run(file: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def test_a_column_may_have_the_name_of_the_output(tmp_path: Path) -> None:
    write_as(trained_module(Mlp, inputs=[replace(FEATURES, column="output")]), tmp_path / "net.onnx", "onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    assert [one.name for one in (*session.get_inputs(), *session.get_outputs())] == ["output", "output_0"]


def test_weights_are_not_overwritten_by_their_description(tmp_path: Path) -> None:
    with pytest.raises(PersistenceError, match=r"description beside the weights(.|\n)*\.safetensors"):
        write_as(trained_module(Mlp), tmp_path / "net.json", "safetensors")


def test_onnx_computes_the_scores_of_any_number_of_rows(tmp_path: Path) -> None:
    model = TorchClassificationModel()._with(trained_module(Mlp, task="classification"), None)
    model.export(str(tmp_path / "net.onnx"))
    expected = Scorer(model.trained).score([to_arrow(X)])["scores"]
    for rows in (1, 7, 50):
        found = run(tmp_path / "net.onnx", {"features": X[:rows]})
        assert list(found) == ["output"]
        np.testing.assert_allclose(found["output"], expected[:rows], atol=1e-5)


def test_onnx_names_columns_masks_and_outputs(tmp_path: Path) -> None:
    words = TensorSpec(name="x0", column="words", dtype="int64", layout="padded")
    number = TensorSpec(name="x1", column="number", dtype="float32")
    inputs = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(), torch.randn(2)
    model = trained_module(Words, *inputs, inputs=[words, number])
    write_as(model, tmp_path / "net.onnx", "onnx")
    names = ["words", "words_mask", "number"]
    found = run(tmp_path / "net.onnx", {n: t.numpy() for n, t in zip(names, inputs, strict=True)})
    expected = Scorer(model).score_tensors(inputs)
    assert set(found) == {"scores", "pooled"}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5)


def test_a_program_has_its_weights_with_it(tmp_path: Path) -> None:
    model = trained_module(Mlp)
    TorchModel()._with(model, None).export(str(tmp_path / "net.pt2"), "pt2")
    program = torch.export.load(tmp_path / "net.pt2").module()
    with torch.no_grad():
        found = program(torch.from_numpy(X[:7])).numpy()
    np.testing.assert_allclose(found, Scorer(model).score([to_arrow(X[:7])])["prediction"], atol=1e-6)


def test_weights_come_with_what_makes_the_module(tmp_path: Path) -> None:
    model = linear(nn.Linear)
    write_as(model, tmp_path / "net.safetensors", "safetensors")
    form = json.loads((tmp_path / "net.json").read_text())
    module = load_object(form["module"])(**form["params"])
    module.load_state_dict(load_file(tmp_path / "net.safetensors"))
    with torch.no_grad():
        found = module(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(found, Scorer(model).score([to_arrow(X)])["prediction"], atol=1e-6)
    assert [spec["column"] for spec in form["inputs"]] == ["features"]


@pytest.mark.parametrize("form", ["onnx", "pt2", "safetensors"])
def test_an_export_that_fails_leaves_the_file_that_it_would_replace(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"net.{form}"
    write_as(linear(nn.Linear), file, form)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    whole = Path.write_bytes

    def fills_the_disk(path: Path, content: bytes) -> int:
        whole(path, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", fills_the_disk)
        with pytest.raises((OSError, PersistenceError)):
            write_as(linear(Special if form == "onnx" else nn.Linear), file, form)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_as(trained_module(Mlp), file, form)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert after[file.name] != before[file.name]


@pytest.mark.parametrize(
    ("kind", "form", "reason"),
    [(Branching, "pt2", "data-dependent"), (Branching, "onnx", "data-dependent"), (Special, "onnx", "bessel_j0")],
)
def test_what_torch_cannot_write_is_refused_with_its_reason(
    tmp_path: Path, kind: type[nn.Linear], form: str, reason: str
) -> None:
    with pytest.raises(PersistenceError, match=f"cannot write the module as {form}.*{reason}(.|\n)*safetensors"):
        write_as(linear(kind), tmp_path / "net", form)
    assert not (tmp_path / "net").exists()

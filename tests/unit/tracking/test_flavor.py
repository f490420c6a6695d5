"""A model on MLflow's disk: its own code and no library's, the environment that was asked for, answers as asked for."""

from __future__ import annotations

import importlib
import json
import math
import pickle
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from mlflow.exceptions import MlflowException
from mlflow.types.schema import AnyType
from pyspark.ml.linalg import Vectors
from torch import nn

from sparktorch import TorchClassificationModel, TorchRegressionModel
from sparktorch.adapters.huggingface.preprocess import Pixels, Tokens
from sparktorch.data.columns import TensorSpec
from sparktorch.data.fields.kinds import kind_of
from sparktorch.errors import ColumnError, PersistenceError
from sparktorch.model.trained_module import TrainedModule
from sparktorch.tracking.flavor import requirements
from sparktorch.tracking.pyfunc import PyFuncModel
from sparktorch.tracking.signature import type_of
from sparktorch.tracking.stages import _input_type, _type_of
from tests.support.mlflow import QUIET
from tests.support.models import trained_module
from tests.support.nets import Mlp

mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
pytest.importorskip("peft")
flavor: Any = importlib.import_module("sparktorch.tracking.flavor")
lora: Any = importlib.import_module("tests.support.tiny_transformers").lora

pytestmark = QUIET

SCORING = ("sparktorch-estimator", "numpy", "pandas", "pyarrow", "safetensors", "torch")

NET = """
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(5, 3)
"""
LAYER = """
from torch import nn

class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 0 + {}
"""
USING_LAYER = """
from torch import nn
from users_net.layer import Layer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer(5, 3)

    def forward(self, x):
        return self.layer(x) + {}
"""


class Square(nn.Linear):
    """Takes rows of 2 x 2."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1)[:, :4])


def model_of(source: Any, **params: Any) -> TorchClassificationModel:
    return TorchClassificationModel()._with(trained_module(source, task="classification"), None)._set(**params)


def served(model: Any, folder: Path) -> Any:
    """Saves a model; returns it as MLflow serves it."""
    flavor.save_model(model, str(folder / "model"), pytorch=False)
    return mlflow.pyfunc.load_model(str(folder / "model"))


def pyfunc_of(trained: TrainedModule, **settings: Any) -> PyFuncModel:
    return PyFuncModel(trained, {"inputs": ["id"], "outputs": {"prediction": "p"}, **settings}, "cpu")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:

    def load(place: Path) -> Any:
        monkeypatch.syspath_prepend(str(place))
        return importlib.import_module("users_net").Net

    yield load
    forget_net()


def forget_net() -> dict[str, Any]:
    names = [name for name in sys.modules if name.partition(".")[0] == "users_net"]
    return {name: sys.modules.pop(name) for name in names}


def test_an_installed_library_is_not_copied_into_the_model(importable: Any, tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib/python3/dist-packages"
    folder.mkdir(parents=True)
    (folder / "users_net.py").write_text(NET)
    flavor.save_model(model_of(importable(folder)), str(tmp_path / "model"), pytorch=False)
    assert not (tmp_path / "model" / "code").exists()


@pytest.mark.parametrize("name", ["users_net.py", "users_net/__init__.py"])
def test_code_out_of_a_zip_travels_with_the_model(importable: Any, tmp_path: Path, name: str) -> None:
    archive = tmp_path / "sent.zip"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr(name, NET)
        files.writestr("other.py", "")
    flavor.save_model(model_of(importable(archive)), str(tmp_path / "model"), pytorch=False)
    assert (tmp_path / "model" / "code" / name).read_text() == NET
    assert not (tmp_path / "model" / "code" / "other.py").exists()


def test_a_model_is_not_saved_into_the_code_that_it_keeps_a_copy_of(importable: Any, tmp_path: Path) -> None:
    package = tmp_path / "users_net"
    package.mkdir()
    (package / "__init__.py").write_text(NET)
    model = model_of(importable(tmp_path))
    with pytest.raises(PersistenceError, match=f"{package}/model lies within {package}, whose code"):
        flavor.save_model(model, str(package / "model"), pytorch=False)
    assert [path.name for path in package.iterdir() if path.name != "__pycache__"] == ["__init__.py"]
    flavor.save_model(model, str(tmp_path / "model"), pytorch=False)
    assert (tmp_path / "model" / "code" / "users_net" / "__init__.py").read_text() == NET


@pytest.mark.parametrize("changed", ["net", "layer"])
def test_a_model_runs_its_own_version_of_its_code_or_is_refused(importable: Any, tmp_path: Path, changed: str) -> None:
    paths = [str(tmp_path / f"model{number}") for number in (1, 2)]
    for number, path in enumerate(paths, 1):
        package = tmp_path / str(number) / "users_net"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"from .net import Net  # {number}")  # holds no class of the model
        (package / "layer.py").write_text(LAYER.format(number if changed == "layer" else 0))
        (package / "net.py").write_text(USING_LAYER.format(number if changed == "net" else 0))
        flavor.save_model(model_of(importable(package.parent)), path, pytorch=False)
        forget_net()
        sys.path.remove(str(package.parent))
    x, first = torch.zeros(1, 5), flavor.load_model(paths[0])
    assert first.module(x)[0, 0] == 1
    refused = rf"(?s)its module 'users_net.{changed}'.*/model1/code/.*in an application of its own"
    for load in (lambda path: flavor.load_model(path).module, mlflow.pyfunc.load_model):
        with pytest.raises(PersistenceError, match=refused):
            load(paths[1])
    older = forget_net()
    second = flavor.load_model(paths[1])
    assert second.module(x)[0, 0] == 2
    sent = pickle.dumps(second.trained)
    forget_net()
    sys.modules.update(older)  # as in a Python worker that has scored with the first
    with pytest.raises(PersistenceError, match=refused):
        pickle.loads(sent).build()


def test_the_environment_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    model = model_of(Mlp)
    flavor.save_model(model, str(tmp_path / "more"), pytorch=False, extra_pip_requirements=["a-library==1.0"])
    more = (tmp_path / "more" / "requirements.txt").read_text().splitlines()
    assert "a-library==1.0" in more
    assert any(line.startswith("torch==") for line in more)
    conda = {"name": "mine", "dependencies": ["python=3.11", {"pip": ["b-library==2.0"]}]}
    flavor.save_model(model, str(tmp_path / "conda"), pytorch=False, conda_env=conda)
    assert yaml.safe_load((tmp_path / "conda" / "conda.yaml").read_text())["name"] == "mine"
    assert "b-library==2.0" in (tmp_path / "conda" / "requirements.txt").read_text().splitlines()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("change", "needed"),
    [
        ({}, set()),
        ({"source": "transformers:BertModel", "params": {"config": {"num_hidden_layers": 1}}}, {"transformers"}),
        ({"source": lora}, {"transformers", "peft"}),
        ({"preprocess": Tokens("/models/bert", max_length=4)}, {"transformers"}),
        ({"preprocess": Pixels("/models/vit")}, {"transformers", "pillow"}),
        ({"inputs": (TensorSpec(name="x0", column="image", dtype="float32", layout="image"),)}, {"pillow"}),
    ],
)
def test_the_environment_has_the_libraries_that_the_code_of_the_model_is_of(
    change: dict[str, Any], needed: set[str]
) -> None:
    trained = replace(model_of(Mlp).trained, **change)
    found = dict(line.split("==") for line in requirements([trained]))
    assert found.keys() & {"transformers", "peft", "pillow"} == needed
    assert all(found[name] == version(name) for name in needed)
    assert found.keys() - needed <= {*SCORING, "torchvision"}
    if "peft" in needed:  # an instance
        assert "peft" in " ".join(requirements([replace(trained, source=lora())]))


def test_a_frame_of_pandas_has_the_names_without_the_backticks_of_spark(tmp_path: Path) -> None:
    model = model_of(Mlp, featuresCol="`my.features`")
    loaded = served(model, tmp_path)
    assert loaded.metadata.signature.inputs.input_names() == ["my.features"]
    rows = np.ones((2, 5), np.float32)
    expected = loaded.predict({"my.features": rows})["prediction"].tolist()
    assert loaded.predict(pd.DataFrame({"my.features": rows.tolist()}))["prediction"].tolist() == expected
    settings = {"inputs": ["`my.features`"], "outputs": {"prediction": "prediction"}}
    older = PyFuncModel(model.trained, settings, "cpu").predict({"`my.features`": rows})
    assert older["prediction"].tolist() == expected


def test_code_that_can_only_be_pickled_is_saved_and_loaded_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Branching(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = super().forward(x)
            return scores if scores.sum() > 0 else scores * 2

    model, path = model_of(Branching), str(tmp_path / "model")
    with pytest.raises(PersistenceError, match="allow_pickle=True"):
        flavor.save_model(model, str(tmp_path / "refused"))
    flavor.save_model(model, path, allow_pickle=True)
    assert "pytorch" not in mlflow.models.Model.load(path).flavors
    for load in (flavor.load_model, mlflow.pyfunc.load_model):
        with pytest.raises(PersistenceError, match="loading a pickle"):
            load(path)
    assert flavor.load_model(path, allow_pickle=True).uid == model.uid
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    assert len(mlflow.pyfunc.load_model(path).predict({"features": np.zeros((3, 5), np.float32)})) == 3


def test_a_signature_of_the_users_own_replaces_ours(tmp_path: Path) -> None:
    signature = mlflow.models.infer_signature(pd.DataFrame({"features": [1.0]}), pd.DataFrame({"prediction": [1.0]}))
    flavor.save_model(model_of(Mlp), str(tmp_path / "own"), pytorch=False, signature=signature)
    assert mlflow.models.Model.load(str(tmp_path / "own")).signature == signature
    flavor.save_model(model_of(Mlp), str(tmp_path / "none"), pytorch=False, signature=False)
    assert mlflow.models.Model.load(str(tmp_path / "none")).signature is None


@pytest.mark.parametrize(("policy", "nan_is_null"), [("keep", False), ("skip", True)])
def test_the_pyfunc_answers_null_where_the_model_keeps_or_skips_invalid_rows(
    policy: str, nan_is_null: bool, tmp_path: Path
) -> None:
    model = model_of(Mlp, handleInvalid=policy)
    rows = np.random.default_rng(1).normal(size=(2, 5)).astype(np.float32)
    pyfunc = served(model, tmp_path)
    found = pyfunc.predict(pd.DataFrame({"features": [rows[0].tolist(), None, rows[1].tolist()]}))
    expected = model.module(torch.from_numpy(rows)).argmax(1).double().tolist()
    assert [found["prediction"][0], found["prediction"][2]] == expected
    assert pd.isna(found["prediction"][1])
    assert found["probability"][1] is None
    for bad in (math.nan, math.inf):
        holed = pyfunc.predict(pd.DataFrame({"features": [[bad, 1.0, 2.0, 3.0, 4.0], rows[1].tolist()]}))
        assert [value is None for value in holed["probability"]] == [nan_is_null, False]
        assert holed["prediction"][1] == expected[1]


def test_a_pyfunc_that_answers_null_takes_all_that_mlflow_makes_columns_of(tmp_path: Path) -> None:
    from mlflow.pyfunc.scoring_server import infer_and_parse_data

    model = model_of(Mlp, handleInvalid="keep")
    pyfunc = served(model, tmp_path)
    rows = np.arange(15.0).reshape(3, 5)
    expected = model.module(torch.from_numpy(rows).float()).argmax(1).double().tolist()
    whole, schema = rows.astype(int).tolist(), pyfunc.metadata.get_input_schema()
    for given in (
        pd.DataFrame({"features": whole}),
        {"features": rows},
        infer_and_parse_data({"inputs": {"features": whole}}, schema),
        infer_and_parse_data({"inputs": whole}, schema),
        infer_and_parse_data({"dataframe_records": [{"features": row} for row in whole]}, schema),
    ):
        assert pyfunc.predict(given)["prediction"].tolist() == expected
    within = infer_and_parse_data({"inputs": {"features": [whole[0], [None, *whole[1][1:]]]}}, schema)
    assert pyfunc.predict(within)["prediction"].isna().tolist() == [False, True]


def test_nested_lists_are_taken_as_pandas_arrow_json_and_numpy_hand_them_over(tmp_path: Path) -> None:
    from mlflow.pyfunc.scoring_server import infer_and_parse_data

    model = model_of(Square)
    model._trained = replace(
        model.trained, inputs=(TensorSpec(name="x0", column="features", dtype="float32", shape=(2, 2)),)
    )
    pyfunc = served(model, tmp_path)
    rows = np.random.default_rng(1).normal(size=(3, 2, 2))
    expected = model.module(torch.from_numpy(rows).float()).argmax(1).double().tolist()
    lists, schema = rows.tolist(), pyfunc.metadata.get_input_schema()
    for given in (
        pd.DataFrame({"features": lists}),
        pd.DataFrame({"features": list(rows)}),
        pa.table({"features": lists}).to_pandas(),  # arrays of arrays, as from files and in a UDF of Spark
        {"features": rows},
        {"features": rows.astype(np.float32)},
        infer_and_parse_data({"inputs": {"features": lists}}, schema),
        infer_and_parse_data({"inputs": lists}, schema),
        infer_and_parse_data({"instances": [{"features": row} for row in lists]}, schema),
        infer_and_parse_data({"dataframe_records": [{"features": row} for row in lists]}, schema),
    ):
        assert pyfunc.predict(given)["prediction"].tolist() == expected
    with pytest.raises(MlflowException, match=r"shape \(2, 3\), the model takes \(2, 2\)"):
        pyfunc.predict({"features": np.zeros((3, 2, 3))})


def test_a_client_of_mlflows_server_reads_why_its_rows_are_refused(tmp_path: Path) -> None:
    from mlflow.pyfunc.scoring_server import invocations

    pyfunc = served(model_of(partial(nn.Linear, 5, 3)), tmp_path)
    body = json.dumps({"inputs": {"features": np.zeros((3, 4)).tolist()}})
    with pytest.raises(MlflowException, match=r"shape \(4,\), the model takes \(5,\)") as refused:
        invocations(body, "application/json", pyfunc, pyfunc.metadata.get_input_schema())
    assert refused.value.get_http_status_code() == 400
    assert refused.value.error_code == "INVALID_PARAMETER_VALUE"
    assert isinstance(refused.value.__cause__, ColumnError)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_the_signature_takes_the_rows_that_transform_takes(tmp_path: Path, dtype: Any) -> None:
    model = model_of(Mlp)
    pyfunc = served(model, tmp_path)
    rows = np.arange(15).reshape(3, 5).astype(dtype)
    expected = model.module(torch.from_numpy(rows).float()).argmax(1).double().tolist()
    index = [8, 2, 5]  # as a filter or `train_test_split` leaves it: without a 0
    for column in (list(rows), rows.tolist()):
        scored = pyfunc.predict(pd.DataFrame({"features": column}, index=index))
        assert scored["prediction"].to_dict() == dict(zip(index, expected, strict=True))
    assert pyfunc.predict({"features": list(rows)})["prediction"].tolist() == expected
    none = pyfunc.predict(pd.DataFrame({"features": list(rows)}, index=index).iloc[:0])
    assert (list(none), len(none)) == (["rawPrediction", "probability", "prediction"], 0)
    assert len(pyfunc.predict(pd.DataFrame({"features": []}))) == 0


def test_numbers_of_any_size_score_by_columns_of_any_index(tmp_path: Path) -> None:
    inputs = [TensorSpec(name="x0", column="a ... b", dtype="float32", shape=(2,), sources=("a", "b"))]
    trained = trained_module(nn.Linear, params={"in_features": 2, "out_features": 3}, inputs=inputs, task="regression")
    model = TorchRegressionModel()._with(trained, None)._set(inputCols=["a", "b"])
    pyfunc = served(model, tmp_path)
    rows = pd.DataFrame({"a": np.array([1, 2], np.int64), "b": np.array([0.5, 1.5], np.float64)}, index=[4, 9])
    expected = trained.build()(torch.from_numpy(rows.to_numpy()).float()).double().tolist()
    scored = pyfunc.predict(rows)
    assert scored.index.tolist() == [4, 9]
    assert [row.tolist() for row in scored["prediction"]] == [pytest.approx(row, abs=1e-6) for row in expected]
    assert len(pyfunc.predict(rows.iloc[:0])) == 0


def embedding() -> tuple[nn.Embedding, TrainedModule]:
    trained = trained_module(
        nn.Embedding,
        torch.zeros(2, dtype=torch.int64),
        params={"num_embeddings": 10, "embedding_dim": 3},
        inputs=[TensorSpec(name="x0", column="id", dtype="int64")],
        task="classification",
    )
    return cast(nn.Embedding, trained.build()), trained


def as_ids(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    assert columns["id"].dtype == np.int32
    return {"x0": torch.from_numpy(columns["id"].astype(np.int64))}


def test_a_whole_number_may_be_null_to_the_pyfunc(tmp_path: Path) -> None:
    module, trained = embedding()
    model = TorchClassificationModel()._with(trained, None)._set(featuresCol="id", handleInvalid="keep")
    pyfunc = served(model, tmp_path)
    expected = float(module.weight[7].argmax())
    for column in ([7, None], pd.array([7, None], dtype="Int64"), [7.0, math.nan]):
        found = pyfunc.predict(pd.DataFrame({"id": column}))["prediction"]
        assert found[0] == expected
        assert pd.isna(found[1])


def test_what_an_integer_dtype_cannot_hold_is_null_to_the_pyfunc_and_to_a_single_row_too() -> None:
    module, trained = embedding()
    model = TorchClassificationModel()._with(trained, None)._set(featuresCol="id")
    expected = module.weight.argmax(1).double().tolist()
    pyfunc = pyfunc_of(trained)
    assert [model.predict(7.9), model.predict(7), *pyfunc.predict(pd.DataFrame({"id": [7.9, 2.0]}))["p"]] == [
        *(expected[7], expected[7]),
        *(expected[7], expected[2]),
    ]
    for bad in (math.nan, 1e30):
        with pytest.raises(ColumnError, match="null"):
            model.predict(bad)
        assert model.copy({model.handleInvalid: "keep"}).predict(bad) is None
        with pytest.raises(ColumnError, match="null"):
            pyfunc.predict(pd.DataFrame({"id": [1.0, bad]}))
    of_lists = replace(trained, source=nn.EmbeddingBag, inputs=(replace(trained.inputs[0], shape=(1,), lists=(1,)),))
    model = TorchClassificationModel()._with(of_lists, None)._set(featuresCol="id", handleInvalid="keep")
    assert [model.predict(Vectors.dense([each])) for each in (7.9, 1e30)] == [expected[7], None]
    with pytest.raises(ColumnError, match="the value for column 'id' does not fit"):
        model.predict({"id": {"a": 1}})
    raw = replace(trained, inputs=(replace(trained.inputs[0], dtype="uint8", kind="binary", layout="raw"),))
    with pytest.raises(ColumnError, match="is a vector"):
        TorchClassificationModel()._with(raw, None)._set(featuresCol="id").predict(Vectors.dense([300.0]))
    narrow = replace(trained, inputs=(replace(trained.inputs[0], dtype="int32"),))
    large = pd.DataFrame({"id": np.array([3_000_000_000, 7], np.uint32)})
    found = pyfunc_of(narrow, invalid="keep").predict(large)["p"]
    assert [found.isna().tolist(), found[1]] == [[True, False], expected[7]]
    lists = replace(trained, inputs=(replace(trained.inputs[0], layout="padded"),))
    assert pyfunc_of(lists)._columns({"id": [[], [2**53 + 1]]})[0].to_pylist() == [[], [2**53 + 1]]


def test_a_callable_gets_the_numbers_of_a_pyfunc_and_of_a_single_row_as_in_transform() -> None:
    _, trained = embedding()
    spec = TensorSpec(name="x0", column="id", dtype="", kind="any", sql="int")
    trained = replace(trained, inputs=(spec,), preprocess=as_ids, returned=("x0",))
    model = TorchClassificationModel()._with(trained, None)._set(featuresCol="id", handleInvalid="keep")
    pyfunc = pyfunc_of(trained, invalid="keep")
    for values in ([7, 3_000_000_000], [7.9, math.nan], [Decimal(7), None]):
        found = pyfunc.predict(pd.DataFrame({"id": pd.Series(values)}))["p"]
        assert [found[0], pd.isna(found[1])] == [model.predict(7), True]
        assert [model.predict(value) for value in values] == [found[0], None]


def test_a_category_is_a_boolean_in_any_form_that_pandas_has_for_it_and_text_is_no_number() -> None:
    spec = TensorSpec(name="x0", column="late", dtype="float32", kind="any", sql="boolean")
    unconverted = partial(kind_of(spec).of_values, name="late", nulls=True)
    for values in ([True, None], [1.0, math.nan], pd.array([1, None], "Int8"), np.array([True, None], object)):
        assert unconverted(pd.Series(values), spec).to_pylist() == [True, None]
    assert unconverted(np.array([1, 0]), spec).to_pylist() == [True, False]
    for values, sql in (([2.0, 0.0], "boolean"), (["5", None], "int")):
        with pytest.raises(ColumnError, match=f"column 'late' is {sql} in the model: ") as caught:
            unconverted(pd.Series(values), replace(spec, sql=sql))
        assert caught.value.where == {"column": "late"}


def test_the_pyfunc_scores_where_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "model")
    flavor.save_model(model_of(Mlp, device="cuda"), path, pytorch=False)  # trained on a GPU, served without one
    assert mlflow.pyfunc.load_model(path) is not None
    with pytest.raises(RuntimeError, match="no-such-device"):
        mlflow.pyfunc.load_model(path, model_config={"device": "no-such-device"})
    monkeypatch.setenv("MLFLOW_DEFAULT_PREDICTION_DEVICE", "no-other-device")
    with pytest.raises(RuntimeError, match="no-other-device"):
        mlflow.pyfunc.load_model(path)


@pytest.mark.parametrize("sql", ["timestamp", "array<timestamp>"])
def test_times_are_of_any_type_in_the_inputs_of_a_pipeline_and_of_their_own_in_its_outputs(sql: str) -> None:
    assert isinstance(_input_type(sql), AnyType)
    assert _type_of(sql) == type_of(sql)
    assert _input_type("double") == type_of("double")

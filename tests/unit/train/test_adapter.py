"""An adapter recognises what users may pass as module, and all else gets one that adds nothing."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertForSequenceClassification

from sparktorch.adapters.huggingface.adapter import HuggingFaceAdapter
from sparktorch.adapters.huggingface.recipe import HuggingFaceRecipe
from sparktorch.adapters.peft import PeftAdapter
from sparktorch.base.batch import Batch
from sparktorch.base.imports import import_path, load_object
from sparktorch.train.recipe.adapter import _ADAPTERS, Adapter, adapted_parts, adapter_of, arguments
from sparktorch.train.recipe.recipe import Recipe
from tests.support.adapters import adapted
from tests.support.lightning_modules import LitMinimal
from tests.support.programs import ROOT
from tests.support.tiny_transformers import bert

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
BERT = "transformers:BertForSequenceClassification"


def model() -> Any:
    return BertForSequenceClassification(bert())


@pytest.mark.parametrize("make", [model, bert, lambda: type(model()), lambda: BERT, lambda: Path("/folder")])
def test_models_classes_configurations_import_paths_and_folders_are_recognised(make: Any) -> None:
    adapter = adapter_of(make())
    assert type(adapter) is HuggingFaceAdapter
    assert adapter.recipe is HuggingFaceRecipe
    assert adapter.loss_step(make()) is not None


@pytest.mark.parametrize(
    "source", [nn.Linear(1, 1), nn.Linear, "torch.nn:Linear", "transformers:NoSuchModel", "nowhere:Net", None, len]
)
def test_any_other_module_gets_the_adapter_that_adds_nothing(source: Any) -> None:
    adapter = adapter_of(source)
    assert type(adapter) is Adapter
    assert adapter.recipe is Recipe
    assert adapter.loss_step(source) is None
    assert adapter.recipe_fields(source, {"a": 1}, seed=0) == {"module": source, "module_params": {"a": 1}}
    assert adapter.to_json(source) is adapter.from_json(source, {}) is None


def test_adapters_count_as_adapters_before_they_count_as_the_model_that_they_adapt() -> None:
    module = adapted()
    assert type(adapter_of(module)) is Adapter
    inner = adapter_of(module.model)
    assert type(inner) is PeftAdapter
    assert inner.loss_step(module.model) is not None
    assert "model" in adapted_parts(module)
    assert not adapted_parts(model())


def test_adapters_on_a_module_without_a_loss_bring_none() -> None:
    assert PeftAdapter().loss_step(SimpleNamespace(peft_config={})) is None


def test_a_model_is_called_by_names_and_any_other_module_by_the_order_of_its_inputs() -> None:
    ids, mask = torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2)
    batch = Batch((ids, mask), None, None, 1, names=("input_ids", "attention_mask"))
    assert arguments(batch, nn.Linear(1, 1)) == ((ids, mask), {})
    assert arguments(batch, model()) == ((), {"input_ids": ids, "attention_mask": mask})
    assert arguments(batch, adapted().model) == ((), {"input_ids": ids, "attention_mask": mask})


def test_every_adapter_is_in_the_registry_and_in_the_architecture() -> None:
    files = (ROOT / "sparktorch" / "adapters").rglob("*.py")
    classes = {
        f"{file.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}:{name}"
        for file in files
        for name in re.findall(r"^class (\w+Adapter)\(", file.read_text(), re.M)
    }
    assert classes == set(_ADAPTERS)
    page = (ROOT / "docs" / "architecture.md").read_text()
    for path in _ADAPTERS:
        assert f"`adapters/{path.split('.')[2].partition(':')[0]}`" in page


def test_what_earlier_versions_named_or_pickled_is_found_where_it_has_moved_to() -> None:
    old, name = "sparktorch.model.series.neuralforecast", "NeuralForecastNetwork"
    network = load_object(f"{old}:{name}")
    assert import_path(network) == f"sparktorch.adapters.neuralforecast:{name}"
    assert pickle.loads(f"c{old}\n{name}\n.".encode()) is network


def test_a_lightning_module_trains_itself_although_it_has_an_attribute_of_adapters_too() -> None:
    module: Any = LitMinimal()
    module.peft_config = {"r": 8}
    assert adapter_of(module).brings_training

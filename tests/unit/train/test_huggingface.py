"""Weights in folders of transformers' are read part by part as `from_pretrained` reads them, under whatever names."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparktorch import TextClassifier
from sparktorch.adapters.huggingface.folder import has_new_weights, opened, rebuildable
from sparktorch.adapters.huggingface.recipe import HuggingFaceRecipe
from sparktorch.errors import ModuleError, SparkTorchError
from sparktorch.tasks.texts.estimator import NEW_TEXTS, TEXTS
from sparktorch.train.recipe.dry_run import dry_run

transformers = pytest.importorskip("transformers")

# This imports transformers, which the older stack does not have.
from tests.support.tiny_transformers import bert, dinov2, gpt2, llama, llava, mixtral, tokenizer_folder, vit  # noqa: E402

CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}
HEAD = {"classifier.weight", "classifier.bias"}


def saved(folder: Path, config: Any) -> str:
    torch.manual_seed(0)
    getattr(transformers, config.architectures[0])(config).save_pretrained(folder)
    return str(folder)


def recipe(folder: str, in_place: bool, **params: Any) -> HuggingFaceRecipe:
    fields = opened(folder, params, seed=5, in_place=in_place)
    assert fields is not None
    return HuggingFaceRecipe(**fields)


def check_same(folder: str, new: set[str] = frozenset(), **params: Any) -> dict[str, torch.Tensor]:  # type: ignore[assignment]
    found, expected = (recipe(folder, in_place, **params).build_module(5).state_dict() for in_place in (True, False))
    assert found.keys() == expected.keys()
    assert {name for name, value in expected.items() if not torch.equal(found[name], value)} == new
    return found


@pytest.mark.parametrize(
    ("config", "params"),
    [
        (vit(), {}),  # renamed
        (mixtral(), {}),  # experts are one parameter each, and many tensors in the folder
        (dinov2(), {}),  # one tensor in the folder is two parameters
        (bert("BertForMaskedLM"), {"architectures": ["BertModel"]}),  # a prefix less, and a head that nobody asks for
        (gpt2("GPT2Model"), {"architectures": ["GPT2LMHeadModel"]}),  # a prefix more, and a tied head
        (llama(tie_word_embeddings=True), {}),
    ],
)
def test_a_model_has_the_weights_that_transformers_reads(config: Any, params: Any, tmp_path: Path) -> None:
    new = {"pooler.dense.weight"} if params.get("architectures") == ["BertModel"] else set()
    check_same(saved(tmp_path, config), new, **params)


@pytest.mark.parametrize("config", [vit(), mixtral()])
def test_the_names_that_the_model_has_are_read_as_well(config: Any, tmp_path: Path) -> None:
    found = check_same(saved(tmp_path, config))
    file = tmp_path / "model.safetensors"
    assert load_file(file).keys() != found.keys()
    save_file(found, file, metadata={"format": "pt"})
    again = check_same(str(tmp_path))
    assert all(torch.equal(again[name], value) for name, value in found.items())


@pytest.mark.parametrize("config", [llama("LlamaForSequenceClassification"), llava(dtype="bfloat16")])
def test_a_folder_and_its_configuration_make_a_model_in_float32_whatever_dtype_they_have(
    config: Any, tmp_path: Path
) -> None:
    model = getattr(transformers, config.architectures[0])(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert torch.bfloat16 in (read.dtype, read.get_text_config().dtype)
    recipes = [recipe(str(tmp_path), True), HuggingFaceRecipe(**opened(read, {}, seed=5) or {})]
    recipes.append(HuggingFaceRecipe(**rebuildable(model.float()) or {}))
    assert [kinds(each.build_module(5)) for each in recipes] == [{torch.float32}] * 3


def test_models_compute_attention_and_experts_as_a_configuration_or_moduleparams_say(tmp_path: Path) -> None:
    folder, eager = saved(tmp_path, bert()), {"attn_implementation": "eager"}
    with pytest.raises(ModuleError, match="one choice holds for the whole model"):
        opened(folder, {"attn_implementation": {"": "eager"}}, seed=0)
    asked = transformers.BertConfig(**{**bert().to_dict(), **eager})
    made = [opened(asked, {}, seed=0), opened(bert(), eager, seed=0)]
    recipes = [HuggingFaceRecipe(**fields or {}) for fields in made]
    recipes += [recipe(folder, in_place, **eager) for in_place in (True, False)]
    assert [made.build_module(0).config._attn_implementation for made in recipes] == ["eager"] * 4  # type: ignore[union-attr]
    assert recipe(folder, False).module_params["config"].keys().isdisjoint(eager)
    batched = HuggingFaceRecipe(**opened(mixtral(), {"experts_implementation": "batched_mm"}, seed=0) or {})
    assert batched.build_module(0).config._experts_implementation == "batched_mm"  # type: ignore[union-attr]


def renamed(folder: Path, kind: str) -> None:
    form = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**form, "model_type": kind}))


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])


BROKEN: list[tuple[Callable[[Path], Any], dict[str, Any], str, str]] = [
    (lambda folder: renamed(folder, "foo"), {}, "config.json in .* cannot be read: .*foo", "module"),
    (lambda folder: None, {"num_labels": "three"}, "num_labels of BertConfig cannot be 'three'", "moduleParams"),
    (cut_off, {}, r"(?s)cannot be read: .*header", "module"),
]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("change", "params", "said", "param"), BROKEN)
def test_what_is_wrong_with_a_folder_is_said_of_the_param_that_names_it(
    change: Callable[[Path], Any], params: dict[str, Any], said: str, param: str, in_place: bool, tmp_path: Path
) -> None:
    folder = saved(tmp_path, bert())
    change(tmp_path)
    with pytest.raises(SparkTorchError, match=said) as caught:
        recipe(folder, in_place, **params).build_deferred(0)
    assert caught.value.where["param"] == param
    assert "fitted again" not in caught.value.hint


def kinds(module: torch.nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in module.parameters()}


def test_old_names_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    file = Path(saved(tmp_path, bert()), "model.safetensors")
    tensors = load_file(file)
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in tensors.items()}
    assert old.keys() != tensors.keys()
    save_file({name: value.bfloat16() for name, value in old.items()}, file, metadata={"format": "pt"})
    found = check_same(str(tmp_path))
    assert {value.dtype for value in found.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "params"), [(bert("BertModel"), CLASSIFIER), (bert(num_labels=3), {"num_labels": 4})]
)
def test_a_new_head_is_that_of_a_new_model(
    config: Any, params: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path, config)
    found = check_same(folder, {"classifier.weight"}, **params)
    read = recipe(folder, True, **params)
    built = HuggingFaceRecipe(module=read.module, module_params=read.module_params).build_deferred(5)
    built.materialise(built.module)
    fresh = built.module.state_dict()
    assert all(torch.equal(found[name], fresh[name]) for name in HEAD)
    assert not torch.equal(
        found["bert.embeddings.word_embeddings.weight"], fresh["bert.embeddings.word_embeddings.weight"]
    )
    with caplog.at_level(logging.WARNING):
        tried = replace(read, loss="CrossEntropyLoss")
        ids, label = torch.ones(2, 4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        dry_run(tried, "classification", 5, {"input_ids": ids}, label, names=("input_ids",), values=False)
    assert "no values for them: classifier.weight, classifier.bias" in caplog.text


@pytest.mark.parametrize("in_place", [True, False])
def test_tied_weights_of_which_the_folder_has_two_values_are_refused(in_place: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path, llama(tie_word_embeddings=True))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    built: Any = recipe(folder, in_place).build_module(0)
    assert built.lm_head.weight is built.model.embed_tokens.weight
    save_file({**tensors, "lm_head.weight": embedding + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ModuleError, match=r"embed_tokens.weight' and 'lm_head.weight' in .*\n.*tie_word_embeddings"):
        recipe(folder, in_place).build_module(0)
    parted: Any = recipe(folder, in_place, tie_word_embeddings=False).build_module(0)
    assert torch.equal(parted.lm_head.weight, embedding + 1)
    assert torch.equal(parted.model.embed_tokens.weight, embedding)


def test_weights_that_are_not_those_of_the_model_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, bert())
    for change, said in (
        ({"hidden_size": 16}, r"has the shape \(32,\), and that of BertForSequenceClassification has \(16,\)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "are quantized"),
    ):
        config = json.loads(Path(folder, "config.json").read_text())
        changed = tmp_path / str(len(list(tmp_path.iterdir())))
        changed.mkdir()
        (changed / "config.json").write_text(json.dumps({**config, **change}))
        (changed / "model.safetensors").symlink_to(Path(folder, "model.safetensors"))
        with pytest.raises(ModuleError, match=said):
            recipe(str(changed), True).build_module(0)
    with pytest.raises(ModuleError, match=r"has the shape \(32,\), and that of .* has \(48,\)"):
        recipe(folder, True, num_labels=4, intermediate_size=48).build_module(0)
    other = Path(saved(tmp_path / "gpt2", gpt2()))
    (other / "config.json").write_text(Path(folder, "config.json").read_text())
    with pytest.raises(ModuleError, match="are not those of BertForSequenceClassification"):
        recipe(str(other), True).build_module(0)


def test_new_weights_train_at_another_rate_than_trained_ones(tmp_path: Path) -> None:
    model: Any = transformers.BertForSequenceClassification(bert())
    folder = str(tokenizer_folder(tmp_path / "folder", ["the", "day"], bert()))
    model.save_pretrained(folder)
    assert has_new_weights(folder)
    new = TextClassifier(modelFolder=folder).completed()
    for parameter in model.parameters():
        parameter.data.add_(0.001)
    model.save_pretrained(folder)
    assert not has_new_weights(folder)
    trained = TextClassifier(modelFolder=folder).completed()
    assert (new.getLearningRate(), trained.getLearningRate()) == (NEW_TEXTS.learning_rate, TEXTS.learning_rate)
    assert trained.getSchedulerInterval() == "step"
    assert trained.getWarmupSteps() > 0

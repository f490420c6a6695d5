"""Models of transformers are trained by name, on their own losses, and on micro-batches without needless padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification, GPT2LMHeadModel

from sparktorch.adapters.huggingface.folder import opened
from sparktorch.adapters.huggingface.loss import ModelLossStep
from sparktorch.adapters.huggingface.recipe import HuggingFaceRecipe
from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import KEY, LABEL, Columns, TensorSpec
from sparktorch.data.preprocess import Preprocess
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.ranks import preload, train_job, train_on
from tests.support.reference import epoch_batches
from tests.support.tiny_transformers import LENGTH, WORDS, bert, causal, gpt2, lora, masked, prompts

preload("tests.support.tiny_transformers")
ROWS, SEED = 90, 5
IDS = TensorSpec(name="x0", column="ids", dtype="int64", shape=(LENGTH,))


def sentences(preprocess: Any, *, labelled: bool) -> Table:
    random = np.random.default_rng(SEED)
    ids = random.integers(3, WORDS, (ROWS, LENGTH))
    ids *= np.arange(LENGTH) < random.integers(2, LENGTH + 1, (ROWS, 1))
    arrays = {"x0": ids, KEY: random.integers(-(2**63), 2**63 - 1, ROWS, dtype=np.int64)}
    if labelled:
        arrays[LABEL] = (ids[:, 0] > WORDS // 2).astype(np.int64)
    label = TensorSpec(name=LABEL, column="label", dtype="int64") if labelled else None
    names = tuple(preprocess({"ids": torch.ones(1, 2, dtype=torch.int64)}, epoch=0, generator=None))
    return Table(arrays, Columns(inputs=(IDS,), label=label, preprocess=Preprocess(preprocess, ["ids"], names)))


def job_for(table: Table, model: Any, **config: Any) -> TrainJob:
    values: dict[str, Any] = {"batch_size": 20, "epochs": 2, "seed": SEED, **config}
    found = opened(model, {}, seed=SEED)
    assert found is not None
    recipe = HuggingFaceRecipe(**found, loss=None, training_step=ModelLossStep(), optimizer="SGD", learning_rate=0.1)
    task = TrainConfig(task="generic", **values)
    return train_job(table, recipe, task)


def by_hand(table: Table, config: TrainConfig, module: Any, loss_of: Any) -> dict[str, torch.Tensor]:
    module = module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for epoch in range(config.epochs):
        for rows in epoch_batches(table, config, epoch):
            optimizer.zero_grad()
            loss_of(module, rows).backward()
            optimizer.step()
    return dict(module.state_dict())


def model_of(kind: Any, config: Any) -> Any:
    torch.manual_seed(SEED)
    return kind(config)


def own_loss(module: Any, rows: Table) -> torch.Tensor:
    ids = torch.from_numpy(rows.arrays["x0"])
    labels = torch.from_numpy(rows.arrays[LABEL])
    loss: torch.Tensor = module(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
    return loss


def mean_of_rows(module: Any, rows: Table) -> torch.Tensor:
    losses = []
    for row in torch.from_numpy(rows.arrays["x0"]):
        ids = row[row != 0][None]
        losses.append(module(input_ids=ids, labels=ids).loss)
    return torch.stack(losses).mean()


def test_a_causal_model_is_trained_on_the_mean_of_its_rows_own_losses() -> None:
    table = sentences(causal, labelled=False)
    job = job_for(table, gpt2(), micro_batch_size=7)
    state, _ = train_on([part.batches() for part in table.parts(2)], job)
    expected = by_hand(table, job.config, model_of(GPT2LMHeadModel, gpt2()), mean_of_rows)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # peft sets it
def test_adapters_are_called_by_the_names_of_their_base_and_alone_come_back() -> None:
    table = sentences(causal, labelled=False)
    recipe = Recipe(module=lora, loss=None, training_step=ModelLossStep(), optimizer="SGD", learning_rate=0.1)
    job = replace(job_for(table, gpt2(), micro_batch_size=7), recipe=recipe)
    state, metas = train_on([part.batches() for part in table.parts(2)], job)
    torch.manual_seed(SEED)
    expected = by_hand(table, job.config, lora(), mean_of_rows)
    adapters = {name: value for name, value in expected.items() if "lora_" in name}
    assert len(adapters) == 4
    assert state.keys() - adapters.keys() == {"sparktorch.base"}
    torch.testing.assert_close({name: state[name] for name in adapters}, adapters, atol=1e-5, rtol=0)
    assert metas[0]["history"][0]["padding_share"] < float((table.arrays["x0"] == 0).mean())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_virtual_tokens_have_no_labels() -> None:
    table = sentences(causal, labelled=False)
    recipe = Recipe(module=prompts, loss=None, training_step=ModelLossStep(), optimizer="SGD", learning_rate=0.1)
    job = replace(job_for(table, gpt2()), recipe=recipe)
    state, _ = train_on([part.batches() for part in table.parts(2)], job)
    torch.manual_seed(SEED)
    expected = by_hand(table, job.config, prompts(), mean_of_rows)
    (name,) = state.keys() - {"sparktorch.base"}
    torch.testing.assert_close(state[name], expected[name], atol=1e-5, rtol=0)


def test_a_classifier_is_called_by_name_and_trained_on_its_own_loss_of_micro_batches_without_needless_padding() -> None:
    table = sentences(masked, labelled=True)
    job = job_for(table, bert(), micro_batch_size=2)
    state, metas = train_on([part.batches() for part in table.parts(2)], job)
    untrimmed = by_hand(table, job.config, model_of(BertForSequenceClassification, bert()), own_loss)
    torch.testing.assert_close(state, untrimmed, atol=1e-6, rtol=0)
    padded = float((table.arrays["x0"] == 0).mean())
    assert all(record["padding_share"] < 0.7 * padded for record in metas[0]["history"])

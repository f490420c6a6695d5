"""A Hugging Face model is fine-tuned in part: frozen but for its head and its biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from sparktorch.base.config import TrainConfig
from sparktorch.data.columns import KEY, LABEL, Columns, TensorSpec, input_name
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.worker import TrainJob
from tests.support.frames import Table
from tests.support.plain import global_batches
from tests.support.ranks import train_on

WORDS, LENGTH, ROWS, SEED, RATE = 20, 6, 240, 5, 0.03
# The gradient of a key's bias is rounding error alone, which Adam would make steps of.
FREEZE = ["*", "!*.classifier.*", "!*.bias", "*.key.bias"]


class TinyBert(nn.Module):
    """A classifier of token ids, small enough for a test; without dropout, which would differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
            num_labels=2,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def sentences() -> Table:
    """Makes sentences of token ids whose class is whether the first word is among the common ones."""
    random = np.random.default_rng(SEED)
    ids = random.integers(1, WORDS, (ROWS, LENGTH))
    mask = (np.arange(LENGTH) < random.integers(2, LENGTH + 1, (ROWS, 1))).astype(np.int64)
    inputs = [
        TensorSpec(name=input_name(i), column=column, dtype="int64", shape=(LENGTH,))
        for i, column in enumerate(("input_ids", "attention_mask"))
    ]
    arrays = {
        "x0": ids * mask,
        "x1": mask,
        LABEL: (ids[:, 0] > WORDS // 2).astype(np.float64),
        KEY: random.integers(-(2**63), 2**63 - 1, ROWS, dtype=np.int64),
    }
    label = TensorSpec(name=LABEL, column="label", dtype="float64")
    return Table(arrays, Columns(inputs=tuple(inputs), label=label, classes=2))


def job_for(table: Table, **config: Any) -> TrainJob:
    recipe = Recipe(
        module=TinyBert,
        loss="CrossEntropyLoss",
        learning_rate=RATE,
        freeze=FREEZE,
        parameter_groups=[{"params": "*.bias", "weight_decay": 0.0}],
    )
    values: dict[str, Any] = {"batch_size": 32, "epochs": 5, "seed": SEED, **config}
    return TrainJob(
        columns=table.columns,
        recipe=recipe,
        config=TrainConfig(task="classification", **values),
        max_imbalance=None,
    )


def by_hand(table: Table, config: TrainConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    module = TinyBert()
    biases = [p for name, p in module.named_parameters() if name.endswith(".bias") and "key" not in name]
    head = [module.bert.classifier.weight]
    for parameter in module.parameters():
        parameter.requires_grad_(any(parameter is one for one in (*biases, *head)))
    optimizer = torch.optim.AdamW([{"params": head}, {"params": biases, "weight_decay": 0.0}], lr=RATE)
    for epoch in range(config.epochs):
        for rows in global_batches(table, config, epoch):
            ids, mask, y = (torch.from_numpy(rows.arrays[name]) for name in ("x0", "x1", LABEL))
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(ids, mask), y.long()).backward()
            optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trained_part_learns_and_the_frozen_part_comes_back_to_the_last_bit(ranks: int) -> None:
    table = sentences()
    job = job_for(table)
    initial = job.recipe.build_module(SEED).state_dict()
    state, metas = train_on([part.batches() for part in table.parts(ranks)], job)
    trained = [name for name in initial if name.endswith(".bias") or "classifier" in name]
    frozen = [name for name in initial if name not in trained or ".key." in name]
    assert len(frozen) > 20
    assert all(torch.equal(state[name], initial[name]) for name in frozen)
    assert not torch.equal(state["bert.classifier.weight"], initial["bert.classifier.weight"])
    losses = [record["loss"] for record in metas[0]["history"]]
    assert losses[-1] < 0.9 * losses[0]
    torch.testing.assert_close(state, by_hand(table, job.config), atol=1e-5, rtol=0)

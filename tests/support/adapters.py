"""A tiny BERT in a folder, with LoRA's adapters on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from tests.support.tiny_transformers import bert

WORDS, LENGTH = 2000, 6


class Adapted(nn.Module):
    """Calls a model by names, and returns its scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def _config() -> BertConfig:
    sizes = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "intermediate_size": 64}
    return bert(**sizes, initializer_range=0.3, num_labels=2)


def save_base(folder: Path, seed: int = 1) -> Path:
    """Saves a base with random weights in a folder."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        BertForSequenceClassification(_config()).save_pretrained(folder)
    return folder


def adapted(folder: str = "") -> Adapted:
    """Loads the base, or makes a random one, and puts adapters of rank 4 on it; its classifier is trained, too."""
    base: Any = BertForSequenceClassification
    model = base.from_pretrained(folder) if folder else base(_config())
    return Adapted(get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])))

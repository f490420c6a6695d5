"""Writes a trained model of transformers as a folder that transformers opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparktorch.data.pretrained import FromFolder
from sparktorch.errors import PersistenceError
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.huggingface import model_in

__all__ = ["save_pretrained"]


def save_pretrained(trained: TrainedModule, folder: str) -> None:
    """Writes configuration, weights and names of classes, and the tokenizer or image processor if it is known.

    Of adapters, it writes what `peft` does: their weights and configuration, without the base.
    """
    module: Any = trained.build()
    if (model := model_in(module)) is None:
        raise PersistenceError(
            f"{type(module).__qualname__} is no model of transformers, and has no save_pretrained",
            hint="model.save(path) saves any module",
        )
    if Path(folder).is_file():
        raise PersistenceError(f"{folder} is a file", hint="name a folder, which is made if it is missing")
    config = model.config
    if trained.labels:
        config.id2label = dict(enumerate(trained.labels))
        config.label2id = {label: number for number, label in enumerate(trained.labels)}
    module.save_pretrained(folder)
    if isinstance(trained.preprocess, FromFolder):
        trained.preprocess.load().save_pretrained(folder)

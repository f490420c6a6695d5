"""A classifier of text that goes on from a local folder of Hugging Face's, and its model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparktorch.adapters.huggingface.folder import config_in
from sparktorch.adapters.huggingface.models import names_of_arguments
from sparktorch.adapters.huggingface.preprocess import FromFolder, Tokens
from sparktorch.base.config import at_least
from sparktorch.base.imports import transformers
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.tasks.shared.pretrained import FolderClassifier, FolderModel
from sparktorch.tasks.shared.settings import TaskSettings
from sparktorch.tasks.texts.params import TextClassificationModelParams, TextClassifierParams

__all__ = ["NEW_TEXTS", "TEXTS", "TextClassificationModel", "TextClassifier"]

# Trained weights need a small rate, which rises first, because the new head begins with large gradients. A tenth of 500
# rows or fewer says too little about which epoch is the best: with 20 held-out rows, the loss was least long before the
# error was.
TEXTS = TaskSettings(
    learning_rate=1e-4,
    usual_rate=5e-5,
    scheduler="CosineAnnealingLR",
    warmup=0.1,
    smallest_batch=16,
    largest_batch=32,
    steps_per_epoch=128,
    most_patience=6,
    least_steps=100,
    rows_in_all=6_000,
    least_epochs=3,
    most_epochs=10,
    unwatched_epochs=3,
    least_trained=450,
)
# These are for models whose weights are random.
NEW_TEXTS = replace(
    TEXTS,
    learning_rate=1e-3,
    usual_rate=1e-3,
    rows_in_all=50_000,
    least_epochs=5,
    most_epochs=20,
    unwatched_epochs=5,
)


class TextClassificationModel(FolderModel, TextClassificationModelParams):
    """A classifier fitted by `TextClassifier`. It reads `textCol` and adds what `TorchClassificationModel` adds."""

    _estimator = "sparktorch.tasks.texts.estimator:TextClassifier"


class TextClassifier(FolderClassifier, TextClassifierParams):
    """Trains a classifier of text from a local folder with a model and a tokenizer of Hugging Face's.

    The folder is at the same path on the driver and in each rank. A model without a head for classes, or with a head
    for fewer classes than the labels have, gets a new head.

    Raises:
        ConfigError, ColumnError, ModuleError, ClusterError: From `fit`, before training starts.
        RankError: From `fit`, when a rank fails.
    """

    _model_class = TextClassificationModel
    _trained_settings, _new_settings = TEXTS, NEW_TEXTS
    _searched_rates = (0.4, 2.0)
    _auto = "AutoModelForSequenceClassification"

    def _preprocess_of(self, folder: str, params: dict[str, Any]) -> FromFolder:
        """Returns the tokenizer's preprocess; refuses a tokenizer that does not fit the model, and too long texts."""
        length = self.getMaxLength()
        at_least("maxLength", length, 1)
        config = config_in(folder)
        model = getattr(transformers(), params["architectures"][0])
        tokens = Tokens(folder, max_length=length, arguments=names_of_arguments(model))
        tokenizer = tokens.load()
        if tokenizer.pad_token_id is None:
            what = f"the tokenizer in {folder} has no padding token, which rows of several lengths need"
            hint = "set tokenizer.pad_token, such as tokenizer.eos_token, and save it in the folder"
            raise ModuleError(what, hint=hint, param="modelFolder")
        size = getattr(config, "vocab_size", None)
        if size is not None and len(tokenizer) > size:
            what = f"the tokenizer in {folder} knows {len(tokenizer)} tokens, and the model {size}"
            hint = "are they of one model? model.resize_token_embeddings(len(tokenizer)) makes room, then save both"
            raise ModuleError(what, hint=hint, param="modelFolder")
        if getattr(config, "pad_token_id", 0) is None:  # Configurations without this attribute need no padding token.
            params["pad_token_id"] = tokenizer.pad_token_id
        positions = getattr(config, "max_position_embeddings", None)
        most = min(positions, tokenizer.model_max_length) if positions else length
        if not self.isSet("maxLength"):
            return replace(tokens, max_length=min(length, most))
        if length > most:
            what = f"maxLength is {length}, and the model and its tokenizer take {most} tokens at most"
            raise ConfigError(what, hint=f"set maxLength to {most} or less", param="maxLength")
        return tokens

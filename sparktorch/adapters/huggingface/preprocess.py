"""`preprocess` by what a folder of Hugging Face's has beside its model: a tokenizer, or an image processor."""

from __future__ import annotations

import functools
import io
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import torch

from sparktorch.adapters.huggingface.folder import stamp
from sparktorch.base.imports import pillow, transformers
from sparktorch.data.preprocess import LoadedPreprocess
from sparktorch.errors import ModuleError, refusing

__all__ = ["FromFolder", "Pixels", "Tokens"]


@dataclass(frozen=True)
class FromFolder(LoadedPreprocess):
    """A `preprocess` of one column, that is sent as a path and read in the process that needs it."""

    folder: str  # The path is the same on each machine.
    auto: ClassVar[str]  # This class of transformers reads the folder.
    libraries: ClassVar[tuple[str, ...]] = ("transformers",)

    def load(self) -> Any:
        """Returns the tokenizer or image processor in the folder, which must be on this machine."""
        if not Path(self.folder).is_dir():
            what = f"there is no folder {self.folder} on {socket.gethostname()}"
            hint = "copy it to this path on each machine, or name one that all of them mount"
            raise ModuleError(what, hint=hint, param="modelFolder")
        return _loaded(self.auto, self.folder, stamp(self.folder))


@functools.lru_cache(maxsize=4)
def _loaded(auto: str, folder: str, _: tuple[tuple[str, int], ...]) -> Any:
    hint = "save_pretrained(folder) of the tokenizer or image processor writes its files beside the model's"
    with refusing(f"{auto} finds nothing to read in {folder} on {socket.gethostname()}", hint, param="modelFolder"):
        return getattr(transformers(), auto).from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@dataclass(frozen=True)
class Tokens(FromFolder):
    """Tokenizes a column of text, padded to its longest row."""

    max_length: int  # A row is cut off after so many tokens.
    arguments: tuple[str, ...] = ()  # The model takes these; if empty, it gets all that the tokenizer returns.
    auto: ClassVar[str] = "AutoTokenizer"

    def load(self) -> Any:
        """Returns the tokenizer; a folder without its files is refused, of which transformers makes an empty one."""
        tokenizer = super().load()
        words = tokenizer.vocab_files_names
        files = {"tokenizer.json", *words.values()} if words else {"tokenizer_config.json"}
        if not any((Path(self.folder) / file).is_file() for file in files):
            what = f"{self.folder} holds no tokenizer: there is none of {', '.join(sorted(files))}"
            hint = "tokenizer.save_pretrained(folder) writes its files beside the model's"
            raise ModuleError(what, hint=hint, param="modelFolder")
        return tokenizer

    def __call__(self, columns: Mapping[str, Any], *, epoch: int | None, generator: Any) -> dict[str, torch.Tensor]:
        """Returns what the tokenizer returns, such as `input_ids` and `attention_mask`."""
        texts = _values(columns, (pa.string(), pa.large_string()), "text", "name a string column", "textCol")
        options = {"padding": True, "truncation": True, "max_length": self.max_length, "return_tensors": "pt"}
        tokens = self.load()(texts, **options)
        return {name: value for name, value in tokens.items() if name in self.arguments or not self.arguments}


@dataclass(frozen=True)
class Pixels(FromFolder):
    """Decodes a column of image files, and resizes and normalises the images as the folder says."""

    auto: ClassVar[str] = "AutoImageProcessor"
    libraries: ClassVar[tuple[str, ...]] = ("transformers", "PIL", "torchvision")

    def __call__(self, columns: Mapping[str, Any], *, epoch: int | None, generator: Any) -> dict[str, torch.Tensor]:
        """Returns what the image processor returns, such as `pixel_values`."""
        hint = "name a binary column, such as content of spark.read.format('binaryFile')"
        files = _values(columns, (pa.binary(), pa.large_binary()), "bytes of image files", hint, "imageCol")
        images = [pillow().open(io.BytesIO(file)).convert("RGB") for file in files]
        return dict(self.load()(images=images, return_tensors="pt"))


def _values(columns: Mapping[str, Any], kinds: tuple[pa.DataType, ...], what: str, hint: str, param: str) -> list[Any]:
    """Returns the values of the only column, which is of one of these types: numbers arrive as tensors."""
    ((name, column),) = columns.items()
    if getattr(column, "type", None) not in kinds:
        raise ModuleError(f"column {name!r} holds no {what}", hint=hint, param=param)
    values: list[Any] = column.to_pylist()
    return values

"""A model's weights in a folder of safetensors files with an index, in the layout of Hugging Face's models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sparktorch.errors import PersistenceError

__all__ = ["INDEX", "WeightsFolder", "is_weights_folder"]

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class WeightsFolder(Mapping[str, torch.Tensor]):
    """Tensors by name, which are mapped into memory when they are asked for: processes of a host share their pages.

    A parameter that a module has under several names is saved under the first of them.

    Attributes:
        path: The folder, on a file system that is mounted under this path wherever the folder is read.
        token: The text that the training that wrote the folder has put into its index; empty for a folder of any
            origin.
    """

    path: str
    token: str = ""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a tensor on the CPU; changes to it are not written to the file."""
        file = self._files[name]
        with self._reading():
            tensor: torch.Tensor = self._opened(file).get_tensor(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name; maps no tensor."""
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def delete(self) -> None:
        """Deletes the files that the training has written, and the folder, unless it holds other files.

        A `PersistenceError` says that no training wrote the folder, or that it cannot be read or deleted.
        """
        if not self.token:
            raise PersistenceError(
                f"{self.path} was written by no fit", hint="delete it yourself", param="modelDir", code="ST-MODEL-DIR"
            )
        files = {Path(file).name for file in self._files.values()}
        self._handles.clear()
        try:
            for file in (*sorted(files), INDEX):
                Path(self.path, file).unlink(missing_ok=True)
        except OSError as error:
            raise PersistenceError(
                f"the weights in {self.path} cannot be deleted: {error}",
                hint="the folder must be writable here; or delete it yourself",
                param="modelDir",
            ) from error
        with suppress(OSError):
            Path(self.path).rmdir()

    def __reduce__(self) -> tuple[type[WeightsFolder], tuple[str, str]]:
        """Returns what a pickle holds: path and token, without open files."""
        return WeightsFolder, (self.path, self.token)

    @cached_property
    def _files(self) -> dict[str, str]:
        """The file of each tensor."""
        with self._reading():
            if not self.token and Path(self.path, _SINGLE).is_file():
                return dict.fromkeys(self._opened(_SINGLE).keys(), _SINGLE)
            index = json.loads(Path(self.path, INDEX).read_text())
            files: dict[str, str] = index["weight_map"]
            token = index.get("metadata", {}).get("sparktorch", "")
        if self.token and token != self.token:
            raise PersistenceError(
                f"{self.path} holds the weights of another training", param="modelDir", code="ST-MODEL-DIR"
            )
        return files

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Context in which files are read; a `PersistenceError` says where they must be."""
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            hint = "the folder must be mounted under this path wherever the model is trained, loaded or scored, with "
            hint += "all its files, and these whole"
            if self.token:
                hint += "; a model whose folder was deleted must be fitted again"
            raise PersistenceError(
                f"the weights in {self.path} cannot be read: {error}",
                hint=hint,
                param="modelDir" if self.token else "module",
                code="ST-MODEL-DIR",
            ) from error

    def _opened(self, file: str) -> Any:
        """Returns an open file of the folder."""
        from safetensors import safe_open

        handles = self._handles
        if file not in handles:
            # An attacker may have written the index: without folders in its names, files stay inside this folder.
            handles[file] = safe_open(Path(self.path, Path(file).name), framework="pt", device="cpu")
        return handles[file]

    @cached_property
    def _handles(self) -> dict[str, Any]:
        """The open files, by name."""
        return {}


def is_weights_folder(path: str) -> bool:
    """Whether a folder holds weights as safetensors."""
    return any(Path(path, name).is_file() for name in (INDEX, _SINGLE))

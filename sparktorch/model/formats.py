"""A trained module as a file that other programs read: a graph as ONNX or by `torch.export`, or weights."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparktorch.base.config import one_of
from sparktorch.base.imports import onnxscript
from sparktorch.base.state_dict import pack_state
from sparktorch.data.columns import TensorSpec
from sparktorch.errors import PersistenceError, causes
from sparktorch.model.export import ExportError, export_whole, exported_whole, quiet_export
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.recipe.adapter import adapter_of
from sparktorch.train.recipe.task import prediction

__all__ = ["write_as"]


def write_as(trained: TrainedModule, file: Path, kind: str) -> None:
    """Writes a module to a file of the format "onnx", "pt2" or "safetensors"; see `TorchModelBase.export`."""
    one_of("format", kind, ("onnx", "pt2", "safetensors"))
    module = trained.build()
    if kind == "safetensors":
        if file.suffix == ".json":
            what = f"{file} would be the description beside the weights"
            raise PersistenceError(what, hint="give the weights another ending, such as .safetensors")
        with _replacing(file) as temporary:
            temporary.write_bytes(pack_state(module.state_dict()))
            temporary.with_suffix(".json").write_text(json.dumps(trained.described(), indent=1))
        return
    graph = _Called(module, trained.names)
    try:
        with _replacing(file) as temporary:
            if kind == "pt2":
                temporary.write_bytes(export_whole(graph, trained.takes))
            else:
                onnxscript()
                _write_onnx(graph, trained, temporary)
    except ExportError as error:
        hint = "format='safetensors' writes the weights alone"
        raise PersistenceError(f"torch cannot write the module as {kind}: {error}", hint=hint) from error


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """Yields a path of the same name in a new folder beside; afterwards, what was written there replaces what was here.

    A program of ONNX may have its weights in a second file, and weights their description: the named file comes last.
    """
    target = Path(os.path.realpath(file))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        temporary = Path(folder, target.name)
        yield temporary
        for written in sorted(Path(folder).iterdir(), key=lambda written: written == temporary):
            written.replace(target.with_name(written.name))


def _write_onnx(graph: nn.Module, trained: TrainedModule, file: Path) -> None:
    exported = exported_whole(graph, trained.takes)
    inputs = _inputs(trained)
    # ONNX gives a name to one tensor only.
    single = "output" if "output" not in inputs else "output_0"
    outputs = [spec.name or single for spec in trained.outputs]
    with quiet_export(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns of its own calls.
        try:
            program = torch.onnx.export(exported, dynamo=True, verbose=False, input_names=inputs, output_names=outputs)
        except Exception as error:  # torch wraps the error in a report, whose last cause says what is wrong.
            *_, cause = causes(error)
            raise ExportError(str(cause).strip().partition("\n")[0]) from error
        assert program is not None, "dynamo=True returns the program"
        program.save(file)


def _inputs(trained: TrainedModule) -> list[str]:
    """Returns a name for each tensor that the graph takes: columns, with their masks, or arguments of `preprocess`."""
    names: list[str] = []
    for position, spec in enumerate(trained.takes):
        if isinstance(spec, TensorSpec):
            names += [spec.column, f"{spec.column}_mask"] if spec.layout == "padded" else [spec.column]
        else:
            names.append(trained.names[position] if trained.names else f"x{position}")
    return names


class _Called(nn.Module):
    """A module as scoring calls it: by names of arguments where its library does so, and it returns its logits."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module, self._argument_names, self._adapter = module, tuple(names), adapter_of(module)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return prediction(self._adapter.call(self.module, inputs, self._argument_names))

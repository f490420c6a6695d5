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
    """Writes a module to a file in the format "onnx", "pt2" or "safetensors"; see `TorchModelBase.export`."""
    one_of("format", kind, ("onnx", "pt2", "safetensors"))
    module = trained.build()
    if kind == "safetensors":
        if file.suffix == ".json":
            what = f"{file} would be the description beside the weights"
            raise PersistenceError(what, hint="give the weights another ending, such as .safetensors")
        with _replace_when_written(file) as new:
            new.write_bytes(pack_state(module.state_dict()))
            new.with_suffix(".json").write_text(json.dumps(trained.describe(), indent=1))
        return
    graph = _CalledAsInScoring(module, trained.names)
    try:
        with _replace_when_written(file) as new:
            if kind == "pt2":
                new.write_bytes(export_whole(graph, trained.takes))
            else:
                onnxscript()  # It refuses a missing package before torch looks for it.
                _write_onnx(graph, trained, new)
    except ExportError as error:
        hint = "format='safetensors' writes the weights alone"
        raise PersistenceError(f"torch cannot write the module as {kind}: {error}", hint=hint) from error


@contextmanager
def _replace_when_written(file: Path) -> Iterator[Path]:
    """Yields a path of the same name in a temporary folder, whose files then replace those of the same names here.

    An ONNX program may have its weights in a second file, and weights have a description. `file` itself is replaced
    last, so that whoever finds it finds its second file, too.
    """
    target = Path(os.path.realpath(file))
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        new = Path(folder, target.name)
        yield new
        for written in sorted(Path(folder).iterdir(), key=lambda written: written == new):
            written.replace(target.with_name(written.name))


def _write_onnx(graph: nn.Module, trained: TrainedModule, file: Path) -> None:
    """Writes the graph as an ONNX program; an `ExportError` says that torch cannot."""
    exported = exported_whole(graph, trained.takes)
    inputs = _input_names(trained)
    # A single output has no name, and must not get the name of an input.
    single_output = "output" if "output" not in inputs else "output_0"
    outputs = [spec.name or single_output for spec in trained.outputs]
    with quiet_export(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch warns of its own calls.
        try:
            program = torch.onnx.export(exported, dynamo=True, verbose=False, input_names=inputs, output_names=outputs)
        except Exception as error:  # torch wraps the error in a report, whose last cause says what is wrong.
            *_, cause = causes(error)
            raise ExportError(str(cause).strip().partition("\n")[0]) from error
        assert program is not None, "dynamo=True returns the program"
        program.save(file)


def _input_names(trained: TrainedModule) -> list[str]:
    """Returns a name for each tensor that the graph takes.

    It is the name of a column, of the mask of a padded column, or of a tensor that `preprocess` makes.
    """
    names: list[str] = []
    for position, spec in enumerate(trained.takes):
        if isinstance(spec, TensorSpec):
            names += [spec.column, f"{spec.column}_mask"] if spec.layout == "padded" else [spec.column]
        else:
            names.append(trained.names[position] if trained.names else f"x{position}")
    return names


class _CalledAsInScoring(nn.Module):
    """A module that calls another as scoring does, with named arguments if its library asks for them.

    It returns the part of the output that is the prediction, such as the logits.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self._argument_names = tuple(names)
        self._adapter = adapter_of(module)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return prediction(self._adapter.call(self.module, inputs, self._argument_names))

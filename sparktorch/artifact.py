"""A trained module as a value: its code, its weights, the tensors it takes and gives. No pyspark.

It scores Arrow columns, and it is a directory of plain files:

    weights.safetensors   the weights
    module.json           how to make the module, and its inputs and outputs
    module.pkl            the module's code, pickled, only where it has no import path
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import nn

from sparktorch.config import Task
from sparktorch.data.columns import TensorSpec
from sparktorch.data.tensors import to_numpy
from sparktorch.errors import PersistenceError
from sparktorch.train.dryrun import OutputSpec
from sparktorch.train.recipe import ModuleSource, Recipe, import_path, load_object
from sparktorch.train.task import align

__all__ = ["FORMAT_VERSION", "Scorer", "TrainedModule"]

FORMAT_VERSION = 1

_OPT_IN = ".read().option('allowPickle', 'true').load(path) (or allow_pickle=True in sparktorch.tracking)"

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TrainedModule:
    """A module's code and weights, and what goes in and comes out.

    Attributes:
        source: The module class, factory, import path or instance.
        params: Keyword arguments of the factory.
        state: The state dict, as `torch.save` writes it.
        inputs: One spec per argument of `forward`.
        outputs: What `forward` returns.
        task: What the outputs mean.
    """

    source: ModuleSource
    params: Mapping[str, Any]
    state: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[OutputSpec, ...]
    task: Task

    @cached_property
    def digest(self) -> str:
        """Identifies the weights and the way they are used; code without import path is like no other."""
        path = self.source if isinstance(self.source, str) else import_path(self.source)
        described = json.dumps([self._describe(), path or uuid.uuid4().hex, repr(dict(self.params))])
        return hashlib.sha256(self.state + described.encode()).hexdigest()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the weights, on the CPU."""
        state: dict[str, torch.Tensor] = torch.load(io.BytesIO(self.state), weights_only=True)
        return state

    def build(self) -> nn.Module:
        """Returns the module with its trained weights, in evaluation mode, on the CPU."""
        module = Recipe(module=self.source, module_params=self.params).build_module(seed=0)
        module.load_state_dict(self.state_dict())
        return module.eval()

    def save(self, directory: Path, *, allow_pickle: bool = False) -> None:
        """Writes the module into an existing directory.

        Raises:
            PersistenceError: The code has no import path and `allow_pickle` is not set, or the
                parameters are not JSON.
        """
        from safetensors.torch import save_file

        state = self.state_dict()
        # safetensors refuses tensors that share memory; tied weights are stored once each.
        save_file({k: v.clone().contiguous() for k, v in state.items()}, directory / "weights.safetensors")
        form = self._describe()
        path = self.source if isinstance(self.source, str) else import_path(self.source)
        if path is not None:
            try:
                params = json.loads(json.dumps(dict(self.params)))
                if params != _listed(dict(self.params)):
                    raise TypeError("keys must be strings")
                form["module"] = {"path": path, "params": params}
            except TypeError as error:
                raise PersistenceError(
                    f"moduleParams cannot be saved as JSON: {error}",
                    hint="use numbers, strings, lists and dicts",
                    param="moduleParams",
                ) from error
        elif allow_pickle:
            import cloudpickle

            (directory / "module.pkl").write_bytes(cloudpickle.dumps((self.source, dict(self.params))))
            form["module"] = {"pickle": "module.pkl"}
        else:
            raise PersistenceError(
                f"the module {_named(self.source)} has no import path that works outside this session",
                hint="put the class into a module file, or allow pickled code with "
                ".write().option('allowPickle', 'true') (or allow_pickle=True in sparktorch.tracking)",
            )
        (directory / "module.json").write_text(json.dumps(form, indent=1))

    @classmethod
    def load(cls, directory: Path, *, allow_pickle: bool = False) -> TrainedModule:
        """Reads a module from a directory that `save` wrote.

        Raises:
            PersistenceError: The directory holds no module, one of a newer format, or pickled
                code and `allow_pickle` is not set.
        """
        from safetensors.torch import load_file

        try:
            form = json.loads((directory / "module.json").read_text())
        except FileNotFoundError as error:
            raise PersistenceError("this is no saved sparktorch model: module.json is missing") from error
        if form["format"] > FORMAT_VERSION:
            raise PersistenceError(
                f"the model was saved in format {form['format']}, this version reads up to {FORMAT_VERSION}",
                hint="upgrade sparktorch-estimator",
            )
        how = form["module"]
        source: ModuleSource
        if "path" in how:
            source, params = how["path"], how["params"]
            made_by = load_object(how["path"])
            if not (allow_pickle or (isinstance(made_by, type) and issubclass(made_by, nn.Module))):
                raise PersistenceError(
                    f"the model is made by {how['path']}, which is no nn.Module class, and loading it calls that",
                    hint=f"if you trust where it comes from: {_OPT_IN}",
                )
        elif allow_pickle:
            source, params = pickle.loads((directory / "module.pkl").read_bytes())
        else:
            raise PersistenceError(
                "the model's code was pickled, and loading a pickle runs whatever is in it",
                hint=f"if you trust where it comes from: {_OPT_IN}",
            )
        buffer = io.BytesIO()
        torch.save(load_file(directory / "weights.safetensors"), buffer)
        return cls(
            source=source,
            params=params,
            state=buffer.getvalue(),
            inputs=tuple(TensorSpec.from_dict(spec) for spec in form["inputs"]),
            outputs=tuple(OutputSpec(spec["name"], tuple(spec["shape"])) for spec in form["outputs"]),
            task=form["task"],
        )

    def _describe(self) -> dict[str, Any]:
        return {
            "format": FORMAT_VERSION,
            "torch": torch.__version__,
            "task": self.task,
            "inputs": [spec.to_dict() for spec in self.inputs],
            "outputs": [asdict(spec) for spec in self.outputs],
        }


class Scorer:
    """Scores columns with one built module."""

    def __init__(self, trained: TrainedModule, *, device: str = "cpu", batch_size: int = 8192) -> None:
        """Builds the module on `device`; `batch_size` rows go through it at a time."""
        self._trained = trained
        self._device = device
        self._batch_size = batch_size
        self._module = trained.build().to(device)

    def score(self, columns: Sequence[pa.Array]) -> dict[str, Array]:
        """Scores one Arrow array per input.

        Returns:
            For a classifier `scores` and `probability` of shape `(rows, classes)` and `prediction`
            of shape `(rows,)`, all float64; for a regressor `prediction`, float64; otherwise one
            array per output by its name, `prediction` if there is just one.

        Raises:
            ColumnError: A row is null or has another shape than the model was fitted on.
        """
        arrays = [to_numpy(c, spec) for c, spec in zip(columns, self._trained.inputs, strict=True)]
        return self.score_arrays(arrays)

    def score_arrays(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Scores one array of shape `(rows, ...)` per input; returns as `score`."""
        rows = len(arrays[0])
        starts = range(0, max(rows, 1), self._batch_size)
        parts = [self._forward([a[start : start + self._batch_size] for a in arrays]) for start in starts]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @torch.inference_mode()
    def _forward(self, arrays: Sequence[Array]) -> dict[str, Array]:
        # Arrow's buffers are read-only, which torch warns about though nothing writes to them.
        inputs = [torch.from_numpy(np.require(a, requirements="W")).to(self._device) for a in arrays]
        output = self._module(*inputs)
        if self._trained.task == "classification":
            return _classify(output.double().cpu())
        if self._trained.task == "regression":
            like = torch.empty(len(output)) if output.dim() == 1 or output.shape[1] == 1 else output
            return {"prediction": align("regression", output, like)[0].double().cpu().numpy()}
        named = output if isinstance(output, Mapping) else dict(enumerate(_tuple(output)))
        single = len(self._trained.outputs) == 1
        return {"prediction" if single else str(name): tensor.float().cpu().numpy() for name, tensor in named.items()}


def _classify(scores: torch.Tensor) -> dict[str, Array]:
    if scores.dim() == 1 or scores.shape[1] == 1:  # one score: the logit of the second class
        logit = scores.reshape(-1)
        scores = torch.stack([-logit, logit], dim=1)
        positive = torch.sigmoid(logit)
        probability = torch.stack([1 - positive, positive], dim=1)
    else:
        probability = torch.softmax(scores, dim=1)
    prediction = scores.argmax(1).double()
    return {
        "scores": scores.numpy(),
        "probability": probability.numpy(),
        "prediction": prediction.numpy(),
    }


def _tuple(output: Any) -> tuple[torch.Tensor, ...]:
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def _listed(value: Any) -> Any:
    """Returns a value with its tuples as lists, which is all that JSON may change about it."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, tuple | list) else value


def _named(source: Any) -> str:
    return source if isinstance(source, str) else getattr(source, "__qualname__", type(source).__qualname__)

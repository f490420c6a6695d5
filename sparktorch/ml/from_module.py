"""Modules that were trained elsewhere, as trained modules that score."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.config import Task
from sparktorch.base.imports import load_object
from sparktorch.base.state_dict import pack_state
from sparktorch.errors import ConfigError, ModuleError, refusing
from sparktorch.ml.fit.checks import naming_params
from sparktorch.ml.fit.first_row_trial import first_inputs
from sparktorch.ml.fit.translate import input_columns
from sparktorch.model.export import Script, example_inputs, export_program
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.frame.prepare import prepare
from sparktorch.train.recipe.adapter import adapter_of
from sparktorch.train.recipe.dry_run import arguments_of, try_forward

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from sparktorch.ml.params.mixins import EstimatorParams

__all__ = ["Weights", "trained_from"]

Weights = Mapping[str, torch.Tensor] | str | os.PathLike[str]

_MLFLOW = ("models:/", "runs:/")
_SUFFIXES = (".pt", ".pt2", ".pth", ".ts")  # Files of programs have these suffixes.


def trained_from(
    estimator: EstimatorParams, task: Task, dataset: DataFrame, weights: Weights | None, labels: Sequence[str]
) -> TrainedModule:
    """Returns the module that an estimator names, tried on the first row; see `TorchModelBase.fromModule`."""
    settings = input_columns(estimator)
    # A row with nulls does not show its shapes, so the first row without nulls is tried.
    options = replace(settings["options"], drop=settings["options"].fill is None)
    with naming_params(estimator, fits=False):
        frame, rows = first_inputs(prepare(dataset, task, label=None, **{**settings, "options": options}))
    columns, arguments = frame.columns, arguments_of(rows)
    preprocess = columns.preprocess
    argument_specs = columns.inputs if preprocess is None else arguments
    source = _source_of(_read(estimator.getModule()), estimator.getModuleParams(), weights, argument_specs)
    trained = TrainedModule(
        **source,
        inputs=columns.inputs,
        arguments=None if preprocess is None else arguments,
        preprocess=None if preprocess is None else preprocess.function,
        returned=None if preprocess is None else preprocess.arguments,
        outputs=(),
        task=task,
        labels=tuple(labels),
    )
    outputs, classes = try_forward(trained.build(), task, rows, columns.arguments)
    if labels and len(labels) != classes:
        raise ConfigError(f"labels has {len(labels)} names, and the module {classes or 'no'} classes", param="labels")
    return replace(trained, outputs=outputs)


def _check_evaluates(program: nn.Module, argument_specs: Any) -> None:
    """Refuses a program of a module in training mode, whose rows depend on each other or on chance."""
    try:
        inputs = example_inputs(argument_specs)
        with torch.no_grad():
            outputs = pytree.tree_leaves(program(*inputs))
            repeated = pytree.tree_leaves(program(*inputs))
            outputs_of_first = pytree.tree_leaves(program(*(tensor[:-1] for tensor in inputs)))
    except Exception:  # The program does not take the columns; the trial on the first row says so.
        return
    try:
        torch.testing.assert_close([tensor[: len(tensor) - 1] for tensor in outputs], outputs_of_first, equal_nan=True)
        torch.testing.assert_close(outputs, repeated, equal_nan=True)
    except AssertionError as error:
        what = "the program's rows depend on each other or on chance, as those of a module in training mode"
        hint = "call module.eval() before it is exported or traced"
        raise ModuleError(what, hint=hint, param="module") from error


def _read(module: Any) -> Any:
    """Returns a TorchScript module, the program in a file or a model in MLflow as an object; all else as it is."""
    if isinstance(module, torch.jit.ScriptModule):
        return Script.of(module)
    if isinstance(module, str | os.PathLike) and (str(module).startswith(_MLFLOW) or Path(module, "MLmodel").is_file()):
        return load_object("sparktorch.tracking.flavor:load_module")(str(module))
    path = Path(module) if isinstance(module, str | os.PathLike) else Path()
    if path.suffix not in _SUFFIXES and not path.is_file():
        return module
    hint = "torch.export.save writes .pt2 files, torch.jit.save others; a file of weights is named by weights"
    with refusing(f"{module} holds no program", hint, param="module"):
        if path.suffix == ".pt2":
            return torch.export.load(path)
        script = Script(path.read_bytes())
        script()  # This raises an error for a file that holds no TorchScript.
    return script


def _source_of(module: Any, params: Mapping[str, Any], weights: Weights | None, argument_specs: Any) -> dict[str, Any]:
    """Returns code, parameters and weights of a module, as fields of a `TrainedModule`."""
    if not isinstance(module, torch.export.ExportedProgram | torch.fx.GraphModule | Script):
        return _fields_of_module(module, params, weights)
    if params or weights is not None:
        raise ConfigError("module is a program, which has its weights with it", hint="pass it alone", param="module")
    graph = module() if isinstance(module, Script) else module
    graph = graph.module() if isinstance(graph, torch.export.ExportedProgram) else graph
    _check_evaluates(graph, argument_specs)
    if isinstance(module, Script):
        return {"source": module, "params": {}, "weights": pack_state({})}
    hint = "it is called with the input columns in their order, and any number of rows: export it with positional "
    hint += "arguments, and torch.export.Dim for the first dimension"
    with refusing("the program does not take the columns", hint, param="module"):
        program = export_program(graph, argument_specs)
    return {"source": program, "params": {}, "weights": pack_state(graph.state_dict())}


def _fields_of_module(module: Any, params: Mapping[str, Any], weights: Weights | None) -> dict[str, Any]:
    """Returns the fields of an instance, a class or factory, or of what a library makes a module of."""
    adapter = adapter_of(module)
    recipe = adapter.recipe_fields(module, params, seed=0, complete=weights is None)
    source = recipe["module"]
    factory = load_object(source) if isinstance(source, str) else source
    factory = factory.func if isinstance(factory, partial) else factory
    is_class = isinstance(factory, type)
    if weights is None and is_class and "initial" not in recipe:
        hint = "pass weights, a state dict or its file, or as module the instance that was trained"
        raise ConfigError(
            f"module is made of the class {factory.__qualname__}, without weights", hint=hint, param="weights"
        )
    built = adapter.recipe(**recipe).build_module(0)
    if weights is not None:
        state = _state(weights)
        inner = [key for key, value in state.items() if isinstance(value, Mapping)]
        hint = f"of the keys {', '.join(map(repr, state))}, pass what is under {inner[0]!r}" if inner else ""
        with refusing("the weights are not those of the module", hint, param="weights"):
            built.load_state_dict(state)
    state_bytes = pack_state(built.state_dict())
    if is_class:
        return {"source": source, "params": recipe["module_params"], "weights": state_bytes}
    # A function is not called again on the executors: what it reads may be on this machine alone.
    return {"source": built, "params": {}, "weights": state_bytes}


def _state(weights: Weights) -> Mapping[str, torch.Tensor]:
    """Returns a state dict, which may be in a file of safetensors or of `torch.save`, also under `state_dict`."""
    if isinstance(weights, Mapping):
        return weights
    path = os.fspath(weights)
    hint = "give a file of safetensors, or one that torch.save wrote of module.state_dict()"
    with refusing(f"the weights in {path} cannot be read", hint, param="weights"):
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    state: Mapping[str, torch.Tensor] = content.get("state_dict", content) if isinstance(content, Mapping) else {}
    return state

"""A trained module as a value: code, weights, inputs and outputs, without pyspark.

It is saved as a directory of plain files:

    weights.safetensors   the weights, unless the training wrote them into another folder (`modelDir`)
    module.json           how to build the module, and its inputs and outputs
    module.pt2            the exported graph, if the module's code has no import path
    module.ts             the TorchScript program, if the module is one
    module.pkl            the pickled code, if there is neither an import path nor a graph
    preprocess.arrow      the Arrow arrays of a `preprocess` that is a dataclass of JSON values and such arrays
    preprocess.pkl        the pickled `preprocess`, if it has no import path and is no such dataclass
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from sparktorch.base.config import Task
from sparktorch.base.imports import import_path, load_object
from sparktorch.base.json_values import is_json, tuples_made, tuples_marked
from sparktorch.base.state_dict import pack_state, unpack_state
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.data.columns import TensorSpec, argument_names
from sparktorch.data.preprocess import Function, check_signature
from sparktorch.errors import PersistenceError, SparkTorchError
from sparktorch.model.bundled_code import check_code, fingerprints
from sparktorch.model.export import ExportError, Program, Script, check_archive, export_program
from sparktorch.train.recipe.adapter import adapter_of
from sparktorch.train.recipe.dry_run import ArgumentSpec, OutputSpec
from sparktorch.train.recipe.frozen_base import load_weights, seed_of
from sparktorch.train.recipe.recipe import ModuleSource, Recipe

__all__ = ["FORMAT_VERSION", "TrainedModule"]

# A model has format 4 if its params hold tuples, 3 if it is TorchScript, 2 if its weights are in a folder, otherwise 1.
FORMAT_VERSION = 4

_WEIGHTS = "weights.safetensors"
_GRAPH = "module.pt2"
_SCRIPT = "module.ts"
_PICKLE = "module.pkl"
_PREPROCESS = "preprocess.pkl"
_ARRAYS = "preprocess.arrow"
_IN_PIPELINE = "for the stages of a pipeline, spark.conf.set('spark.sparktorch.allowPickle', 'true'); in "
_IN_PIPELINE += "sparktorch.tracking, allow_pickle=True"
_OPT_IN = f".read().option('allowPickle', 'true').load(path); {_IN_PIPELINE}"


@dataclass(frozen=True, kw_only=True)
class TrainedModule:
    """A module's code and weights, its inputs and its outputs.

    Attributes:
        source: The module's class, factory, import path or instance, or its exported graph or TorchScript program.
        params: Keyword arguments of the class or factory.
        weights: The state dict as the bytes of a safetensors file, or the folder that has it. For a module with
            adapters, it lacks the frozen base.
        inputs: Specs of the input columns.
        outputs: Specs of what `forward` returns.
        task: What the labels are.
        preprocess: Makes the arguments of `forward` from the inputs; `None` if the inputs are the arguments.
        arguments: Specs of the arguments of `forward` that `preprocess` makes; `None` without `preprocess`.
        returned: Names under which `preprocess` returns the arguments, in the order of `arguments`.
        labels: Names of the classes; `()` if unknown.
        seed: The seed with which the training called the class or factory, which may draw more than the weights.
        code: Fingerprints of the files that were saved with the model, as from `fingerprints`; its classes must come
            from these files. `None` without such files.
    """

    source: ModuleSource | Program | Script
    params: Mapping[str, Any]
    weights: bytes | WeightsFolder
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[OutputSpec, ...]
    task: Task
    preprocess: Function | None = None
    arguments: tuple[ArgumentSpec, ...] | None = None
    returned: tuple[str, ...] | None = None
    labels: tuple[str, ...] = ()
    seed: int = 0
    code: Mapping[str, str] | None = None

    @property
    def takes(self) -> tuple[TensorSpec, ...] | tuple[ArgumentSpec, ...]:
        """Specs of the arguments of `forward`."""
        return self.inputs if self.arguments is None else self.arguments

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments of `forward`, by which some libraries' models are called."""
        return argument_names(self.inputs) if self.preprocess is None else self.returned or ()

    def build(self, state: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
        """Returns the module with its trained weights, or with `state`, in evaluation mode, on the CPU.

        Weights in a folder are mapped into memory, which the processes of a host share until they change it. A
        `PersistenceError` says that this process has imported a class of the module from another version of `code`.
        """
        self._check_code()
        module = self._build_unchecked(state)
        check_code(self.code or {}, map(type, module.modules()))
        return module

    def _check_code(self) -> None:
        """Refuses a class, factory or `preprocess` that does not come from the files saved with the model."""
        source = load_object(self.source) if self.code and isinstance(self.source, str) else self.source
        check_code(self.code or {}, (source, self.preprocess))

    def _build_unchecked(self, state: Mapping[str, torch.Tensor] | None) -> nn.Module:
        """Returns the module, from whichever code its import path leads to."""
        if isinstance(self.weights, WeightsFolder):
            assert state is None, "weights in a folder are mapped, and not unpacked"
            return self._recipe(initial=self.weights).build_module(self.seed).eval()
        weights = unpack_state(self.weights) if state is None else state
        if isinstance(self.source, Program | Script):
            return self.source(**weights).eval()
        module = self._recipe().build_module(seed_of(weights, self.seed))
        load_weights(module, weights)
        return module.eval()

    @cached_property
    def layers(self) -> tuple[str, ...] | None:
        """Names of the modules in the module; `None` for a graph."""
        return None if self._is_graph else tuple(name for name, _ in self._without_values().named_modules() if name)

    def parts(self) -> list[nn.Module]:
        """Returns the parts of the module, whose tensors need not have values; none for a graph."""
        return [] if self._is_graph else list(self._without_values().modules())

    @property
    def _is_graph(self) -> bool:
        return isinstance(self.source, Program | Script)

    def _without_values(self) -> nn.Module:
        """Returns the module, whose tensors need not have values."""
        if isinstance(self.source, nn.Module):
            return self.source
        try:
            with torch.device("meta"):
                return self._recipe().build_module(self.seed)
        except SparkTorchError:  # The constructor looks at values, or reads files.
            return self.build()

    def _recipe(self, **initial: Any) -> Recipe:
        assert not isinstance(self.source, Program | Script)
        return adapter_of(self.source).recipe(module=self.source, module_params=self.params, **initial)

    def unpack(self) -> tuple[TrainedModule, dict[str, torch.Tensor] | None]:
        """Returns the module without its weights, and the weights as the argument of `build`.

        So memory does not hold the weights twice, packed and unpacked. Weights in a folder stay there.
        """
        if isinstance(self.weights, WeightsFolder):
            return self, None
        return replace(self, weights=b""), unpack_state(self.weights)

    def save(self, directory: Path, *, allow_pickle: bool = False, layers: bool = False) -> None:
        """Writes the module into an existing directory; with `layers`, in a form that has its layers.

        Raises:
            PersistenceError: The code could only be pickled, and `allow_pickle` is not set. Either the module has no
                import path, or has parameters that are not JSON, and its graph cannot be exported; or `preprocess` has
                no import path.
        """
        form = {**self._form(), "module": self._save_code(directory, allow_pickle, layers)}
        is_exported_now = "program" in form["module"] and not isinstance(self.source, Program)
        # A graph needs all weights: it has no source that could make the frozen base of adapters again.
        weights = pack_state(self.build().state_dict()) if is_exported_now else self.weights
        if isinstance(weights, WeightsFolder):
            form |= {"format": 2, "weights": {"path": weights.path, "token": weights.token}}
        else:
            (directory / _WEIGHTS).write_bytes(weights)
        if "$tuple" in json.dumps(form["module"]):
            form["format"] = 4
        if self.preprocess is not None:
            form["preprocess"] = self._save_preprocess(directory, allow_pickle)
        (directory / "module.json").write_text(json.dumps(form, indent=1))

    def _save_code(self, directory: Path, allow_pickle: bool, layers: bool) -> dict[str, Any]:
        """Writes the module's code to a file if it needs one; returns its entry in `module.json`."""
        if isinstance(self.source, Program):
            return _write_program(self.source, directory)
        if isinstance(self.source, Script):
            (directory / _SCRIPT).write_bytes(self.source.archive)
            return {"script": _SCRIPT}
        path = self._path
        params = dict(self.params)
        adapter = adapter_of(self.source)
        code = adapter.rebuildable(self.source)
        if code is not None:
            path, params = code["module"], code["module_params"]
        if path is None:
            why = f"the module {_name_of(self.source)} has no import path that works outside this session"
        elif _is_json(params):
            return {"path": path, "params": tuples_marked(params)}
        else:
            why = f"the parameters of {path} are not all numbers, strings, lists and dicts"
        try:
            if isinstance(self.weights, WeightsFolder):
                raise ExportError("it was fitted with modelDir, and a graph holds the weights")
            if layers:
                raise ExportError("a graph has no layers, which outputLayers names")
            if adapter.argument_names(self.source, self.names):
                raise ExportError("its configuration makes another model, and a graph takes no arguments by name")
            return _write_program(export_program(self.build(), self.takes), directory)
        except ExportError as error:
            why += f", and torch.export cannot capture its graph: {error}"
            return _write_pickle(directory / _PICKLE, (self.source, params), why, allow_pickle)

    def _save_preprocess(self, directory: Path, allow_pickle: bool) -> dict[str, Any]:
        """Writes the callable to a file if it needs one; returns its entry in `module.json`."""
        class_path = import_path(type(self.preprocess))
        if class_path is not None and is_dataclass(self.preprocess):
            params = {field.name: getattr(self.preprocess, field.name) for field in fields(self.preprocess)}
            arrays = {name: params.pop(name) for name in list(params) if isinstance(params[name], pa.Array)}
            params = tuples_marked(params)
            if is_json(params):
                _write_arrays(directory / _ARRAYS, arrays)
                entry = {"path": class_path, "params": params}
                return {**entry, "arrays": _ARRAYS} if arrays else entry
        path = import_path(self.preprocess)
        if path is not None:
            return {"path": path}
        why = f"preprocess {_name_of(self.preprocess)} has no import path that works outside this session"
        return _write_pickle(directory / _PREPROCESS, self.preprocess, why, allow_pickle)

    @classmethod
    def load(cls, directory: Path, *, allow_pickle: bool = False, code: Path | None = None) -> TrainedModule:
        """Reads a module from a directory that `save` wrote; `code` is the folder of the files saved with it, if any.

        Raises:
            PersistenceError: There is no module, its format is newer, or this process has imported another version of
                its class. Without `allow_pickle`, also for everything that could run arbitrary code: pickled code, a
                factory that is no `nn.Module` class, or a graph with other operators than torch's own.
        """
        try:
            form = json.loads((directory / "module.json").read_text())
        except FileNotFoundError as error:
            raise PersistenceError(
                "this is no saved sparktorch model: module.json is missing", code="ST-NOT-A-MODEL"
            ) from error
        if form["format"] > FORMAT_VERSION:
            raise PersistenceError(
                f"the model was saved in format {form['format']}, this version reads up to {FORMAT_VERSION}",
                hint="upgrade sparktorch-estimator",
                code="ST-NOT-A-MODEL",
            )
        source, params = _load_code(directory, form["module"], allow_pickle)
        arguments = None
        if "arguments" in form:
            arguments = tuple(ArgumentSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in form["arguments"])
        trained = cls(
            source=source,
            params=params,
            weights=WeightsFolder(**form["weights"]) if "weights" in form else (directory / _WEIGHTS).read_bytes(),
            inputs=tuple(TensorSpec.from_dict(spec) for spec in form["inputs"]),
            outputs=tuple(OutputSpec(spec["name"], tuple(spec["shape"])) for spec in form["outputs"]),
            task=form["task"],
            preprocess=_load_preprocess(directory, form.get("preprocess"), allow_pickle),
            arguments=arguments,
            returned=tuple(form["returned"]) if "returned" in form else None,
            labels=tuple(form.get("labels", ())),
            seed=form.get("seed", 0),
            code=None if code is None else fingerprints(code),
        )
        trained._check_code()
        return trained

    @property
    def _path(self) -> str | None:
        """The import path of the module's class or factory."""
        return self.source if isinstance(self.source, str) else import_path(self.source)

    def describe(self) -> dict[str, Any]:
        """Returns inputs, outputs and labels as JSON, and import path and parameters of the module if it has a path."""
        params = dict(self.params) if self._path is not None and _is_json(dict(self.params)) else None
        return {**self._form(), "module": self._path, "params": params}

    def _form(self) -> dict[str, Any]:
        """Returns the entries of `module.json` that do not depend on how code and weights are saved."""
        form: dict[str, Any] = {
            "format": 3 if isinstance(self.source, Script) else 1,
            "torch": torch.__version__,
            "task": self.task,
            "seed": self.seed,
            "inputs": [spec.to_dict() for spec in self.inputs],
            "outputs": [asdict(spec) for spec in self.outputs],
        }
        if self.arguments is not None:
            form["arguments"] = [asdict(spec) for spec in self.arguments]
        if self.returned is not None:
            form["returned"] = list(self.returned)
        if self.labels:
            form["labels"] = list(self.labels)
        return form


def _write_pickle(file: Path, value: object, why: str, allow_pickle: bool) -> dict[str, Any]:
    """Pickles code that cannot be saved otherwise, if pickles are allowed; returns its entry in `module.json`."""
    if not allow_pickle:
        allowed = f".write().option('allowPickle', 'true'); {_IN_PIPELINE}"
        raise PersistenceError(why, hint=f"put it into a module file, or allow pickled code with {allowed}")
    import cloudpickle  # Scoring does not need it, and may lack it.

    file.write_bytes(cloudpickle.dumps(value))
    return {"pickle": file.name}


def _write_arrays(file: Path, arrays: Mapping[str, pa.Array]) -> None:
    """Writes arrays, if there are any. Their lengths may differ, so each is the only list of a column."""
    if arrays:
        lists = {name: pa.LargeListArray.from_arrays([0, len(array)], array) for name, array in arrays.items()}
        table = pa.table(lists)
        with pa.ipc.new_file(str(file), table.schema) as writer:
            writer.write_table(table)


def _read_arrays(file: Path) -> dict[str, pa.Array]:
    """Reads the arrays that `_write_arrays` wrote, by name."""
    with pa.OSFile(str(file)) as source:
        table = pa.ipc.open_file(source).read_all()
    return {name: table.column(name).chunk(0).flatten() for name in table.column_names}


def _write_program(program: Program, directory: Path) -> dict[str, Any]:
    """Writes an exported graph; returns its entry in `module.json`."""
    (directory / _GRAPH).write_bytes(program.archive)
    return {"program": _GRAPH, "parameters": list(program.parameters)}


def _load_code(directory: Path, entry: Mapping[str, Any], allow_pickle: bool) -> tuple[Any, Mapping[str, Any]]:
    """Returns the source and parameters that `_save_code` wrote, from its entry in `module.json`."""
    if "path" in entry:
        factory = load_object(entry["path"])
        if not (isinstance(factory, type) and issubclass(factory, nn.Module)):
            what = f"the model is made by {entry['path']}, which is no nn.Module class, and loading it calls that"
            _require_trust(what, allow_pickle)
        return entry["path"], tuples_made(entry["params"])
    if "program" in entry:
        program = Program((directory / _GRAPH).read_bytes(), tuple(entry["parameters"]))
        try:
            check_archive(program.archive)
        except ExportError as error:
            what = f"the model's exported graph could run code of its own when it is loaded: {error}"
            _require_trust(what, allow_pickle)
        return program, {}
    if "script" in entry:
        _require_trust("the model is a TorchScript program, which can read and write files", allow_pickle)
        return Script((directory / _SCRIPT).read_bytes()), {}
    _require_trust("the model's code was pickled, and loading a pickle runs whatever is in it", allow_pickle)
    source, params = pickle.loads((directory / _PICKLE).read_bytes())
    return source, params


def _load_preprocess(directory: Path, entry: Mapping[str, Any] | None, allow_pickle: bool) -> Function | None:
    """Returns the callable that `_save_preprocess` wrote, from its entry in `module.json`."""
    if entry is None:
        return None
    if "path" in entry:
        function = load_object(entry["path"])
        if "params" in entry:
            if not (isinstance(function, type) and is_dataclass(function)):
                raise PersistenceError(
                    f"the model's preprocess is made by {entry['path']}, which loading does not call", code="ST-PICKLE"
                )
            # The file may name any dataclass and any function: only what looks like a `preprocess` is called.
            check_signature(function.__call__)
            arrays = _read_arrays(directory / _ARRAYS) if "arrays" in entry else {}
            function = function(**tuples_made(entry["params"]), **arrays)
        check_signature(function)
    else:
        _require_trust("the model's preprocess was pickled, and loading a pickle runs whatever is in it", allow_pickle)
        function = pickle.loads((directory / _PREPROCESS).read_bytes())
    loaded: Function = function
    return loaded


def _require_trust(what: str, allow_pickle: bool) -> None:
    """Refuses a model that could run arbitrary code, unless the caller allows that."""
    if not allow_pickle:
        raise PersistenceError(what, hint=f"if you trust where it comes from: {_OPT_IN}")


def _is_json(value: Any) -> bool:
    """Whether a value survives a round trip through JSON, apart from tuples, which become lists."""
    try:
        return bool(json.loads(json.dumps(value)) == _listed(value))
    except (TypeError, ValueError):
        return False


def _listed(value: Any) -> Any:
    """Returns a value with tuples as lists, as JSON returns it."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, tuple | list) else value


def _name_of(source: Any) -> str:
    """Returns an import path, or the name of a class, a function or an instance's class."""
    return source if isinstance(source, str) else getattr(source, "__qualname__", type(source).__qualname__)

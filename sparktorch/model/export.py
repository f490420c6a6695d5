"""Exports a module as a `torch.export` program: its graph, for modules whose code has no import path.

The program is the graph in evaluation mode. The weights are an input of the graph, so that the archive holds none of
them: they stay in safetensors.

A `.pt2` archive can run code when it is loaded: `torch.export.load` unpickles sample inputs and custom objects,
resolves names, and evaluates symbolic expressions. Archives that are written here have nothing to unpickle, and
`check_archive` refuses all other archives before torch reads them.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.export.passes import move_to_device_pass

from sparktorch.base.quiet import quiet
from sparktorch.data.columns import TensorSpec
from sparktorch.errors import ModuleError
from sparktorch.train.recipe.dry_run import ArgumentSpec

__all__ = [
    "ExportError",
    "Program",
    "Script",
    "check_archive",
    "example_inputs",
    "export_program",
    "export_whole",
    "exported_whole",
    "quiet_export",
]

Inputs = Sequence[TensorSpec] | Sequence[ArgumentSpec]

_lock = RLock()  # torch.export changes global state of the process.
_EXAMPLE_ROWS = 3
_EXAMPLE_LONGEST = 5
# A target in a graph is an operator of torch, or an arithmetic operator of Python.
_OPERATORS = r"torch\.ops\.(aten|prims)\.\w+\.\w+|_operator\.(getitem|add|sub|mul|neg|floordiv|mod|eq|ne|lt|le|gt|ge)"
# torch writes symbolic expressions as sympy's srepr: "Mul(Integer(8), Symbol('s21', positive=True))".
_EXPRESSION = (
    r"(?:\b(?:Add|Mul|Pow|Min|Max|Mod|PythonMod|FloorDiv|CeilDiv|Integer|Rational|Symbol|positive|nonnegative"
    r"|integer|True|False)\b|'[su]\d+'|-?\d+(?!\d)|[(),= ])*"
)
# A guard compares sizes of inputs with numbers.
_GUARD = r"(?:L\['inputs'\]\[\d+\]|\.size\(\)|\[\d+\]|[0-9+*()<>=! -]|//|%)*"
_TEXT_RECORDS = ("archive_format", "archive_version", "version", "byteorder", "serialization_id")


class ExportError(Exception):
    """A module cannot be exported, or an archive is not one of ours; the message says why."""


@dataclass(frozen=True)
class Program:
    """An exported module; called like a module class, it returns the module.

    Attributes:
        archive: The `.pt2` archive.
        parameters: Names of the entries of the state dict that are parameters; the others are buffers.
    """

    archive: bytes
    parameters: tuple[str, ...]

    def __call__(self, **state: torch.Tensor) -> nn.Module:
        """Returns the module with the weights `state`."""
        return _ExportedModule(self, state)


@dataclass(frozen=True)
class Script:
    """A program as `torch.jit.save` writes it, with its weights; called like a module class, it returns the module."""

    archive: bytes

    @classmethod
    def of(cls, module: torch.jit.ScriptModule) -> Script:
        """Returns the program of a TorchScript module."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.save(module, buffer)
        return cls(buffer.getvalue())

    def __call__(self) -> nn.Module:
        """Returns the module on the CPU."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module: nn.Module = torch.jit.load(  # type: ignore[no-untyped-call]
                io.BytesIO(self.archive), map_location="cpu"
            )
        return module


def export_program(module: nn.Module, inputs: Inputs) -> Program:
    """Exports a module that is on the CPU and in evaluation mode, for any number of rows.

    An `ExportError` says that the graph cannot be captured, or computes something else than the module.
    """
    state = _sorted(module.state_dict())
    arguments = example_inputs(inputs)
    shapes: Any = (dict.fromkeys(state), _dynamic_shapes(inputs))
    with quiet_export():
        exported = torch.export.export(_OverState(module), (state, arguments), dynamic_shapes=shapes)
        # torch would pickle the example inputs, which hold the weights.
        exported.example_inputs = None
        buffer = io.BytesIO()
        torch.export.save(exported, buffer)
    parameters = tuple(name for name, _ in module.named_parameters(remove_duplicate=False))
    program = Program(buffer.getvalue(), parameters)
    check_archive(program.archive)
    _compare(module, program(**state), example_inputs(inputs, rows=_EXAMPLE_ROWS + 2, longest=_EXAMPLE_LONGEST + 2))
    return program


def export_whole(module: nn.Module, inputs: Inputs) -> bytes:
    """Returns the `.pt2` archive of a module on the CPU with its weights, whose program takes the inputs only."""
    with quiet_export():
        buffer = io.BytesIO()
        torch.export.save(exported_whole(module, inputs), buffer)
    return buffer.getvalue()


def exported_whole(module: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """Returns the program of a module on the CPU, which takes any number of rows of the inputs."""
    arguments = example_inputs(inputs)
    shapes: Any = _dynamic_shapes(inputs)
    with quiet_export():
        parameters = inspect.signature(module.forward).parameters.values()
        # torch takes the shapes of `*inputs` as those of one parameter.
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            shapes = (shapes,)
        return torch.export.export(module, arguments, dynamic_shapes=shapes)


def example_inputs(
    inputs: Inputs, rows: int = _EXAMPLE_ROWS, longest: int = _EXAMPLE_LONGEST
) -> tuple[torch.Tensor, ...]:
    """Returns example arguments of `forward` for `rows` rows; padded rows have the length `longest`.

    An `ExportError` refuses jagged and sparse inputs, which `torch.export` cannot capture.
    """
    arguments: list[torch.Tensor] = []
    for spec in inputs:
        if spec.layout in ("jagged", "sparse_csr"):
            subject = f"column {spec.column!r}" if isinstance(spec, TensorSpec) else spec.name
            raise ExportError(f"{subject} is {spec.layout}, and no graph can take that")
        is_padded = spec.layout == "padded"
        shape = (rows, longest, *spec.shape) if is_padded else (rows, *spec.shape)
        dtype = getattr(torch, spec.dtype)
        generator = torch.Generator().manual_seed(rows)
        if dtype.is_floating_point:
            arguments.append(torch.randn(shape, generator=generator, dtype=dtype))
        elif dtype == torch.bool:  # A mask says that all positions hold data.
            arguments.append(torch.ones(shape, dtype=dtype))
        else:  # Integers may be indices, of which 0 is always one.
            arguments.append(torch.zeros(shape, dtype=dtype))
        if is_padded:
            # The rows differ in length.
            arguments.append(torch.arange(longest) <= torch.arange(rows)[:, None] % longest)
    return tuple(arguments)


def _dynamic_shapes(inputs: Inputs) -> tuple[Any, ...]:
    """Returns shapes for `torch.export` with any number of rows, and any length of padded rows."""
    dynamic = torch.export.Dim.DYNAMIC
    shapes: list[Any] = []
    for spec in inputs:
        if isinstance(spec, ArgumentSpec):
            # `preprocess` makes the argument, whose other axes may vary, too.
            shapes.append({0: dynamic, **dict.fromkeys(range(1, len(spec.shape) + 1), torch.export.Dim.AUTO)})
        elif spec.layout == "padded":
            shapes += [{0: dynamic, 1: dynamic}] * 2  # The mask has the same axes.
        else:
            shapes.append({0: dynamic})
    return tuple(shapes)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Lets one thread export at a time, raises failures as `ExportError`, and suppresses reports that torch prints."""
    try:
        with _lock, quiet("torch"), redirect_stderr(io.StringIO()), torch.no_grad():
            yield
    except Exception as error:  # torch.export raises whatever its passes raise.
        raise ExportError(str(error).strip().partition("\n")[0]) from error


def check_archive(archive: bytes) -> None:
    """Refuses an archive that is more than a graph of torch's own operators, before torch unpickles or evaluates it."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as records:
            problems = [_problem_in(record.filename, records.read(record)) for record in records.infolist()]
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, AttributeError) as error:
        problems = [f"the archive cannot be read: {error}"]
    for problem in problems:
        if problem:
            raise ExportError(problem)


def _problem_in(path: str, content: bytes) -> str:
    """Returns why a record is refused: torch would unpickle it, or evaluate its strings; empty if it is not."""
    folder, _, name = path.rpartition("/")
    if name.endswith("_config.json"):
        for entry in json.loads(content)["config"].values():
            if entry["use_pickle"] or not entry["path_name"].startswith(("tensor_", "weight_")):
                return f"{path} names pickled objects"
    elif folder.endswith("/models") or folder == "models":
        for key, text in _strings(json.loads(content)):
            allowed = {"target": _OPERATORS, "expr_str": _EXPRESSION, "guards_code": _GUARD}.get(key)
            if allowed is not None and not re.fullmatch(allowed, text):
                return f"{path} holds the {key} {text!r}"
    elif content and name not in _TEXT_RECORDS and not name.startswith(("tensor_", "weight_")):
        return f"{path} would be unpickled"
    return ""


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields every string in a JSON value, with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _strings(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)


def _sorted(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights sorted by name, which is the order in which a program expects them."""
    return {name: state[name].detach() for name in sorted(state)}


def _compare(module: nn.Module, exported: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Refuses a graph that does not compute the same as the module."""
    with torch.inference_mode():
        try:
            torch.testing.assert_close(exported(*inputs), module(*inputs), rtol=1e-4, atol=1e-5)
        except (AssertionError, RuntimeError) as error:
            raise ExportError(f"the graph differs from the module: {error}") from error


def _graph_on(program: Program, device: torch.device) -> Any:
    """Returns the graph of a program, captured on the CPU, as a function that computes on a device."""
    with quiet_export():
        exported = torch.export.load(io.BytesIO(program.archive))
        return (exported if device.type == "cpu" else move_to_device_pass(exported, device)).module()


class _OverState(nn.Module):
    """A module as a function of its weights and its inputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # The list hides the module from nn.Module: its weights are an argument.
        self._module = [module]

    def forward(self, state: dict[str, torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> Any:
        return torch.func.functional_call(self._module[0], state, inputs, tie_weights=False)


class _ExportedModule(nn.Module):
    """A program with its weights, under their names in the original module."""

    def __init__(self, program: Program, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._program = program
        self._device = torch.device("cpu")
        # The list hides the graph from nn.Module: its weights are an argument.
        self._graph = [_graph_on(program, self._device)]
        for name, value in state.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if name in program.parameters:
                owner.register_parameter(leaf, nn.Parameter(value))
            else:
                owner.register_buffer(leaf, value)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._graph[0](_sorted(self.state_dict()), inputs)

    def _apply(self, fn: Any, recurse: bool = True) -> _ExportedModule:
        """Moves the graph with the weights, because it names devices, and holds tensors that are no weights."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0, device=self._device)).device
        if device != self._device:
            self._graph = [_graph_on(self._program, device)]
            self._device = device
        return self

    def train(self, mode: bool = True) -> _ExportedModule:
        """Refuses training mode: the graph is that of evaluation mode."""
        if mode:
            raise ModuleError(
                "this module was loaded from its exported graph, which is that of evaluation mode",
                hint="to train on, make the module from its class and load_state_dict() these weights",
            )
        return super().train(mode)

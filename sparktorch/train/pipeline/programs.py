"""What each stage of a pipeline computes, and the module that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from sparktorch.errors import ModuleError
from sparktorch.train.pipeline.layers import Call, Modes
from sparktorch.train.pipeline.recording import Recording
from sparktorch.train.pipeline.stages import free_nodes, is_value, stages_of_nodes

__all__ = ["Program", "Stage", "programs"]


@dataclass(frozen=True)
class Program:
    """What a stage computes.

    Attributes:
        run: Computes it, of the stage, the values that it receives, and the inputs of the module.
        modes: The modes of torch in which it does, but for calls and operators in modes of their own.
        received: Shape and dtype of each value that it receives, and whether it requires gradients, without values.
        returned: The same of each value that it returns: what the next stage receives, or the module's outputs.
        calls: Its calls of layers, and the modes of each.
        operators: The operators in modes of their own.
        constants: Its constant tensors.
    """

    run: Callable[..., Any]
    modes: Modes
    received: list[torch.Tensor]
    returned: list[torch.Tensor]
    calls: list[tuple[Call, Modes]]
    operators: list[tuple[Callable[..., Any], Modes]]
    constants: list[torch.Tensor]


def programs(recording: Recording, stages: Mapping[str, int], count: int) -> list[Program]:
    """Returns the programs of all stages.

    Raises:
        ModuleError: What every stage computes for itself is changed in place.
    """
    stage_of, free = stages_of_nodes(recording, stages), free_nodes(recording)
    _check_in_place(recording, free)
    final = [value for value in recording.outputs if isinstance(value, fx.Node)]
    # The values that cross into each stage, in the order in which they are made.
    crossing: list[list[fx.Node]] = [[] for _ in range(count + 1)]
    for node in recording.nodes:
        if node in free or not is_value(node):
            continue
        last = max((stage_of[user] for user in node.users if user in stage_of), default=0)
        last = count - 1 if node in final else last
        for stage in range(stage_of[node] + 1, last + 1):
            crossing[stage].append(node)
    found = []
    for stage in range(count):
        own = [node for node in recording.nodes if stage_of[node] == stage and node not in free]
        ends = final if stage == count - 1 else crossing[stage + 1]
        found.append(_program(recording, own, free, crossing[stage], ends))
    return found


def _check_in_place(recording: Recording, free: set[fx.Node]) -> None:
    """Refuses operators that change in place what every stage computes for itself with what one stage has."""
    for node in recording.nodes:
        schema = getattr(node.target, "_schema", None)
        if node in free or schema is None or node in recording.calls:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, fx.Node) and (value in free or value in recording.tensors):
                raise ModuleError(
                    f"the forward pass changes in place, by {schema.name}, what does not come from its layers",
                    hint="make a new tensor instead, as by + instead of +=",
                    param="module",
                )


def _program(
    recording: Recording, own: list[fx.Node], free: set[fx.Node], received: list[fx.Node], ends: list[fx.Node]
) -> Program:
    code = _Code(recording, received)
    for node in filter(free.__contains__, recording.nodes):  # also unused ones: they may change another in place
        code.value(node)
    for node in own:
        code.add(node)
    code.graph.output(tuple(code.value(node) for node in ends))
    run = fx.GraphModule({}, code.graph).forward  # torch generates it
    kept = code.calls, code.operators, code.constants
    return Program(run, recording.modes, _without_values(received), _without_values(ends), *kept)


class _Code:
    """The graph of a program while it is made; what it cannot hold, it asks the stage for, which is its first input."""

    def __init__(self, recording: Recording, received: Sequence[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.calls: list[tuple[Call, Modes]] = []
        self.operators: list[tuple[Callable[..., Any], Modes]] = []
        self.constants: list[torch.Tensor] = []
        self._recording, self._stage = recording, self.graph.placeholder("stage")
        self._made = {node: self.graph.placeholder(f"received_{number}") for number, node in enumerate(received)}
        for number, node in enumerate(recording.inputs):
            self._made[node] = self.graph.placeholder(f"input_{number}")

    def value(self, node: fx.Node) -> fx.Node:
        """Returns what a node of the recording is here; adds a parameter, or what inputs alone decide."""
        if node not in self._made:
            if node in self._recording.constants:
                self._made[node] = self._of_stage("constant", len(self.constants))
                self.constants.append(self._recording.constants[node])
            elif node in self._recording.tensors:
                self._made[node] = self._of_stage("read", self._recording.tensors[node])
            else:
                self.add(node)
        return self._made[node]

    def add(self, node: fx.Node) -> None:
        """Adds what computes a node of the recording."""
        modes = node.meta["modes"]
        if node in self._recording.calls:
            arguments: Any = node.args[1]
            found = self._of_stage("call", len(self.calls), [self.value(each) for each in arguments])
            self.calls.append((self._recording.calls[node], modes))
        elif modes == self._recording.modes:
            found = self.graph.node_copy(node, self.value)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
            found = self._of_stage("operate", len(self.operators), *args, **kwargs)
            self.operators.append((cast(Callable[..., Any], node.target), modes))
        self._made[node] = found

    def _of_stage(self, method: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_method(method, (self._stage, *args), kwargs)


def _without_values(nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    found = [torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta") for node in nodes]
    return [each.requires_grad_(node.meta["requires_grad"]) for each, node in zip(found, nodes, strict=True)]


class Stage(nn.Module):
    """A stage: its layers, and its parameters between layers.

    Attributes:
        layers: Its layers, which are those of the module.
        between: Its parameters between layers.
        program: What it computes now.
    """

    program: Program

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        """Takes the layers and parameters of these names out of a module, which keeps them."""
        super().__init__()
        parts = dict(module.named_modules(remove_duplicate=False))
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self._module = (module,)  # not as a part of this one
        self._places = {name: place for place, name in enumerate(name for name in names if name in parts)}
        self.layers = nn.ModuleList(parts[name] for name in self._places)
        self._between = {name: f"p{place}" for place, name in enumerate(name for name in names if name in parameters)}
        self.between = nn.ParameterDict({own: parameters[name] for name, own in self._between.items()})

    def give_back(self) -> None:
        """Puts the parameters between layers, which sharding has replaced, into the module again."""
        for name, own in self._between.items():
            path, _, last = name.rpartition(".")
            self._module[0].get_submodule(path)._parameters[last] = self.between[own]

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Computes what the program says of the values that it receives and the module's inputs.

        Raises:
            ModuleError: A layer computes something of another shape or dtype than when it was recorded.
        """
        # What a stage receives is a leaf, or a view of FSDP's, which nothing may change in place.
        values = [value.clone() if value.requires_grad else value for value in received]
        with self.program.modes.entered():
            returned = self.program.run(self, *values, *inputs.values())
        for value, expected in zip(returned, self.program.returned, strict=True):
            if value.shape != expected.shape or value.dtype != expected.dtype:
                raise ModuleError(
                    f"a stage of the pipeline computes {_described(value)}, and {_described(expected)} when its "
                    "forward pass was recorded",
                    hint="its layers must return the same shapes and dtypes each time, or divide the module with "
                    "strategyParams.shard",
                    param="module",
                )
        return tuple(_to_send(v, expected) for v, expected in zip(returned, self.program.returned, strict=True))

    def call(self, number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Calls a layer; one without tensors is that of the module."""
        call, modes = self.program.calls[number]
        place = self._places.get(call.layer)
        part = self._module[0].get_submodule(call.layer) if place is None else self.layers[place]
        with modes.entered():
            return call(part, tensors)

    def operate(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """Applies an operator in modes of its own."""
        operator, modes = self.program.operators[number]
        with modes.entered():
            return operator(*args, **kwargs)

    def constant(self, number: int) -> torch.Tensor:
        """Returns a constant tensor."""
        return self.program.constants[number]

    def read(self, name: str) -> torch.Tensor:
        """Returns a parameter between layers, or a buffer."""
        if name in self._between:
            found: torch.Tensor = self.between[self._between[name]]
            return found
        return self._module[0].get_buffer(name)


def _to_send(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns a value as it is sent: contiguous, with gradients if later stages have any, and no view: FSDP warns."""
    value = value if expected.requires_grad else value.detach()
    return value.clone(memory_format=torch.contiguous_format) if value._is_view() else value.contiguous()


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"

"""What each stage of a pipeline computes, as a graph, and the module that computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from sparktorch.errors import ModuleError
from sparktorch.train.pipeline.layers import Call
from sparktorch.train.pipeline.recording import Recording
from sparktorch.train.pipeline.stages import free_nodes, is_value, stages_of_nodes

__all__ = ["Program", "Stage", "programs"]


@dataclass(frozen=True)
class Program:
    """What a stage computes.

    Attributes:
        graph: Its graph; its placeholders are the values that it receives, then the inputs of the module.
        received: Shape and dtype of each value that it receives, and whether it requires gradients, without values.
        returned: The same of each value that it returns: what the next stage receives, or the module's outputs.
        calls: Its calls of layers.
        constants: Its constant tensors.
    """

    graph: fx.GraphModule
    received: list[torch.Tensor]
    returned: list[torch.Tensor]
    calls: list[Call]
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
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    calls: list[Call] = []
    constants: list[torch.Tensor] = []
    for number, node in enumerate(received):
        made[node] = graph.placeholder(f"received_{number}")
    for number, node in enumerate(recording.inputs):
        made[node] = graph.placeholder(f"input_{number}")

    def value(node: fx.Node) -> fx.Node:
        if node not in made:  # a parameter, or what inputs alone decide
            if node in recording.constants:
                made[node] = graph.call_function(_constant, (len(constants),))
                constants.append(recording.constants[node])
            elif node in recording.tensors:
                made[node] = graph.call_function(_read, (recording.tensors[node],))
            else:
                made[node] = graph.node_copy(node, value)
        return made[node]

    for node in filter(free.__contains__, recording.nodes):  # also unused ones: they may change another in place
        value(node)
    for node in own:
        if node in recording.calls:
            calls.append(recording.calls[node])
            arguments: Any = node.args[1]
            made[node] = graph.call_function(_call, (len(calls) - 1, [value(each) for each in arguments]))
            made[node].meta = node.meta
        else:
            made[node] = graph.node_copy(node, value)
    graph.output(tuple(value(node) for node in ends))
    module = fx.GraphModule({}, graph)
    return Program(module, _without_values(received), _without_values(ends), calls, constants)


def _without_values(nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    found = [torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta") for node in nodes]
    return [each.requires_grad_(node.meta["requires_grad"]) for each, node in zip(found, nodes, strict=True)]


def _call(number: int, tensors: list[torch.Tensor]) -> Any:
    raise AssertionError("a stage calls the layer")


def _read(name: str) -> Any:
    raise AssertionError("a stage reads the tensor")


def _constant(number: int) -> Any:
    raise AssertionError("a stage has the tensor")


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
        returned = _Running(self, self.program).run(*values, *inputs.values())
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

    def call(self, call: Call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Calls a layer; one without tensors is that of the module."""
        place = self._places.get(call.layer)
        return call(self._module[0].get_submodule(call.layer) if place is None else self.layers[place], tensors)

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


class _Running(fx.Interpreter):
    """Runs a program in a stage."""

    def __init__(self, stage: Stage, program: Program) -> None:
        super().__init__(program.graph)
        self._stage, self._program = stage, program

    def run_node(self, n: fx.Node) -> Any:
        with n.meta["modes"].entered() if "modes" in n.meta else nullcontext():
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _call:
            return self._stage.call(self._program.calls[args[0]], args[1])
        if target is _read:
            return self._stage.read(args[0])
        if target is _constant:
            return self._program.constants[args[0]]
        return super().call_function(target, args, kwargs)

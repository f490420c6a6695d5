"""What each stage of a pipeline computes, and the module that computes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import fx, nn

from sparktorch.errors import ModuleError
from sparktorch.train.pipeline.in_place import needs_gradient
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
        ModuleError: A parameter is changed in place, or a value that stages receive in several views.
    """
    stage_of, free = stages_of_nodes(recording, stages), free_nodes(recording)
    _check_parameters(recording)
    final = [value for value in recording.outputs if isinstance(value, fx.Node)]
    crossing = [*_crossing(recording, stage_of, free, count), final]
    _check_crossing(recording, stage_of, crossing)
    order = {node: place for place, node in enumerate(recording.nodes)}
    starts = [sum(own < stage for own in stage_of.values()) for stage in range(count + 1)]
    met = [
        [_without_values(node, gradient=needs_gradient(node, order, start, final)) for node in nodes]
        for nodes, start in zip(crossing, starts, strict=True)
    ]
    found = []
    for stage in range(count):
        nodes = [node for node in recording.nodes if node in free or stage_of[node] == stage]
        code = _Code(recording, nodes, list(zip(crossing[stage], met[stage], strict=True)))
        for node in nodes:  # also unused ones: they may change another in place
            code.add(node)
        code.graph.output(tuple(code.value(node) for node in crossing[stage + 1]))
        run = fx.GraphModule({}, code.graph).forward  # torch generates it
        kept = code.calls, code.operators, code.constants
        found.append(Program(run, recording.modes, met[stage], met[stage + 1], *kept))
    return found


def _crossing(
    recording: Recording, stage_of: Mapping[fx.Node, int], free: Collection[fx.Node], count: int
) -> list[list[fx.Node]]:
    """Returns the values that cross into each stage, in the order in which they are made."""
    found: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in (*recording.inputs, *recording.nodes):
        if node in free or not is_value(node):
            continue
        last = max((stage_of[user] for user in node.users if user in stage_of), default=0)
        last = count - 1 if node in recording.outputs else last
        for stage in range(stage_of.get(node, 0) + 1, last + 1):
            found[stage].append(node)
    return found


def _check_parameters(recording: Recording) -> None:
    """Refuses to change parameters in place."""
    kept = {memory: name for node, name in recording.tensors.items() for memory in node.meta["memory"]}
    for node in recording.nodes:
        for memory in node.meta["writes"] & kept.keys():
            raise ModuleError(
                f"the forward pass changes {kept[memory]!r} in place, by {node.name}",
                hint="make a new tensor instead, as by + instead of +=",
                param="module",
            )


def _check_crossing(
    recording: Recording, stage_of: Mapping[fx.Node, int], crossing: Sequence[Sequence[fx.Node]]
) -> None:
    """Refuses to change a value in place of which a stage has received several views: each is a copy."""
    for node in recording.nodes:
        for received, memory in product(crossing[: stage_of[node] + 1], node.meta["writes"]):
            views = sum(memory in value.meta["memory"] for value in received)
            if views > 1:
                raise ModuleError(
                    f"the forward pass changes in place, by {node.name} in stage {stage_of[node]} of the pipeline, one "
                    f"of {views} views of a value that earlier stages have computed",
                    hint="make a new tensor instead, as by torch.cat or by + instead of +=, or name other layers in "
                    "strategyParams.split",
                    param="module",
                )


class _Code:
    """The graph of a program while it is made; what it cannot hold, it asks the stage for, which is its first input."""

    def __init__(
        self, recording: Recording, nodes: Sequence[fx.Node], received: Sequence[tuple[fx.Node, torch.Tensor]]
    ) -> None:
        self.graph = fx.Graph()
        self.calls: list[tuple[Call, Modes]] = []
        self.operators: list[tuple[Callable[..., Any], Modes]] = []
        self.constants: list[torch.Tensor] = []
        self._recording, self._stage = recording, self.graph.placeholder("stage")
        values = {node: self.graph.placeholder(f"received_{number}") for number, (node, _) in enumerate(received)}
        inputs = {node: self.graph.placeholder(f"input_{number}") for number, node in enumerate(recording.inputs)}
        self._made = inputs | values
        written = {memory for node in nodes for memory in node.meta["writes"]}
        cloned = {node for node, value in received if value.requires_grad}  # by the stage
        for node, _ in received if written else ():  # what is a copy of a value in its layout may be a view in another
            value = node.meta["val"]
            if not value.is_contiguous():
                self._made[node] = self.graph.call_function(_laid_out, (values[node], value.stride()))
                cloned.add(node)
        for node in list(self._made):
            if (
                node not in cloned and node.meta["memory"] & written
            ):  # it is the schedule's, for this micro-batch or for all of them
                self._made[node] = self.graph.call_method("clone", (self._made[node],))

    def value(self, node: fx.Node) -> fx.Node:
        """Returns what a node of the recording is here; adds a parameter, a buffer or a constant."""
        if node not in self._made:
            if node in self._recording.constants:
                self._made[node] = self._of_stage("constant", len(self.constants))
                self.constants.append(self._recording.constants[node])
            else:
                self._made[node] = self._of_stage("read", self._recording.tensors[node])
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


def _without_values(node: fx.Node, *, gradient: bool) -> torch.Tensor:
    value = node.meta["val"]
    return torch.empty(value.shape, dtype=value.dtype, device="meta").requires_grad_(gradient)


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
        self._frozen = {name for name in self._between if not parameters[name].requires_grad}

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
            found = call(part, tensors)
        _check_result(call, found)
        return found

    def operate(self, number: int, /, *args: Any, **kwargs: Any) -> Any:
        """Applies an operator in modes of its own."""
        operator, modes = self.program.operators[number]
        with modes.entered():
            return operator(*args, **kwargs)

    def constant(self, number: int) -> torch.Tensor:
        """Returns a constant tensor."""
        return self.program.constants[number]

    def read(self, name: str) -> torch.Tensor:
        """Returns a parameter between layers, or a buffer.

        Raises:
            ModuleError: A frozen parameter has begun to train.
        """
        if name in self._between:
            found: torch.Tensor = self.between[self._between[name]]
            if found.requires_grad and name in self._frozen:
                raise _unfrozen(f"parameter {name!r}")
            return found
        return self._module[0].get_buffer(name)


def _check_result(call: Call, found: Sequence[torch.Tensor]) -> None:
    """Refuses what a layer has returned without values, or with gradients that nobody would pass on."""
    if any(value.is_meta or hasattr(value, "fake_mode") for value in found):
        raise ModuleError(
            f"layer {call.layer!r} computes with a tensor without values: it keeps some outside the module, from when "
            "its forward pass was recorded",
            hint="keep it in a buffer, or make it in each call",
            param="module",
        )
    if len(found) != len(call.result_gradients):
        raise ModuleError(
            f"layer {call.layer!r} returns {len(found)} tensors, and {len(call.result_gradients)} when its forward "
            "pass was recorded",
            hint="return as many each time, or divide the module with strategyParams.shard",
            param="module",
        )
    if any(value.requires_grad and not before for value, before in zip(found, call.result_gradients, strict=True)):
        raise _unfrozen(f"what layer {call.layer!r} returns")


def _unfrozen(what: str) -> ModuleError:
    return ModuleError(
        f"{what} requires gradients, and did not when the forward pass was recorded",
        hint="do not freeze it before the training, or divide the module with strategyParams.shard",
        param="module",
    )


def _laid_out(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Returns a copy with other strides; those of an expanded value are 0, along which all is the same."""
    once = [size if step else min(1, size) for size, step in zip(value.shape, stride, strict=True)]
    part = value[tuple(slice(size) for size in once)]
    return torch.empty_strided(once, stride, dtype=value.dtype, device=value.device).copy_(part).expand(value.shape)


def _to_send(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns a value as it is sent: contiguous, with gradients if later stages have any, and no view: FSDP warns."""
    value = value if expected.requires_grad else value.detach()
    return value.clone(memory_format=torch.contiguous_format) if value._is_view() else value.contiguous()


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor of shape {tuple(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"

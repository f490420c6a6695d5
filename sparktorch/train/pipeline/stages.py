"""Cuts a recorded forward pass into stages, and makes each a module that computes its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from sparktorch.errors import ConfigError, ModuleError, nearest
from sparktorch.train.pipeline.recording import Call, Recording

__all__ = ["Program", "Stage", "cut", "layers_of", "programs"]

_PARAM = "strategyParams"
_WHOLE = (nn.MultiheadAttention, nn.RNNBase)  # they read the weights of their parts without calling them
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # nobody calls them


def layers_of(module: nn.Module, stages: int, split: Sequence[str] = ()) -> list[str]:
    """Returns the names of the parts that stages call as they are, in order of definition.

    A part is called as it is unless it holds more than half a stage's share of the parameters, or a layer of `split`.
    """
    most = sum(p.numel() for p in module.parameters()) / (2 * stages)
    found: list[str] = []

    def visit(path: str, part: nn.Module) -> None:
        for name, child in part.named_children():
            here = f"{path}{name}"
            size = sum(p.numel() for p in child.parameters())
            within = any(layer.startswith(f"{here}.") for layer in split)
            whole = isinstance(child, _WHOLE) or parametrize.is_parametrized(child)
            opens = size > most and here not in split and not whole
            if isinstance(child, _CONTAINERS) or within or (opens and list(child.children())):
                visit(f"{here}.", child)
            else:
                found.append(here)

    visit("", module)
    return found


def cut(recording: Recording, module: nn.Module, stages: int, split: Sequence[str] = ()) -> dict[str, int]:
    """Returns the stage of each layer that is called, and of each parameter that is used between layers.

    Without `split`, the stage with the most work has as little as possible, where a layer's work is its share of the
    operations of a forward pass and its share of the parameters; a cut lies where the fewest values cross it.

    Args:
        recording: A forward pass.
        module: The module that was recorded.
        stages: Number of stages.
        split: Names of the layers that stages begin with, but for the first.

    Raises:
        ConfigError: There are not as many layers, or `split` does not fit.
        ModuleError: A parameter would be in several stages.
    """
    calls = [node for node in recording.nodes if node in recording.calls]
    names = [recording.calls[node].layer for node in calls]
    starts = _given(names, split, stages) if split else _balanced(recording, module, calls, stages)
    found: dict[str, int] = {}
    for index, name in enumerate(names):
        stage = sum(start <= index for start in starts)
        if found.setdefault(name, stage) != stage:
            raise ModuleError(
                f"{name!r} is called in stages {found[name]} and {stage} of the pipeline",
                hint="name the layers that stages begin with in strategyParams.split, so that one stage has all its "
                "calls",
                param=_PARAM,
            )
    stage_of = _stages_of_nodes(recording, found)
    between: dict[str, set[int]] = {}
    for node, name in recording.tensors.items():
        if name in recording.parameters:
            between.setdefault(name, set()).update(stage_of[user] for user in node.users)
    for name, users in between.items():
        if len(users) > 1:
            raise ModuleError(
                f"parameter {name!r} is used in stages {sorted(users)} of the pipeline",
                hint="name other layers in strategyParams.split, or divide the module with strategyParams.shard",
                param=_PARAM,
            )
        found[name] = min(users)
    if {stage for _, stage, parameter in _held(module, found) if parameter.requires_grad} != set(range(stages)):
        raise ConfigError(
            f"strategyParams.pipeline makes {stages} stages, and not every one has a layer to train: {_shown(found)}",
            hint="name the layers that stages begin with in strategyParams.split, make fewer stages, or freeze less",
            param=_PARAM,
        )
    return found


def _given(names: list[str], split: Sequence[str], stages: int) -> list[int]:
    """Returns the index of the first call of each stage but the first."""
    if len(split) != stages - 1:
        raise ConfigError(
            f"strategyParams.split names {len(split)} layers, and {stages} stages begin with {stages - 1} besides the "
            "first",
            hint="name one layer for each stage but the first",
            param=_PARAM,
        )
    starts = []
    for layer in split:
        found = [i for i, name in enumerate(names) if name == layer or name.startswith(f"{layer}.")]
        if not found:
            raise ConfigError(
                f"strategyParams.split: the forward pass calls no layer {layer!r}",
                hint=nearest(layer, dict.fromkeys(names)),
                param=_PARAM,
            )
        starts.append(found[0])
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise ConfigError(
            f"strategyParams.split names {', '.join(map(repr, split))}, which are not called in this order after "
            f"{names[0]!r}",
            hint="name them in the order in which the forward pass calls them",
            param=_PARAM,
        )
    return starts


def _balanced(recording: Recording, module: nn.Module, calls: list[fx.Node], stages: int) -> list[int]:
    """Returns the index of the first call of each stage but the first, for stages with equal work."""
    seen: set[int] = set()
    sizes = []
    for node in calls:
        part = module.get_submodule(recording.calls[node].layer)
        sizes.append(sum(p.numel() for p in part.parameters() if id(p) not in seen))
        seen.update(map(id, part.parameters()))
    work = [recording.calls[node].work for node in calls]
    costs = [size / max(sum(sizes), 1) + each / max(sum(work), 1) for size, each in zip(sizes, work, strict=True)]
    if sum(size > 0 for size in sizes) < stages:
        raise ConfigError(
            f"strategyParams.pipeline makes {stages} stages, and the module has {sum(size > 0 for size in sizes)} "
            "layers with parameters that can be told apart",
            hint="make fewer stages, or name the layers that stages begin with in strategyParams.split",
            param=_PARAM,
        )
    order = {node: index for index, node in enumerate(recording.nodes)}
    crossing = [0] + [len(_live(recording, order[node])) for node in calls[1:]]
    # best[k][j]: the largest cost of k + 1 stages of the first j calls, then the values that cross their ends
    totals = list(accumulate(costs, initial=0.0))
    layers = list(accumulate((size > 0 for size in sizes), initial=0))
    best: list[dict[int, tuple[float, int, list[int]]]] = [
        {end: (totals[end], 0, []) for end in range(1, len(calls) + 1) if layers[end]}
    ]
    for _ in range(1, stages):
        row: dict[int, tuple[float, int, list[int]]] = {}
        for end in range(1, len(calls) + 1):
            ways = [
                (max(round(most, 9), round(totals[end] - totals[start], 9)), values + crossing[start], [*cuts, start])
                for start, (most, values, cuts) in best[-1].items()
                if start < end and layers[end] > layers[start]
            ]
            if ways:
                row[end] = min(ways)
        best.append(row)
    return best[-1][len(calls)][2]


def _live(recording: Recording, index: int) -> list[fx.Node]:
    """Returns the values made before a node that it or later ones use, but for what inputs alone decide."""
    first, later = recording.nodes[:index], set(recording.nodes[index:])
    free = _free(recording)
    kept = {value for value in recording.outputs if isinstance(value, fx.Node)}
    return [
        node for node in first if node not in free and _is_value(node) and (node in kept or later & set(node.users))
    ]


def _is_value(node: fx.Node) -> bool:
    """Whether a node is a tensor; what a layer returns is a list of them."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _free(recording: Recording) -> set[fx.Node]:
    """Returns the nodes that inputs alone decide, such as masks, which every stage computes for itself."""
    buffers = {node for node, name in recording.tensors.items() if name not in recording.parameters}
    free = {*recording.inputs, *buffers, *recording.constants}
    for node in recording.nodes:
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node not in recording.calls and not seeded and all(source in free for source in node.all_input_nodes):
            free.add(node)
    return free


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


def _stages_of_nodes(recording: Recording, stages: Mapping[str, int]) -> dict[fx.Node, int]:
    """Returns the stage of each node: that of the last layer that was called before it.

    Raises:
        ModuleError: Layers are not called in the order of the stages.
    """
    found, current = {}, 0
    for node in recording.nodes:
        if node in recording.calls:
            name = recording.calls[node].layer
            if stages[name] < current:
                raise ModuleError(
                    f"the forward pass calls {name!r} of stage {stages[name]} after layers of stage {current}, other "
                    "than when it was cut",
                    hint="it must call the same layers in the same order each time, or be divided with "
                    "strategyParams.shard",
                    param="module",
                )
            current = stages[name]
        found[node] = current
    return found


def _held(module: nn.Module, stages: Mapping[str, int]) -> list[tuple[str, int, nn.Parameter]]:
    """Returns the parameters of the stages.

    Raises:
        ModuleError: One is in several stages.
    """
    owners: dict[int, tuple[str, int]] = {}
    found = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parts = name.split(".")
        paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        for stage in {stages[path] for path in paths if path in stages}:
            first, other = owners.setdefault(id(parameter), (name, stage))
            if other != stage and first == name:
                raise ModuleError(
                    f"parameter {name!r} is used in stages {other} and {stage} of the pipeline",
                    hint="name other layers in strategyParams.split, or divide the module with strategyParams.shard",
                    param=_PARAM,
                )
            if other != stage:
                raise ModuleError(
                    f"{first!r} of stage {other} and {name!r} of stage {stage} of the pipeline are one parameter",
                    hint="untie them, or divide the module with strategyParams.shard",
                    param=_PARAM,
                )
            found.append((name, stage, parameter))
    return found


def _shown(stages: Mapping[str, int]) -> str:
    groups: dict[int, list[str]] = {}
    for name, stage in stages.items():
        groups.setdefault(stage, []).append(name)
    return "; ".join(f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0] for names in groups.values())


@dataclass(frozen=True)
class Program:
    """What a stage computes.

    Attributes:
        graph: Its graph; its placeholders are the values that it receives, then the inputs of the module.
        received: Shape and dtype of each value that it receives, as fake tensors.
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
        ModuleError: A value that is no floating-point number, and that layers decide, crosses from a stage to another.
    """
    stage_of, free = _stages_of_nodes(recording, stages), _free(recording)
    _check_in_place(recording, free)
    final = [value for value in recording.outputs if isinstance(value, fx.Node)]
    # The values that cross into each stage, in the order in which they are made.
    crossing: list[list[fx.Node]] = [[] for _ in range(count + 1)]
    for node in recording.nodes:
        if node in free or not _is_value(node):
            continue
        last = max((stage_of[user] for user in node.users if user in stage_of), default=0)
        last = count - 1 if node in final else last
        for stage in range(stage_of[node] + 1, last + 1):
            crossing[stage].append(node)
        value = node.meta["val"]
        if last > stage_of[node] and not value.is_floating_point():
            raise ModuleError(
                f"a tensor of dtype {str(value.dtype).removeprefix('torch.')} that stage {stage_of[node]} computes is "
                f"used by stage {last}, and stages pass on floating-point numbers only",
                hint="choose other layers in strategyParams.split",
                param=_PARAM,
            )
    found = []
    for stage in range(count):
        own = [node for node in recording.nodes if stage_of[node] == stage and node not in free]
        ends = final if stage == count - 1 else crossing[stage + 1]
        found.append(_program(recording, own, free, crossing[stage], ends))
    return found


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

    for node in recording.nodes:  # also those that nobody uses: they may change another in place
        if node in free:
            value(node)
    for node in own:
        if node in recording.calls:
            calls.append(recording.calls[node])
            arguments: Any = node.args[1]
            made[node] = graph.call_function(_call, (len(calls) - 1, [value(each) for each in arguments]))
        else:
            made[node] = graph.node_copy(node, value)
    graph.output(tuple(value(node) for node in ends))
    metas = [[node.meta["val"] for node in nodes] for nodes in (received, ends)]
    return Program(fx.GraphModule({}, graph), metas[0], metas[1], calls, constants)


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
        parts, parameters = dict(module.named_modules()), dict(module.named_parameters(remove_duplicate=False))
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
        """Computes what the program says of the values that it receives and the module's inputs."""
        # What a stage receives is a leaf, or a view of FSDP's, which nothing may change in place.
        values = [value.clone() if value.requires_grad else value for value in received]
        return _Running(self, self.program).run(*values, *inputs.values())

    def call(self, call: Call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Calls a layer."""
        with call.context():
            return call(self.layers[self._places[call.layer]], tensors)

    def read(self, name: str) -> torch.Tensor:
        """Returns a parameter between layers, or a buffer."""
        if name in self._between:
            found: torch.Tensor = self.between[self._between[name]]
            return found
        return self._module[0].get_buffer(name)


class _Running(fx.Interpreter):
    """Runs a program in a stage."""

    def __init__(self, stage: Stage, program: Program) -> None:
        super().__init__(program.graph)
        self._stage, self._program = stage, program

    def run_node(self, n: fx.Node) -> Any:
        with nullcontext() if n.meta.get("gradients", True) else torch.no_grad():
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _call:
            return self._stage.call(self._program.calls[args[0]], args[1])
        if target is _read:
            return self._stage.read(args[0])
        if target is _constant:
            return self._program.constants[args[0]]
        return super().call_function(target, args, kwargs)

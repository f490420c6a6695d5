"""Cuts a recorded forward pass into stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from sparktorch.errors import ConfigError, ModuleError, nearest
from sparktorch.train.pipeline.recording import Recording

__all__ = ["add_evaluated", "cut", "free_nodes", "is_value", "layers_of", "stages_of_nodes"]

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


def cut(
    recording: Recording,
    module: nn.Module,
    stages: int,
    split: Sequence[str] = (),
    styles: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, int]:
    """Returns the stage of each layer that is called, and of each parameter that is used between layers.

    Without `split`, the stage with the most work has as little as possible, where a layer's work is its share of the
    operations of a forward pass and its share of the parameters; a cut lies where the fewest values cross it.

    Args:
        recording: A forward pass.
        module: The module that was recorded.
        stages: Number of stages.
        split: Names of the layers that stages begin with, but for the first.
        styles: How `tensor` divides layers, by their names, in the order of their last calls; what a "colwise" one
            makes is in one stage until a "rowwise" one takes it.

    Raises:
        ConfigError: There are not as many layers, or `split` does not fit.
        ModuleError: A parameter would be in several stages.
    """
    calls = [
        node
        for node in recording.nodes
        if node in recording.calls and _placed(module, recording.calls[node].layer, split)
    ]
    names = [recording.calls[node].layer for node in calls]
    behind = _behind_divided(recording, module, calls, styles) if styles else {}
    starts = _given(names, split, stages) if split else _balanced(recording, module, calls, stages, set(behind))
    for start in starts:
        if start in behind:
            raise ConfigError(
                f"a stage would begin with {names[start]!r}, behind {behind[start]!r}, of whose output strategyParams."
                'tensor leaves each rank a part until a "rowwise" layer',
                hint='name layers in strategyParams.split that follow a "rowwise" one',
                param=_PARAM,
            )
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
    for name, users in _between(recording, found, stages).items():
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


def add_evaluated(recording: Recording, module: nn.Module, stage_of: dict[str, int], stages: int) -> None:
    """Adds the layers and parameters that evaluation alone uses, in the stage of what is called before them.

    Raises:
        ModuleError: A parameter would be in several stages.
    """
    current = 0
    for node in recording.nodes:
        if node in recording.calls:
            name = recording.calls[node].layer
            if name not in stage_of and _placed(module, name):
                stage_of[name] = current
            current = stage_of.get(name, current)
    for name, users in _between(recording, stage_of, stages).items():
        stage_of.setdefault(name, min(users))
    _held(module, stage_of)


def _placed(module: nn.Module, layer: str, split: Sequence[str] = ()) -> bool:
    """Whether a layer is in one stage; one without tensors is wherever it is called."""
    part = module.get_submodule(layer)
    return layer in split or next(part.parameters(), None) is not None or next(part.buffers(), None) is not None


def _between(recording: Recording, stage_of: Mapping[str, int], stages: int) -> dict[str, set[int]]:
    """Returns the stages that use each parameter between layers; what the module returns, the last one does."""
    of_node = stages_of_nodes(recording, stage_of)
    found: dict[str, set[int]] = {}
    for node, name in recording.tensors.items():
        if name in recording.parameters:
            found.setdefault(name, set()).update(of_node.get(user, stages - 1) for user in node.users)
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
    if starts[0] == 0:
        raise ConfigError(
            f"strategyParams.split names {split[0]!r}, with which the first stage begins anyway",
            hint="name one layer for each stage but the first",
            param=_PARAM,
        )
    if starts != sorted(set(starts)):
        raise ConfigError(
            f"strategyParams.split names {', '.join(map(repr, split))}, which are not called in this order after "
            f"{names[0]!r}",
            hint="name them in the order in which the forward pass calls them",
            param=_PARAM,
        )
    return starts


def _behind_divided(
    recording: Recording, module: nn.Module, calls: Sequence[fx.Node], styles: Mapping[str, str]
) -> dict[int, str]:
    """Returns the places of calls where a value crosses of which each rank has a part, and the layer that made it.

    Args:
        recording: A forward pass.
        module: The module that was recorded.
        calls: The calls.
        styles: How layers are divided, in the order of their last calls.
    """
    styled = [(module.get_submodule(name), style) for name, style in styles.items()]
    parts: dict[fx.Node, str] = {}
    for node in recording.nodes:
        name = recording.calls[node].layer if node in recording.calls else ""
        within = {id(part) for part in module.get_submodule(name).modules()} if name else set()
        own = [style for part, style in styled if id(part) in within and style != "sum_gradients"]
        if own:
            found = name if own[-1] == "colwise" else ""
        else:
            found = next((parts[source] for source in node.all_input_nodes if source in parts), "")
        if found:
            parts[node] = found
    order = {node: index for index, node in enumerate(recording.nodes)}
    last = {node: max(_uses(recording, node, order), default=order[node]) for node in parts}
    return {
        index: parts[node]
        for index, start in enumerate(calls)
        for node in parts
        if order[node] < order[start] <= last[node]
    }


def _uses(recording: Recording, node: fx.Node, order: Mapping[fx.Node, int]) -> Iterator[int]:
    """Yields the places of the nodes that use one; behind all of them, where the module returns it."""
    yield from (order[user] for user in node.users if user in order)
    if any(node is output for output in recording.outputs):
        yield len(order)


def _balanced(
    recording: Recording, module: nn.Module, calls: list[fx.Node], stages: int, excluded: set[int]
) -> list[int]:
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
        alone = next(module.children(), None) is None
        raise ConfigError(
            f"strategyParams.pipeline makes {stages} stages, and the module has {sum(size > 0 for size in sizes)} "
            "layers with parameters that can be told apart",
            hint=f"{type(module).__name__} alone is one layer: pass a module whose forward calls several, or use "
            "strategyParams.shard"
            if alone
            else "make fewer stages, or name the layers that stages begin with in strategyParams.split",
            param=_PARAM,
        )
    order = {node: index for index, node in enumerate(recording.nodes)}
    at_each = _crossing(recording, order)
    crossing = [at_each[order[node]] for node in calls]
    # Between the calls of a layer that is called again, a cut would put it into two stages.
    named: dict[str, list[int]] = {}
    for index, node in enumerate(calls):
        named.setdefault(recording.calls[node].layer, []).append(index)
    within = {index for places in named.values() for index in range(places[0] + 1, places[-1] + 1)}
    possible = set(range(len(calls))) - within
    if sum(index > 0 for index in possible) < stages - 1:
        possible = set(range(len(calls)))  # `cut` says which layer is in the way
    possible -= excluded
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
                if start < end and start in possible and layers[end] > layers[start]
            ]
            if ways:
                row[end] = min(ways)
        best.append(row)
    if len(calls) not in best[-1]:
        raise ConfigError(
            f"strategyParams.pipeline makes {stages} stages, and layers that "
            f"{'strategyParams.tensor divides' if excluded else 'are called several times'} leave fewer",
            hint="make fewer stages"
            + (", or divide fewer layers by strategyParams.plan" if excluded else "")
            + ", or name the layers that stages begin with in strategyParams.split",
            param=_PARAM,
        )
    return best[-1][len(calls)][2]


def _crossing(recording: Recording, order: Mapping[fx.Node, int]) -> list[int]:
    """Returns how many values that layers decide were made before each node, and are used by it or later ones."""
    free, changes = free_nodes(recording), [0] * (len(order) + 2)
    for node, made in order.items():
        if node in free or not is_value(node):
            continue
        last = max(_uses(recording, node, order), default=made)
        changes[made + 1] += 1
        changes[last + 1] -= 1
    return list(accumulate(changes))


def is_value(node: fx.Node) -> bool:
    """Whether a node is a tensor; what a layer returns is a list of them."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def free_nodes(recording: Recording) -> set[fx.Node]:
    """Returns the nodes that inputs alone decide, such as masks, which every stage computes for itself."""
    changed: set[int] = set()  # memory that something else changes in place
    while True:
        free = _free_but(recording, changed)
        found = {memory for node in recording.nodes if node not in free for memory in node.meta["writes"]}
        if found <= changed:
            return free
        changed |= found


def _free_but(recording: Recording, changed: set[int]) -> set[fx.Node]:
    """Returns the nodes that inputs alone decide, but for those with some memory."""
    buffers = {node for node, name in recording.tensors.items() if name not in recording.parameters}
    inputs = {node for node in recording.inputs if not node.meta["memory"] & changed}
    free = {*inputs, *buffers, *recording.constants}
    for node in recording.nodes:
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        bound = node in recording.calls or seeded or (node.meta["memory"] | node.meta["writes"]) & changed
        if not bound and all(source in free for source in node.all_input_nodes):
            free.add(node)
    return free


def stages_of_nodes(recording: Recording, stages: Mapping[str, int]) -> dict[fx.Node, int]:
    """Returns the stage of each node: that of the last layer with one that was called before it.

    Raises:
        ModuleError: Layers are not called in the order of the stages.
    """
    found, current = {}, 0
    for node in recording.nodes:
        if node in recording.calls:
            name = recording.calls[node].layer
            if stages.get(name, current) < current:
                raise ModuleError(
                    f"the forward pass calls {name!r} of stage {stages[name]} after layers of stage {current}, other "
                    "than when it was cut",
                    hint="it must call the same layers in the same order each time, or be divided with "
                    "strategyParams.shard",
                    param="module",
                )
            current = stages.get(name, current)
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

"""Which values of a recorded forward pass share memory, what changes them in place, and when they need gradients."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from sparktorch.train.pipeline.layers import Call, call_of_layer, memory_of

__all__ = ["Gradients", "mark_memory", "mark_used", "needs_gradient"]


def mark_memory(nodes: Iterable[fx.Node], calls: Mapping[fx.Node, Call]) -> None:
    """Notes in `meta["memory"]` which memory the tensors of each node have, and in `meta["writes"]` what it changes.

    Args:
        nodes: All nodes, in order, with their results in `meta["val"]`.
        calls: The call of each node that is one.
    """
    for node in nodes:
        node.meta["memory"] = frozenset(memory_of(value) for value in _tensors(node.meta.get("val")))
        node.meta["writes"] = frozenset(memory for value in _written(node, calls) for memory in value.meta["memory"])
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in calls:  # what a layer returns may be what it got
            shared = calls[source].shared.get(int(node.args[1]))  # type: ignore[arg-type]
            if shared is not None:
                node.meta["memory"] = source.args[1][shared].meta["memory"]  # type: ignore[index,union-attr]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _written(node: fx.Node, calls: Mapping[fx.Node, Call]) -> list[fx.Node]:
    """Returns the arguments that a node changes in place."""
    if node in calls:
        arguments: Any = node.args[1]
        return [arguments[place] for place in calls[node].written]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    written = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    values = pytree.tree_leaves([value for name, value in given.items() if name in written])
    return [value for value in values if isinstance(value, fx.Node)]


class Gradients(fx.Interpreter):
    """Runs a recorded graph again to see from which node on, in `meta["gradient_from"]`, a value requires gradients.

    That is the node itself, a later one that changes it in place, or `None`.
    """

    def __init__(self, graph: fx.GraphModule, calls: Sequence[Call]) -> None:
        """Takes the graph and the calls of layers, by number."""
        super().__init__(graph, garbage_collect_values=False)
        self._calls = calls

    def run_node(self, n: fx.Node) -> Any:
        """Computes a node, without values."""
        found = self._called(n) if n.target is call_of_layer().default else super().run_node(n)
        changed = {other: value for other, value in self.env.items() if other.meta["memory"] & n.meta["writes"]}
        result = list(changed.values()) if found is None and torch.is_grad_enabled() else found
        n.meta["gradient_from"] = n if _requires(result) else None
        for other, value in changed.items():
            if other.meta["gradient_from"] is None and _requires(value):
                other.meta["gradient_from"] = n
        return found

    def _called(self, node: fx.Node) -> list[torch.Tensor]:
        call = self._calls[int(node.args[0])]  # type: ignore[arg-type]
        inputs: Any = self.map_nodes_to_values(node.args[1], node)
        for place, gradient in call.written.items():
            if gradient and not inputs[place].requires_grad:
                inputs[place].add_(torch.zeros_like(inputs[place]).requires_grad_())
        found = []
        for place, (value, gradient) in enumerate(zip(node.meta["val"], call.result_gradients, strict=True)):
            given = inputs[call.shared[place]] if place in call.shared else None
            if given is not None and given.shape == value.shape:
                found.append(given)
            else:
                found.append(torch.empty_like(value).requires_grad_(gradient).clone())  # may be changed in place
        return found


def _requires(values: Any) -> bool:
    return any(value.requires_grad for value in _tensors(values))  # an operator, such as unbind, returns several


def mark_used(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Collection[fx.Node]) -> None:
    """Notes in `meta["used"]` whether an output's gradient depends on a node: not on what is detached, for example.

    Args:
        nodes: What a forward pass computes, in order.
        inputs: The tensors that it gets.
        outputs: The tensors that it returns.
    """
    order = {node: place for place, node in enumerate(nodes)}
    sharing: dict[int, list[fx.Node]] = {}
    for node in (*inputs, *nodes):
        for memory in node.meta["memory"]:
            sharing.setdefault(memory, []).append(node)
    for node in reversed(nodes):
        changed = [other for memory in node.meta["writes"] for other in sharing.get(memory, ())]
        node.meta["used"] = any(_is_used(value, order, order[node] + 1, outputs) for value in (node, *changed))


def needs_gradient(node: fx.Node, order: Mapping[fx.Node, int], at: int, outputs: Collection[fx.Node]) -> bool:
    """Whether a backward pass needs the gradient of a value as it is at some place.

    Args:
        node: The value.
        order: The place of each node.
        at: The place.
        outputs: The tensors that the forward pass returns.
    """
    since = node.meta["gradient_from"]
    return since is not None and order.get(since, -1) < at and _is_used(node, order, at, outputs)


def _is_used(node: fx.Node, order: Mapping[fx.Node, int], at: int, outputs: Collection[fx.Node]) -> bool:
    """Whether an output's gradient depends on a value by what reads it at a place or later."""
    readers = [user for user in node.users if order.get(user, -1) >= at and user.meta["gradient_from"] is user]
    return node in outputs or any(user.meta["used"] and _passes_gradient(user, node) for user in readers)


def _passes_gradient(user: fx.Node, node: fx.Node) -> bool:
    """Whether the gradient of what a node reads depends on its own.

    Without gradients, it does where the node returns that itself, as `to` may do, or changes it in place; a layer may
    do anything.
    """
    if user.meta["modes"].gradients or user.target in (call_of_layer().default, operator.getitem):
        return True
    return bool((user.meta["memory"] | user.meta["writes"]) & node.meta["memory"])

"""Records a module's forward pass as a graph: its layers are nodes that are called as they are, the rest operators.

Torch's `make_fx` records what the modules above the layers compute. It runs on fake tensors, of a copy of the module
that has shapes and no values. Shapes and other numbers are constants of the graph.
"""

from __future__ import annotations

import copy
import pickle
import random
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils import _pytree as pytree

from sparktorch.base.quiet import quiet
from sparktorch.errors import ModuleError, SparkTorchError, line_of_user
from sparktorch.train.pipeline.in_place import Gradients, mark_memory, mark_used
from sparktorch.train.pipeline.kept import check_attributes, checksum, is_plain, kept_by, take_attributes
from sparktorch.train.pipeline.layers import Call, Modes, call_of_layer, check_functions, recorded_layers
from sparktorch.train.recipe.huggingface import without_caches

_FAKES = "torch._subclasses.fake_tensor"  # logs the tracebacks of errors, which are raised, too

__all__ = ["Recording", "Twin"]


@dataclass(frozen=True)
class Recording:
    """A forward pass.

    Attributes:
        nodes: What it computes, in order: operators of torch, `operator.getitem`, and calls of layers. Each has its
            result in `meta["val"]`, a fake tensor; the `Modes` in `meta["modes"]`; and what `in_place` notes.
        modes: The modes in which it began.
        inputs: The tensors that it gets, as nodes.
        outputs: What it returns, flattened: nodes, and values that are no tensors.
        spec: How that was nested.
        calls: The call of each node that is one.
        tensors: Name of the parameter or buffer that each node of that kind reads.
        parameters: Names of all parameters of the module.
        constants: The tensor of each node that is one, such as a number that is written into a mask.
    """

    nodes: list[fx.Node]
    modes: Modes
    inputs: list[fx.Node]
    outputs: list[Any]
    spec: Any
    calls: Mapping[fx.Node, Call]
    tensors: Mapping[fx.Node, str]
    parameters: Collection[str]
    constants: Mapping[fx.Node, torch.Tensor]

    def checksum(self) -> int:
        """Returns a number of 32 bits, which is the same for the same forward pass in all processes."""
        layers = [(call.layer, list(filter(_is_compared, call.arguments))) for call in self.calls.values()]
        read = [*self.tensors.values(), *(tensor.item() for tensor in self.constants.values())]
        return checksum(map(repr, (*map(_compared, self.nodes), *layers, *read)))


def _compared(node: fx.Node) -> tuple[Any, ...]:
    """Returns what a node computes, in terms that all processes have: other ranks have other devices and objects."""
    values = filter(_is_compared, pytree.tree_leaves((node.args, node.kwargs)))
    found = [value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    forms = [(tuple(value.shape), value.dtype) for value in found]
    modes = node.meta["modes"]
    return (
        node.name,
        *values,
        forms,
        modes.gradients,
        sorted(modes.autocast.items(), key=str),
        node.meta["gradient_from"],
    )


def _is_compared(value: Any) -> bool:
    return is_plain(value) or isinstance(value, complex | fx.Node)


class Twin:
    """A copy of a module that has shapes and no values, and takes no memory."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Copies the module.

        Args:
            module: The module.
            device: Where it computes.

        Raises:
            ModuleError: It cannot be copied.
        """
        from torch._subclasses import FakeTensor, FakeTensorMode
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        plain = (each for part in module.modules() for each in vars(part).values() if isinstance(each, torch.Tensor))
        kept = [each for each in plain if each.is_meta or isinstance(each, FakeTensor)]
        held = [*module.parameters(), *module.buffers(), *kept]
        fakes = [tensor for tensor in held if isinstance(tensor, FakeTensor)]
        self.mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        known: dict[int, Any] = {}
        for tensor in held:
            fake = self._fake(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        with self.mode:
            self._seed = nn.Parameter(torch.empty((), device=self.device))
        try:
            with unset_fake_temporarily():
                self.module: nn.Module = copy.deepcopy(module, known)
        except Exception as error:
            raise ModuleError(
                f"{type(module).__name__} cannot be copied, which strategyParams.pipeline needs: {error}",
                hint="define __deepcopy__, or divide it with strategyParams.shard",
                param="module",
            ) from error
        without_caches(self.module)
        self.names = {id(t): name for name, t in [*self.module.named_parameters(), *self.module.named_buffers()]}

    def record(
        self,
        layers: Sequence[str],
        run: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        *,
        training: bool,
        attributes_of: nn.Module | None = None,
    ) -> Recording:
        """Records a forward pass.

        Args:
            layers: Names of the parts that are called as they are.
            run: Calls the module, its first argument, with the tensors.
            tensors: Only their shapes, strides and dtypes count.
            training: Whether in training mode.
            attributes_of: Has what the parts above the layers keep besides tensors now; `None` for this copy.

        Raises:
            ModuleError: The forward pass depends on values, computes with tensors that the module does not have, or
                changes what the module keeps.
        """
        from torch.fx.experimental.proxy_tensor import make_fx

        calls: list[Call] = []
        found: dict[str, Any] = {}

        def flat(*fakes: torch.Tensor) -> list[torch.Tensor]:
            found["values"], found["spec"] = pytree.tree_flatten(run(self.module, *fakes))
            check_functions(found["values"], set())
            return [value for value in found["values"] if isinstance(value, torch.Tensor)]

        self.module.train(training)
        if attributes_of is not None:
            take_attributes(self.module, attributes_of, layers)
        kept = kept_by(self.module, layers)
        buffers = {name: (buffer, buffer._version) for name, buffer in self.module.named_buffers()}
        before = _state()
        untouched = torch.random.fork_rng(devices=[])  # dropout draws numbers, also those without values
        try:
            with (
                untouched,
                quiet(_FAKES),
                self.mode,
                recorded_layers(self.module, layers, calls, self._seed),
                torch.enable_grad(),
            ):
                modes = Modes.now(*{self.device.type, "cpu"})
                fakes = [self._fake(tensor) for tensor in tensors]
                graph = make_fx(flat, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
                of_calls = self._of_calls(graph, calls)
                mark_memory(graph.graph.nodes, of_calls)
                Gradients(graph, calls).run(*fakes)
        except SparkTorchError:
            raise
        except Exception as error:
            raise ModuleError(
                f"the forward pass of {self._kind} cannot be recorded{line_of_user(error)}: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                hint=_way_out(error),
                param="module",
            ) from error
        finally:
            torch.clear_autocast_cache()
        self._check(buffers, before)
        check_attributes(self._kind, kept, kept_by(self.module, layers))
        return self._recording(graph, of_calls, found, modes)

    def call(self, run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Calls the module in training mode, and records nothing; `run` and `tensors` are as in `record`."""
        self.module.train()
        with torch.random.fork_rng(devices=[]), quiet(_FAKES), self.mode, torch.no_grad():
            return run(self.module, *map(self._fake, tensors))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape, strides and dtype, without values."""
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def _check(self, buffers: Mapping[str, tuple[torch.Tensor, int]], numbers: bytes) -> None:
        """Refuses what would be another thing in each pass."""
        now = dict(self.module.named_buffers())
        changed = [
            name
            for name, (buffer, version) in buffers.items()
            if now.get(name) is not buffer or buffer._version != version
        ]
        if changed:
            raise ModuleError(
                f"the forward pass of {self._kind} changes buffer {changed[0]!r}, and a pipeline computes on a "
                "micro-batch and its padding at a time",
                hint="leave it as it is in training, or divide the module with strategyParams.shard",
                param="module",
            )
        if numbers != _state():
            raise ModuleError(
                f"the forward pass of {self._kind} draws numbers of Python or NumPy, which a recording would repeat",
                hint="draw them with torch, within a layer, or divide the module with strategyParams.shard",
                param="module",
            )

    @property
    def _kind(self) -> str:
        return type(self.module).__name__

    @staticmethod
    def _of_calls(graph: fx.GraphModule, calls: Sequence[Call]) -> dict[fx.Node, Call]:
        """Returns the call of each node that is one; gives nodes that read tensors these as their values."""
        for node in graph.graph.find_nodes(op="get_attr"):
            node.meta["val"] = getattr(graph, node.target)
        found = graph.graph.find_nodes(op="call_function", target=call_of_layer().default)
        return {node: calls[node.args[0]] for node in found}

    def _recording(
        self, graph: fx.GraphModule, calls: Mapping[fx.Node, Call], found: Mapping[str, Any], modes: Modes
    ) -> Recording:
        nodes: list[fx.Node] = []
        inputs: list[fx.Node] = []
        outputs: list[fx.Node] = []
        tensors: dict[fx.Node, str] = {}
        constants: dict[fx.Node, torch.Tensor] = {}
        for node in _with_modes(graph.graph, modes):
            if node.op == "placeholder":
                inputs.append(node)
            elif node.op == "output":
                outputs = list(node.args[0])
            elif node.op == "get_attr":
                read = getattr(graph, node.target)
                if read is self._seed:
                    continue
                kept = self._name_or_constant(read)
                if isinstance(kept, str):
                    tensors[node] = kept
                else:
                    constants[node] = kept
            else:
                nodes.append(node)
        mark_used(nodes, inputs, {node for node in outputs if isinstance(node, fx.Node)})
        places = iter(outputs)
        values = [next(places) if isinstance(value, torch.Tensor) else value for value in found["values"]]
        parameters = dict(self.module.named_parameters())
        return Recording(nodes, modes, inputs, values, found["spec"], calls, tensors, parameters, constants)

    def _name_or_constant(self, tensor: Any) -> str | torch.Tensor:
        """Returns the name of a parameter or buffer, or a number that the forward pass makes a tensor of.

        Raises:
            ModuleError: It is another tensor, or a function.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ModuleError(
                f"the forward pass of {self._kind} calls an operator of torch that takes functions, such as "
                "torch.cond, above its layers",
                hint="call it within a layer, or divide the module with strategyParams.shard",
                param="module",
            )
        constant: torch.Tensor | None = getattr(tensor, "constant", None) if hasattr(tensor, "fake_mode") else tensor
        if id(tensor) in self.names:
            return self.names[id(tensor)]
        if constant is not None and not constant.dim():
            return constant
        raise ModuleError(
            f"the forward pass of {self._kind} computes with a tensor of shape {tuple(tensor.shape)} that is neither a "
            "parameter nor a buffer",
            hint="keep it with register_buffer, or make it in each call, as by torch.full; not in a function's cache",
            param="module",
        )


def _state() -> bytes:
    """Returns the state of Python's and NumPy's generators."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _way_out(error: BaseException) -> str:
    """Returns what to do about a forward pass that cannot be recorded."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_detect_is_causal_mask":  # of torch's transformers
            return (
                "pass is_causal=True or False beside the mask, whose values torch compares with a causal one otherwise"
            )
        package, owner = frame.f_globals.get("__name__", ""), frame.f_locals.get("self")
        if package.startswith("transformers.") and type(owner).__name__.endswith("Experts"):
            return "set experts_implementation='batched_mm' where the model is made"
    if "data-dependent" in str(error) or "aten._local_scalar_dense" in str(error):
        return (
            "above its layers it may not depend on values of tensors: compute both paths, as by torch.where, for all "
            "ranks must call the same layers"
        )
    return "above its layers it may compute with torch only; or divide it with strategyParams.shard"


def _with_modes(graph: fx.Graph, modes: Modes) -> Iterator[Any]:
    """Returns the nodes but for those that change modes, which are in `meta["modes"]` of the others."""
    states = [modes]
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            states[-1] = replace(states[-1], gradients=bool(node.args[0]))
        elif node.target is _enter_autocast:
            kind, dtype, enabled, _ = node.args
            states.append(replace(states[-1], autocast={**states[-1].autocast, kind: dtype if enabled else None}))
        elif node.target is _exit_autocast:
            states[-2:] = [replace(states[-2], gradients=states[-1].gradients)]
        else:
            node.meta["modes"] = states[-1]
            yield node

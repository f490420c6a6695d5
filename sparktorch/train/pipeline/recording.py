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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from sparktorch.errors import ModuleError, SparkTorchError

__all__ = ["Call", "Recording", "Twin"]


@dataclass
class Call:
    """A call of a layer.

    Attributes:
        layer: Name of the layer.
        arguments: Its arguments, flattened; the tensors among them are those of another call.
        spec: How they were nested.
        places: Which of them are tensors.
        result_spec: How its result was nested.
        result_places: Which values of the result are tensors.
        work: Floating-point operations of its forward pass.
        gradients: Whether gradients were enabled.
        autocast: By type of device, the dtype of autocast there; `None` where it was disabled.
    """

    layer: str
    arguments: list[Any]
    spec: Any
    places: list[int]
    result_spec: Any = None
    result_places: list[int] = field(default_factory=list)
    work: int = 0
    gradients: bool = True
    autocast: dict[str, torch.dtype | None] = field(default_factory=dict)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Context in which the layer was called."""
        with ExitStack() as stack:
            if not self.gradients:
                stack.enter_context(torch.no_grad())
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            yield

    def __call__(self, part: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Calls the layer with other tensors; returns the tensors of its result."""
        values = list(self.arguments)
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = pytree.tree_unflatten(values, self.spec)
        found = pytree.tree_leaves(part(*args, **kwargs))
        return [value for value in found if isinstance(value, torch.Tensor)]


@dataclass(frozen=True)
class Recording:
    """A forward pass.

    Attributes:
        nodes: What it computes, in order: operators of torch, `operator.getitem`, and calls of layers.
        inputs: The tensors that it gets, as nodes.
        outputs: What it returns, flattened: nodes, and values that are no tensors.
        spec: How that was nested.
        calls: The call of each node that is one.
        tensors: Name of the parameter or buffer that each node of that kind reads.
        parameters: Names of all parameters of the module.
        constants: The tensor of each node that is one, such as a number that is written into a mask.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[Any]
    spec: Any
    calls: Mapping[fx.Node, Call]
    tensors: Mapping[fx.Node, str]
    parameters: Collection[str]
    constants: Mapping[fx.Node, torch.Tensor]


class Twin:
    """A copy of a module that has shapes and no values, and takes no memory."""

    def __init__(self, module: nn.Module) -> None:
        """Copies the module.

        Raises:
            ModuleError: It cannot be copied.
        """
        from torch._subclasses import FakeTensor, FakeTensorMode

        held = [*module.parameters(), *module.buffers()]
        fakes = [tensor for tensor in held if isinstance(tensor, FakeTensor)]
        self.mode = fakes[0].fake_mode if fakes else FakeTensorMode(allow_non_fake_inputs=True)
        known: dict[int, Any] = {}
        for tensor in held:
            if isinstance(tensor, FakeTensor):
                known[id(tensor)] = tensor
                continue
            fake = self.mode.from_tensor(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        try:
            self.module: nn.Module = copy.deepcopy(module, known)
        except Exception as error:
            raise ModuleError(
                f"{type(module).__name__} cannot be copied, which strategyParams.pipeline needs: {error}",
                hint="define __deepcopy__, or divide it with strategyParams.shard",
                param="module",
            ) from error
        for part in self.module.modules():
            config: Any = getattr(part, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False  # a cache of a model of transformers would be one object for all passes
        self.names = {id(t): name for name, t in [*self.module.named_parameters(), *self.module.named_buffers()]}

    def record(
        self, layers: Sequence[str], run: Callable[..., Any], tensors: Sequence[torch.Tensor], *, training: bool
    ) -> Recording:
        """Records a forward pass.

        Args:
            layers: Names of the parts that are called as they are.
            run: Calls the module, its first argument, with the tensors.
            tensors: Only their shapes and dtypes count.
            training: Whether in training mode.

        Raises:
            ModuleError: The forward pass depends on values, or computes with tensors that the module does not have.
        """
        from torch.fx.experimental.proxy_tensor import make_fx

        calls: list[Call] = []
        found: dict[str, Any] = {}

        def flat(*fakes: torch.Tensor) -> list[torch.Tensor]:
            found["values"], found["spec"] = pytree.tree_flatten(run(self.module, *fakes))
            return [value for value in found["values"] if isinstance(value, torch.Tensor)]

        self.module.train(training)
        buffers = {name: (buffer, buffer._version) for name, buffer in self.module.named_buffers()}
        before = _state()
        untouched = torch.random.fork_rng(devices=[])  # dropout draws numbers, also those without values
        kind = tensors[0].device.type if tensors else "cpu"
        try:
            with untouched, self.mode, _layers(self.module, layers, calls, kind), torch.enable_grad():
                fakes = [self.mode.from_tensor(tensor.detach()) for tensor in tensors]
                graph = make_fx(flat, pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
        except SparkTorchError:
            raise
        except Exception as error:
            raise ModuleError(
                f"the forward pass of {self._kind} cannot be recorded{_line_of_user(error)}: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                hint="above its layers it may compute with torch only, and not depend on values of tensors; or divide "
                "it with strategyParams.shard",
                param="module",
            ) from error
        finally:
            torch.clear_autocast_cache()
        self._check(buffers, before)
        return self._recording(graph, calls, found)

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

    def _recording(self, graph: fx.GraphModule, calls: list[Call], found: Mapping[str, Any]) -> Recording:
        nodes: list[fx.Node] = []
        inputs: list[fx.Node] = []
        outputs: list[fx.Node] = []
        tensors: dict[fx.Node, str] = {}
        of_calls: dict[fx.Node, Call] = {}
        constants: dict[fx.Node, torch.Tensor] = {}
        gradients = True
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                inputs.append(node)
            elif node.op == "output":
                outputs = list(node.args[0])
            elif node.op == "get_attr":
                tensor: Any = getattr(graph, node.target)
                name = self.names.get(id(tensor))
                constant = getattr(tensor, "constant", None) if hasattr(tensor, "fake_mode") else tensor
                if name is not None:
                    tensors[node] = name
                elif constant is not None and not constant.dim():
                    constants[node] = constant
                else:
                    raise ModuleError(
                        f"the forward pass of {self._kind} computes with a tensor of shape "
                        f"{tuple(tensor.shape)} that is neither a parameter nor a buffer",
                        hint="keep it with register_buffer, or make it with torch.full",
                        param="module",
                    )
            elif node.target is torch._C._set_grad_enabled:
                gradients = bool(node.args[0])
            else:
                nodes.append(node)
                node.meta["gradients"] = gradients
                if node.target is _call_of_layer().default:
                    of_calls[node] = calls[node.args[0]]
        places = iter(outputs)
        values = [next(places) if isinstance(value, torch.Tensor) else value for value in found["values"]]
        parameters = dict(self.module.named_parameters())
        return Recording(nodes, inputs, values, found["spec"], of_calls, tensors, parameters, constants)


def _state() -> bytes:
    """Returns the state of Python's and NumPy's generators."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _line_of_user(error: BaseException) -> str:
    """Returns where an exception left the user's code."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(own) and "/" in frame.filename]
    return f" at {of_user[-1].filename}:{of_user[-1].lineno}, {of_user[-1].line!r}" if of_user else ""


def _tensors(values: Sequence[Any]) -> list[int]:
    return [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]


_results: list[list[torch.Tensor]] = []  # what the layer that is being recorded has returned


@cache
def _call_of_layer() -> Any:
    """Returns the operator that stands for a layer while a forward pass is recorded."""

    @torch.library.custom_op("sparktorch::layer", mutates_args=())
    def layer(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        raise AssertionError("it is recorded, and never called")

    @layer.register_fake
    def _(number: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for tensor in _results[-1]]  # an operator may not return what it got

    return torch.ops.sparktorch.layer


@contextmanager
def _layers(module: nn.Module, names: Sequence[str], calls: list[Call], kind: str) -> Iterator[None]:
    """Context in which the named parts of a module are recorded as calls, with their hooks.

    Args:
        module: The module.
        names: Names of the parts.
        calls: Where the calls are added.
        kind: Type of the device of the inputs.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
    from torch.utils.flop_counter import FlopCounterMode

    operator = _call_of_layer().default

    def instead(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            flat, spec = pytree.tree_flatten((args, kwargs))
            call = Call(name, flat, spec, _tensors(flat), gradients=torch.is_grad_enabled())
            for each in {kind, "cpu"}:
                enabled = torch.is_autocast_enabled(each)
                call.autocast[each] = torch.get_autocast_dtype(each) if enabled else None
            calls.append(call)
            with disable_proxy_modes_tracing(), FlopCounterMode(display=False) as counter, torch.no_grad():
                values, call.result_spec = pytree.tree_flatten(part(*args, **kwargs))
            call.work, call.result_places = counter.get_total_flops(), _tensors(values)
            _results.append([values[place] for place in call.result_places])
            found = operator(len(calls) - 1, [flat[place] for place in call.places])
            _results.pop()
            for place, tensor in zip(call.result_places, found, strict=True):
                values[place] = tensor
            call.arguments = [None if isinstance(value, torch.Tensor) else value for value in flat]
            return pytree.tree_unflatten(values, call.result_spec)

        return recorded

    parts = [module.get_submodule(name) for name in names]
    try:
        for name, part in zip(names, parts, strict=True):
            vars(part)["_call_impl"] = instead(name, part._call_impl)
        yield
    finally:
        for part in parts:
            vars(part).pop("_call_impl", None)

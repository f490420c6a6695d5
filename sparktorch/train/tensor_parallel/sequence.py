"""Sequence parallelism: between divided layers, each rank of a group has its part of the positions of every row.

Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), section 4.2.2. Norms, dropout and residual sums of torch's
transformer layers work on a `DTensor` divided along axis 1, in uneven parts where the positions do not divide. What the
first layers of attention and feed-forward network take is gathered, and gathered again backward unless it is kept, so
that nothing else of all positions is kept but within these layers, where features are divided; their last layers
scatter sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.dtensor import unviewed
from sparktorch.train.tensor_parallel.gathered_linear import POSITIONS, as_part, is_part
from sparktorch.train.tensor_parallel.sharded_attention import drawn_apart

__all__ = ["LAYERS", "STACKS", "divide_sequence", "is_below", "linear_layers", "norms_of", "outermost"]

LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)
_NORMS = (nn.LayerNorm, nn.RMSNorm)
# Parts of a layer that take all positions, and how they are divided.
_TAKING_ALL = {"self_attn": "heads", "multihead_attn": "heads", "linear1": "colwise", "linear2": "rowwise"}
_PARAM = "strategyParams"


def norms_of(module: nn.Module, divided: Mapping[str, str], obstacle: Callable[[str, str], str]) -> list[str]:
    """Returns the names of the norms of which each rank computes some positions.

    Args:
        module: The module.
        divided: The style of each layer that is divided, by its name.
        obstacle: Returns why a layer of a name cannot be divided by a style; empty if it can.

    Raises:
        ConfigError: The module has no transformer layer of torch's, or one that cannot compute on parts of a sequence.
    """
    layers = [name for name, part in module.named_modules() if type(part) in LAYERS]
    if not layers:
        raise ConfigError(
            "strategyParams.sequence divides nn.TransformerEncoderLayer and nn.TransformerDecoderLayer only, and "
            f"{type(module).__name__} has none",
            hint="leave sequence out",
            param=_PARAM,
        )
    found = []
    for name in layers:
        layer: Any = module.get_submodule(name)
        prefix = f"{name}." if name else ""
        whole = [child for child in _TAKING_ALL if hasattr(layer, child) and prefix + child not in divided]
        found_whole = [(child, obstacle(prefix + child, _TAKING_ALL[child])) for child in whole]
        reason = _obstacle(layer, found_whole)
        if reason:
            raise ConfigError(
                f"strategyParams.sequence cannot divide {name or type(module).__name__!r}, {reason}",
                hint="change the layer, or leave sequence out",
                param=_PARAM,
            )
        found += [prefix + child for child, part in layer.named_children() if isinstance(part, _NORMS)]
    for name, stack in _stacks(module):
        if stack.norm is None:
            continue
        if type(stack.norm) not in _NORMS:
            raise ConfigError(
                f"strategyParams.sequence cannot divide {name or type(module).__name__!r}, whose norm is a "
                f"{type(stack.norm).__name__}",
                hint="use nn.LayerNorm or nn.RMSNorm, or leave sequence out",
                param=_PARAM,
            )
        found.append(f"{name}.norm" if name else "norm")
    named = {id(module.get_submodule(name)): name for name in found}  # a norm of several layers is summed once
    return [name for name in named.values() if list(module.get_submodule(name).parameters())]


def linear_layers(module: nn.Module) -> Iterator[str]:
    """Yields the names of the linear layers of transformer layers, which take or return divided sequences."""
    for name, part in module.named_modules():
        if type(part) in LAYERS:
            below = (child for child, each in part.named_modules() if isinstance(each, nn.Linear))
            yield from (f"{name}.{child}" if name else child for child in below)


def _obstacle(layer: Any, whole: list[tuple[str, str]]) -> str:
    """Returns why a layer cannot compute on parts of a sequence; empty if it can.

    Args:
        layer: The layer.
        whole: Names of its parts that are not divided, and must be, and why they cannot be; empty if they could.
    """
    for name, reason in whole:
        if reason:
            return f"for it must divide its {name!r}, {reason}"
    if whole:
        return "whose activation is not known to be elementwise"
    if not layer.self_attn.batch_first:
        return "whose inputs have positions first: set batch_first=True"
    for name, part in layer.named_children():
        if name.startswith("norm") and type(part) not in _NORMS:
            return f"whose {name!r} is a {type(part).__name__}, not nn.LayerNorm or nn.RMSNorm"
        if name.startswith("norm") and len(part.normalized_shape) != 1:
            return f"whose {name!r} takes other positions into account, with normalized_shape={part.normalized_shape}"
        if name.startswith("dropout") and type(part) not in (nn.Dropout, nn.Identity):
            return f"whose {name!r} is a {type(part).__name__}, not nn.Dropout or nn.Identity"
    return ""


def _stacks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields stacks between whose layers nothing is put together."""
    for name, part in module.named_modules():
        if type(part) in STACKS and all(type(layer) in LAYERS for layer in part.layers):
            yield name, part


def outermost(module: nn.Module) -> list[str]:
    """Returns the names of the stacks and single layers that split their input and put their output together."""
    stacks = [name for name, _ in _stacks(module)]
    within = {id(layer) for _, stack in _stacks(module) for layer in stack.layers}
    return stacks + [n for n, part in module.named_modules() if type(part) in LAYERS and id(part) not in within]


def is_below(name: str, parts: Iterable[str]) -> bool:
    """Whether a part of a module is one of some, or within one."""
    return any(not part or name == part or name.startswith(f"{part}.") for part in parts)


def divide_sequence(module: nn.Module, mesh: DeviceMesh) -> None:
    """Lets stacks and layers compute on a rank's positions, in place; their linear layers and attention are divided.

    Args:
        module: The module, which `norms_of` takes.
        mesh: The ranks of this rank's group, in one dimension.
    """
    for name in outermost(module):
        module.get_submodule(name).register_forward_hook(unviewed, with_kwargs=True)
    stacks = [stack for _, stack in _stacks(module)]
    layers = [part for part in module.modules() if type(part) in LAYERS]
    for part in (*stacks, *layers):
        vars(part).update(mesh=mesh)
        # Dropout within a feed-forward network is of all positions.
        for name, child in part.named_children():
            if type(child) in _NORMS or (name != "dropout" and type(child) is nn.Dropout):
                child.__class__ = _OF_POSITIONS[type(child)]
        part.__class__ = _SPLIT[type(part)]


class _Split(nn.Module):
    """A stack or a layer: given all positions, it returns all of them; given some in each rank, it returns these."""

    mesh: DeviceMesh
    first: ClassVar[str]  # the name of the argument that is divided

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes what torch's does.

        Raises:
            ModuleError: The input has not axes of rows, positions and features.
        """
        given = dict(kwargs) if self.first in kwargs else {**kwargs, self.first: args[0]}
        rest = args if self.first in kwargs else args[1:]
        return self._whole_or_part(given.pop(self.first), *rest, **given)

    def _whole_or_part(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_part(x):
            return super().forward(x, *args, **kwargs)
        if x.dim() != 3 or x.is_nested:
            raise ModuleError(
                f"{type(self).__name__} gets a{' nested' if x.is_nested else ''} tensor of {x.dim()} axes, and its "
                "positions are divided by strategyParams.sequence",
                hint="give it tensors of three axes: rows, positions and features",
                param=_PARAM,
            )
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        found: Any = super().forward(whole.redistribute(placements=[Shard(POSITIONS)]), *args, **kwargs)
        return found.redistribute(placements=[Replicate()]).to_local()  # backward, each rank takes its own positions


class TransformerEncoder(_Split, nn.TransformerEncoder):
    """Torch's, whose name it has for `wrap_classes`, as have those below."""

    first = "src"


class TransformerDecoder(_Split, nn.TransformerDecoder):
    """Torch's; what its layers attend to is whole in each rank."""

    first = "tgt"


class TransformerEncoderLayer(_Split, nn.TransformerEncoderLayer):
    """Torch's."""

    first = "src"


class TransformerDecoderLayer(_Split, nn.TransformerDecoderLayer):
    """Torch's; what it attends to is whole in each rank."""

    first = "tgt"


class LayerNorm(nn.LayerNorm):
    """Torch's, of a rank's positions; the gradients of its parameters are to be summed."""

    def forward(self, input: torch.Tensor) -> Any:
        """Normalises each position.

        Raises:
            ModuleError: The input is not divided.
        """
        _check_part(self, input)
        return _of_positions(super().forward, input)


class RMSNorm(nn.RMSNorm):
    """Torch's, of a rank's positions; the gradients of its parameters are to be summed."""

    def forward(self, x: torch.Tensor) -> Any:
        """Normalises each position.

        Raises:
            ModuleError: The input is not divided.
        """
        _check_part(self, x)
        return _of_positions(super().forward, x)


class Dropout(nn.Dropout):
    """Torch's, which draws other numbers for the positions of each rank."""

    def forward(self, input: torch.Tensor) -> Any:
        """Drops numbers of each position."""
        if not (self.training and self.p and is_part(input)):
            return super().forward(input)
        rank = input.device_mesh.get_local_rank()  # type: ignore[attr-defined]
        return _of_positions(lambda own: drawn_apart(partial(F.dropout, own, self.p), rank, own.device), input)


_SPLIT: dict[type, type] = {
    nn.TransformerEncoder: TransformerEncoder,
    nn.TransformerDecoder: TransformerDecoder,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerDecoderLayer: TransformerDecoderLayer,
}
_OF_POSITIONS: dict[type, type] = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm, nn.Dropout: Dropout}


def _check_part(norm: nn.Module, x: torch.Tensor) -> None:
    if not is_part(x):  # its gradient would be summed as if each rank had some positions
        raise ModuleError(
            f"an nn.{type(norm).__name__} of a transformer layer is called outside of the layer, whose sequences "
            "strategyParams.sequence divides",
            hint="give each its own norm, or leave sequence out",
            param=_PARAM,
        )


def _of_positions(function: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    """Calls a function, which computes each position by itself, on a rank's positions of a `DTensor`."""
    return as_part(function(x.to_local()), x.device_mesh, x.shape)

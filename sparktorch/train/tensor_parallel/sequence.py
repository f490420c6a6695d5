"""Sequence parallelism: between divided layers, each rank of a group has its part of the positions of every row.

Korthikanti et al. 2022 (https://arxiv.org/abs/2205.05198), section 4.2.2. Norms, dropout and residual sums of torch's
transformer layers work on a `DTensor` divided along axis 1, in uneven parts where the positions do not divide. What the
first layers of attention and feed-forward network take is gathered; their last layers scatter sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.errors import ConfigError
from sparktorch.train.sharding.dtensor import unviewed
from sparktorch.train.tensor_parallel.divided_layers import POSITIONS, as_part, drawn_apart, is_part

__all__ = ["LAYERS", "is_below", "linear_layers", "norms_of", "outermost", "shard_sequence"]

LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)
_NORMS = (nn.LayerNorm, nn.RMSNorm)
# Parts of a layer that take all positions, and how they are divided.
_TAKING_ALL = {"self_attn": "heads", "multihead_attn": "heads", "linear1": "colwise", "linear2": "rowwise"}


def norms_of(module: nn.Module, divided: Mapping[str, str], obstacle: Callable[[str, str], str]) -> list[str]:
    """Returns the names of the norms of which each rank computes some positions.

    It refuses modules without transformer layers of torch's, or with one that cannot compute on parts of a sequence.
    `divided` has styles by name; `obstacle` returns why a layer of a name cannot be divided by a style, if so.
    """
    layers: dict[str, Any] = {name: part for name, part in module.named_modules() if type(part) in LAYERS}
    if not layers:
        raise _refused(f"divides torch's transformer layers, and {type(module).__name__} has none")
    norms: dict[nn.Module, str] = {}  # one of several layers is summed once
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        whole = [child for child in _TAKING_ALL if hasattr(layer, child) and prefix + child not in divided]
        why = [(child, obstacle(prefix + child, _TAKING_ALL[child])) for child in whole]
        reasons = [f"for it must divide its {child!r}, {reason}" for child, reason in why if reason]
        reasons += ["whose activation is not known to be elementwise"] if whole else []
        if not layer.self_attn.batch_first:
            reasons.append("whose inputs have positions first: set batch_first=True")
        if reasons:
            raise _refused(f"cannot divide {name!r}, {reasons[0]}")
        norms |= {part: prefix + child for child, part in layer.named_children() if isinstance(part, _NORMS)}
    for name, stack in _stacks(module):
        if isinstance(stack.norm, _NORMS):
            norms[stack.norm] = f"{name}.norm" if name else "norm"
    return [name for norm, name in norms.items() if list(norm.parameters())]


def _refused(why: str) -> ConfigError:
    hint = "change the layer, or leave sequence out"
    return ConfigError(f"strategyParams.sequence {why}", hint=hint, param="strategyParams")


def linear_layers(module: nn.Module) -> Iterator[str]:
    """Yields the names of the linear layers of transformer layers, which take or return divided sequences."""
    for name, part in module.named_modules():
        if type(part) in LAYERS:
            below = (child for child, each in part.named_modules() if isinstance(each, nn.Linear))
            yield from (f"{name}.{child}" if name else child for child in below)


def _stacks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields stacks between whose layers nothing is put together."""
    for name, part in module.named_modules():
        if type(part) in _STACKS and all(type(layer) in LAYERS for layer in part.layers):
            yield name, part


def outermost(module: nn.Module) -> list[str]:
    """Returns the names of the stacks and single layers that split their input and put their output together."""
    stacks = [name for name, _ in _stacks(module)]
    within = {id(layer) for _, stack in _stacks(module) for layer in stack.layers}
    return stacks + [n for n, part in module.named_modules() if type(part) in LAYERS and id(part) not in within]


def is_below(name: str, parts: Iterable[str]) -> bool:
    """Whether a part of a module is one of some, or within one."""
    return any(not part or name == part or name.startswith(f"{part}.") for part in parts)


def shard_sequence(module: nn.Module, mesh: DeviceMesh) -> None:
    """Lets stacks and layers compute on a rank's positions, in place; their linear layers and attention are divided."""
    for name in outermost(module):
        module.get_submodule(name).register_forward_hook(unviewed, with_kwargs=True)
    stacks = [stack for _, stack in _stacks(module)]
    for part in (*stacks, *(part for part in module.modules() if type(part) in LAYERS)):
        for name, child in part.named_children():
            # Dropout within a feed-forward network is of all positions.
            if type(child) in _NORMS or (name != "dropout" and type(child) is nn.Dropout):
                child.__class__ = _SHARDED[type(child)]
        vars(part).update(mesh=mesh)
        part.__class__ = _SHARDED[type(part)]


class _Split(nn.Module):
    """A stack or a layer: given all positions, it returns all of them; given some in each rank, it returns these.

    What a decoder's layers attend to is whole in each rank.
    """

    mesh: DeviceMesh

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes what torch's does."""
        first = "src" if isinstance(self, nn.TransformerEncoder | nn.TransformerEncoderLayer) else "tgt"
        x, *rest = (kwargs.pop(first), *args) if first in kwargs else args
        if is_part(x):
            return super().forward(x, *rest, **kwargs)
        from torch.distributed.tensor import DTensor, Replicate, Shard

        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        found: Any = super().forward(whole.redistribute(placements=[Shard(POSITIONS)]), *rest, **kwargs)
        return found.redistribute(placements=[Replicate()]).to_local()  # backward, each rank takes its own positions


class _OfPositions(nn.Module):
    """A norm or dropout of a rank's positions; the gradients of its parameters are to be summed."""

    def forward(self, x: torch.Tensor) -> Any:
        """Computes each position by itself; dropout draws other numbers in each rank."""
        if not is_part(x):
            return super().forward(x)
        part: Any = x
        own = part.to_local()
        compute = partial(super().forward, own)
        draws = self.training and getattr(self, "p", None)
        found = drawn_apart(compute, part.device_mesh.get_local_rank(), own.device) if draws else compute()
        return as_part(found, part.device_mesh, part.shape)


# They have the names of torch's classes, by which `wrap_classes` finds them.
_SHARDED: dict[type, Any] = {
    kind: type(kind.__name__, (own, kind), {"__doc__": "Torch's, of which a rank has some positions."})
    for own, kinds in ((_Split, (*LAYERS, *_STACKS)), (_OfPositions, (*_NORMS, nn.Dropout)))
    for kind in kinds
}

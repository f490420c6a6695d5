"""Tensor parallelism: each rank of a group has a part of every divided layer, and all compute on the same rows.

Shoeybi et al. 2019, Megatron-LM (https://arxiv.org/abs/1909.08053), section 3. Torch's `parallelize_module` divides the
layers, `nn.Linear` and `nn.Embedding`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from sparktorch.base.devices import is_host, module_of
from sparktorch.errors import ConfigError, ModuleError, nearest

__all__ = ["DIVIDED", "STYLES", "check_plan", "divide", "share_rows"]

STYLES = ("colwise", "rowwise", "colwise_gather_output")
_PARAM = "strategyParams"
_EXAMPLE = "strategyParams={'plan': {'layers.*.fc1': 'colwise', 'layers.*.fc2': 'rowwise'}}"
DIVIDED = (nn.Linear, nn.Embedding)
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Softsign, nn.Dropout, nn.Identity),
)
_OF_TRANSFORMERS = {"embedding_rowwise": "rowwise", "colwise_rep": "colwise_gather_output"}  # other names for the same
_WITHOUT_PARTNER = ("embedding_rowwise", "colwise_rep", "colwise_gather_output")
_HEADS = ("num_attention_heads", "num_key_value_heads")


def divide(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Divides layers of a module among the ranks of a mesh of one dimension, in place.

    Args:
        module: The module, with the same parameters in every rank.
        mesh: The ranks of this rank's group.
        plan: As in `MeshOptions.plan`.

    Raises:
        ConfigError: The plan does not fit the module.
        ModuleError: The module cannot be divided.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    def style(part: nn.Module, name: str) -> ParallelStyle:
        if name == "rowwise":
            return RowwiseParallel(input_layouts=Replicate() if isinstance(part, nn.Embedding) else None)
        return ColwiseParallel(output_layouts=Replicate() if name == "colwise_gather_output" else None)

    parts = dict(module.named_modules())
    styles = {name: style(parts[name], kind) for name, kind in check_plan(module, plan, mesh.size()).items()}
    parallelize_module(module, mesh, styles, src_data_rank=None)  # all ranks have the same parameters


def check_plan(module: nn.Module, plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Returns the style of each layer that is divided, by its name.

    Args:
        module: The module.
        plan: As in `MeshOptions.plan`; if it is empty, the plan that a transformers model brings, or the layers that
            are known to belong together: those of `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` behind
            the attention, and pairs of `nn.Linear` in an `nn.Sequential` with nothing but activations between them.
        size: Number of ranks that share a layer.

    Raises:
        ConfigError: A pattern matches no layer, or one that cannot be divided; or nothing is known of the module.
        ModuleError: The module has batch normalisation.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise ModuleError(
                f"{name or 'the module'} is batch normalisation, and ranks that share a layer compute on all their "
                "rows together",
                hint="use nn.GroupNorm or nn.LayerNorm, or leave strategyParams.tensor out",
                param=_PARAM,
            )
    if plan:
        return _matched(module, plan, size)
    found = _own_plan(module, size)
    if found is None:
        found = {
            name: style for pair in _known_pairs(module) if _all_divide(module, pair, size) for name, style in pair
        }
    if not found:
        raise ConfigError(
            f"strategyParams.tensor is {size}, and {type(module).__name__} has no layers that are known to be divisible"
            f" by {size}",
            hint=f"name them: {_EXAMPLE}",
            param=_PARAM,
        )
    return found


def _matched(module: nn.Module, plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Returns the style of each layer that matches a pattern; the first that matches decides."""
    names = [name for name, _ in module.named_modules() if name]
    parts = dict(module.named_modules())
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"strategyParams.plan: {pattern!r} matches no part of the module",
                hint=nearest(pattern, [name for name in names if isinstance(parts[name], DIVIDED)]),
                param=_PARAM,
            )
        for name in matching:
            reason = _obstacle(module, name, style, size)
            if reason:
                raise ConfigError(
                    f"strategyParams.plan: {pattern!r} matches {name!r}, {reason}",
                    hint="make the pattern narrower, or choose another number of ranks for strategyParams.tensor",
                    param=_PARAM,
                )
            found.setdefault(name, style)
    return found


def _obstacle(module: nn.Module, name: str, style: str, size: int) -> str:
    """Returns why a layer cannot be divided; empty if it can."""
    part = module.get_submodule(name)
    if not isinstance(part, DIVIDED):
        return f"a {type(part).__name__}, and only nn.Linear and nn.Embedding can be divided"
    if _tied(module, part):
        return "whose weights are tied to those of another part"
    # An embedding's weight has a row for each entry, that of a linear layer has one for each output.
    rows, columns = part.weight.shape
    along = columns if (style == "rowwise") == isinstance(part, nn.Linear) else rows
    if along % size:
        return f"whose {tuple(part.weight.shape)} weights are not divisible by {size} under {style!r}"
    return ""


def _own_plan(module: nn.Module, size: int) -> dict[str, str] | None:
    """Returns the plan that a transformers model brings; `None` if it has none."""
    plan = getattr(module, "_tp_plan", None)
    if not plan or not isinstance(plan, Mapping):
        return None
    config = module.config
    for name in _HEADS:
        heads = getattr(config, name, size)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(
                f"strategyParams.tensor is {size}, and the model's {name} is {heads}",
                hint=f"set it to a divisor of {heads}",
                param=_PARAM,
            )
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        for name, part in module.named_modules():
            if not fnmatchcase(name, pattern) or _tied(module, part):
                continue
            own = _OF_TRANSFORMERS.get(style, style or "nothing")
            reason = _obstacle(module, name, own, size) if own in STYLES else f"by {style!r}, which is not supported"
            if reason and style in _WITHOUT_PARTNER:  # a vocabulary of any size is held whole
                continue
            if reason:
                raise ConfigError(
                    f"the plan of {type(module).__name__} divides {name!r}, {reason}",
                    hint=f"give a plan of your own, {_EXAMPLE}",
                    param=_PARAM,
                )
            found[name] = own
    return found


def _tied(module: nn.Module, part: nn.Module) -> bool:
    owners = Counter(p for each in module.modules() for p in each.parameters(recurse=False))
    return any(owners[p] > 1 for p in part.parameters(recurse=False))


def _known_pairs(module: nn.Module) -> Iterable[list[tuple[str, str]]]:
    """Yields the layers of torch's own modules that belong together, with their styles."""
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            yield [(f"{prefix}linear1", "colwise"), (f"{prefix}linear2", "rowwise")]
        elif isinstance(part, nn.Sequential):
            shown = [(name, child) for name, child in part.named_children() if not isinstance(child, _ELEMENTWISE)]
            last = ""
            for (name, child), (following, after) in pairwise(shown):
                if name != last and isinstance(child, nn.Linear) and isinstance(after, nn.Linear):
                    last = following
                    yield [(f"{prefix}{name}", "colwise"), (f"{prefix}{following}", "rowwise")]


def _all_divide(module: nn.Module, layers: list[tuple[str, str]], size: int) -> bool:
    return not any(_obstacle(module, name, style, size) for name, style in layers)


def share_rows(module: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Lets a module compute on the rows of all ranks of a group in each of them, and return each rank its own.

    Before a forward pass, the ranks exchange the tensors among its arguments, padded with zeros where those of another
    rank are longer, and set their generators to one seed. All else, from sampling to losses, is each rank's own.

    Args:
        module: The module; it must return a row for each of its rows.
        group: This rank's group.
        device: This rank's device.
    """
    exchange = _Exchange(group, device)
    before, after = (torch.compiler.disable(hook) for hook in (exchange.before, exchange.after))  # type: ignore[no-untyped-call]
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


class _Exchange:
    """The hooks around a forward pass, in one rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._counts: list[int] = []
        self._longest = (0, 0)
        self._generators: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Returns the arguments with the rows of all ranks."""
        found, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(found) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if not places or len({len(found[i]) for i in places}) > 1:
            raise ModuleError(
                f"{type(module).__name__} is called with {len(places)} tensors that have not all as many rows, and "
                "ranks that share layers exchange rows",
                hint="pass tensors with a row for each row to forward, or leave strategyParams.tensor out",
                param=_PARAM,
            )
        for i in places:
            if found[i].layout is not torch.strided:
                raise ModuleError(
                    f"{type(module).__name__} gets a tensor of layout {found[i].layout}, which ranks that share layers "
                    "cannot exchange",
                    hint="pad it, see setInputFormats, or leave strategyParams.tensor out",
                    param=_PARAM,
                )
        first = found[places[0]]
        shapes, seed = self._meet([found[i].shape for i in places])
        self._counts = [shape[0][0] for shape in shapes]
        most = [torch.Size(map(max, *(shape[k] for shape in shapes))) for k in range(len(places))]
        own, widest = first.shape[1:2], most[0][1:2]
        self._longest = (own[0], widest[0]) if own != widest else (0, 0)
        for k, i in enumerate(places):
            found[i] = self._together(found[i], most[k])
        self._agree(seed)
        return pytree.tree_unflatten(found, spec)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns this rank's rows of the output."""
        self._restore()
        rank, total = self._group.rank(), sum(self._counts)
        start = sum(self._counts[:rank])

        def own_rows(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.shape[:1] != (total,):
                raise ModuleError(
                    f"{type(module).__name__} returned a tensor of shape {tuple(leaf.shape)} for {total} rows, and "
                    "ranks that share layers each take their own rows of it",
                    hint="return a row for each row, and compute the loss in loss or trainingStep",
                    param=_PARAM,
                )
            part: torch.Tensor = _OwnRows.apply(leaf, self._group, self._counts, start)  # type: ignore[no-untyped-call]
            mine, widest = self._longest
            return part[:, :mine] if widest and part.shape[1:2] == (widest,) else part

        return pytree.tree_map(own_rows, output)

    def _meet(self, shapes: list[torch.Size]) -> tuple[list[list[list[int]]], int]:
        """Returns the shapes of each rank's tensors, and the first rank's seed."""
        own = torch.tensor([int(torch.randint(2**62, ())), *(size for shape in shapes for size in shape)])
        rows = _gathered(own.to(self._device), self._group).tolist()
        ends = [1]
        for shape in shapes:
            ends.append(ends[-1] + len(shape))
        return [[row[start:end] for start, end in pairwise(ends)] for row in rows], rows[0][0]

    def _together(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns the rows of all ranks, with this rank's padded to a shape."""
        return _concatenated(_padded(tensor, shape), self._group, self._counts)

    def _agree(self, seed: int) -> None:
        of_device = None if is_host(self._device) else module_of(self._device).get_rng_state(self._device)
        self._generators = (torch.get_rng_state(), of_device)
        torch.manual_seed(seed)

    def _restore(self) -> None:
        assert self._generators is not None
        of_host, of_device = self._generators
        torch.set_rng_state(of_host)
        if of_device is not None:
            module_of(self._device).set_rng_state(of_device, self._device)


class _OwnRows(torch.autograd.Function):
    """Takes a rank's rows; backward, each rank gets the gradients of all rows, each from the rank that has the row."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, group: dist.ProcessGroup, counts: list[int], start: int) -> torch.Tensor:
        ctx.group, ctx.counts = group, counts
        return full[start : start + counts[group.rank()]].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        shape = torch.Size((max(ctx.counts), *gradient.shape[1:]))
        return _concatenated(_padded(gradient, shape), ctx.group, ctx.counts), None, None, None


def _padded(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns a tensor filled up to a shape with zeros at the ends of its axes."""
    if tensor.shape == shape:
        return tensor.contiguous()
    filled = tensor.new_zeros(shape)
    filled[tuple(slice(size) for size in tensor.shape)] = tensor
    return filled


def _concatenated(tensor: torch.Tensor, group: dist.ProcessGroup, counts: list[int]) -> torch.Tensor:
    """Returns the rows of the ranks of a group in their order; each has given as many, of which `counts` count."""
    found = _gathered(tensor, group)
    if len(set(counts)) == 1:
        return found.flatten(0, 1)
    return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the tensors of the ranks of a group, of one shape, stacked."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)  # as bytes, for backends do not take every dtype
    found = flat.new_empty(group.size() * flat.numel())
    dist.all_gather_into_tensor(found, flat, group=group)
    return found.view(tensor.dtype).view(group.size(), *tensor.shape)

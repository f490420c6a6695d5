"""Tensor parallelism: each rank of a group has a part of every divided layer, and all compute on the same rows.

Shoeybi et al. 2019, Megatron-LM (https://arxiv.org/abs/1909.08053), section 3. Torch's `parallelize_module` divides the
layers, `nn.Linear` and `nn.Embedding`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from sparktorch.errors import ConfigError, nearest
from sparktorch.train.sharding.dtensor import local, unviewed

__all__ = ["DIVIDED", "STYLES", "SUMMED", "check_plan", "left_whole", "shard_layers"]

SUMMED = "sum_gradients"
_GATHERED = "colwise_gather_output"
STYLES = ("colwise", "rowwise", _GATHERED, SUMMED)
_PARAM = "strategyParams"
_EXAMPLE = "strategyParams={'plan': {'layers.*.fc1': 'colwise', 'layers.*.fc2': 'rowwise'}}"
DIVIDED = (nn.Linear, nn.Embedding)
_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
# The reason why torch's own attention cannot be divided by heads, and what to use instead.
_PACKED = (
    "an nn.MultiheadAttention, whose queries, keys and values are one parameter: write attention with an nn.Linear for "
    "each of them, or use strategy='zero3'"
)
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Softsign, nn.Dropout, nn.Identity),
)
_ACTIVATIONS = (F.relu, F.gelu, *_ELEMENTWISE)
# Other names for the same.
_OTHER_NAMES = {"embedding_rowwise": "rowwise", "colwise_rep": _GATHERED, "replicated_with_grad_allreduce": SUMMED}
_WITHOUT_PARTNER = ("embedding_rowwise", "colwise_rep", _GATHERED)


def shard_layers(
    module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, str], materialise: Callable[[nn.Module], None]
) -> None:
    """Divides layers of a module among the ranks of a mesh of one dimension, in place.

    All have the same parameters; `materialise` gives a layer its values first. Of "sum_gradients", the caller sums the
    gradients over these ranks.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    parts: dict[str, Any] = dict(module.named_modules(remove_duplicate=False))
    of_torch: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        _GATHERED: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
    }
    for name, kind in styles.items():
        part = parts[name]
        if kind == SUMMED:
            continue
        materialise(part)
        of_table = kind == "rowwise" and isinstance(part, nn.Embedding)
        style = RowwiseParallel(input_layouts=Replicate()) if of_table else of_torch[kind]
        parallelize_module(part, mesh, style, src_data_rank=None)  # No rank sends the others its parameters.
        if isinstance(part, nn.Embedding):
            part.register_forward_pre_hook(_check_index)
        part.register_forward_hook(unviewed, with_kwargs=True)
    for part in parts.values():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # Its kernels for nested tensors take whole layers.


def _check_index(part: Any, inputs: Any) -> None:
    """Refuses what is no row of a table: of a divided one, torch returns zeros for it."""
    index = local(inputs[0])
    in_range: Any = ((index >= 0) & (index < part.num_embeddings)).all()
    torch._assert_async(in_range, f"an index is not one of the {part.num_embeddings} rows of an nn.Embedding")


def check_plan(module: nn.Module, plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Returns the style of each layer that is divided among `size` ranks, by its name.

    Without a plan, that is the one that a model brings, or the layers that are known to belong together:
    feed-forward layers of `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, and pairs of `nn.Linear` in an
    `nn.Sequential` with nothing but activations between them. Of these, those that cannot be divided stay whole. A
    `ConfigError` says that a pattern matches no layer, or one that cannot be divided, or that nothing is known of the
    module.
    """
    styles = _matched(module, plan, size) if plan else _plan_of_model(module, size)
    if styles is None:
        styles, _ = _styles_of_pairs(module, size)
    if not styles:
        layers = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)][:4]
        raise ConfigError(
            f"strategyParams.tensor is {size}, and {type(module).__name__} has no layers that are known to be divisible"
            f" by {size}",
            hint=f"name layers of nn.Linear or nn.Embedding that belong together ({', '.join(layers) or 'it has none'})"
            f", as in {_EXAMPLE}; a model without, as GPT-2, can be divided by strategyParams.shard",
            param=_PARAM,
            code="ST-TENSOR-PARALLEL",
        )
    return styles


def left_whole(module: nn.Module, size: int) -> list[tuple[str, str]]:
    """Returns the layers that `check_plan` does not divide without a plan, though it knows their kind, and why."""
    return [] if _plan_of_model(module, size) is not None else _styles_of_pairs(module, size)[1]


def _styles_of_pairs(module: nn.Module, size: int) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Returns the styles of known layers; and of those that cannot be divided together, the first, and why."""
    styles: dict[str, str] = {}
    whole: list[tuple[str, str]] = []
    tied = _tied_parts(module)
    for pair in _known_pairs(module):
        obstacles = [(name, _obstacle(module.get_submodule(name), size, style, tied)) for name, style in pair]
        reasons = [(name, obstacle) for name, obstacle in obstacles if obstacle]
        if not reasons:
            styles |= dict(pair)
        whole += reasons[:1]
    whole += [(name, _PACKED) for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention)]
    return styles, whole


def _matched(module: nn.Module, plan: Mapping[str, str], size: int) -> dict[str, str]:
    """Returns the style of each layer that matches a pattern; the first that matches decides."""
    parts = {name: part for name, part in module.named_modules() if name}
    tied = _tied_parts(module)
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        matching = [name for name in parts if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"strategyParams.plan: {pattern!r} matches no part of the module",
                hint=nearest(pattern, [name for name, part in parts.items() if isinstance(part, DIVIDED)]),
                param=_PARAM,
                code="ST-TENSOR-PARALLEL",
            )
        for name in (name for name in matching if name not in styles):
            reason = _obstacle(parts[name], size, style, tied)
            if reason:
                raise ConfigError(
                    f"strategyParams.plan: {pattern!r} matches {name!r}, {reason}",
                    hint="make the pattern narrower, or choose another number of workers for strategyParams.tensor",
                    param=_PARAM,
                )
            styles[name] = style
    return styles


def _obstacle(part: Any, size: int, style: str, tied: Set[nn.Module]) -> str:
    """Returns why a layer cannot be divided; empty if it can."""
    if part in tied:
        return "whose weights are tied to those of another part"  # Gradients would be summed once for each.
    if style == SUMMED:
        return "" if list(part.parameters(recurse=False)) else "which has no parameters of its own"
    if isinstance(part, nn.MultiheadAttention):
        return _PACKED
    if type(part) not in DIVIDED:  # A subclass may compute something else.
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        return f"a {kind}, and {style!r} divides only nn.Linear and nn.Embedding, no subclass"
    if {n for n, _ in part.named_parameters()} - {"weight", "bias"} or list(part.buffers()):
        return "which has other parameters or buffers than those of its class"
    if isinstance(part, nn.Embedding) and (part.max_norm is not None or part.scale_grad_by_freq):
        return "with max_norm or scale_grad_by_freq, which a divided table cannot have"
    # An embedding's weight has a row for each entry, that of a linear layer has one for each output.
    along = (style == "rowwise") == isinstance(part, nn.Linear)
    divides = part.weight.shape[along] % size == 0
    return "" if divides else f"whose {tuple(part.weight.shape)} weights are not divisible by {size} under {style!r}"


def _plan_of_model(module: Any, size: int) -> dict[str, str] | None:
    """Returns the plan that a model brings; `None` if it has none."""
    plan = getattr(module, "_tp_plan", None)
    if not plan or not isinstance(plan, Mapping):
        return None
    config = getattr(module, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, size)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(
                f"strategyParams.tensor is {size}, and the model's {name} is {heads}",
                hint=f"set it to a divisor of {heads}",
                param=_PARAM,
                code="ST-TENSOR-PARALLEL",
            )
    tied = _tied_parts(module)
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        for name, part in module.named_modules():
            if not fnmatchcase(name, pattern) or part in tied:
                continue
            ours = _OTHER_NAMES.get(style, style or "nothing")
            reason = _obstacle(part, size, ours, tied) if ours in STYLES else f"by {style!r}, which is not supported"
            if not reason:
                styles[name] = ours
            elif style not in _WITHOUT_PARTNER:  # A vocabulary of any size is held whole.
                raise ConfigError(
                    f"the plan of {type(module).__name__} divides {name!r}, {reason}",
                    hint=f"give a plan of your own, {_EXAMPLE}",
                    param=_PARAM,
                )
    return styles


def _tied_parts(module: nn.Module) -> set[nn.Module]:
    """Returns the parts of a module that have a parameter which another part has, too."""
    parts = [(part, [*part.parameters(recurse=False)]) for part in module.modules()]
    holders = Counter(parameter for _, parameters in parts for parameter in parameters)
    return {part for part, parameters in parts if any(holders[parameter] > 1 for parameter in parameters)}


def _known_pairs(module: nn.Module) -> Iterable[list[tuple[str, str]]]:
    """Yields the layers of torch's own modules that belong together, with their styles."""
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if type(part) in _TRANSFORMER_LAYERS:
            activation = part.activation
            if activation in _ACTIVATIONS or isinstance(activation, _ELEMENTWISE):
                yield [(f"{prefix}linear1", "colwise"), (f"{prefix}linear2", "rowwise")]
        elif type(part).forward is nn.Sequential.forward:
            layers = [(name, child) for name, child in part.named_children() if not isinstance(child, _ELEMENTWISE)]
            last = ""
            for (name, child), (following, after) in pairwise(layers):
                if name != last and isinstance(child, nn.Linear) and isinstance(after, nn.Linear):
                    last = following
                    yield [(f"{prefix}{name}", "colwise"), (f"{prefix}{following}", "rowwise")]

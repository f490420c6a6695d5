"""What is checked and decided before a module is divided into stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.errors import ConfigError, ModuleError
from sparktorch.train.pipeline.arguments import Arguments
from sparktorch.train.pipeline.pipe import check_rows, names_in_stages, stages_of
from sparktorch.train.pipeline.programs import programs
from sparktorch.train.pipeline.recording import Twin
from sparktorch.train.pipeline.stages import add_evaluated, cut, layers_of, stages_of_nodes
from sparktorch.train.recipe.huggingface import arguments
from sparktorch.train.recipe.recipe import Recipe

__all__ = ["Staged", "check_each_row", "check_pipeline", "check_stages", "first_of_all", "leave", "staged"]

_PARAM = "strategyParams"
_TOLERANCE = 1e-4  # of outputs of a row that should be equal: what other rows do to it has its own size


@dataclass(frozen=True)
class Staged:
    """How a module is divided into stages.

    Attributes:
        twin: Records its forward passes.
        layers: Names of the layers that are called as they are.
        stage_of: The stage of each layer, and of each parameter between them.
        read: Names of the buffers that are read between layers, which any stage may do.
        passed: Bytes that the stage which passes on most passes on of the rows that were recorded.
        work: Floating-point operations of the layers of each stage, in a forward pass of these rows.
    """

    twin: Twin
    layers: list[str]
    stage_of: dict[str, int]
    read: set[str]
    passed: int
    work: list[int]

    def stage(self, parameter: str) -> int:
        """Returns the stage of a parameter, by any of its names."""
        names = names_in_stages(self.twin.module, self.stage_of)
        return stages_of(names[parameter], self.stage_of)[0]


def check_pipeline(config: TrainConfig, recipe: Recipe) -> None:
    """Refuses settings that a pipeline does not support.

    Raises:
        ConfigError: One of them is set.
    """
    if recipe.steps_itself:
        raise ConfigError(
            "a LightningModule computes in steps of its own, whose passes a pipeline cannot run",
            hint="pass its network as module, with a loss, or use strategyParams.shard instead of pipeline",
            param="module",
        )
    if config.compile:
        raise ConfigError(
            "compile is set, and strategyParams.pipeline calls the layers of the module, not the module",
            hint="leave compile out",
            param="compile",
        )
    if config.precision == "fp16":
        raise ConfigError(
            "precision 'fp16' scales the loss, and strategyParams.pipeline divides the gradients",
            hint="set precision='bf16'",
            param="precision",
        )


def check_stages(module: nn.Module) -> None:
    """Refuses modules that no pipeline can train as one process does.

    Raises:
        ConfigError: The module has adapters.
        ModuleError: The module has batch normalisation, embeddings with sparse gradients, or extra state.
    """
    if hasattr(module, "peft_config"):
        raise ConfigError(
            "strategyParams.pipeline divides no module with adapters",
            hint="divide parameters with strategyParams.shard, or train the model without adapters",
            param=_PARAM,
        )
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise ModuleError(
                f"{name or 'the module'} is batch normalisation, and a pipeline computes on a micro-batch at a time",
                hint="use nn.GroupNorm or nn.LayerNorm, or leave strategyParams.pipeline out",
                param=_PARAM,
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ModuleError(
                f"{name or 'the module'} has sparse gradients, which ranks of a pipeline do not clip or measure",
                hint="leave sparse=True out",
                param=_PARAM,
            )
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise ModuleError(
                f"{name or 'the module'} has extra state, which a rank cannot save of layers of other ranks",
                hint="keep it in a buffer, or divide the module with strategyParams.shard",
                param=_PARAM,
            )


@torch.no_grad()
def check_each_row(module: nn.Module, batch: Batch) -> None:
    """Refuses a module that in evaluation computes another output of a row beside another row.

    It looks at values: of tensors without any, it says nothing; nor of modules that draw numbers or fail.

    Args:
        module: The module.
        batch: A row, or more.

    Raises:
        ModuleError: The module mixes rows.
    """
    from torch._subclasses import FakeTensor

    args, kwargs = arguments(batch, module)
    kwargs.pop("labels", None)
    given = Arguments.of(args, kwargs)
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in (*module.parameters(), *given.tensors)):
        return
    alone = [tensor[:1] for tensor in given.tensors]
    both = [torch.cat([tensor, _another(tensor)]) for tensor in alone]
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.random.fork_rng(devices=()):
            found = [
                pytree.tree_leaves(given.call(module, *(t.clone() for t in tensors)))
                for tensors in (alone, alone, both)
            ]
    except Exception:
        return  # the dry run says why
    finally:
        for part, mode in modes.items():
            part.training = mode
    for one, again, beside in zip(*found, strict=True):
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel() and torch.equal(one, again):
            largest = torch.maximum(one.abs().max(), beside[:1].abs().max())
            if (beside[:1] - one).abs().max() > _TOLERANCE * largest:
                raise ModuleError(
                    f"{type(module).__name__} computes another output of a row beside another one, and a pipeline "
                    "computes on a micro-batch at a time",
                    hint="compute each row by itself, as nn.LayerNorm does, or use strategyParams.shard",
                    param=_PARAM,
                )


def _another(row: torch.Tensor) -> torch.Tensor:
    """Returns another row that a module takes where it takes this one; of some, only the same."""
    if row.is_floating_point():
        return row / 2 + 0.25
    return row.flip(-1) if row.dim() > 1 and row.dtype is not torch.bool else row


def staged(
    module: nn.Module,
    stages: int,
    split: Sequence[str],
    batch: Batch,
    device: torch.device | None = None,
    styles: Mapping[str, str] = MappingProxyType({}),
) -> Staged:
    """Divides a module into stages, which says nothing of values.

    Args:
        module: The module.
        stages: Number of stages.
        split: Names of the layers that they begin with, but for the first; empty for stages with equal work.
        batch: Its forward pass is recorded, in training and in evaluation.
        device: Where the stages compute; `None` for the CPU.
        styles: How `tensor` divides layers, by their names.

    Raises:
        ConfigError: The options do not fit the module.
        ModuleError: The module cannot be divided.
    """
    for name, tensor in zip(batch.names or [""] * len(batch.inputs), batch.inputs, strict=True):
        if tensor.is_nested or tensor.layout is not torch.strided:
            raise ModuleError(
                f"input {name!r} is of layout {str(tensor.layout).removeprefix('torch.')}, which a pipeline cannot cut "
                "into micro-batches of one shape",
                hint="set inputLayouts to 'dense' or 'padded' for the column, or leave strategyParams.pipeline out",
                param=_PARAM,
            )
    twin = Twin(module, device or torch.device("cpu"))
    layers = layers_of(twin.module, stages, split)
    args, kwargs = arguments(batch, module)
    kwargs.pop("labels", None)  # with which a model of transformers computes a loss, too
    given = Arguments.of(args, kwargs)
    with _in_order_of_calls(twin.module, styles) as called:
        trained = twin.record(layers, given.call, given.tensors, training=True)
    evaluated = twin.record(layers, given.call, given.tensors, training=False)
    found = cut(trained, twin.module, stages, split, called)
    add_evaluated(evaluated, twin.module, found, stages)
    made = [programs(recording, found, stages) for recording in (trained, evaluated)]  # refuses what cannot be cut
    for each in made:
        check_rows(each[-1].returned, given.rows)
    names = names_in_stages(twin.module, found)
    for name, _ in twin.module.named_parameters():  # nothing uses those that are in no stage
        if name not in names:
            found[name] = 0
    passed = max(sum(value.nbytes for value in each.received) for each in made[0])
    work, of_node = [0] * stages, stages_of_nodes(trained, found)
    for node, call in trained.calls.items():
        work[of_node[node]] += call.work
    read = {name for each in (trained, evaluated) for name in each.tensors.values() if name not in each.parameters}
    return Staged(twin, layers, found, read, passed, work)


@contextmanager
def _in_order_of_calls(module: nn.Module, styles: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Context with styles of layers, in which a layer that is called becomes the last one."""
    found = dict(styles)

    def called(name: str, *_: object) -> None:
        found[name] = found.pop(name)

    handles = [module.get_submodule(name).register_forward_hook(partial(called, name)) for name in styles]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def first_of_all(value: Any) -> Any:
    """Returns rank 0's value in all ranks."""
    found = [value]
    dist.broadcast_object_list(found, 0)
    return found[0]


def leave(module: nn.Module, own: Collection[str], others: Collection[str], read: Collection[str]) -> None:
    """Leaves a module the parameters of this rank's stages, and none of the tensors of other ranks' layers.

    Args:
        module: The module.
        own: Names of the layers of this rank's stages, and of their parameters between layers.
        others: Names of those of other ranks.
        read: Names of the buffers that any stage may read.
    """
    paths: dict[nn.Module, list[str]] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        paths.setdefault(part, []).append(path)
    for part, found in paths.items():
        for last in list(part._parameters):
            if not any(_within(_joined(path, last), kept) for path in found for kept in own):
                setattr(part, last, None)  # nn.RNNBase has them in a list, too
        here, there = (any(_within(path, name) for path in found for name in names) for names in (own, others))
        if there and not here:
            for last in part._buffers:
                if not any(_joined(path, last) in read for path in found):
                    part._buffers[last] = None
            vars(part).update({last: None for last, value in vars(part).items() if isinstance(value, torch.Tensor)})


def _joined(path: str, last: str) -> str:
    return f"{path}.{last}" if path else last

"""A mesh whose ranks have layers one after another: each passes on what its stages computed.

Huang et al. 2019, GPipe (https://arxiv.org/abs/1811.06965). How a module becomes stages, and what runs them, is in
`sparktorch/train/pipeline`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.devices import seed
from sparktorch.distributed.process_group import subgroup, sum_over_ranks
from sparktorch.train.checkpoint.tensors import OPTIMIZER
from sparktorch.train.huggingface.models import arguments
from sparktorch.train.pipeline.checks import SETTINGS, check_equal, check_inputs, check_parts
from sparktorch.train.pipeline.cut import Cut
from sparktorch.train.pipeline.pipe import Pipe
from sparktorch.train.pipeline.stage import Stage
from sparktorch.train.pipeline.step import MicroLosses, arguments_of, check_step, stand_in
from sparktorch.train.recipe.arguments import Arguments
from sparktorch.train.recipe.loss import Sums
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.sharding.dtensor import part_of, unadvised
from sparktorch.train.sharding.units import check_checkpointing, units
from sparktorch.train.strategies.base import Step
from sparktorch.train.strategies.mesh import Mesh
from sparktorch.train.strategies.mesh_options import MeshOptions
from sparktorch.train.tensor_parallel.comparison import Comparison, in_evaluation
from sparktorch.train.tensor_parallel.row_exchange import RowExchange

__all__ = ["PipelineMesh"]


class PipelineMesh(Mesh):
    """A mesh with the dimension `pipeline`: the engine's module is a `Pipe`; a rank has parameters of some stages."""

    runs_passes = True
    refusals = SETTINGS
    _pipe: Pipe
    _exchange: RowExchange

    @classmethod
    def check_module(cls, options: MeshOptions, recipe: Recipe, module: nn.Module, workers: int) -> None:
        """Refuses what other meshes do, and modules that no pipeline trains as one process does."""
        check_parts(module)
        super().check_module(options, recipe, module, workers)

    @classmethod
    def check_call(cls, options: MeshOptions, recipe: Recipe, module: nn.Module, batch: Batch) -> None:
        """Refuses modules that are not the composition of their stages, and steps that need more than the output."""
        check_inputs(batch)
        cut = Cut(module, options.stages, options.split, cls._styles_of(module, options))
        step = recipe.build_training_step()
        given = None if step is None else check_step(step, module, batch)
        if given is None:
            args, kwargs = arguments(batch, module)
            kwargs.pop("labels", None)  # with which a model of transformers computes a loss, too
            given = Arguments.of(args, kwargs)
        check_equal(cut, given, module)
        parts = nn.ModuleList(cut.stage(number) for number in range(options.stages))
        check_checkpointing(options, f"{type(module).__name__} in stages", units(parts, options))

    @property
    def exchanges_rows(self) -> bool:
        """Whether ranks exchange the inputs of a forward pass."""
        return True

    @cached_property
    def _sharing(self) -> dist.ProcessGroup:
        """The ranks that compute on the same rows."""
        lists = self._ranks.mesh.movedim(2, 1).reshape(-1, self._sizes.pipeline * self._sizes.tensor).tolist()
        return subgroup(self._world, lists)

    @cached_property
    def _stage(self) -> int:
        """This rank's place among those with other layers."""
        return part_of(self._ranks, "pipeline").get_local_rank()

    def prepare(self, module: nn.Module) -> Pipe:
        """Leaves this rank the parameters of its stages, and divides these."""
        options = self._options
        styles = self._styles(module)
        cut = Cut(module, options.stages, options.split, styles)
        group = part_of(self._ranks, "pipeline").get_group()
        own = range(group.rank(), options.stages, group.size())
        stages = [cut.stage(number) for number in own]
        aliases = cut.aliases(stages)
        by_number = dict(zip(own, stages, strict=True))
        comparisons = self._undivided(module, lambda *given: self._comparisons(module, cut, by_number, *given)) or {}
        cut.keep(own)
        self._divide_layers(module, styles)
        compared = [
            comparison.check(stage.to(self._device), partial(self._complete, module))
            for stage, comparison in comparisons.items()
        ]
        self._compared = bool(compared) and all(compared)
        for stage in stages:
            present = {type(part).__name__ for part in stage.modules()}
            classes = [name for name in options.wrap_classes if name in present]
            self._divided(stage, replace(options, wrap_classes=classes))
        for part, name, other, same in aliases:
            setattr(part, name, getattr(other, same))
        self.materialise(module)  # the buffers of no stage
        for part in {*module.modules(), *(below for stage in stages for below in stage.modules())}:
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, buffer.to(self._device))
        self._whole = cut.outline
        copies = self._sharing.size() < self._world.world_size
        how = options.schedule, options.count
        self._pipe = Pipe(module, stages, cut, group, self._device, how, copies=copies)
        self._exchange = RowExchange(self._sharing, self._device)
        self._exchange.attach(self._pipe)
        return self._pipe

    def _comparisons(
        self, module: nn.Module, cut: Cut, own: dict[int, Stage], args: Any, kwargs: Any
    ) -> dict[Stage, Comparison]:
        """Returns what this rank's stages compute of a few rows before their layers are divided."""
        exchange, found = RowExchange(self._sharing, self._device), dict[Stage, Comparison]()
        given = Arguments.of(*exchange.before(module, args, kwargs))
        exchange.restore()
        inputs = {str(place): tensor for place, tensor in enumerate(given.tensors)}
        passed: Sequence[torch.Tensor] = ()
        for number in range(self._options.stages):
            stage = own.get(number) or cut.stage(number)
            stage.given = given
            if number in own:
                found[stage] = Comparison(stage, passed, inputs, part_of(self._ranks, "tensor").get_group())
            with torch.no_grad(), in_evaluation(stage):
                of_host = {name: tensor.cpu() for name, tensor in inputs.items()}
                returned = stage(*(tensor.cpu() for tensor in passed), **of_host)
            passed = [tensor.to(self._device) for tensor in returned]
        return found

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Returns the user's module, of which this rank has some parameters only."""
        return cast(Pipe, module).module

    def shown(self, module: nn.Module) -> nn.Module:
        """Returns what stands for the pipeline: it has the methods of the user's module, and no parts."""
        return stand_in(self.unwrap(module), module.__call__)

    def run_pass(
        self, module: nn.Module, batch: Batch, step: Step, scale: float, autocast: AbstractContextManager[Any]
    ) -> tuple[torch.Tensor, Sums]:
        """Runs the rows of all ranks that share them through the pipeline."""
        assert isinstance(module, Pipe)
        own = arguments_of(step, module.module, batch)
        ones = torch.ones(len(batch.inputs[0]), device=self._device)
        weights = [ones if each is None else each for each in (batch.weight, batch.loss_weight)]
        self._exchange.flags = (batch.weight is not None) + 2 * (batch.loss_weight is not None)
        sent = (own.values, list(batch.inputs), batch.label, weights)
        (values, inputs, label, weights), _ = self._exchange.before(module, sent, {})
        seed(torch.initial_seed() + self._stage, self._device)  # stages drop other activations; tensor ranks the same
        given = replace(own, values=values)
        # A rank without rows has weights of zero for its placeholders, and others may have none.
        weight, loss_weight = (each if self._exchange.flags & bit else None for bit, each in enumerate(weights, 1))
        every = replace(batch, inputs=tuple(inputs), label=label, weight=weight, loss_weight=loss_weight)
        every = replace(every, lengths={}, tokens=None)  # which are known of this rank's own rows only
        losses = MicroLosses(step, module.module, every, given, compare=not self._compared_step)
        self._compared_step = True
        try:
            total = module.train_rows(given, losses, scale, autocast)
        finally:
            self._exchange.restore()
        return total / self._sharing.size(), losses.metrics

    def metrics(self) -> dict[str, float]:
        """Returns the share of the time that ranks of a pipeline were idle, and that of equal stages by formula."""
        idle, whole = sum_over_ranks(torch.tensor(self._pipe.idle(), dtype=torch.float64), self._world).tolist()
        return {"pipeline_bubble_formula": self._options.bubble} | ({"pipeline_bubble": idle / whole} if whole else {})

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context in which the pipeline is called for a forward pass."""
        with super().evaluating(module):
            yield module

    @contextmanager
    def no_sync(self, module: nn.Module, *, last: bool = False) -> Iterator[None]:
        """Context that does nothing: a schedule reduces gradients at its end."""
        yield

    def saves(self, name: str) -> bool:
        """Returns whether this rank saves an unsharded tensor; of a stage, a rank of that stage does."""
        if name.startswith(OPTIMIZER) or name.partition(".")[2] in self._pipe.cut.stage_of:
            others = (part_of(self._ranks, name) for name in ("data", "shard", "tensor"))
            return all(part.get_local_rank() == 0 for part in others)
        return super().saves(name)

    def common_buffers(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Returns the buffers that all ranks have; those of a stage's layers, no forward pass changes."""
        stage_of, named = self._pipe.cut.stage_of, self._pipe.module.named_buffers(remove_duplicate=False)
        return [buffer for name, buffer in named if name not in stage_of]

    def shares(self, module: nn.Module, *, copy: bool = False) -> dict[str, torch.Tensor]:
        """Returns this rank's shards of its stages, by name."""
        with self.evaluating(module):
            self._let_go(module)
            found = self._pipe.shares()
            return {name: tensor.cpu().clone() for name, tensor in found.items()} if copy else found

    def state_dict(
        self, module: nn.Module, *, copy: bool = False, leave_out: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Gathers the whole model's state dict in rank 0; returns an empty dict in other ranks."""
        with unadvised(), self.evaluating(module):
            self._let_go(module)
            return self._pipe.whole_state(leave_out)

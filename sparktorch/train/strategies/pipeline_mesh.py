"""A mesh whose ranks have layers one after another: each passes on what its stages computed.

Huang et al. 2019, GPipe (https://arxiv.org/abs/1811.06965). How a module becomes stages, and what runs them, is in
`sparktorch/train/pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.devices import seed
from sparktorch.base.no_op import no_op
from sparktorch.distributed.process_group import sum_over_ranks
from sparktorch.errors import ConfigError
from sparktorch.train.checkpoint.tensors import OPTIMIZER
from sparktorch.train.pipeline.checks import MicroLosses, arguments_of, check_equal, check_rows, check_step, stand_in
from sparktorch.train.pipeline.cut import Cut
from sparktorch.train.pipeline.pipe import Pipe, as_bytes
from sparktorch.train.recipe.loss import Step, Sums
from sparktorch.train.sharding.arguments import Arguments
from sparktorch.train.sharding.dtensor import PIPELINE, part_of, unadvised, whole
from sparktorch.train.sharding.units import check_checkpointing, check_parts, units
from sparktorch.train.strategies.base import Job, Start
from sparktorch.train.strategies.mesh import MESH, Mesh, check_mesh, check_mesh_settings

__all__ = ["KIND"]


class PipelineMesh(Mesh):
    """A mesh with the dimension `pipeline`: the engine's module is a `Pipe`; a rank has parameters of some stages."""

    _reshard_after_forward = False
    _compares_calls = False
    _compared_step = False
    _pipe: Pipe
    _cut: Cut

    @cached_property
    def _stacked(self) -> dist.ProcessGroup:
        """The ranks that have the layers one after another."""
        return part_of(self._ranks, "pipeline").get_group()

    def prepare(self, module: nn.Module, start: Start) -> Pipe:
        """Leaves this rank the parameters of its stages, and divides these."""
        options, styles = self._options, self._styles(module)
        if self._sizes.tensor > 1:
            self._compare_division(module, styles, start)
        cut, group = Cut(module, options.stages, options.split), self._stacked
        stages = {number: cut.stage(number) for number in range(group.rank(), options.stages, group.size())}
        aliases = cut.aliases(stages.values())
        cut.keep(stages)
        self._divide_layers(module, styles, start)
        for stage in stages.values():
            present = {type(part).__name__ for part in stage.modules()}
            classes = [name for name in options.wrap_classes if name in present]
            self._divided(stage, replace(options, wrap_classes=classes), start, module)
        for part, name, holder, name_there in aliases:
            setattr(part, name, getattr(holder, name_there))
        start.materialise(module)  # This makes the buffers that are in no stage.
        for part in {*module.modules(), *(below for stage in stages.values() for below in stage.modules())}:
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, buffer.to(self._device))
        self._cut, self._whole = cut, cut.outline
        copies = self._sharing.size() < self._world.world_size
        self._pipe = Pipe(module, stages, group, self._device, options.schedule, options.count, copies=copies)
        return self._pipe

    def shared_rows(self, batch: Batch, before: Callable[[], object] = no_op) -> AbstractContextManager[Batch]:
        """Returns a context of a pass on the rows of all ranks of a pipeline, padded as those of its copies are."""
        if batch.pads:
            longest = torch.tensor([batch.inputs[position].shape[1] for position in batch.pads])
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            batch = batch.padded(dict(zip(batch.pads, longest.tolist(), strict=True)))
        return super().shared_rows(batch, before)

    def for_training_step(self, module: nn.Module) -> nn.Module:
        """Returns what stands for the pipeline: it has the methods of the user's module, and no parts."""
        return stand_in(self._pipe.module, module.__call__)

    def run_pass(
        self, module: nn.Module, batch: Batch, step: Step, scale: float, autocast: AbstractContextManager[Any]
    ) -> tuple[torch.Tensor, Sums]:
        """Runs the rows of all ranks that share them through the pipeline."""
        pipe = self._pipe
        # Lengths and tokens are left out, by which a micro-batch would be cut to its longest row.
        batch = replace(batch, lengths={}, tokens=None)
        arguments = arguments_of(step, pipe.module, batch).to(self._device)
        # From here on, stages drop other activations, and ranks that share a layer the same.
        seed(torch.initial_seed() + self._stacked.rank(), self._device)
        losses = MicroLosses(step, pipe.module, batch, arguments, compare=not self._compared_step)
        self._compared_step = True
        return pipe.train_rows(arguments, losses, scale, autocast), losses.metrics

    def metrics(self) -> dict[str, float]:
        """Returns the share of the time that ranks of a pipeline were idle, and that of equal stages by formula."""
        idle, whole = sum_over_ranks(torch.tensor(self._pipe.idle(), dtype=torch.float64), self._world).tolist()
        return {"pipeline_bubble_formula": self._options.bubble} | ({"pipeline_bubble": idle / whole} if whole else {})

    def saves(self, name: str) -> bool:
        """Returns whether this rank saves an unsharded tensor; of a stage, a rank of that stage does."""
        if name.startswith(OPTIMIZER) or name.partition(".")[2] in self._cut.stage_of:
            coordinates = zip(self._sizes._fields, (self._layout == self._world.rank).nonzero()[0], strict=True)
            return all(coordinate == 0 for name, coordinate in coordinates if name != PIPELINE)
        return super().saves(name)

    def _common_buffers(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Returns the buffers that all ranks have; those of a stage's layers, no forward pass changes."""
        stage_of, named = self._cut.stage_of, self._pipe.module.named_buffers(remove_duplicate=False)
        return [buffer for name, buffer in named if name not in stage_of]

    def _tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the tensors of this rank's stages by name; the first rank has those that are in no stage, too."""
        state = self._pipe.module.state_dict(keep_vars=True)
        return {name: state[name] for name in self._cut.outline.state if self._rank_of(name) == self._stacked.rank()}

    def _rank_of(self, name: str) -> int:
        """Returns the rank in the group that has a parameter or buffer; the first for those of no stage."""
        return self._cut.stage_of.get(name, 0) % self._stacked.size()

    def state_dict(
        self, module: nn.Module, *, copy: bool = False, leave_out: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Gathers the whole model's state dict in rank 0; returns an empty dict in other ranks."""
        group, main, gathered = self._stacked, self._world.is_main, dict[str, torch.Tensor]()
        with_rank_0 = 0 in dist.get_process_group_ranks(group)
        with unadvised(), self.evaluating(module):
            self._let_go(module)
            state = self._pipe.module.state_dict()
            for name, meta in self._cut.outline.state.items():
                source = self._rank_of(name)
                # This is a collective of the ranks that have the stage.
                tensor = whole(state[name].detach()) if source == group.rank() else None
                if not with_rank_0 or name in leave_out:
                    continue
                # Rank 0 alone receives it: devices of the others may be nearly full.
                if source and tensor is not None:
                    dist.send(as_bytes(tensor.to(self._device).contiguous()), group=group, group_dst=0)
                elif source and main:
                    tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
                    dist.recv(as_bytes(tensor), group=group, group_src=source)
                if main and tensor is not None:
                    gathered[name] = tensor.to("cpu", copy=True)
        return gathered


def _check(job: Job) -> None:
    """Refuses what other meshes do, and modules and training steps that no pipeline trains as one process does."""
    options, module, batch = job.options, job.module, job.batch
    if module is not None:
        check_parts(module, staged=True)
    check_mesh(job)
    if module is None or batch is None:
        return
    check_rows(batch.inputs, batch.rows, "the job gives", "inputLayouts")
    cut = Cut(module, options.stages, options.split)
    step = job.recipe.build_training_step()
    arguments = None if step is None else check_step(step, module, batch)
    check_equal(cut, arguments or Arguments.of_batch(batch, module), module)
    parts = nn.ModuleList(cut.stage(number) for number in range(options.stages))
    check_checkpointing(options, f"{type(module).__name__} in stages", units(parts, options, module))


def _check_settings(job: Job) -> None:
    """Refuses settings that other meshes do, and those that stages of a module cannot have."""
    if job.config.compile:
        raise ConfigError(
            "compile is set, and strategyParams.pipeline calls the stages of the module, not the module",
            hint="leave compile out",
            param="compile",
            code="ST-MESH",
        )
    if job.options.param_dtype:
        raise ConfigError(
            "strategyParams.param_dtype is set, and stages of a pipeline pass on values in the dtypes of the module",
            hint="set precision='bf16', which leaves parameters as they are, or leave it out",
            param="strategyParams",
            code="ST-MESH",
        )
    check_mesh_settings(job)


KIND = replace(MESH, rank=PipelineMesh, check_settings=_check_settings, check=_check, runs_passes=True)

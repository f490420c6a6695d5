"""A mesh whose ranks have layers one after another: each passes on what its stages computed.

Huang et al. 2019, GPipe (https://arxiv.org/abs/1811.06965). How a module becomes stages, and what runs them, is in
`sparktorch/train/pipeline`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.devices import is_host, seed
from sparktorch.distributed.process_group import subgroup, sum_over_ranks
from sparktorch.errors import Refusal
from sparktorch.train.checkpoint.tensors import OPTIMIZER
from sparktorch.train.pipeline.checks import MicroLosses, arguments_of, check_equal, check_rows, check_step, stand_in
from sparktorch.train.pipeline.cut import Cut, Stage
from sparktorch.train.pipeline.pipe import Pipe, as_bytes
from sparktorch.train.recipe.adapter import arguments
from sparktorch.train.recipe.loss import Sums
from sparktorch.train.sharding.arguments import Arguments
from sparktorch.train.sharding.dtensor import PIPELINE, part_of, unadvised, whole
from sparktorch.train.sharding.units import check_checkpointing, check_parts, units
from sparktorch.train.strategies.base import Job, Start, Step
from sparktorch.train.strategies.mesh import MESH, Mesh, check_mesh, styles_of
from sparktorch.train.tensor_parallel.comparison import Comparison, in_evaluation, moved
from sparktorch.train.tensor_parallel.row_exchange import RowExchange

__all__ = ["KIND"]

_log = logging.getLogger(__name__)


class PipelineMesh(Mesh):
    """A mesh with the dimension `pipeline`: the engine's module is a `Pipe`; a rank has parameters of some stages."""

    exchanges_rows = True
    _reshard_after_forward = False
    _compares_calls = False
    _compared_step = False
    _pipe: Pipe
    _cut: Cut
    _exchange: RowExchange

    @cached_property
    def _sharing(self) -> dist.ProcessGroup:
        """The ranks that compute on the same rows."""
        lists = self._layout.movedim(2, 1).reshape(-1, self._sizes.pipeline * self._sizes.tensor).tolist()
        return subgroup(self._world, lists)

    @cached_property
    def _stacked(self) -> dist.ProcessGroup:
        """The ranks that have the layers one after another."""
        return part_of(self._ranks, "pipeline").get_group()

    def prepare(self, module: nn.Module, start: Start) -> Pipe:
        """Leaves this rank the parameters of its stages, and divides these."""
        options, styles = self._options, self._styles(module)
        cut = Cut(module, options.stages, options.split, styles)
        group = self._stacked
        own = {number: cut.stage(number) for number in range(group.rank(), options.stages, group.size())}
        aliases = cut.aliases(own.values())
        comparisons = self._undivided(module, start, lambda *given: self._comparisons(module, cut, own, *given)) or {}
        cut.keep(own)
        self._divide_layers(module, styles, start)
        compared = [
            comparison.check(stage.to(self._device), partial(self._complete, module))
            for stage, comparison in comparisons.items()
        ]
        self._compared = bool(compared) and all(compared)
        for stage in own.values():
            present = {type(part).__name__ for part in stage.modules()}
            classes = [name for name in options.wrap_classes if name in present]
            self._divided(stage, replace(options, wrap_classes=classes), start, module)
        for part, name, other, same in aliases:
            setattr(part, name, getattr(other, same))
        start.materialise(module)  # the buffers of no stage
        for part in {*module.modules(), *(below for stage in own.values() for below in stage.modules())}:
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, buffer.to(self._device))
        self._cut, self._whole = cut, cut.outline
        copies = self._sharing.size() < self._world.world_size
        self._pipe = Pipe(module, own, group, self._device, options.schedule, options.count, copies=copies)
        self._exchange = RowExchange(self._sharing, self._device)
        self._exchange.attach(self._pipe)
        return self._pipe

    def _comparisons(
        self, module: nn.Module, cut: Cut, own: dict[int, Stage], args: Any, kwargs: Any
    ) -> dict[Stage, Comparison]:
        """Returns what this rank's stages compute of a row of each rank before their layers are divided.

        The first rank of those with the same rows calls all stages, one after another on its device, and the first rank
        of those that share a stage's layers once more with gradients. Nothing is compared if it cannot.
        """
        exchange, found = RowExchange(self._sharing, self._device), dict[Stage, Comparison]()
        given = Arguments.of(*exchange.before(module, args, kwargs))
        exchange.restore()
        inputs = {str(place): tensor for place, tensor in enumerate(given.tensors)}
        stages = {number: own.get(number) or cut.stage(number) for number in range(self._options.stages)}
        for stage in stages.values():
            stage.given = given
        sent: list[Any] = [self._passed_on(stages, inputs) if self._sharing.rank() == 0 else None]
        dist.broadcast_object_list(sent, group=self._sharing, group_src=0)
        for number, passed in sent[0].items():
            if number in own:
                received = [tensor.to(self._device) for tensor in passed]
                found[own[number]] = Comparison(own[number], received, inputs, self._layers, device=self._device)
        return found

    def _passed_on(
        self, stages: dict[int, Stage], inputs: dict[str, torch.Tensor]
    ) -> dict[int, Sequence[torch.Tensor]]:
        """Returns what each stage receives, on the host; nothing if a stage fails on an accelerator."""
        passed: dict[int, Sequence[torch.Tensor]] = {0: ()}
        try:
            for number, stage in list(stages.items())[:-1]:
                with moved(stage, self._device), torch.no_grad(), in_evaluation(stage):
                    returned = stage(*(tensor.to(self._device) for tensor in passed[number]), **inputs)
                passed[number + 1] = [tensor.cpu() for tensor in returned]
        except Exception as error:
            if is_host(self._device):
                raise
            _log.warning("the plan is not compared with the undivided module, which fails: %s", error)
            return {}
        return passed

    def shown(self, module: nn.Module) -> nn.Module:
        """Returns what stands for the pipeline: it has the methods of the user's module, and no parts."""
        return stand_in(self._pipe.module, module.__call__)

    def run_pass(
        self, module: nn.Module, batch: Batch, step: Step, scale: float, autocast: AbstractContextManager[Any]
    ) -> tuple[torch.Tensor, Sums]:
        """Runs the rows of all ranks that share them through the pipeline."""
        pipe = self._pipe
        own = arguments_of(step, pipe.module, batch)
        ones = torch.ones(len(batch.inputs[0]), device=self._device)
        weights = [ones if each is None else each for each in (batch.weight, batch.loss_weight)]
        self._exchange.flags = (batch.weight is not None) + 2 * (batch.loss_weight is not None)
        sent = (own.values, list(batch.inputs), batch.label, weights)
        (values, inputs, label, weights), _ = self._exchange.before(module, sent, {})
        # Stages drop other activations, and ranks that share a layer the same.
        seed(torch.initial_seed() + self._stacked.rank(), self._device)
        given = replace(own, values=values)
        # A rank without rows has weights of zero for its placeholders, and others may have none.
        weight, loss_weight = (each if self._exchange.flags & bit else None for bit, each in enumerate(weights, 1))
        every = replace(batch, inputs=tuple(inputs), label=label, weight=weight, loss_weight=loss_weight)
        every = replace(every, lengths={}, tokens=None)  # which are known of this rank's own rows only
        losses = MicroLosses(step, pipe.module, every, given, compare=not self._compared_step)
        self._compared_step = True
        try:
            total = pipe.train_rows(given, losses, scale, autocast)
        finally:
            self._exchange.restore()
        return total / self._sharing.size(), losses.metrics

    def metrics(self) -> dict[str, float]:
        """Returns the share of the time that ranks of a pipeline were idle, and that of equal stages by formula."""
        idle, whole = sum_over_ranks(torch.tensor(self._pipe.idle(), dtype=torch.float64), self._world).tolist()
        return {"pipeline_bubble_formula": self._options.bubble} | ({"pipeline_bubble": idle / whole} if whole else {})

    def saves(self, name: str) -> bool:
        """Returns whether this rank saves an unsharded tensor; of a stage, a rank of that stage does."""
        if name.startswith(OPTIMIZER) or name.partition(".")[2] in self._cut.stage_of:
            places = (self._layout == self._world.rank).nonzero()[0]
            return all(place == 0 for name, place in zip(self._sizes._fields, places, strict=True) if name != PIPELINE)
        return super().saves(name)

    def _common_buffers(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Returns the buffers that all ranks have; those of a stage's layers, no forward pass changes."""
        stage_of, named = self._cut.stage_of, self._pipe.module.named_buffers(remove_duplicate=False)
        return [buffer for name, buffer in named if name not in stage_of]

    def _tensors(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the tensors of this rank's stages by name; the first rank has those that are in no stage, too."""
        own = self._pipe.module.state_dict(keep_vars=True)
        return {name: own[name] for name in self._cut.outline.state if self._rank_of(name) == self._stacked.rank()}

    def _rank_of(self, name: str) -> int:
        """Returns the rank in the group that has a parameter or buffer; the first for those of no stage."""
        return self._cut.stage_of.get(name, 0) % self._stacked.size()

    def state_dict(
        self, module: nn.Module, *, copy: bool = False, leave_out: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Gathers the whole model's state dict in rank 0; returns an empty dict in other ranks."""
        group, main, found = self._stacked, self._world.is_main, dict[str, torch.Tensor]()
        first = 0 in dist.get_process_group_ranks(group)
        with unadvised(), self.evaluating(module):
            self._let_go(module)
            own = self._pipe.module.state_dict()
            for name, meta in self._cut.outline.state.items():
                source = self._rank_of(name)
                tensor = whole(own[name].detach()) if source == group.rank() else None  # a collective of the stage's
                if not first or name in leave_out:
                    continue
                if source and tensor is not None:  # to rank 0 alone: devices of the others may be nearly full
                    dist.send(as_bytes(tensor.to(self._device).contiguous()), group=group, group_dst=0)
                elif source and main:
                    tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self._device)
                    dist.recv(as_bytes(tensor), group=group, group_src=source)
                if main and tensor is not None:
                    found[name] = tensor.to("cpu", copy=True)
        return found


def _check(job: Job) -> None:
    """Refuses what other meshes do, and modules and training steps that no pipeline trains as one process does."""
    options, module, batch = job.options, job.module, job.batch
    if module is not None:
        check_parts(module, staged=True)
    check_mesh(job)
    if module is None or batch is None:
        return
    check_rows(batch.inputs, batch.rows, "the job gives", "inputLayouts")
    cut = Cut(module, options.stages, options.split, styles_of(module, options))
    step = job.recipe.build_training_step()
    given = None if step is None else check_step(step, module, batch)
    if given is None:
        args, kwargs = arguments(batch, module)
        kwargs.pop("labels", None)  # with which a model may compute a loss, too
        given = Arguments.of(args, kwargs)
    check_equal(cut, given, module)
    parts = nn.ModuleList(cut.stage(number) for number in range(options.stages))
    check_checkpointing(options, f"{type(module).__name__} in stages", units(parts, options, module))


KIND = replace(
    MESH,
    rank=PipelineMesh,
    check=_check,
    runs_passes=True,
    refusals=(
        Refusal(
            "compile",
            lambda job: job.config.compile,
            "compile is set, and strategyParams.pipeline calls the stages of the module, not the module",
            "leave compile out",
            "ST-MESH",
        ),
        Refusal(
            "strategyParams",
            lambda job: job.options.param_dtype,
            "strategyParams.param_dtype is set, and stages of a pipeline pass on values in the dtypes of the module",
            "set precision='bf16', which leaves parameters as they are, or leave it out",
            "ST-MESH",
        ),
        *MESH.refusals,
    ),
)

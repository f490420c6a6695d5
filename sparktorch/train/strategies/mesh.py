"""Ranks in up to four dimensions: copies of the model, its layers in stages, shards of parameters, parts of layers.

`data` x `shard` is hybrid sharding: the model is divided within groups of ranks, and each group has a copy of it. Zhao
et al. 2023, PyTorch FSDP (https://arxiv.org/abs/2304.11277), section 3.2.2. A group that lies on one host gathers
parameters without the network between hosts, which carries 1/`shard` of the gradients then. `tensor` divides layers:
`tensor_parallel.py`. `pipeline` has layers one after another on several ranks: `sparktorch/train/pipeline`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import is_host, seed
from sparktorch.distributed.process_group import subgroup, sum_over_ranks
from sparktorch.errors import ConfigError, nearest
from sparktorch.train.checkpoint.tensors import OPTIMIZER
from sparktorch.train.dtensor import (
    divide_gradients,
    gradients_by_copies,
    local,
    mesh_of_training,
    part_of,
    step_apart,
    unadvised,
    undivided,
)
from sparktorch.train.pipeline.kept import Changes
from sparktorch.train.pipeline.pipe import Pipe
from sparktorch.train.pipeline.programs import Stage
from sparktorch.train.pipeline.setup import check_each_row, check_pipeline, check_stages, first_of_all, leave, staged
from sparktorch.train.pipeline.step import MicroLosses, StandIn, arguments_of, check_step
from sparktorch.train.recipe.huggingface import MODEL_LOSS, gets_row_labels
from sparktorch.train.recipe.loss import Sums
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.base import Step
from sparktorch.train.strategies.divided_shapes import check_shapes, check_values
from sparktorch.train.strategies.fsdp import Zero3, check_optimizer
from sparktorch.train.strategies.mesh_options import MeshOptions, Sizes
from sparktorch.train.strategies.row_exchange import RowExchange, share_rows
from sparktorch.train.strategies.tensor_parallel import (
    OWN_ROWS,
    SUMMED,
    check_gradients,
    check_parts_within,
    check_plan,
    divide,
)

__all__ = ["Mesh", "MeshOptions"]

_log = logging.getLogger(__name__)

_MOST_ROWS, _RANKS = "pipeline_rows", "pipeline_ranks"
_FLAGS = 2  # bits of an exchange of rows that say which weights there are


class Mesh(Zero3[MeshOptions]):
    """As `zero3` within each group of `shard` ranks; between groups, gradients are averaged."""

    options_type = MeshOptions
    _summed: Sequence[nn.Module] = ()
    _compared = False
    _compared_step = False
    _exchange: RowExchange
    _pipe: Pipe
    _changes: Changes

    @classmethod
    def check(cls, config: TrainConfig, recipe: Recipe, options: MeshOptions) -> None:
        """Refuses what `zero3` does and, with `tensor`, modules that train themselves."""
        if cls.own_passes(options):
            check_pipeline(config, recipe)
            if options.param_dtype is not None:
                raise ConfigError(
                    f"strategyParams.param_dtype is {options.param_dtype!r}, and stages of a pipeline pass on values "
                    "in the dtypes of the module",
                    hint="set precision='bf16', which leaves parameters as they are, or leave it out",
                    param="strategyParams",
                )
        super().check(config, recipe, options)
        if options.sequence and config.compile:
            raise ConfigError(
                "compile does not compile layers between which strategyParams.sequence divides sequences",
                hint="leave compile or sequence out",
                param="compile",
            )
        if (options.tensor or 1) > 1 and recipe.steps_itself:
            raise ConfigError(
                "a LightningModule computes in steps of its own, in which ranks that share layers cannot exchange rows",
                hint="pass its network as module, with a loss, or use strategyParams.shard instead of tensor",
                param="strategyParams",
            )

    @classmethod
    def check_workers(cls, options: MeshOptions, workers: int) -> None:
        """Refuses dimensions that do not multiply to the number of workers."""
        options.sizes(workers)

    @classmethod
    def check_module(cls, options: MeshOptions, recipe: Recipe, module: nn.Module, workers: int) -> None:
        """Refuses what `zero3` does and, with `tensor`, plans that do not fit, and losses of rows from the module."""
        super().check_module(options, recipe, module, workers)
        if cls.own_passes(options):
            check_stages(module)
        if (options.tensor or 1) * (options.pipeline or 1) == 1:
            return
        if recipe.training_step == MODEL_LOSS and gets_row_labels(module):
            raise ConfigError(
                f"{type(module).__name__} computes the loss of its rows, which with strategyParams.tensor or pipeline "
                "are those of several ranks",
                hint="set loss, such as 'CrossEntropyLoss'",
                param="loss",
            )
        if (options.tensor or 1) == 1:
            return
        check_optimizer(recipe, module)
        staged = cls.own_passes(options)
        check_plan(module, options.plan, options.tensor or 1, staged=staged, sequence=options.sequence)

    @classmethod
    def check_call(cls, options: MeshOptions, recipe: Recipe, module: nn.Module, batch: Batch) -> None:
        """Refuses plans whose layers do not fit each other, modules that cannot be cut into stages, and their steps.

        Of steps of a pipeline, those that need more than the output of all.
        """
        if options.plan:
            size, styles = options.tensor or 1, check_plan(module, options.plan, options.tensor or 1)
            check_shapes(module, styles, size, batch)
            check_values(module, styles, size, batch)
        step = recipe.build_training_step()
        if not cls.own_passes(options):
            if step is not None and (options.tensor or 1) > 1:
                check_parts_within(step, module, batch)
            return
        found = staged(module, options.stages, options.split, batch)
        check_each_row(module, batch)
        if step is not None:
            check_step(step, module, batch)
        called = {type(part).__name__ for name in found.layers for part in module.get_submodule(name).modules()}
        for name in options.wrap_classes:
            if name not in called:
                raise ConfigError(
                    f"strategyParams.wrap_classes names {name!r}, and strategyParams.pipeline divides parts of that "
                    "class themselves",
                    hint=nearest(name, called),
                    param="strategyParams",
                )

    @cached_property
    def _sizes(self) -> Sizes:
        return self._options.sizes(self._world.world_size)

    @cached_property
    def _ranks(self) -> DeviceMesh:
        """The ranks in all dimensions; those of a group are on one host where a host has enough."""
        data, _, shard, tensor = self._sizes
        hosts: list[str] = [""] * self._world.world_size
        dist.all_gather_object(hosts, self._world.host)
        order = torch.tensor(sorted(range(len(hosts)), key=lambda rank: hosts.index(hosts[rank])))
        # Collectives number the ranks of a group in ascending order, and so must the mesh.
        ranks, largest = order.view(data, -1).sort().values.view(self._sizes), max(map(hosts.count, hosts))
        for name, size in (("tensor", tensor), ("shard", shard * tensor)):
            groups = ranks.view(-1, size).tolist()
            apart = sum(len({hosts[rank] for rank in group}) > 1 for group in groups)
            if apart and size <= largest and self._world.is_main:
                _log.warning(
                    "%d of %d %s groups of strategy 'mesh' are on several hosts, whose network they load",
                    *(apart, len(groups), name),
                )
        along = [ranks.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(self._sizes)]
        groups = [subgroup(self._world, lists) for lists in along]
        return mesh_of_training(groups, self._device.type, ranks, Sizes._fields)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks that hold different samples, in the dimensions `data` and `shard`."""
        return part_of(self._ranks, "data", "shard")

    @cached_property
    def _sharing(self) -> dist.ProcessGroup:
        """The ranks that compute on the same rows."""
        if self._sizes.pipeline == 1:
            return part_of(self._ranks, "tensor").get_group()
        lists = self._ranks.mesh.movedim(2, 1).reshape(-1, self._sizes.pipeline * self._sizes.tensor).tolist()
        return subgroup(self._world, lists)

    @cached_property
    def _stage(self) -> int:
        """This rank's place among those with other layers."""
        return part_of(self._ranks, "pipeline").get_local_rank()

    @property
    def exchanges_rows(self) -> bool:
        """Whether ranks exchange the inputs of a forward pass."""
        return self._sizes.tensor * self._sizes.pipeline > 1

    def together(self, batch: Batch) -> Batch:
        """Returns a batch whose padded inputs are as long as the longest of the ranks that compute on its rows."""
        if not (self.exchanges_rows and batch.pads):
            return batch
        longest = torch.tensor([batch.inputs[place].shape[1] for place in batch.pads])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._sharing)
        return batch.padded(dict(zip(batch.pads, longest.tolist(), strict=True)))

    @classmethod
    def own_passes(cls, options: MeshOptions) -> bool:
        """Whether ranks pass micro-batches through their stages."""
        return (options.pipeline or 1) > 1

    @classmethod
    def shards(cls, options: MeshOptions, workers: int) -> bool:
        """Whether parameters are wrapped for sharding: not where no ranks have other rows of the same part.

        What is not divided by `tensor` is a plain tensor then, beside `DTensor`s.
        """
        together = (options.pipeline or 1) * (options.tensor or 1)
        return super().shards(options, workers) and (together != workers or cls.needs_group(options))

    @property
    def wraps(self) -> bool:
        """Whether parameters are wrapped: in loops of users, who give torch's functions lists of them, always."""
        return super().wraps or (self.in_users_loop and not self.alone)

    @property
    def gradient_divisor(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self._sizes.data * self._sizes.shard

    def prepare(self, module: nn.Module) -> nn.Module:
        """Divides layers, and shards what is left of each rank's parameters, in place."""
        if self.runs_passes:
            return self._piped(module)
        if self.exchanges_rows:
            found = self._divide_layers(module, self._styles(module))
            divided = {name: part for style in found.keys() - {OWN_ROWS, SUMMED} for name, part in found[style].items()}
            self._exchange = share_rows(module, self._sharing, self._device, found.get(OWN_ROWS), divided)
        return super().prepare(module)

    def _styles(self, module: nn.Module) -> dict[str, str]:
        """Returns the style of each layer that is divided."""
        plan, sizes, sequence = self._options.plan, self._sizes, self._options.sequence
        if sizes.tensor == 1:
            return {}
        return check_plan(module, plan, sizes.tensor, staged=self.runs_passes, sequence=sequence)

    def _divide_layers(self, module: nn.Module, styles: Mapping[str, str]) -> dict[str, dict[str, nn.Module]]:
        """Divides those layers that this rank has, in place; returns those of each style, by their names."""
        parts = {name: module.get_submodule(name) for name in styles}
        held = {name: part for name, part in parts.items() if next(part.parameters(), None) is not None}
        if styles:
            own, mesh = {name: styles[name] for name in held}, part_of(self._ranks, "tensor")
            divide(module, mesh, own, self.materialise, sequence=self._options.sequence)
        found: dict[str, dict[str, nn.Module]] = {}
        for name, part in held.items():
            found.setdefault(styles[name], {})[name] = part
        self._summed = list(found.get(SUMMED, {}).values())
        return found

    def _piped(self, module: nn.Module) -> Pipe:
        """Leaves this rank the parameters of its stages, and divides these."""
        assert self.example is not None
        options = self._options
        found = staged(module, options.stages, options.split, self.example(), self._device)
        stage_of = first_of_all(found.stage_of)  # batches of other shapes might be cut elsewhere
        group = part_of(self._ranks, "pipeline").get_group()
        own = range(group.rank(), options.stages_per_rank * group.size(), group.size())
        styles = self._styles(module)
        here, others = ([name for name, at in stage_of.items() if (at in own) == mine] for mine in (True, False))
        leave(module, here, others, found.read)
        self._divide_layers(module, styles)
        stages = [Stage(module, [name for name in stage_of if stage_of[name] == number]) for number in own]
        for stage in stages:
            present = {type(part).__name__ for part in stage.modules()}
            classes = [name for name in options.wrap_classes if name in present]
            self._divided(stage, replace(options, wrap_classes=classes))
            stage.give_back()
        self.materialise(module)  # the buffers between layers
        for part in module.modules():
            held = [(name, buffer) for name, buffer in part._buffers.items() if buffer is not None]
            part._buffers.update((name, buffer.to(self._device)) for name, buffer in held)
        self._pipe = Pipe(
            module,
            stages,
            found.twin,
            found.layers,
            stage_of,
            group,
            self._device,
            schedule=options.schedule,
            micro_batches=options.count,
        )
        self._changes = Changes(module, found.layers)
        self._pipe.register_forward_pre_hook(lambda *_: self._tell())
        self._exchange = share_rows(self._pipe, self._sharing, self._device)
        self._pipe.register_forward_pre_hook(lambda *_: self._check_told())
        return self._pipe

    def _tell(self, flags: int = 0) -> None:
        """Tells the other ranks of flags, and of what the module keeps, in the next exchange of rows."""
        self._exchange.flags = flags | self._changes.bits() << _FLAGS

    def _check_told(self) -> None:
        self._changes.check(self._exchange.flags >> _FLAGS)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Returns the user's module, of which this rank may have some parameters only."""
        return module.module if isinstance(module, Pipe) else module

    def shown(self, module: nn.Module) -> nn.Module:
        """Returns what stands for a pipeline: it has the methods of the user's module, and no parts."""
        return StandIn(module.module, module.__call__) if isinstance(module, Pipe) else module

    def run_pass(
        self, module: nn.Module, batch: Batch, step: Step, scale: float, autocast: AbstractContextManager[Any]
    ) -> tuple[torch.Tensor, Sums]:
        """Runs the rows of all ranks that share them through the pipeline."""
        assert isinstance(module, Pipe)
        own = arguments_of(step, module.module, batch)
        ones = torch.ones(len(batch.inputs[0]), device=self._device)
        weights = [ones if each is None else each for each in (batch.weight, batch.loss_weight)]
        self._tell((batch.weight is not None) + 2 * (batch.loss_weight is not None))
        sent = (own.values, list(batch.inputs), batch.label, weights)
        (values, inputs, label, weights), _ = self._exchange.before(module, sent, {})
        self._check_told()
        seed(torch.initial_seed() + self._stage, self._device)  # stages drop other activations; tensor ranks the same
        given = replace(own, values=values)
        # A rank without rows has weights of zero for its placeholders, and others may have none.
        weight, loss_weight = (each if self._exchange.flags & bit else None for bit, each in enumerate(weights, 1))
        every = replace(
            batch,
            inputs=tuple(inputs),
            label=label,
            weight=weight,
            loss_weight=loss_weight,
            lengths={},  # these two are known of this rank's own rows only
            tokens=None,
        )
        losses = MicroLosses(step, module.module, every, given, compare=not self._compared_step)
        self._compared_step = True
        try:
            total = module.train_rows(given, losses, scale, autocast)
        finally:
            self._exchange.restore()
        return total / self._sharing.size(), losses.metrics

    def own_state(self) -> dict[str, torch.Tensor]:
        """Returns the most rows of a pass so far, to which others are padded, and how many ranks had them together."""
        if not self.runs_passes:
            return super().own_state()
        found = {_MOST_ROWS: self._pipe.most_rows, _RANKS: self._sharing.size()}
        return super().own_state() | {name: torch.tensor(number) for name, number in found.items()}

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores it, if as many ranks have rows together; is a collective."""
        super().load_own_state(state)
        if self.runs_passes and _MOST_ROWS in state:
            same = _RANKS in state and int(state[_RANKS]) == self._sharing.size()
            most = state[_MOST_ROWS].to(self._device) * same
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._sharing)  # on another mesh, they may have had others
            self._pipe.most_rows = int(most)

    def metrics(self) -> dict[str, float]:
        """Returns the share of the time that ranks of a pipeline were idle, and that of equal stages by formula."""
        if not self.runs_passes:
            return {}
        idle, whole = sum_over_ranks(torch.tensor(self._pipe.idle(), dtype=torch.float64), self._world).tolist()
        return {"pipeline_bubble_formula": self._options.bubble} | ({"pipeline_bubble": idle / whole} if whole else {})

    def optimizer(self, recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
        """Builds the optimizer of this rank's shards, which may lie on several meshes, or beside plain tensors."""
        whole = self._pipe.twin.module if self.runs_passes else None
        built = recipe.build_optimizer(module, whole)
        if len({hasattr(parameter, "to_local") for parameter in module.parameters()}) > 1:
            step_apart(built)
        if self.exchanges_rows and isinstance(built, torch.optim.ASGD):
            for group in built.param_groups:
                group["foreach"] = False  # its kernels take those of one mesh only
        return built

    @property
    def acts_in_steps(self) -> bool:
        """Whether gradients must be summed before a step."""
        return bool(self._summed)

    def before_step(self, module: nn.Module) -> None:
        """Sums the gradients that ranks which share layers have computed in parts; compares the others, once."""
        if self._sizes.tensor == 1:
            return
        if not self.wraps:
            divide_gradients(module)
        group = part_of(self._ranks, "tensor").get_group()
        for part in self._summed:
            for parameter in part.parameters(recurse=False):
                if parameter.grad is not None:
                    dist.all_reduce(local(parameter.grad), group=group)
        if not self._compared:
            self._compared = True
            check_gradients(module, group)

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[nn.Module]:
        """Context in which ranks that share layers have the same bits of what is not divided."""
        if self._sizes.tensor > 1 and not is_host(self._device):  # kernels of accelerators may differ in the last bits
            group = part_of(self._ranks, "tensor").get_group()
            source = dist.get_global_rank(group, 0)
            for parameter in module.parameters():
                if undivided(parameter, "tensor"):
                    dist.broadcast(local(parameter.detach()), source, group=group)
        with super().evaluating(module) as same:
            yield module if isinstance(module, Pipe) else same

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Context in which gradients are not reduced; a schedule reduces them at its end."""
        with nullcontext() if self.runs_passes else super().no_sync(module):
            yield

    def saves(self, name: str) -> bool:
        """Returns whether this rank saves an unsharded tensor; of a stage, a rank of that stage does."""
        if self.runs_passes and (name.startswith(OPTIMIZER) or name.partition(".")[2] in self._pipe.own_names):
            others = (part_of(self._ranks, name) for name in ("data", "shard", "tensor"))
            return all(part.get_local_rank() == 0 for part in others)
        return super().saves(name)

    def common_buffers(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Returns the buffers that all ranks have; those of a stage's layers, no forward pass changes."""
        return self._pipe.common_buffers if self.runs_passes else super().common_buffers(module)

    def shares(self, module: nn.Module, *, copy: bool = False) -> dict[str, torch.Tensor]:
        """Returns this rank's shards by name; of a pipeline, those of its stages."""
        if not isinstance(module, Pipe):
            return super().shares(module, copy=copy)
        with self.evaluating(module):
            self._let_go(module)
            found = module.shares()
            return {name: tensor.cpu().clone() for name, tensor in found.items()} if copy else found

    def gradient_norm(self, module: nn.Module) -> torch.Tensor:
        """Returns the norm of the whole model's gradients, of which some ranks have copies."""
        if self.alone:
            return super().gradient_norm(module)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for count, gradients in self._gradients(module).items():
            total += nn.utils.get_total_norm(gradients).to(self._device, torch.float64).square() / count
        dist.all_reduce(total)
        return total.sqrt()

    def _gradients(self, module: nn.Module) -> dict[int, list[torch.Tensor]]:
        """Returns this rank's parts of the gradients, by how many of all ranks have the same."""
        return gradients_by_copies(module, self._world.world_size, self._sizes.tensor)

    def state_dict(
        self, module: nn.Module, *, copy: bool = False, leave_out: Collection[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Gathers the whole model's state dict in rank 0; returns an empty dict in other ranks."""
        with unadvised():
            if isinstance(module, Pipe):
                with self.evaluating(module):
                    self._let_go(module)
                    return module.whole_state(leave_out)
            return super().state_dict(module, copy=copy, leave_out=leave_out)

    def clip_gradients(self, module: nn.Module, *, norm: float | None, value: float | None) -> torch.Tensor | None:
        """Clips each rank's part of the gradients; torch's functions take no tensors of several meshes."""
        if self.alone:
            return super().clip_gradients(module, norm=norm, value=value)
        own = [part for parts in self._gradients(module).values() for part in parts]
        if value is not None and own:
            torch._foreach_clamp_min_(own, -value)
            torch._foreach_clamp_max_(own, value)
        if norm is None:
            return None
        total = self.gradient_norm(module)
        factor = (norm / (total + 1e-6)).clamp(max=1.0)
        if own:
            torch._foreach_mul_(own, factor.to(own[0].device, torch.float32))
        return total

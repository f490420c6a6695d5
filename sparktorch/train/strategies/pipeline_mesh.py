"""A mesh whose ranks have layers one after another: each passes on what its stages computed.

Huang et al. 2019, GPipe (https://arxiv.org/abs/1811.06965). How a module becomes stages, and what runs them, is in
`sparktorch/train/pipeline`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import seed
from sparktorch.distributed.process_group import subgroup, sum_over_ranks
from sparktorch.errors import ConfigError, nearest
from sparktorch.train.checkpoint.tensors import OPTIMIZER
from sparktorch.train.dtensor import part_of, unadvised
from sparktorch.train.pipeline.kept import Changes
from sparktorch.train.pipeline.pipe import Pipe
from sparktorch.train.pipeline.programs import Stage
from sparktorch.train.pipeline.setup import check_each_row, check_pipeline, check_stages, first_of_all, leave, staged
from sparktorch.train.pipeline.step import MicroLosses, StandIn, arguments_of, check_step
from sparktorch.train.recipe.loss import Sums
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.strategies.base import Step
from sparktorch.train.strategies.fsdp import check_checkpointing, units
from sparktorch.train.strategies.mesh import Mesh
from sparktorch.train.strategies.mesh_options import MeshOptions
from sparktorch.train.strategies.row_exchange import share_rows

__all__ = ["PipelineMesh"]

_MOST_ROWS, _RANKS = "pipeline_rows", "pipeline_ranks"
_FLAGS = 2  # bits of an exchange of rows that say which weights there are


class PipelineMesh(Mesh):
    """A mesh with the dimension `pipeline`: the engine's module is a `Pipe`; a rank has parameters of some stages."""

    runs_passes = True
    _pipe: Pipe
    _changes: Changes

    @classmethod
    def check(cls, config: TrainConfig, recipe: Recipe, options: MeshOptions) -> None:
        """Refuses what other meshes do, and settings that stages do not support."""
        check_pipeline(config, recipe)
        if options.param_dtype is not None:
            raise ConfigError(
                f"strategyParams.param_dtype is {options.param_dtype!r}, and stages of a pipeline pass on values "
                "in the dtypes of the module",
                hint="set precision='bf16', which leaves parameters as they are, or leave it out",
                param="strategyParams",
            )
        super().check(config, recipe, options)

    @classmethod
    def check_module(cls, options: MeshOptions, recipe: Recipe, module: nn.Module, workers: int) -> None:
        """Refuses what other meshes do, and modules that are no stages."""
        check_stages(module)
        super().check_module(options, recipe, module, workers)

    @classmethod
    def check_call(cls, options: MeshOptions, recipe: Recipe, module: nn.Module, batch: Batch) -> None:
        """Refuses modules that cannot be cut into stages, and steps that need more than the output of all."""
        cls._check_layers(options, module, batch)
        found = staged(module, options.stages, options.split, batch, styles=cls._styles_of(module, options))
        check_each_row(module, batch)
        step = recipe.build_training_step()
        if step is not None:
            check_step(step, module, batch)
        layers = nn.ModuleList(module.get_submodule(name) for name in found.layers)
        called = {type(part).__name__ for part in layers.modules()}
        for name in options.wrap_classes:
            if name not in called:
                raise ConfigError(
                    f"strategyParams.wrap_classes names {name!r}, and strategyParams.pipeline divides parts of that "
                    "class themselves",
                    hint=nearest(name, called),
                    param="strategyParams",
                )
        check_checkpointing(options, f"{type(module).__name__} in stages", units(layers, options))

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
        assert self.example is not None
        options = self._options
        styles = self._styles(module)
        found = staged(module, options.stages, options.split, self.example(), self._device, styles)
        stage_of = first_of_all(found.stage_of)  # batches of other shapes might be cut elsewhere
        group = part_of(self._ranks, "pipeline").get_group()
        own = range(group.rank(), options.stages_per_rank * group.size(), group.size())
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
        self._whole = found.twin.module
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
        """Tells the other ranks of flags, of what the module keeps and of the last recording, in the next exchange."""
        self._exchange.flags = flags | self._changes.bits(self._pipe.recorded) << _FLAGS

    def _check_told(self) -> None:
        self._changes.check(self._exchange.flags >> _FLAGS)

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Returns the user's module, of which this rank has some parameters only."""
        return cast(Pipe, module).module

    def shown(self, module: nn.Module) -> nn.Module:
        """Returns what stands for the pipeline: it has the methods of the user's module, and no parts."""
        return StandIn(self.unwrap(module), module.__call__)

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
        found = {_MOST_ROWS: self._pipe.most_rows, _RANKS: self._sharing.size()}
        return super().own_state() | {name: torch.tensor(number) for name, number in found.items()}

    def load_own_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores it, if as many ranks have rows together; is a collective."""
        super().load_own_state(state)
        if _MOST_ROWS in state:
            same = _RANKS in state and int(state[_RANKS]) == self._sharing.size()
            most = state[_MOST_ROWS].to(self._device) * same
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._sharing)  # on another mesh, they may have had others
            self._pipe.most_rows = int(most)

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
        if name.startswith(OPTIMIZER) or name.partition(".")[2] in self._pipe.own_names:
            others = (part_of(self._ranks, name) for name in ("data", "shard", "tensor"))
            return all(part.get_local_rank() == 0 for part in others)
        return super().saves(name)

    def common_buffers(self, module: nn.Module) -> Iterable[torch.Tensor]:
        """Returns the buffers that all ranks have; those of a stage's layers, no forward pass changes."""
        return self._pipe.common_buffers

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

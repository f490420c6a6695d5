"""The context that a user's function gets in each rank: global batches, collectives, strategies, checkpoints."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import timedelta
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from sparktorch.base.batch import Batch
from sparktorch.base.config import TrainConfig
from sparktorch.base.no_op import never, no_op
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.distributed.collectives import Collectives
from sparktorch.distributed.pause import Paused
from sparktorch.distributed.process_group import sum_over_ranks
from sparktorch.errors import ConfigError
from sparktorch.train.checkpoint.checkpointer import Checkpointer, Position
from sparktorch.train.checkpoint.store import snapshot
from sparktorch.train.numerics.determinism import generators_state, seed_all, set_generators_state
from sparktorch.train.numerics.sync_batchnorm import has_batch_norm
from sparktorch.train.recipe.loss import step_scales
from sparktorch.train.recipe.recipe import Recipe, recipe_of
from sparktorch.train.strategies.base import GradientSync, Start, Strategy
from sparktorch.train.strategies.registry import build_strategy, check_strategy
from sparktorch.worker.global_batch import GlobalBatch, RankRows, global_batch
from sparktorch.worker.held_rows import GroupContext

__all__ = ["RunContext"]

# Progress is published once in this time at most.
_PROGRESS_SECONDS = 0.2
# If the function has raised, its last save gets this time to end.
_SAVE_SECONDS = 2.0
# A limit that is never reached: ranks may return hours after each other.
_LONG = timedelta(days=365)
# Records of epochs have these names already.
_RESERVED_NAMES = {"epoch", "steps", "validations", "untrained"}
# MLflow takes names of these characters.
_METRIC_NAME = re.compile(r"[/\w.\- :]+")


class RunContext(Collectives):
    """The context of a function that `sparktorch.run` calls in each rank.

    Besides the members that are listed here, it has the collectives of `Collectives`: `all_reduce`, `all_gather`,
    `broadcast`, `reduce_scatter`, `scatter`, `gather` and `barrier`. Every rank calls the same methods in the same
    order.

    Attributes:
        world: The rank's position: rank, world size, local rank, host, device.
        device: The rank's torch device.
        seed: The seed of the run. When the function is called, the generators of all ranks start from it.
        epochs: The epochs that are left to train, counted from 0; all epochs, unless the run resumes.
        steps: Number of steps in an epoch; 0 without a DataFrame.
        restored: What the last `save` of an earlier attempt saved; `None` if this run does not resume.
    """

    def __init__(
        self,
        world: World,
        client: Client,
        config: TrainConfig,
        *,
        group: GroupContext | None,
        checkpointer: Checkpointer | None,
    ) -> None:
        """Takes the rank's world, client and configuration, its group if the run has rows, and its checkpointer."""
        super().__init__(world)
        self.world = world
        self.device = torch.device(world.device)
        self.seed = config.seed
        self._client = client
        self._config = config
        self._group = group
        self._checkpointer = checkpointer
        self.steps = 0 if group is None else group.plan.steps
        # Each wrapped module has its strategy, and the object that reduces its gradients.
        self._strategies: dict[nn.Module, Strategy[Any]] = {}
        self._syncs: dict[nn.Module, GradientSync] = {}
        self._min_rows = 1
        # How often the function has called `report` and `save`.
        self._reports = 0
        self._saves = 0
        # The epoch and the step of the next batch.
        self._epoch = 0
        self._step = 0
        # Whether the random numbers of the ranks differ already.
        self._diverged = False
        # The state of the random generators to continue at; `None` if there is none, or once they have continued.
        self._generators: Mapping[str, Any] | None = None
        # The state that `save` keeps while ranks that share rows draw the same numbers.
        self._generators_outside: Mapping[str, Any] | None = None
        self._loss: torch.Tensor | None = None
        self._next_progress = 0.0
        self.restored: dict[str, Any] | None = None
        self._restore()
        self._client.pause.begin(self._saves + 1)
        # The first step in the epoch in which the run resumes.
        self._first_step = {self._epoch: self._step}
        self.epochs = range(self._epoch, config.epochs)

    def loader(self, epoch: int) -> Iterator[GlobalBatch]:
        """Yields this rank's part of every global batch of an epoch: the batches that `TorchEstimator` would train.

        Which rows make up a batch depends on the rows, the seed and the batch size, and not on the number of ranks. In
        the epoch in which a run resumes, the first loader begins after the last step before the save. Every rank takes
        all its batches, or leaves the loader after the same batch.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            ConfigError: The run has no DataFrame.
            ColumnError: All rows have the weight 0.
        """
        shard = self._group_with_rows().shard
        first = self._first_step.pop(epoch, 0)
        self._client.enter("running", epoch=epoch + 1, step=first)
        self._check_same_point("loader")
        # Each rank scales its losses by the weights of the whole batches, and for what then divides the gradients.
        weights = sum_over_ranks(shard.step_weights(epoch), self.world)
        divisor = next((sync.divisor for sync in self._syncs.values()), self.world_size)
        scales = step_scales(weights, divisor)
        self._diverge()
        with closing(shard.epoch(epoch, min_rows=self._min_rows, first=first)) as batches:
            try:
                for step in range(first, self.steps):
                    self._client.at_step(step + 1)
                    batch = next(batches)
                    self.continue_generators()
                    self._epoch = epoch
                    self._step = step + 1
                    self._loss = None
                    with self._shared_rows(batch) as shared:
                        yield global_batch(shared, step, float(scales[step]), self._note)
                    self._show(epoch, step)
            finally:
                # A loop that leaves early goes on with the next epoch, after a resume, too.
                self._epoch = epoch + 1
                self._step = 0

    def validation(self, size: int = 4096) -> Iterator[GlobalBatch]:
        """Yields this rank's rows with a true `validationIndicatorCol`, in the same number of batches in every rank.

        A rank with fewer rows than others gets batches with `rows` 0 at the end, which hold a placeholder row.

        Args:
            size: The most rows of a batch.

        Raises:
            ConfigError: The run has no DataFrame.
        """
        group = self._group_with_rows()
        count = -(-group.validation_rows // size)  # This division rounds up.
        with closing(group.shard.validation(size, batches=count)) as batches:
            for step, batch in enumerate(batches):
                self._client.moved()
                with self._shared_rows(batch) as shared:
                    yield global_batch(shared, step, 1 / max(shared.rows, 1), no_op)

    @property
    def dataset(self) -> RankRows:
        """This rank's training rows as a `torch.utils.data.Dataset`.

        Ranks have different numbers of rows, but a DDP module needs the same number of batches in every rank, and a
        module with divided layers the same rows in all ranks that share a layer: use `loader` for these.

        Raises:
            ConfigError: The run has no DataFrame.
        """
        return RankRows(self._group_with_rows().shard)

    @overload
    def wrap(self, module: nn.Module) -> nn.Module: ...

    @overload
    def wrap(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]: ...

    def wrap(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
        """Moves a module to the rank's device, and wraps it as the run's `strategy` says: in DDP, by default.

        Afterwards, random numbers differ between ranks, as dropout needs it.

        Args:
            module: The module, with the same parameters in every rank: built from the same seed, or loaded.
            optimizer: An optimizer of the module's parameters. Strategies that divide its state or the parameters build
                it again.

        Returns:
            The module to call; with an optimizer, also the optimizer to step. Make schedulers for this optimizer.

        Raises:
            ModuleError: The optimizer has other parameters than the module, or has taken steps.
            ConfigError: The strategy does not take such an optimizer.
        """
        recipe = Recipe(module=module) if optimizer is None else recipe_of(module, optimizer)
        check_strategy(self._config, recipe)
        strategy = build_strategy(self._config, self.world, in_users_loop=True)
        self._check_same_point("wrap")
        self._min_rows = max(self._min_rows, 2 if has_batch_norm(module) else 1)
        self._same_in_all_ranks(module)
        wrapped = strategy.prepare(module, Start())
        sync = strategy.gradients(wrapped)
        if optimizer is None and sync.completes:
            raise ConfigError(
                f"strategy {self._config.strategy!r} works in the optimizer's steps, and wrap got none",
                hint="pass the optimizer, too: wrap(module, optimizer)",
            )
        self._strategies[wrapped] = strategy
        self._syncs[wrapped] = sync
        if optimizer is not None and type(strategy).optimizer is not Strategy.optimizer:
            optimizer = strategy.optimizer(recipe, module)
        elif optimizer is not None and not _has_parameters_of(optimizer, module):
            optimizer = recipe.build_optimizer(module)
        if optimizer is not None:
            _hook_steps(optimizer, strategy, sync, wrapped)
        self._warm_up(wrapped, sync)
        self._diverge()
        return wrapped if optimizer is None else (wrapped, optimizer)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context in which `backward` adds up this rank's gradients, and does not send them.

        Args:
            module: The module that `wrap` returned.
        """
        self._strategy_of(module)
        return self._syncs[module].no_sync()

    def state_dict(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the whole state dict of a wrapped module, on the CPU, in rank 0; an empty dict in other ranks.

        Args:
            module: The module that `wrap` returned.
        """
        strategy = self._strategy_of(module)
        self._check_same_point("state_dict")
        return strategy.state_dict(module, copy=True)

    def report(self, **metrics: float | torch.Tensor) -> None:
        """Shows rank 0's numbers in the progress bar, and logs them to MLflow; other ranks' numbers are ignored.

        The reports of a run are numbered from 1; the number is MLflow's step. A resumed run continues with the number
        after those of its last `save`.

        Raises:
            ConfigError: Records have such a name already, or MLflow does not take it.
        """
        for name in metrics:
            if name in _RESERVED_NAMES or not _METRIC_NAME.fullmatch(name):
                raise ConfigError(
                    f"report({name}=...): no metric can be called that",
                    hint=f"{', '.join(sorted(_RESERVED_NAMES))} are taken; names have letters, digits and "
                    "_ - . : / and spaces",
                )
        values = {}
        for name, value in metrics.items():
            values[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        self._reports += 1
        if self.world.is_main:
            self._client.epoch_done(self._reports, {"epoch": self._reports, **values})

    def save(self, state: Mapping[str, Any], *, own: Mapping[str, Any] | None = None) -> None:
        """Saves a checkpoint in the background; does nothing unless the run has a `checkpointDir`.

        Every rank calls it. A checkpoint also has the position in the epoch, and each rank's random generators. A run
        whose ranks are lost resumes from the last checkpoint; so does another run with the same `checkpointDir` and
        configuration.

        Args:
            state: What rank 0 saves for all ranks: state dicts, numbers, strings, tensors, lists and dicts of these.
            own: What each rank saves for itself; it is lost if a run resumes with another number of ranks.

        Raises:
            PersistenceError: The state holds another type, or another run has taken over the directory.
            ConfigError: The state holds sharded tensors.
        """
        if self._checkpointer is None:
            return
        self._saves += 1
        rest = {
            "state": _on_host(state, "state") if self.world.is_main else None,
            "own": _on_host(own or {}, "own"),
            "reports": self._reports,
            "generators": self._generators_outside or generators_state(self.device),
        }
        share = snapshot({}, rest, never)
        self._checkpointer.save(Position(self._saves, self._epoch, self._step), share, None)
        if self._client.pause.stops_after(self._saves) and self._checkpointer.is_complete():
            raise Paused

    def continue_generators(self) -> None:
        """Continues this rank's random numbers where they were at the `save` from which the run resumes, once.

        `loader` calls it before its first batch. A loop without `loader` calls it before the first random number that
        matters, that is, after the modules are built. It does nothing in a run that does not resume, or that resumes
        with another number of ranks.
        """
        if self._generators is not None:
            set_generators_state(self._generators, self.device)
            self._generators = None

    def let_save_end(self) -> None:
        """Waits for the last save for a moment; is called if the function has raised an exception."""
        if self._checkpointer is not None:
            self._checkpointer.let_end(_SAVE_SECONDS)

    def finish(self) -> None:
        """Waits for the other ranks and the last save, and marks the run as finished; is called after the function."""
        self._check_same_point("return")
        if self._checkpointer is not None:
            self._client.enter("saving")
            self._checkpointer.close(Position(self._saves, self._epoch, self._step))

    def _restore(self) -> None:
        """Reads the checkpoint from which the run resumes."""
        manifest = None if self._checkpointer is None else self._checkpointer.start
        if self._checkpointer is None or manifest is None:
            return
        store = self._checkpointer.store
        same_ranks = manifest.world_size == self.world_size
        main = store.read_rest(manifest, 0)
        rank_rest = store.read_rest(manifest, self.rank) if same_ranks else {"own": {}, "generators": None}
        self.restored = {**main["state"], **rank_rest["own"]}
        self._generators = rank_rest["generators"]
        self._saves = manifest.step
        self._reports = main["reports"]
        self._epoch = manifest.epoch
        self._step = manifest.step_in_epoch

    @contextmanager
    def _shared_rows(self, batch: Batch) -> Iterator[Batch]:
        """Context of a batch with the rows of all ranks that share layers of a wrapped module.

        In it, these ranks draw the same numbers. `save` keeps the generators with which each rank goes on afterwards.
        """
        sharing = (strategy for strategy in self._strategies.values() if strategy.ranks_of_rows > 1)
        strategy = next(sharing, None)
        if strategy is None:
            yield batch
            return

        def keep_generators() -> None:
            self._generators_outside = generators_state(self.device)

        try:
            with strategy.shared_rows(batch, keep_generators) as shared:
                yield shared
        finally:
            self._generators_outside = None

    def _strategy_of(self, module: nn.Module) -> Strategy[Any]:
        if module not in self._strategies:
            raise ConfigError(f"{type(module).__name__} is no module that wrap returned", hint="pass the wrapped one")
        return self._strategies[module]

    def _check_same_point(self, name: str) -> None:
        """Raises unless all ranks are at the same point and have called `save` equally often; it is a collective."""
        if self.world_size > 1 and dist.is_initialized():
            self._compare(f"{name} after {self._saves} saves", wait=_LONG if name == "return" else None)

    def _group_with_rows(self) -> GroupContext:
        if self._group is None:
            raise ConfigError(
                "the run has no rows", hint="pass a DataFrame: sparktorch.run(function, df, inputCols=...)"
            )
        return self._group

    def _diverge(self) -> None:
        """Makes the random numbers of the ranks differ, once."""
        if not self._diverged:
            self._diverged = True
            seed_all(self.seed + self.rank + 1 + self._saves)

    def _same_in_all_ranks(self, module: nn.Module) -> None:
        """Copies rank 0's parameters and buffers to a module, as DDP does, if generators differ between ranks."""
        if self.world_size > 1 and self._diverged:
            for tensor in module.state_dict().values():
                if isinstance(tensor, torch.Tensor):
                    tensor.copy_(self.broadcast(tensor))

    def _warm_up(self, module: nn.Module, sync: GradientSync) -> None:
        """Lets the reducer find its final order, so that a resumed run sums gradients in the same order.

        See `Engine.warm_up`. For two ranks, any order gives the same sum.
        """
        if self._checkpointer is None or self.world_size < 3:
            return
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for _ in range(sync.warm_up_passes):
            sync.reduce()
        module.zero_grad()

    def _note(self, loss: torch.Tensor) -> None:
        self._loss = loss

    def _show(self, epoch: int, step: int) -> None:
        """Publishes the progress at most a few times a second, because reading the loss waits for the device."""
        now = time.perf_counter()
        if not self.world.is_main or (now < self._next_progress and step + 1 < self.steps):
            return
        self._next_progress = now + _PROGRESS_SECONDS
        # A loss is scaled so that the mean over ranks is the loss of the batch: this rank's loss stands for it.
        loss = None if self._loss is None else float(self._loss)
        self._client.progress(epoch=epoch + 1, epochs=self._config.epochs, step=step + 1, steps=self.steps, loss=loss)


def _hook_steps(
    optimizer: torch.optim.Optimizer, strategy: Strategy[Any], sync: GradientSync, module: nn.Module
) -> None:
    """Makes each step of an optimizer complete the gradients before it, and do the strategy's part after it."""

    def complete_gradients(*_: Any) -> None:
        sync.complete()

    def after_step(*_: Any) -> None:
        strategy.after_step(module)

    optimizer.register_step_pre_hook(complete_gradients)
    optimizer.register_step_post_hook(after_step)


def _has_parameters_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> bool:
    """Returns whether an optimizer's parameters are still the module's."""
    parameters = set(module.parameters())
    return all(parameter in parameters for group in optimizer.param_groups for parameter in group["params"])


def _on_host(state: Mapping[str, Any], name: str) -> Any:
    """Returns a copy of nested values, with all tensors on the CPU; `name` is the argument of `save`."""
    if not isinstance(state, Mapping):
        hint = "name what it holds, such as save({'net': context.state_dict(net)})"
        raise ConfigError(f"save takes a mapping, and {name} is a {type(state).__qualname__}", hint=hint)

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if hasattr(value, "to_local"):
            raise ConfigError(
                f"{name} holds a sharded tensor, which no single rank can save",
                hint="torch.distributed.checkpoint.state_dict.get_state_dict makes whole ones, with "
                "StateDictOptions(full_state_dict=True); or pass local parts as own=",
            )
        return value.detach().to("cpu", copy=True)

    return tree_map(copy, dict(state))

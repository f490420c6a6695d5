"""The state that a checkpoint holds, and how a training resumes from it, with any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.errors import PersistenceError
from sparktorch.train.callbacks import Callbacks
from sparktorch.train.checkpoint.store import CheckpointStore, Manifest, Share, read_tensors, snapshot
from sparktorch.train.checkpoint.tensors import (
    create_optimizer_state,
    forget_optimizer_state,
    load_buffers,
    load_extra_state,
    load_optimizer_values,
    load_tensors,
    named_tensors,
    needed_parts,
    optimizer_values,
    own_buffers,
    parameter_names,
    storable,
)
from sparktorch.train.loop.engine import Engine
from sparktorch.train.loop.progress import Progress
from sparktorch.train.numerics.determinism import generators_state, seed_all, set_generators_state
from sparktorch.train.numerics.ema import MovingAverage

__all__ = ["TrainingState"]

_BEST = "best."
# The name of a tensor that only one rank has begins with this word and the number of the rank.
_RANK = "rank"
_BUFFER = "buffer."
_STRATEGY = "strategy."


class TrainingState:
    """Everything that a rank's training needs to resume, except for its position, which is in the manifest."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        engine: Engine,
        average: MovingAverage | None,
        callbacks: Callbacks,
        progress: Progress,
    ) -> None:
        """Takes the parts of the training; it saves them, and loads into them."""
        self._config = config
        self._world = world
        self._engine = engine
        self._average = average
        self._callbacks = callbacks
        self._progress = progress
        self._device = torch.device(world.device)

    @property
    def _layout(self) -> str:
        """The settings that decide which rank has which values, as text."""
        return repr((self._config.strategy, sorted(self._config.strategy_params.items())))

    def check(self) -> None:
        """Refuses schedules, optimizers and callbacks whose state a checkpoint cannot store; names the value's path."""
        for name, value in self._rest().items():
            storable(value, name)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the training by name, not copied, without the best weights and a frozen base."""
        engine = self._engine
        tensors = named_tensors(engine.unwrapped, engine.optimizer)
        if engine.base is not None:
            left_out = {f"module.{name}" for name in engine.base.names}
            tensors = {name: value for name, value in tensors.items() if name not in left_out}
        if self._average is not None:
            averages = self._average.named_tensors(parameter_names(engine.unwrapped))
            tensors |= {f"average.{name}": value for name, value in averages.items()}
        return tensors

    def share(self) -> Share:
        """Returns a copy of this rank's share of the state."""
        engine = self._engine
        rank_prefix = f"{_RANK}{self._world.rank}."
        best_weights = self._progress.best.state or {}
        best = {f"{_BEST}{name}": value for name, value in best_weights.items()}
        buffers = own_buffers(engine.unwrapped, main=self._world.is_main)
        tensors_of_rank = {f"{rank_prefix}{_BUFFER}{name}": value for name, value in buffers.items()}
        strategy_state = engine.strategy.own_state.state_dict()
        tensors_of_rank |= {f"{rank_prefix}{_STRATEGY}{name}": value for name, value in strategy_state.items()}

        def saves(name: str) -> bool:
            return name in tensors_of_rank or engine.strategy.saves(name)

        return snapshot(self._tensors() | best | tensors_of_rank, self._rest(), saves)

    def _rest(self) -> dict[str, Any]:
        """Returns the state other than named tensors."""
        engine = self._engine
        return {
            "strategy": self._layout,
            "base": engine.base.digest if engine.base else None,
            "optimizer": optimizer_values(engine.unwrapped, engine.optimizer),
            "schedule": engine.schedule.state_dict(),
            "scaler": engine.scaler.state_dict(),
            "callbacks": self._callbacks.state_dict(),
            "asked": self._callbacks.has_stop_request(engine.hooks.stop_requested),
            "module": engine.hooks.state_dict(),
            "means": engine.means.state_dict(),
            "micro_batch_size": engine.micro_batches.size if engine.micro_batches.searches else None,
            "generators": generators_state(self._device),
            **self._progress.state(),
        }

    def load(self, store: CheckpointStore, manifest: Manifest) -> None:
        """Loads a checkpoint, which another number of ranks may have written."""
        engine = self._engine
        rank = self._world.rank
        world_size = self._world.world_size
        rests = self._read_rests(store, manifest)
        # A rank goes on with what the old rank of the same number has saved. If the number of ranks has changed, all
        # ranks take over the buffers of the old rank 0. A rank whose number no old rank had takes over the callbacks of
        # the old rank 0, too.
        same_ranks = manifest.world_size == world_size
        source = rank if same_ranks else 0
        main = rests[0]
        rank_rest = rests[rank if rank < manifest.world_size else 0]
        if main.get("base") != (engine.base.digest if engine.base else None):
            raise PersistenceError(
                "the frozen parameters under the adapters are not those that the checkpoint was trained on",
                hint="load the same base as before, or train from the start with another checkpointDir",
                param="checkpointDir",
                code="ST-CHECKPOINT-OTHER",
            )
        # Tensors are loaded in place, so the optimizer must have its state before. The step that creates the state
        # changes the weights, so the weights are loaded afterwards.
        create_optimizer_state(engine.optimizer)
        has_best = main["best"]["loss"] < math.inf
        best = self._load_tensors(store, manifest, source, has_best=has_best)
        # Under "zero1", each rank has only values for its share of the parameters. If several ranks have values for a
        # parameter, those of the lowest rank count: they come last here.
        values: dict[str, Any] = {}
        for _, rest in sorted(rests.items(), reverse=True):
            values |= rest["optimizer"]
        load_optimizer_values(engine.unwrapped, engine.optimizer, values)
        engine.schedule.load_state_dict(main["schedule"])
        engine.scaler.load_state_dict(main["scaler"])
        if engine.micro_batches.searches:
            engine.micro_batches.size = main.get("micro_batch_size") or engine.micro_batches.size
        # Numbers that the ranks sum up must go on in one rank only: each old rank's numbers go to one new rank.
        assigned_rests = [rests[old] for old in range(rank, manifest.world_size, world_size)]
        self._progress.merge(main, assigned_rests, best)
        self._callbacks.load_state_dict(rank_rest["callbacks"])
        if any(rest.get("asked") for rest in rests.values()):  # Checkpoints of earlier versions lack "asked".
            self._callbacks.request_stop()
        engine.hooks.load_state_dict(rank_rest.get("module", {}), same_ranks=same_ranks)
        engine.means.clear()
        for rest in assigned_rests:
            engine.means.load_state_dict(rest["means"])
        if same_ranks:
            set_generators_state(rank_rest["generators"], self._device)
        else:
            seed_all(self._config.seed + rank + 1 + manifest.step)

    def _load_tensors(
        self, store: CheckpointStore, manifest: Manifest, source: int, *, has_best: bool
    ) -> dict[str, torch.Tensor]:
        """Loads the parts of tensors that this rank needs, and returns the best weights.

        With a folder for the model, these are this rank's share of the best weights; otherwise they are all weights in
        rank 0, and none in other ranks. `source` is the old rank whose own tensors this rank takes over; `has_best`
        says whether the checkpoint has best weights.
        """
        engine = self._engine
        tensors = self._tensors()
        shares = dict[str, torch.Tensor]()
        source_prefix = f"{_RANK}{source}."
        if has_best and self._config.model_folder:
            shares = engine.strategy.shares(engine.module, copy=True)
            tensors |= {f"{_BEST}{name}": share for name, share in shares.items()}
        part_needed = needed_parts(tensors)
        reads_best = self._world.is_main and not shares

        def needs(name: str, first: list[int], shape: list[int]) -> bool:
            if name.startswith(source_prefix) or (reads_best and name.startswith(_BEST)):
                return True
            return part_needed(name, first, shape)

        with store.local(manifest, needs) as directory:
            saved_names = load_tensors(directory, tensors)
            best = read_tensors(directory, 0, _BEST) if reads_best else {}
            tensors_of_rank = read_tensors(directory, source, source_prefix)
        forget_optimizer_state(engine.unwrapped, engine.optimizer, saved_names)
        load_buffers(engine.unwrapped, _under(_BUFFER, tensors_of_rank))
        load_extra_state(engine.unwrapped, _under("module.", tensors))
        engine.strategy.own_state.load_state_dict(_under(_STRATEGY, tensors_of_rank))
        if shares:
            return shares
        # Files hold scalars as tensors with one element.
        shapes = {name: value.shape for name, value in engine.unwrapped.state_dict().items()}
        return {name: value.view(shapes.get(name, value.shape)) for name, value in best.items()}

    def _read_rests(self, store: CheckpointStore, manifest: Manifest) -> dict[int, dict[str, Any]]:
        """Reads the rest of the old ranks' state, by rank.

        It reads that of rank 0 and of this rank; if the ranks have other parts of the state now, it reads that of all
        ranks.
        """
        all_ranks = range(manifest.world_size)
        same_ranks = manifest.world_size == self._world.world_size
        needed_ranks = {0, self._world.rank} if same_ranks else all_ranks
        rests = {old: store.read_rest(manifest, old) for old in needed_ranks}
        if rests[0].get("strategy") != self._layout:
            rests |= {old: store.read_rest(manifest, old) for old in all_ranks if old not in rests}
        return rests


def _under(prefix: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the values whose names start with a prefix, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}

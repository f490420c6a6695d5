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
# Names of tensors that only one rank has begin with this and the number of the rank.
_RANK = "rank"
_BUFFER = "buffer."
_STRATEGY = "strategy."


class TrainingState:
    """All that a rank's training needs to resume, except its position, which is in the manifest."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        engine: Engine,
        average: MovingAverage | None,
        callbacks: Callbacks,
        progress: Progress,
    ) -> None:
        """Takes the parts of the training, which it saves and loads in place."""
        self._config, self._world, self._engine, self._average = config, world, engine, average
        self._callbacks, self._progress, self._device = callbacks, progress, torch.device(world.device)

    @property
    def _layout(self) -> str:
        """The settings that decide which rank has which values."""
        return repr((self._config.strategy, sorted(self._config.strategy_params.items())))

    def check(self) -> None:
        """Refuses schedules, optimizers and callbacks whose state a checkpoint cannot store, by the value's path."""
        for name, value in self._rest().items():
            storable(value, name)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors of the training by name, not copied, except the best weights and a frozen base."""
        engine = self._engine
        left_out = {f"module.{name}" for name in engine.base.names} if engine.base else set()
        tensors = named_tensors(engine.unwrapped, engine.optimizer)
        tensors = {name: value for name, value in tensors.items() if name not in left_out}
        if self._average is not None:
            averages = self._average.named_tensors(parameter_names(engine.unwrapped))
            tensors |= {f"average.{name}": value for name, value in averages.items()}
        return tensors

    def share(self) -> Share:
        """Returns a copy of this rank's share of the state."""
        engine, rank_prefix = self._engine, f"{_RANK}{self._world.rank}."
        best = {f"{_BEST}{name}": value for name, value in (self._progress.best.state or {}).items()}
        buffers = own_buffers(engine.unwrapped, main=self._world.is_main)
        state = {f"{rank_prefix}{_BUFFER}{name}": value for name, value in buffers.items()}
        strategy_state = engine.strategy.own_state.state_dict()
        state |= {f"{rank_prefix}{_STRATEGY}{name}": value for name, value in strategy_state.items()}

        def saves(name: str) -> bool:
            return name in state or engine.strategy.saves(name)

        return snapshot(self._tensors() | best | state, self._rest(), saves)

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
            "asked": self._callbacks.stop_requested(engine.hooks.stop_requested),
            "module": engine.hooks.state_dict(),
            "means": engine.means.state_dict(),
            "micro_batch_size": engine.micro_batches.size if engine.micro_batches.searches else None,
            "generators": generators_state(self._device),
            **self._progress.state(),
        }

    def load(self, store: CheckpointStore, manifest: Manifest) -> None:
        """Loads a checkpoint, which another number of ranks may have written."""
        engine, rank, size = self._engine, self._world.rank, self._world.world_size
        rests = self._read_rests(store, manifest)
        # A rank goes on with what the old rank of its number has saved. With another number of ranks, all take over the
        # buffers of rank 0, and a rank that has no old one its callbacks, too.
        same_ranks = manifest.world_size == size
        source = rank if same_ranks else 0
        main, rank_rest = rests[0], rests[rank if rank < manifest.world_size else 0]
        if main.get("base") != (engine.base.digest if engine.base else None):
            raise PersistenceError(
                "the frozen parameters under the adapters are not those that the checkpoint was trained on",
                hint="load the same base as before, or train from the start with another checkpointDir",
                param="checkpointDir",
                code="ST-CHECKPOINT-OTHER",
            )
        # Tensors are loaded in place: the optimizer needs its state before, by a step that changes the weights.
        create_optimizer_state(engine.optimizer)
        best = self._load_tensors(store, manifest, source, best=main["best"]["loss"] < math.inf)
        # Under "zero1", each rank has the values of its share only. Where several have some, rank 0's count.
        values: dict[str, Any] = {}
        for _, rest in sorted(rests.items(), reverse=True):
            values |= rest["optimizer"]
        load_optimizer_values(engine.unwrapped, engine.optimizer, values)
        engine.schedule.load_state_dict(main["schedule"])
        engine.scaler.load_state_dict(main["scaler"])
        if engine.micro_batches.searches:
            engine.micro_batches.size = main.get("micro_batch_size") or engine.micro_batches.size
        # What ranks sum up goes on in one of them: each old rank's sums go to one new rank.
        summed_here = [rests[old] for old in range(rank, manifest.world_size, size)]
        self._progress.merge(main, summed_here, best)
        self._callbacks.load_state_dict(rank_rest["callbacks"])
        if any(rest.get("asked") for rest in rests.values()):  # Earlier versions did not save it.
            self._callbacks.ask()
        engine.hooks.load_state_dict(rank_rest.get("module", {}), same_ranks=same_ranks)
        engine.means.clear()
        for rest in summed_here:
            engine.means.load_state_dict(rest["means"])
        if same_ranks:
            set_generators_state(rank_rest["generators"], self._device)
        else:
            seed_all(self._config.seed + rank + 1 + manifest.step)

    def _load_tensors(
        self, store: CheckpointStore, manifest: Manifest, source: int, *, best: bool
    ) -> dict[str, torch.Tensor]:
        """Loads the parts of tensors that this rank needs; returns the best weights: its share, or rank 0's of all.

        `source` is the old rank whose tensors of its own this rank takes over; `best` says that there are best weights.
        """
        engine, tensors, shares = self._engine, self._tensors(), dict[str, torch.Tensor]()
        source_prefix = f"{_RANK}{source}."
        if best and self._config.model_folder:
            shares = engine.strategy.shares(engine.module, copy=True)
            tensors |= {f"{_BEST}{name}": share for name, share in shares.items()}
        part_needed, reads_best = needed_parts(tensors), self._world.is_main and not shares

        def needs(name: str, first: list[int], shape: list[int]) -> bool:
            if name.startswith(source_prefix) or (reads_best and name.startswith(_BEST)):
                return True
            return part_needed(name, first, shape)

        with store.local(manifest, needs) as directory:
            saved_names = load_tensors(directory, tensors)
            saved = read_tensors(directory, 0, _BEST) if reads_best else {}
            state = read_tensors(directory, source, source_prefix)
        forget_optimizer_state(engine.unwrapped, engine.optimizer, saved_names)
        load_buffers(engine.unwrapped, _under(_BUFFER, state))
        load_extra_state(engine.unwrapped, _under("module.", tensors))
        engine.strategy.own_state.load_state_dict(_under(_STRATEGY, state))
        shapes = {name: value.shape for name, value in engine.unwrapped.state_dict().items()}
        return shares or {name: value.view(shapes.get(name, value.shape)) for name, value in saved.items()}

    def _read_rests(self, store: CheckpointStore, manifest: Manifest) -> dict[int, dict[str, Any]]:
        """Reads the ranks' other state, by rank: rank 0's and this rank's, or all if ranks have other parts now."""
        every = range(manifest.world_size)
        same_ranks = manifest.world_size == self._world.world_size
        rests = {old: store.read_rest(manifest, old) for old in ({0, self._world.rank} if same_ranks else every)}
        if rests[0].get("strategy") != self._layout:
            rests |= {old: store.read_rest(manifest, old) for old in every if old not in rests}
        return rests


def _under(prefix: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the values whose names start with a prefix, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}

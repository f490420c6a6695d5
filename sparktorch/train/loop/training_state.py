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
_OWN = "rank"  # with the rank's number, prefixes tensors that only one rank has
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
        """What decides which rank has which values."""
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
        engine, own = self._engine, f"{_OWN}{self._world.rank}."
        best = {f"{_BEST}{name}": value for name, value in (self._progress.best.state or {}).items()}
        buffers = own_buffers(engine.unwrapped, main=self._world.is_main)
        state = {f"{own}{_BUFFER}{name}": value for name, value in buffers.items()}
        state |= {f"{own}{_STRATEGY}{name}": value for name, value in engine.strategy.own_state.state_dict().items()}

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
            "asked": self._callbacks.asked(engine.hooks.asked),
            "module": engine.hooks.state_dict(),
            "means": engine.means.state_dict(),
            "micro_batch_size": engine.split.size if engine.split.searches else None,
            "generators": generators_state(self._device),
            **self._progress.state(),
        }

    def load(self, store: CheckpointStore, manifest: Manifest) -> None:
        """Loads a checkpoint, which another number of ranks may have written."""
        engine, rank, size = self._engine, self._world.rank, self._world.world_size
        rests = self._read_rests(store, manifest)
        source = rank if manifest.world_size == size else 0
        main, own = rests[0], rests[rank if rank < manifest.world_size else 0]
        if main.get("base") != (engine.base.digest if engine.base else None):
            raise PersistenceError(
                "the frozen parameters under the adapters are not those that the checkpoint was trained on",
                hint="load the same base as before, or train from the start with another checkpointDir",
                param="checkpointDir",
                code="ST-CHECKPOINT-OTHER",
            )
        create_optimizer_state(engine.optimizer)
        best = self._load_tensors(store, manifest, f"{_OWN}{source}.", best=main["best"]["loss"] < math.inf)
        # Under "zero1", each rank has the values of its own share only.
        values = {
            name: found for _, rest in sorted(rests.items(), reverse=True) for name, found in rest["optimizer"].items()
        }
        load_optimizer_values(engine.unwrapped, engine.optimizer, values)
        engine.schedule.load_state_dict(main["schedule"])
        engine.scaler.load_state_dict(main["scaler"])
        if engine.split.searches:
            engine.split.size = main.get("micro_batch_size") or engine.split.size
        mine = [rests[old] for old in range(rank, manifest.world_size, size)]
        self._progress.merge(main, mine, best)
        self._callbacks.load_state_dict(own["callbacks"])
        if any(rest.get("asked") for rest in rests.values()):  # Earlier versions did not save it.
            self._callbacks.ask()
        engine.hooks.load_state_dict(own.get("module", {}), same_ranks=manifest.world_size == size)
        engine.means.clear()
        for rest in mine:
            engine.means.load_state_dict(rest["means"])
        if manifest.world_size == size:
            set_generators_state(own["generators"], self._device)
        else:
            seed_all(self._config.seed + rank + 1 + manifest.step)

    def _load_tensors(
        self, store: CheckpointStore, manifest: Manifest, own: str, *, best: bool
    ) -> dict[str, torch.Tensor]:
        """Loads the parts of tensors that this rank needs; returns the best weights: its share, or rank 0's of all.

        `own` is the name prefix of the rank-specific tensors that this rank resumes from.
        """
        engine, wanted, shares = self._engine, self._tensors(), dict[str, torch.Tensor]()
        if best and self._config.model_folder:
            shares = engine.strategy.shares(engine.module, copy=True)
            wanted |= {f"{_BEST}{name}": share for name, share in shares.items()}
        part_needed, main = needed_parts(wanted), self._world.is_main and not shares

        def needs(name: str, first: list[int], shape: list[int]) -> bool:
            return name.startswith(own) or (main and name.startswith(_BEST)) or part_needed(name, first, shape)

        with store.local(manifest, needs) as directory:
            known = load_tensors(directory, wanted)
            whole = read_tensors(directory, 0, _BEST) if main else {}
            state = read_tensors(directory, int(own[len(_OWN) : -1]), own)
        forget_optimizer_state(engine.unwrapped, engine.optimizer, known)
        load_buffers(engine.unwrapped, _under(_BUFFER, state))
        load_extra_state(engine.unwrapped, _under("module.", wanted))
        engine.strategy.own_state.load_state_dict(_under(_STRATEGY, state))
        shapes = {name: value.shape for name, value in engine.unwrapped.state_dict().items()}
        return shares or {name: value.view(shapes.get(name, value.shape)) for name, value in whole.items()}

    def _read_rests(self, store: CheckpointStore, manifest: Manifest) -> dict[int, dict[str, Any]]:
        """Reads the ranks' other state, by rank: rank 0's and this rank's, or all if ranks have other parts now."""
        rank, before = self._world.rank, range(manifest.world_size)
        same = manifest.world_size == self._world.world_size
        rests = {old: store.read_rest(manifest, old) for old in ({0, rank} if same else before)}
        if rests[0].get("strategy") != self._layout:
            rests |= {old: store.read_rest(manifest, old) for old in before if old not in rests}
        return rests


def _under(prefix: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the values whose names start with a prefix, by their names without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}

"""Callbacks that travel by name."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparktorch import Callback
from sparktorch.train.callbacks import FitContext


class Diary(Callback):
    """Writes every hook and where the training stands into a file per rank; on the driver, into a list."""

    def __init__(self, directory: Path, ranks: Any = "main") -> None:
        self.ranks = ranks
        self.told: list[dict[str, Any]] = []
        self.places: list[dict[str, Any]] = []
        self._directory = directory

    def _write(self, hook: str, context: FitContext) -> None:
        with (self._directory / f"rank{context.world.rank}").open("a") as file:
            file.write(f"{hook} {context.epoch} {context.step}\n")

    def on_fit_start(self, context: FitContext) -> None:
        assert context.module.training
        assert context.optimizer.param_groups
        self._write("fit", context)

    def on_epoch_start(self, context: FitContext) -> None:
        self._write("epoch", context)

    def on_step_end(self, context: FitContext) -> None:
        self._write("step", context)

    def on_validation_end(self, context: FitContext, metrics: dict[str, float]) -> None:
        metrics["val_loss"] *= 1  # it has one, and may be written to
        metrics["val_loss"] = 0.0
        self._write("validated", context)

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        assert record["epoch"] == context.epoch
        self._write("epoch over", context)

    def on_fit_end(self, context: FitContext) -> None:
        self._write("fit over", context)

    def on_driver_progress(self, record: dict[str, Any]) -> None:
        self.places.append(record)

    def on_driver_epoch(self, record: dict[str, Any]) -> None:
        self.told.append(record)


class Adds(Callback):
    """Adds to the record of each epoch, or changes what is in it."""

    def __init__(self, value: Any, name: str = "added") -> None:
        self._value, self._name = value, name

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        record[self._name] = self._value


class Determinism(Callback):
    """Adds to the record of each epoch whether torch is deterministic in the rank."""

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        record["deterministic"] = torch.are_deterministic_algorithms_enabled()


class Stops(Callback):
    """Asks one rank to stop, from one hook, in the second epoch."""

    ranks = "all"

    def __init__(self, rank: int, hook: str) -> None:
        self._rank, self._hook = rank, hook

    def _ask(self, hook: str, context: FitContext) -> None:
        if hook == self._hook and context.epoch == 2 and context.world.rank == self._rank:
            context.stop()

    def on_step_end(self, context: FitContext) -> None:
        self._ask("on_step_end", context)

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        self._ask("on_epoch_end", context)


def draws() -> list[float]:
    """Draws from each generator that a fit seeds."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


class Draws(Callback):
    """Writes what each rank draws first into a file per rank."""

    ranks = "all"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_fit_start(self, context: FitContext) -> None:
        (self._directory / f"rank{context.world.rank}").write_text(json.dumps(draws()))


class FailsIn(Callback):
    """Raises in every rank, or in rank 0 alone."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def on_step_end(self, context: FitContext) -> None:
        if context.step == 3:
            raise ArithmeticError("planted in a callback")


class Locked(Callback):
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Misspelt(Callback):
    """Asks for ranks that there are not."""

    ranks = "mian"  # type: ignore[assignment]


class NoCompiler(Callback):
    """Takes the C++ compiler away from a rank, and what it has compiled before."""

    def __init__(self, empty: Path) -> None:
        self._empty = empty

    def on_fit_start(self, context: FitContext) -> None:
        from torch._inductor import config

        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self._empty)
        config.cpp.cxx = (None, "no-such-compiler")


class Halves(Callback):
    """Halves all learning rates after each epoch."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        for group in context.optimizer.param_groups:
            group["lr"] *= 0.5


class Clamps(Callback):
    """Clamps the weights after each step."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    @torch.no_grad()
    def on_step_end(self, context: FitContext) -> None:
        for parameter in context.module.parameters():
            parameter.clamp_(-0.1, 0.1)


class Freezes(Callback):
    """Freezes the first layer after the first epoch, or unfreezes it then."""

    def __init__(self, ranks: Any = "all", *, requires_grad: bool = False) -> None:
        self.ranks, self._requires_grad = ranks, requires_grad

    def on_epoch_end(self, context: FitContext, record: dict[str, Any]) -> None:
        for name, parameter in context.module.named_parameters():
            if name.startswith("layers.0"):
                parameter.requires_grad_(self._requires_grad)

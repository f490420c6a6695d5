"""Saves a training while it goes on: the loop waits for a copy in host memory, not for the file system."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

from sparktorch.config import CheckpointConfig
from sparktorch.errors import PersistenceError
from sparktorch.train.checkpoint import CheckpointStore, Manifest, Share
from sparktorch.world import World

__all__ = ["Board", "Position", "Saver"]

_CLAIM_AGAIN_SECONDS = 10.0
_PATIENCE = 10.0  # seconds without a heartbeat of a rank whose share is missing


class Board(Protocol):
    """Where ranks lay down what one of them collects; see `sparktorch.train.link.Link`."""

    def post(self, topic: str, value: dict[str, Any]) -> None:
        """Lays down a JSON object."""
        ...

    def collect(self, topic: str, *, patience: float | None = None) -> list[dict[str, Any]]:
        """Waits for those of all ranks, but not for one that has not been heard of for `patience` seconds."""
        ...

    def agree(self, topic: str, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Posts and collects, in every rank."""
        ...

    def warn(self, text: str) -> None:
        """Has the driver warn of something that does not end the fit."""
        ...


@dataclass(frozen=True)
class Position:
    """How far a training is.

    Attributes:
        step: Optimizer steps taken since it began.
        epoch: The epoch it is in, from 0.
        step_in_epoch: Steps taken in that epoch.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0


class Saver:
    """Writes this rank's shares in a thread; rank 0 makes checkpoints of those that all ranks have written.

    A share that cannot be written is warned about, and the training goes on without that checkpoint.

    Attributes:
        store: The checkpoints.
        start: The one that the training goes on from, `None` for the beginning.
    """

    def __init__(self, config: CheckpointConfig, job: dict[str, Any], world: World, board: Board) -> None:
        """Claims the directory, and looks for the checkpoint to go on from; every rank does it.

        The checkpoints of a training that has come to its end are removed.

        Args:
            config: Where and how often.
            job: What identifies the training.
            world: This rank's place.
            board: Where ranks say what they have written.

        Raises:
            PersistenceError: Another fit writes there, or the checkpoints are of another training.
        """
        self._config, self._job, self._world, self._board = config, job, world, board
        self.store = CheckpointStore(config.directory)
        self._losses: dict[int, float] = {}  # of the checkpoints that were validated, in rank 0
        self.start = self._find_start()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._claims = threading.Thread(target=self._claim, name="sparktorch-claim", daemon=True)

    def __enter__(self) -> Saver:
        if self._world.is_main:
            self._claims.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()  # a process that is used again must not hold on to the directory

    def _find_start(self) -> Manifest | None:
        """Returns the checkpoint to go on from, the same in every rank; `None` for the beginning."""
        found: dict[str, Any] = {}
        if self._world.is_main:
            self.store.claim(self._config.owner)
            if self.store.finished:
                self.store.clear()
            manifest, problems = self.store.usable()
            for problem in problems:
                self._board.warn(f"a checkpoint is left out: {problem}")
            if manifest is not None:
                _check_same(manifest.job, self._job, self._config.directory)
                found = {"step": manifest.step}
            kept = {step for step in self.store.steps() if manifest is not None and step <= manifest.step}
            self.store.keep(kept)
            losses = {step: self._loss_at(step) for step in kept}
            self._losses = {step: loss for step, loss in losses.items() if loss is not None}
        step = self._board.agree("start", found)[0].get("step")
        return None if step is None else self.store.read_manifest(step)

    def _loss_at(self, step: int) -> float | None:
        try:
            return self.store.read_manifest(step).loss
        except PersistenceError:  # it was never finished
            return None

    def due(self, position: Position) -> bool:
        """Whether the state at this position is to be saved; `step_in_epoch` 0 is the end of an epoch."""
        if self._config.unit == "epoch":
            return position.step_in_epoch == 0 and position.epoch % self._config.interval == 0
        return position.step % self._config.interval == 0

    def save(self, position: Position, share: Share, loss: float | None) -> None:
        """Begins to write a share, as soon as the one before is written.

        Args:
            position: How far the training is.
            share: Of the state, nobody else's.
            loss: Of the last validation.
        """
        self._wait()
        self._thread = threading.Thread(
            target=self._write, args=(position, share, loss), name="sparktorch-save", daemon=True
        )
        self._thread.start()

    def close(self, position: Position) -> None:
        """Waits for what is being written, and notes that the training has come to its end."""
        self._wait()
        self._done.set()
        if self._world.is_main:
            self._claims.join()  # or it would claim the directory once more after it has been given back
            try:
                self.store.finish(position.step)
                self.store.release(self._config.owner)
            except (OSError, PersistenceError) as error:
                self._board.warn(f"the end of the training could not be noted: {error}")

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, position: Position, share: Share, loss: float | None) -> None:
        step, topic = position.step, f"saved/{position.step}"
        try:
            written: dict[str, Any] = {"files": self.store.write_share(step, self._world.rank, share)}
        except Exception as error:  # file systems have errors of their own
            written = {"error": f"{type(error).__name__}: {error}"}
            self._board.warn(f"no checkpoint at step {step}: {written['error']}")
        try:
            self._board.post(topic, written)
            if self._world.is_main:
                self._complete(position, self._board.collect(topic, patience=_PATIENCE), loss)
        except Exception as error:
            self._board.warn(f"no checkpoint at step {step}: {type(error).__name__}: {error}")

    def _complete(self, position: Position, written: list[dict[str, Any]], loss: float | None) -> None:
        if any("error" in share for share in written):
            return
        files = {name: found for share in written for name, found in share["files"].items()}
        self.store.write_manifest(
            Manifest(
                step=position.step,
                epoch=position.epoch,
                step_in_epoch=position.step_in_epoch,
                world_size=self._world.world_size,
                job=self._job,
                loss=loss,
                files=files,
            )
        )
        if loss is not None:
            self._losses[position.step] = loss
        kept = {step for step in self.store.steps() if step <= position.step}
        kept = set(sorted(kept)[-self._config.keep :])
        if self._losses:
            kept.add(min(self._losses, key=lambda step: self._losses[step]))
        self.store.keep(kept, before=position.step)

    def _claim(self) -> None:
        try:
            while not self._done.wait(_CLAIM_AGAIN_SECONDS):
                self.store.claim(self._config.owner)
        except Exception as error:
            self._board.warn(f"{self._config.directory} could not be claimed again: {error}")


def _check_same(saved: dict[str, Any], job: dict[str, Any], directory: str) -> None:
    names = sorted(name for name in saved.keys() | job.keys() if saved.get(name) != job.get(name))
    if names:
        differences = "; ".join(f"{name}: {saved.get(name)!r} there, {job.get(name)!r} here" for name in names)
        raise PersistenceError(
            f"{directory} holds the unfinished training of another configuration ({differences})",
            hint="go on with the same configuration, or set another checkpointDir",
            param="checkpointDir",
        )

"""Saves a training while it goes on: the loop waits for a copy in host memory, not for the file system."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sparktorch.base.config import CheckpointConfig
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.errors import PersistenceError, SparkTorchError
from sparktorch.train.checkpoint.directory import cannot_write
from sparktorch.train.checkpoint.lease import Lease
from sparktorch.train.checkpoint.store import CheckpointStore, Manifest, Share

__all__ = ["Checkpointer", "Position"]

_LEAVING_SECONDS = 5.0  # for a claim that is being renewed
_LOOK_SECONDS = 1.0
_PATIENCE = 10.0  # seconds without a heartbeat of a rank whose share is missing


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


class Checkpointer:
    """Writes this rank's shares in a thread; rank 0 makes checkpoints of those that all ranks have written.

    A share that cannot be written is warned about, and the training goes on without that checkpoint.

    Attributes:
        store: The checkpoints.
        start: The one that the training goes on from, `None` for the beginning.
        seconds: How long this rank has copied shares and waited for one to be written before the next, while its
            training stood still; and how long it has written them, beside the training.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        job: dict[str, Any],
        world: World,
        client: Client,
        *,
        claim_seconds: float = 10.0,
        seen_seconds: float = 5.0,
    ) -> None:
        """Claims the directory, and looks for the checkpoint to go on from; every rank does it.

        The checkpoints of a training that has come to its end are removed.

        Args:
            config: Where and how often.
            job: What identifies the training.
            world: This rank's place.
            client: By which ranks say what they have written.
            claim_seconds: Between two renewals of the claim on the directory.
            seen_seconds: After which a network file system shows what another host has written.

        Raises:
            PersistenceError: Another fit writes there, the checkpoints are of another training, or the directory
                cannot be written, or is another one on this rank's host than on that of rank 0.
            ClusterError: The directory cannot be reached.
        """
        self._config, self._job, self._world, self._client = config, job, world, client
        self._claim_seconds, self._seen_seconds = claim_seconds, seen_seconds
        self._kept: dict[int, float | None] = {}  # in rank 0: the checkpoints that are whole, with their losses
        self.seconds = dict.fromkeys(("checkpoint_copy", "checkpoint_wait", "checkpoint_write"), 0.0)
        self._failing = False
        self._step = -1  # of the last save
        self._attempts: set[str] = set()  # in rank 0: this one, and those before it
        self._thread: threading.Thread | None = None
        self._collecting = False
        self._lost: PersistenceError | None = None
        self._claim: Lease | None = None
        self._done = threading.Event()
        self._claims = threading.Thread(target=self._renew, name="sparktorch-claim", daemon=True)
        try:
            self.store, self.start = self._find_start()
        except BaseException:
            self._stop_claiming()
            raise

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_claiming()  # a process that is used again must not hold on to the directory

    def _find_start(self) -> tuple[CheckpointStore, Manifest | None]:
        """Returns the store, and the checkpoint to go on from, the same in every rank; `None` for the beginning."""
        found = self._clear_up() if self._world.is_main else {}
        found = self._client.agree("start", found)[0]
        store = CheckpointStore(self._config.directory, found["attempt"], self._client.moved)
        self._check_shared(store, found["host"])
        if "step" not in found:
            return store, None
        return store, store.read_manifest(found["step"], found["written_by"])

    def _clear_up(self) -> dict[str, Any]:
        """Takes the directory, removes what nobody will go on from, and returns what all ranks must know."""
        attempt = secrets.token_hex(4)
        store = CheckpointStore(self._config.directory, attempt, self._client.moved)
        try:
            self._claim = store.claim(self._config.owner, self._config.restart)
        except SparkTorchError:
            raise
        except Exception as error:
            reason, hint = cannot_write(self._config.directory, error)
            raise PersistenceError(f"checkpointDir {reason}", hint=hint, param="checkpointDir") from error
        self._claims.start()  # to read all that is there may take longer than a claim has force
        if store.finished_by(self._config.owner):
            store.reopen()  # but the fit was not: it has lost a rank that was about to hand back its result
        elif store.finished:
            store.clear()
        manifest, problems = store.usable()
        for problem in problems:
            self._client.warn(f"a checkpoint is left out: {problem}")
        found = {"attempt": attempt, "host": self._world.host}
        if manifest is None:
            store.keep(set())
            self._attempts = {attempt}
            return found
        _check_same(manifest.job, self._job, self._config.directory)
        self._kept = {other.step: other.loss for other in store.manifests() if other.step <= manifest.step}
        store.keep(set(self._kept))
        self._attempts = {attempt, *store.attempts()}
        return {**found, "step": manifest.step, "written_by": manifest.attempt}

    def _check_shared(self, store: CheckpointStore, host: str) -> None:
        """Refuses a directory that is none of rank 0's: of what each rank writes at home nobody could go on."""
        deadline = time.monotonic() + self._seen_seconds
        while not store.claimed_by(self._config.owner):
            if time.monotonic() > deadline:
                raise PersistenceError(
                    f"checkpointDir {self._config.directory} is not the same directory here as on rank 0's host {host}",
                    hint="set a directory that all workers share: of a network file system, or of an object store",
                    param="checkpointDir",
                )
            time.sleep(0.1)

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

        Raises:
            PersistenceError: Another fit has taken the directory.
        """
        # Only ranks' main threads keep step: a second share of the same step could get under the first one's manifest.
        assert position.step > self._step, f"step {position.step} is saved after step {self._step}"
        self._step = position.step
        self.seconds["checkpoint_copy"] += share.seconds
        self._wait()
        if self._lost is not None:
            raise self._lost
        self._thread = threading.Thread(
            target=self._write, args=(position, share, loss), name="sparktorch-save", daemon=True
        )
        self._thread.start()

    def close(self, position: Position) -> None:
        """Waits for what is being written, and notes that the training has come to its end."""
        self._wait()
        if self._claim is None:
            return
        self._stop_claiming()  # or the directory would be claimed once more after it has been given back
        try:
            self._hold()
            self.store.keep(set(self._kept), attempts=self._attempts)
            self.store.finish(position.step, self._config.owner)
            self.store.release(self._config.owner)
        except Exception as error:
            self._client.warn(f"the end of the training could not be noted in {self._config.directory}: {error}")

    def _wait(self) -> None:
        """Waits for what is being written; this rank moves with it, and does not stand still where others have to."""
        started = time.perf_counter()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if self._collecting:
                self._client.moved()
        self.seconds["checkpoint_wait"] += time.perf_counter() - started

    def _write(self, position: Position, share: Share, loss: float | None) -> None:
        step, topic, started = position.step, f"saved/{position.step}", time.perf_counter()
        try:
            written: dict[str, Any] = {"files": self.store.write_share(step, self._world.rank, share)}
            self._failing &= self._world.is_main  # which has a manifest still to write
        except Exception as error:  # file systems have errors of their own
            written = {"error": str(error)}
            self._failed(step, error)
        self.seconds["checkpoint_write"] += time.perf_counter() - started
        try:
            self._client.post(topic, written)
            found = self._collect(topic) if self._world.is_main else []
        except Exception as error:  # a rank is lost, or the driver: the loop meets that, too
            self._client.warn(f"no checkpoint at step {step}: {type(error).__name__}: {error}")
            return
        if self._world.is_main:
            self._complete(position, found, loss)

    def _collect(self, topic: str) -> list[dict[str, Any]]:
        self._collecting = True
        try:
            return self._client.collect(topic, patience=_PATIENCE)
        finally:
            self._collecting = False

    def _failed(self, step: int, error: Exception) -> None:
        """Warns of a checkpoint that cannot be written, unless the one before could not be either."""
        if not self._failing:
            self._failing = True
            reason, hint = cannot_write(self._config.directory, error)
            self._client.warn(
                f"no checkpoint at step {step}: {reason}; the training goes on, and every checkpoint is tried again "
                f"without a further warning until one is written\n  -> {hint}"
            )

    def _complete(self, position: Position, written: list[dict[str, Any]], loss: float | None) -> None:
        """Makes a checkpoint of what all ranks have written, and removes those that are not to be kept."""
        if any("error" in share for share in written) or not self._seal(position, written, loss):
            with suppress(Exception):  # or it goes with those that are not kept
                self.store.drop(position.step)
            return
        try:
            self._forget_old(position.step)
        except Exception as error:
            self._client.warn(f"old checkpoints in {self._config.directory} could not be removed: {error}")

    def _seal(self, position: Position, written: list[dict[str, Any]], loss: float | None) -> bool:
        """Writes the manifest of a checkpoint; returns whether it could be written."""
        manifest = Manifest(
            step=position.step,
            epoch=position.epoch,
            step_in_epoch=position.step_in_epoch,
            world_size=self._world.world_size,
            job=self._job,
            loss=loss,
            files={name: found for share in written for name, found in share["files"].items()},
        )
        try:
            self._hold()
            self.store.write_manifest(manifest)
        except PersistenceError:  # the directory is lost, which ends the training at its next checkpoint
            return False
        except Exception as error:
            self._failed(position.step, error)
            return False
        self._kept[position.step] = loss
        self._failing = False
        return True

    def _forget_old(self, step: int) -> None:
        """Removes the checkpoints that are not to be kept, now that there is a new one."""
        kept = set(sorted(self._kept)[-self._config.keep :])
        losses = {step: loss for step, loss in self._kept.items() if loss is not None}
        if losses:
            kept.add(min(losses, key=lambda step: losses[step]))
        self._kept = {step: loss for step, loss in self._kept.items() if step in kept}
        self._hold()
        self.store.keep(kept, before=step, attempts=self._attempts)

    def _renew(self) -> None:
        """Renews the claim for as long as the training goes on, or until somebody else has it."""
        while self._lost is None and not self._done.wait(self._claim_seconds):
            self._renew_once()

    def _stop_claiming(self) -> None:
        self._done.set()
        if self._claims.is_alive():
            self._claims.join(_LEAVING_SECONDS)

    def _hold(self) -> None:
        """Raises if somebody else has, or ever had, the directory."""
        assert self._claim is not None
        try:
            if self._lost is None:
                self._claim.check()
        except PersistenceError as error:
            self._lost = error
        if self._lost is not None:
            raise self._lost

    def _renew_once(self) -> None:
        assert self._claim is not None
        try:
            self._claim.renew()
        except PersistenceError as error:
            self._lost = error
        except Exception as error:  # it may pass
            self._client.warn(f"the claim on {self._config.directory} could not be renewed: {error}")


def _check_same(saved: dict[str, Any], job: dict[str, Any], directory: str) -> None:
    names = sorted(name for name in saved.keys() | job.keys() if saved.get(name) != job.get(name))
    if names:
        differences = "; ".join(f"{name}: {saved.get(name)!r} there, {job.get(name)!r} here" for name in names)
        raise PersistenceError(
            f"{directory} holds the unfinished training of another configuration ({differences})",
            hint="go on with the same configuration, or set another checkpointDir",
            param="checkpointDir",
        )

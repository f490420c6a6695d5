"""Saves checkpoints in the background: the loop waits for a copy to host memory, not for the file system."""

from __future__ import annotations

import math
import re
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from sparktorch.base.config import INITIAL_WEIGHTS, CheckpointConfig
from sparktorch.base.world import World
from sparktorch.distributed.client import Client
from sparktorch.errors import PersistenceError, SparkTorchError
from sparktorch.train.checkpoint.directory import Lease, cannot_write
from sparktorch.train.checkpoint.store import CheckpointStore, Manifest, Share

__all__ = ["Checkpointer", "Position", "unfinished"]

# Settings that identify contents end in this form; those in checkpoints of version 0.1 do not.
_CONTENTS = re.compile(r" \((sha256|module) [^()]+\)")
# The end of a training waits at most this long for a lease that is just being renewed.
_LEAVING_SECONDS = 5.0
# While a rank waits for its thread, it looks this often at whether to count the wait as progress.
_LOOK_SECONDS = 1.0
# The wait of rank 0 for the other ranks' shares counts as progress only for this long: a share may never come.
_COLLECTING_SECONDS = 60.0
# A rank whose share is missing counts as lost if it has sent no heartbeat for this long.
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Position:
    """How far a training has come.

    Attributes:
        step: Steps of the optimizer since the training began.
        epoch: Number of the epoch, from 0.
        step_in_epoch: Steps taken in the epoch.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0


class Checkpointer:
    """Writes this rank's shares in a thread; rank 0 completes a checkpoint once all ranks have written their shares.

    If a share cannot be written, the driver logs a warning, and the training goes on without that checkpoint.

    Attributes:
        start: Manifest of the checkpoint to resume from; `None` starts from the beginning.
        seconds: Seconds by activity. `checkpoint_copy` (copying shares) and `checkpoint_wait` (waiting for the previous
            share) block the training; `checkpoint_write` (writing shares) runs in parallel to it.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        job: dict[str, Any],
        world: World,
        client: Client,
        *,
        fixed: str = "",
        best_delta: float = 0.0,
        claim_seconds: float = 10.0,
        seen_seconds: float = 5.0,
    ) -> None:
        """Acquires the directory's lease in rank 0, and finds the checkpoint to resume from; every rank calls it.

        Checkpoints of another fit's finished training are removed, unless this fit is to train that model for more
        epochs.

        `job` has the settings that identify the training. `fixed` says why the training cannot go on to another number
        of epochs; it is empty if the training can. A checkpoint is better than the best so far if its loss is smaller
        by more than `best_delta`. The lease is renewed every `claim_seconds`. A network file system shows what another
        host has written after `seen_seconds` at the latest.

        Raises:
            PersistenceError: Another fit writes into the directory, the checkpoints there are those of another
                training or cannot go on to this number of epochs, or the ranks do not share the directory.
        """
        self._config = config
        self._job = job
        self._world = world
        self._client = client
        self._fixed = fixed
        self._claim_seconds = claim_seconds
        self._seen_seconds = seen_seconds
        self._best_delta = best_delta
        # Rank 0 alone knows the losses of complete checkpoints by step, the step of the best checkpoint, and the
        # attempts that wrote checkpoints: this attempt and earlier ones.
        self._losses: dict[int, float | None] = {}
        self._best = -1
        self._attempts: set[str] = set()
        self.seconds = dict.fromkeys(("checkpoint_copy", "checkpoint_wait", "checkpoint_write"), 0.0)
        # Whether the last checkpoint could not be written: then no further warning is given.
        self._failing = False
        self._last_saved_step = -1
        self._thread: threading.Thread | None = None
        self._collecting = False
        self._lease: Lease | None = None
        # The error of a lost lease, once somebody else has been seen to hold the lease.
        self._lost: PersistenceError | None = None
        self._done = threading.Event()
        self._claims = threading.Thread(target=self._keep_renewing, name="sparktorch-claim", daemon=True)
        with ExitStack() as undo:
            undo.callback(self._stop_claiming)
            self.store, self.start = self._find_start()
            undo.pop_all()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_claiming()  # The process may be reused, and must not go on renewing the lease.

    def _find_start(self) -> tuple[CheckpointStore, Manifest | None]:
        """Returns the store and the manifest to resume from, the same in every rank; `None` to start afresh."""
        start = self._clear_up() if self._world.is_main else {}
        start = self._client.agree("start", start)[0]
        store = CheckpointStore(self._config.directory, start["attempt"], self._client.moved)
        self._check_shared(store, start["host"])
        if "step" not in start:
            return store, None
        return store, store.read_manifest(start["step"], start["written_by"])

    def _clear_up(self) -> dict[str, Any]:
        """Acquires the lease, and removes unusable checkpoints; returns what all ranks must know about the start."""
        attempt = secrets.token_hex(4)
        store = CheckpointStore(self._config.directory, attempt, self._client.moved)
        try:
            self._lease = store.claim(self._config.owner, self._config.restart)
        except SparkTorchError:
            raise
        except Exception as error:
            reason, hint = cannot_write(self._config.directory, error)
            raise PersistenceError(
                f"checkpointDir {reason}", hint=hint, param="checkpointDir", code="ST-CHECKPOINT-DIR"
            ) from error
        self._claims.start()  # Reading all checkpoints may take longer than a lease lasts.
        store.refuse_newer()
        going_on = unfinished(store, self._config.owner, self._job)
        if going_on is not None:
            # The check comes first, so that a refused fit leaves the directory as it is. The training that goes on may
            # be marked as finished, because it had fewer epochs, or a rank was lost before it returned its result.
            _check_same(going_on, self._job, self._config.directory, self._fixed)
            store.reopen()
        elif store.finished:
            store.clear()
        manifest, problems = store.usable()
        for problem in problems:
            self._client.warn(f"a checkpoint is left out: {problem}")
        start = {"attempt": attempt, "host": self._world.host}
        if manifest is None:
            store.keep(set())
            self._attempts = {attempt}
            return start
        begun = manifest.job.get(INITIAL_WEIGHTS)
        if begun is not None and begun != self._job.get(INITIAL_WEIGHTS):
            self._client.warn(
                f"module has other initial weights than the training in {self._config.directory} began with, which "
                "goes on with its own; to train from these, set another checkpointDir"
            )
        for earlier in sorted(store.manifests(), key=lambda earlier: earlier.step):
            if earlier.step <= manifest.step:
                self._note_complete(earlier.step, earlier.loss)
        store.keep(set(self._losses))
        self._attempts = {attempt, *store.attempts()}
        self._client.warn(f"going on from the checkpoint in {self._config.directory}{_progress_text(manifest)}")
        return {**start, "step": manifest.step, "written_by": manifest.attempt}

    def _check_shared(self, store: CheckpointStore, host: str) -> None:
        """Checks that this rank sees rank 0's directory: no training can resume from files on separate disks."""
        deadline = time.monotonic() + self._seen_seconds
        while not store.claimed_by(self._config.owner):
            if time.monotonic() > deadline:
                raise PersistenceError(
                    f"checkpointDir {self._config.directory} is not the same directory here as on rank 0's host {host}",
                    hint="set a directory that all workers share: of a network file system, or of an object store",
                    param="checkpointDir",
                    code="ST-CHECKPOINT-DIR",
                )
            time.sleep(0.1)

    def is_due(self, position: Position) -> bool:
        """Returns whether a checkpoint is due at this position; `step_in_epoch` 0 is the end of an epoch."""
        if self._config.unit == "epoch":
            return position.step_in_epoch == 0 and position.epoch % self._config.interval == 0
        return position.step % self._config.interval == 0

    def save(self, position: Position, share: Share, loss: float | None) -> None:
        """Waits until the previous share is written, and starts to write a share, which nobody else may change.

        `loss` is what `TrainConfig.judged` returns for the last validation. A `PersistenceError` says that another fit,
        or a later attempt of this fit, has taken over the lease.
        """
        # No step is saved twice: the threads of the ranks are not in step with each other, so the manifest of the first
        # checkpoint could name files of the second one.
        assert position.step > self._last_saved_step, (
            f"step {position.step} is saved after step {self._last_saved_step}"
        )
        self._last_saved_step = position.step
        self.seconds["checkpoint_copy"] += share.seconds
        self.wait()
        if self._lost is not None:
            raise self._lost
        self._thread = threading.Thread(
            target=self._write, args=(position, share, loss), name="sparktorch-save", daemon=True
        )
        self._thread.start()

    def is_complete(self) -> bool:
        """Waits for the last save; returns whether it has become a checkpoint. Every rank calls it."""
        self.wait()
        # Rank 0 alone knows which checkpoints are complete, and tells the other ranks.
        step = self._last_saved_step
        answers = self._client.agree(f"complete/{step}", {"complete": step in self._losses})
        return bool(answers[0]["complete"])

    def close(self, position: Position, *, finished: bool = True) -> None:
        """Waits for pending writes, and marks the training as finished, so that no fit goes on with it by itself."""
        self.wait()
        if self._lease is None:
            return
        self._stop_claiming()  # Otherwise, the lease could be renewed after its release.
        try:
            self._check_lease()
            self.store.keep(set(self._losses), attempts=self._attempts)
            if finished:
                self.store.finish(position.step, self._config.owner)
            self.store.release(self._config.owner)
        except Exception as error:
            self._client.warn(f"the end of the training could not be noted in {self._config.directory}: {error}")

    def let_end(self, seconds: float) -> None:
        """Waits for pending writes, for at most some seconds: if a rank was killed, its share never comes."""
        if self._thread is not None:
            self._thread.join(seconds)

    def wait(self) -> None:
        """Waits for pending writes; for a while, rank 0's wait for the other ranks' reports counts as progress."""
        started = time.perf_counter()
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if self._collecting and time.perf_counter() - started < _COLLECTING_SECONDS:
                self._client.moved()
        self.seconds["checkpoint_wait"] += time.perf_counter() - started

    def _write(self, position: Position, share: Share, loss: float | None) -> None:
        """Writes a share and reports it to rank 0, which then completes the checkpoint; runs in a thread."""
        step = position.step
        topic = f"saved/{position.step}"
        started = time.perf_counter()
        try:
            written: dict[str, Any] = {"files": self.store.write_share(step, self._world.rank, share)}
            if not self._world.is_main:  # Rank 0 has still to write the manifest, which may fail.
                self._failing = False
        except Exception as error:  # File systems raise various exceptions.
            written = {"error": str(error)}
            self._warn_of_failure(step, error)
        self.seconds["checkpoint_write"] += time.perf_counter() - started
        try:
            self._client.post(topic, written)
            self._collecting = self._world.is_main
            reports = self._client.collect(topic, patience=_PATIENCE_SECONDS) if self._world.is_main else []
        except Exception as error:  # A rank or the driver is lost; the loop will fail, too.
            with suppress(Exception):  # The store may be gone.
                self._client.warn(f"no checkpoint at step {step}: {type(error).__name__}: {error}")
            return
        finally:
            self._collecting = False
        if self._world.is_main:
            self._complete(position, reports, loss)

    def _warn_of_failure(self, step: int, error: Exception) -> None:
        """Warns that a checkpoint cannot be written, unless the previous one could not be written either."""
        if not self._failing:
            self._failing = True
            reason, hint = cannot_write(self._config.directory, error)
            self._client.warn(
                f"no checkpoint at step {step}: {reason}; the training goes on, and every checkpoint is tried again "
                f"without a further warning until one is written\n  -> {hint}"
            )

    def _complete(self, position: Position, reports: list[dict[str, Any]], loss: float | None) -> None:
        """Completes a checkpoint from the reports of all ranks, and removes old ones."""
        failed = any("error" in report for report in reports)
        if failed or not self._seal(position, reports, loss):
            with suppress(Exception):  # What cannot be removed now is removed later, with old checkpoints.
                self.store.drop(position.step)
            return
        keep = {*sorted(self._losses)[-self._config.keep :], self._best}
        self._losses = {step: loss for step, loss in self._losses.items() if step in keep}
        try:
            self._check_lease()
            self.store.keep(keep, before=position.step, attempts=self._attempts)
        except Exception as error:
            self._client.warn(f"old checkpoints in {self._config.directory} could not be removed: {error}")

    def _seal(self, position: Position, reports: list[dict[str, Any]], loss: float | None) -> bool:
        """Writes the manifest of a checkpoint; returns whether it could be written."""
        files: dict[str, dict[str, Any]] = {}
        for report in reports:
            files |= report["files"]
        manifest = Manifest(
            **asdict(position),
            world_size=self._world.world_size,
            job=self._job,
            loss=loss,
            files=files,
        )
        try:
            self._check_lease()
            self.store.write_manifest(manifest)
        except Exception as error:
            if self._lost is None:  # Once the lease is lost, the next `save` raises.
                self._warn_of_failure(position.step, error)
            return False
        self._note_complete(position.step, loss)
        self._failing = False
        return True

    def _note_complete(self, step: int, loss: float | None) -> None:
        """Notes a complete checkpoint, and whether it is the best so far."""
        best_loss = self._losses.get(self._best)
        bound = math.inf if best_loss is None else best_loss - self._best_delta
        self._losses[step] = loss
        if loss is not None and loss < bound:
            self._best = step

    def _keep_renewing(self) -> None:
        """Renews the lease until the training ends or somebody else holds the lease; runs in a thread."""
        while self._lost is None and not self._done.wait(self._claim_seconds):
            self._renew()

    def _renew(self) -> None:
        assert self._lease is not None
        try:
            self._lease.renew()
        except PersistenceError as error:
            self._lost = error
        except Exception as error:  # The file system may be out of reach for a while.
            self._client.warn(f"the claim on {self._config.directory} could not be renewed: {error}")

    def _stop_claiming(self) -> None:
        self._done.set()
        if self._claims.is_alive():
            self._claims.join(_LEAVING_SECONDS)

    def _check_lease(self) -> None:
        """Raises if somebody else holds the lease, or has been seen to hold it."""
        assert self._lease is not None
        try:
            if self._lost is None:
                self._lease.check()
        except PersistenceError as error:
            self._lost = error
        if self._lost is not None:
            raise self._lost


def unfinished(store: CheckpointStore, owner: str, job: Mapping[str, Any]) -> Manifest | None:
    """Returns the latest manifest of the training that a fit goes on with; `None` if the store holds no such training.

    A fit goes on with an unfinished training. It goes on with a finished training if it had the same owner, or if its
    job differs in nothing but the number of epochs.
    """
    latest = next(iter(store.manifests()), None)
    if latest is None or not store.finished or store.finished_by(owner):
        return latest
    return latest if _changed_settings(latest.job, {**latest.job, **job}) == ["epochs"] else None


def _changed_settings(saved: Mapping[str, Any], job: Mapping[str, Any]) -> list[str]:
    """Returns the names of the settings that differ between the job of a checkpoint and this job."""
    names = (saved.keys() | job.keys()) - {INITIAL_WEIGHTS}
    if "rows" not in saved:  # Version 0.1.0 did not save this setting.
        names -= {"rows"}
    changed = []
    for name in names:
        value = job.get(name)
        without_contents = _CONTENTS.sub("", value) if isinstance(value, str) else value
        if saved.get(name) not in (value, without_contents):
            changed.append(name)
    return sorted(changed)


def _progress_text(manifest: Manifest) -> str:
    """Returns how far a training has come, as text; the text is empty if a user's loop counts no epochs and steps."""
    if manifest.step_in_epoch:
        return f": epoch {manifest.epoch + 1}, after step {manifest.step_in_epoch}"
    return f": after epoch {manifest.epoch}" if manifest.epoch else ""


def _check_same(manifest: Manifest, job: Mapping[str, Any], directory: str, fixed: str) -> None:
    """Raises if a checkpoint belongs to another training, or cannot go on to the job's number of epochs."""
    saved = manifest.job
    what = ""
    hint = "go on with the same configuration, or set another checkpointDir"
    names = _changed_settings(saved, job)
    if names == ["epochs"] and fixed:
        what = f"a training of {saved.get('epochs')} epochs that cannot go on to {job['epochs']}: {fixed}"
    elif names == ["epochs"] and int(job["epochs"]) <= manifest.epoch:
        what = f"a training that has done {manifest.epoch} epochs, and epochs is {job['epochs']}"
        hint = "set more epochs, or another checkpointDir"
    elif names and names != ["epochs"]:
        differences = "; ".join(f"{name}: {saved.get(name)!r} there, {job.get(name)!r} here" for name in names)
        what = f"the unfinished training of another configuration ({differences})"
    if "data" in names:
        hint += "; numbers that rows get as they are read (idCol) depend on the partitions: write them into the table"
    if what:
        param = "epochs" if names == ["epochs"] else "checkpointDir"
        raise PersistenceError(f"{directory} holds {what}", hint=hint, param=param, code="ST-CHECKPOINT-OTHER")

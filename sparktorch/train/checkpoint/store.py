"""Checkpoints: every rank writes its share of the training's state, and any number of ranks can read it.

A checkpoint is a directory of plain files:

- `rank-N.safetensors`: rank N's share of the tensors, in the layout of `torch.distributed.checkpoint`. Earlier versions
  may have written further parts of the same tensors into `rank-N-1.safetensors` and so on.
- `rank-N.pt`: the rest of rank N's state, which is read with `weights_only=True`.
- `manifest.json`: how far the training was, and size and SHA-256 of the other files. It is written last, atomically: a
  directory without it is no checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from sparktorch.base.devices import download
from sparktorch.base.no_op import no_op
from sparktorch.errors import PersistenceError
from sparktorch.train.checkpoint.directory import CLAIM, Directory, Lease, claim_in
from sparktorch.train.checkpoint.tensors import Needs, fetch_tensors, foreign, storable
from sparktorch.train.sharding.dtensor import first_copy, local_part

__all__ = ["CheckpointStore", "Manifest", "Share", "read_tensors", "snapshot"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_FINISHED = "finished.json"
_NAME = re.compile(r"step-(\d{9})(?:-([0-9a-f]+))?")
_FILE = re.compile(r"rank-\d{5}(\.pt|(-\d+)?\.safetensors)")


@dataclass(frozen=True)
class Share:
    """A copy of one rank's share of the state, on the CPU.

    Attributes:
        tensors: This rank's part of each tensor, by name, with the part's offset along each axis of the whole tensor.
        rest: The rest of the state as bytes from `torch.save`, because the loop goes on changing the state.
        seconds: Seconds that the copy took.
    """

    tensors: Mapping[str, tuple[torch.Tensor, list[int]]]
    rest: bytes
    seconds: float = 0.0


def snapshot(tensors: Mapping[str, torch.Tensor], rest: dict[str, Any], saves: Callable[[str], bool]) -> Share:
    """Copies a rank's share of the state, so that it can be written while the training goes on.

    From sharded tensors, it copies this rank's shards. `saves` takes the name of an unsharded tensor, and returns
    whether this rank saves it. A `PersistenceError` refuses a value in `rest` that is neither a number, a string, a
    tensor, nor a list or dict of these.
    """
    started = time.perf_counter()
    parts = {}
    offsets = {}
    for name, value in tensors.items():
        # If several ranks have the same shard of a tensor, the first of them saves it.
        is_saved_here = first_copy(value) if hasattr(value, "to_local") else saves(name)
        if is_saved_here:
            part, offset = local_part(value)
            if part.numel():
                parts[name] = part.detach()
                offsets[name] = offset or [0]
    copies = download(parts, copy=True)
    # The layout of the files has no scalars: they become tensors with one element.
    shares = {name: (copy.reshape(copy.shape or (1,)).contiguous(), offsets[name]) for name, copy in copies.items()}
    content = io.BytesIO()
    torch.save({name: storable(value, name) for name, value in rest.items()}, content)
    return Share(shares, content.getvalue(), time.perf_counter() - started)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Metadata of a checkpoint.

    Attributes:
        step: Optimizer steps taken since the training began.
        epoch: The epoch in which the training is, from 0.
        step_in_epoch: Steps taken in this epoch.
        world_size: Number of ranks that wrote the checkpoint.
        job: Settings that identify the training; a training with other settings may not resume from it.
        loss: What `TrainConfig.judged` returns for the last validation; `None` without a validation.
        files: Size in bytes and SHA-256 of each file, by name.
        attempt: The attempt that wrote the checkpoint.
        format: The version of the layout of the files.
    """

    step: int
    epoch: int
    step_in_epoch: int
    world_size: int
    job: dict[str, Any]
    loss: float | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    attempt: str = ""
    format: int = _FORMAT


class CheckpointStore:
    """The checkpoints of one training, in a directory on any file system that fsspec supports.

    Each attempt writes into its own folders, because ranks of an earlier attempt may run on for seconds, and must not
    write into folders that are read later.
    """

    def __init__(self, url: str, attempt: str = "", moved: Callable[[], object] = no_op) -> None:
        """Opens the directory, which need not exist; `moved` is called for every few MB, and counts them as progress.

        `attempt`, in hexadecimal, identifies this attempt in the names of its folders.
        """
        self.directory = Directory(url, moved)
        self._attempt = attempt

    def write_share(self, step: int, rank: int, share: Share) -> dict[str, dict[str, Any]]:
        """Writes a rank's files; returns size in bytes and SHA-256 of each."""
        from safetensors.torch import save
        from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

        contents = {f"rank-{rank:05d}.pt": share.rest}
        if share.tensors:
            tensors = {name: part for name, (part, _) in share.tensors.items()}
            offsets = {name: {SAVED_OFFSETS_KEY: offset} for name, (_, offset) in share.tensors.items()}
            contents[f"rank-{rank:05d}.safetensors"] = save(tensors, {CUSTOM_METADATA_KEY: json.dumps(offsets)})
        for name, content in contents.items():
            self.directory.put(f"{_folder(step, self._attempt)}/{name}", content)
        return {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        }

    def write_manifest(self, manifest: Manifest) -> None:
        """Writes the manifest, which turns the files of all ranks into a checkpoint."""
        values = asdict(manifest) | {"attempt": self._attempt}
        content = json.dumps({"manifest": values, "sha256": _digest(values)}, indent=1).encode()
        self.directory.put(f"{_folder(manifest.step, self._attempt)}/{_MANIFEST}", content)

    def claim(self, owner: str, restart: int = 0) -> Lease:
        """Acquires the directory's lease for this attempt of a fit; raises what `Lease` does.

        Writing the lease does not count as progress: a thread renews it for as long as the process lives.
        """
        return Lease(Directory(self.directory.url), owner, self._attempt, restart)

    def claimed_by(self, owner: str) -> bool:
        """Returns whether this attempt of a fit holds the lease; every rank must be able to see that."""
        claim = claim_in(self.directory) or {}
        return (claim.get("owner"), claim.get("attempt")) == (owner, self._attempt)

    def release(self, owner: str) -> None:
        """Releases the lease if this fit holds it."""
        if (claim_in(self.directory) or {}).get("owner") == owner:
            self.directory.remove(CLAIM)

    def finish(self, step: int, owner: str = "") -> None:
        """Marks a fit's training as finished, so that no other fit resumes from its checkpoints."""
        self.directory.put(_FINISHED, json.dumps({"step": step, "owner": owner}).encode())

    @property
    def finished(self) -> bool:
        """Whether the training of these checkpoints is marked as finished."""
        return self.directory.exists(_FINISHED)

    def finished_by(self, owner: str) -> bool:
        """Returns whether the finished training is this fit's; false if the mark cannot be read."""
        try:
            return bool(json.loads(self.directory.read(_FINISHED))["owner"] == owner)
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return False

    def reopen(self) -> None:
        """Removes the mark of a finished training."""
        self.directory.remove(_FINISHED)

    def clear(self) -> None:
        """Removes all checkpoints."""
        self.keep(set())
        self.reopen()

    def attempts(self) -> set[str]:
        """Returns the attempts that have folders."""
        return {attempt for _, attempt in self._folders()}

    def keep(self, steps: set[int], *, before: int | None = None, attempts: set[str] | None = None) -> None:
        """Removes all checkpoints but the complete ones of `steps`.

        With `before`, it leaves checkpoints from this step on alone, because ranks may be writing them. With
        `attempts`, it leaves checkpoints of other attempts alone, because a later attempt may have started.
        """
        for step, attempt in self._folders():
            if (before is not None and step >= before) or (attempts is not None and attempt not in attempts):
                continue
            folder = _folder(step, attempt)
            if step not in steps:
                # The manifest is removed first, so that a half-removed checkpoint does not look complete.
                self.directory.remove(f"{folder}/{_MANIFEST}")
                self.directory.remove(folder)
            elif not self.directory.exists(f"{folder}/{_MANIFEST}"):
                self.directory.remove(folder)

    def drop(self, step: int) -> None:
        """Removes this attempt's files of a checkpoint that will not be completed."""
        self.directory.remove(_folder(step, self._attempt))

    def _folders(self) -> list[tuple[int, str]]:
        """Returns step and attempt of every folder, latest step first."""
        matches = (_NAME.fullmatch(name) for name in self.directory.names())
        return sorted(((int(match[1]), match[2] or "") for match in matches if match), reverse=True)

    def read_manifest(self, step: int, attempt: str = "") -> Manifest:
        """Returns the manifest of a checkpoint.

        A `PersistenceError` says that the manifest is missing, damaged, or names files that cannot belong to it.
        """
        problem = ""
        try:
            content = json.loads(self.directory.read(f"{_folder(step, attempt)}/{_MANIFEST}"))
            values = content["manifest"]
            manifest = Manifest(**values)
            names = values["files"]
            refusals = {
                "it was changed after it was written": content["sha256"] != _digest(values),
                "it is that of another checkpoint": (manifest.step, manifest.attempt) != (step, attempt),
                "it names files that no rank writes": not all(_FILE.fullmatch(name) for name in names),
                "it lacks files of some ranks": not all(
                    f"rank-{n:05d}.pt" in names for n in range(manifest.world_size)
                ),
            }
            reasons = [reason for reason, applies in refusals.items() if applies]
            if reasons:
                problem = f"cannot be used: {reasons[0]}"
        except FileNotFoundError:
            problem = "was never finished"
        except (ValueError, TypeError, KeyError) as error:
            problem = f"is damaged: {error}"
        if problem:
            path = f"{self.directory.url}/{_folder(step, attempt)}/{_MANIFEST}"
            raise PersistenceError(f"checkpoint {path} {problem}", code="ST-CHECKPOINT-DAMAGED")
        return manifest

    @contextmanager
    def local(self, manifest: Manifest, needs: Needs) -> Iterator[Path]:
        """Context with a local directory that has the tensor files of a checked checkpoint, and no other files.

        `needs` returns whether a part of a tensor will be read.
        """
        with tempfile.TemporaryDirectory(prefix="sparktorch-") as folder:
            for name, file in manifest.files.items():
                if name.endswith(".safetensors"):
                    source = f"{_folder(manifest.step, manifest.attempt)}/{name}"
                    fetch_tensors(self.directory, source, Path(folder, name), file["bytes"], needs)
            yield Path(folder)

    def read_rest(self, manifest: Manifest, rank: int) -> dict[str, Any]:
        """Returns the rest of a rank's state, besides named tensors.

        A `PersistenceError` refuses a file with anything but numbers, strings, tensors, and lists and dicts of these.
        """
        name = f"rank-{rank:05d}.pt"
        content = self.directory.read(f"{_folder(manifest.step, manifest.attempt)}/{name}")
        try:
            rest: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            raise foreign(name, str(error).partition("\n")[0]) from error
        return rest

    def check(self, manifest: Manifest) -> None:
        """Compares the files of a checkpoint with its manifest; a `PersistenceError` says what differs."""
        for name, written in manifest.files.items():
            problem = ""
            try:
                measured = self.directory.measure(f"{_folder(manifest.step, manifest.attempt)}/{name}")
                if measured != written:
                    size = f"{measured['bytes']:,} bytes of {written['bytes']:,}"
                    problem = f"is damaged: it has {size}, or others than were written"
            except FileNotFoundError as error:
                problem = f"cannot be read: {error}"
            if problem:
                what = f"{name} of the checkpoint at step {manifest.step}"
                raise PersistenceError(f"{what} {problem}", code="ST-CHECKPOINT-DAMAGED")

    def refuse_newer(self) -> None:
        """Raises a `PersistenceError` if a newer version of sparktorch has written a checkpoint.

        This version would take it for damaged, and remove it.
        """
        for step, attempt in self._folders():
            path = f"{_folder(step, attempt)}/{_MANIFEST}"
            try:
                layout = json.loads(self.directory.read(path))["manifest"].get("format", 1)
            except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
                continue  # The checkpoint is unfinished or damaged.
            if isinstance(layout, int) and layout > _FORMAT:
                raise PersistenceError(
                    f"checkpoint {self.directory.url}/{path} was written by a newer version of sparktorch",
                    hint="update sparktorch, or set another checkpointDir",
                    param="checkpointDir",
                    code="ST-CHECKPOINT-OTHER",
                )

    def usable(self) -> tuple[Manifest | None, list[PersistenceError]]:
        """Returns the latest intact checkpoint (`None` if there is none), and the errors of later checkpoints."""
        problems: list[PersistenceError] = []
        for step, attempt in self._folders():
            with _adding_errors_to(problems):
                manifest = self.read_manifest(step, attempt)
                self.check(manifest)
                return manifest, problems
        return None, problems

    def manifests(self) -> list[Manifest]:
        """Returns the readable manifests, latest first, without checking the files that they name."""
        manifests = []
        for step, attempt in self._folders():
            with suppress(PersistenceError):
                manifests.append(self.read_manifest(step, attempt))
        return manifests


def read_tensors(directory: Path, rank: int, prefix: str) -> dict[str, torch.Tensor]:
    """Returns a rank's unsharded tensors whose names start with a prefix, by their names without it."""
    from safetensors import safe_open

    path = directory / f"rank-{rank:05d}.safetensors"
    if not path.exists():
        return {}
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - a `safe_open` is no mapping
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


@contextmanager
def _adding_errors_to(problems: list[PersistenceError]) -> Iterator[None]:
    """Context that adds a `PersistenceError` to a list instead of raising it."""
    try:
        yield
    except PersistenceError as error:
        problems.append(error)


def _folder(step: int, attempt: str) -> str:
    return f"step-{step:09d}-{attempt}" if attempt else f"step-{step:09d}"


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

"""Checkpoints: every rank writes its share of the training's state, any number of ranks reads it.

A checkpoint is a directory of plain files:

- `rank-N.safetensors`: rank N's share of the tensors, in the layout of `torch.distributed.checkpoint`;
- `rank-N.pt`: what else that rank needs, read with `weights_only=True`;
- `manifest.json`: written last, atomically. It says how far the training was, and size and SHA-256
  of the other files. A directory without it is no checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparktorch.errors import PersistenceError
from sparktorch.train.state import local_part

__all__ = ["CheckpointStore", "Manifest", "Share", "read_rest", "read_tensors", "snapshot"]

E = TypeVar("E", bound=Exception)

_FORMAT = 1
_MANIFEST = "manifest.json"
_FINISHED = "finished.json"
_CLAIM = "claim.json"
_CLAIM_SECONDS = 30.0
_NAME = re.compile(r"step-(\d{9})")
_FILE = re.compile(r"rank-\d{5}\.(safetensors|pt)")


@dataclass(frozen=True)
class Share:
    """One rank's share of the state at one moment, on the CPU and nobody else's.

    Attributes:
        tensors: By name.
        offsets: Where each begins in the whole tensor.
        rest: What else there is, as `torch.save` writes it: the loop goes on changing it.
    """

    tensors: dict[str, torch.Tensor]
    offsets: dict[str, list[int]]
    rest: bytes


def snapshot(tensors: Mapping[str, torch.Tensor], rest: dict[str, Any], saves: Callable[[str], bool]) -> Share:
    """Copies a rank's share of the state, so that it can be written while the training goes on.

    Args:
        tensors: By name; of those divided among ranks, the part of this rank is kept.
        rest: What else to keep: numbers, strings, tensors, and lists and dicts of them.
        saves: Whether this rank keeps a tensor that is not divided.
    """
    kept: dict[str, torch.Tensor] = {}
    offsets: dict[str, list[int]] = {}
    for name, value in tensors.items():
        part, offset = local_part(value)
        if (part is not value or saves(name)) and part.numel():
            kept[name] = part.detach().to("cpu", copy=True).reshape(part.shape or (1,)).contiguous()
            offsets[name] = offset or [0]
    content = io.BytesIO()
    torch.save(rest, content)
    return Share(kept, offsets, content.getvalue())


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: Optimizer steps taken since the training began.
        epoch: The epoch it is in, from 0.
        step_in_epoch: Steps taken in that epoch.
        world_size: Number of ranks that wrote it.
        job: What identifies the training; one with another may not go on from it.
        loss: Of the last validation; `None` without any.
        files: Size in bytes and SHA-256 of each file.
        format: Of the files.
    """

    step: int
    epoch: int
    step_in_epoch: int
    world_size: int
    job: dict[str, Any]
    loss: float | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = _FORMAT


class CheckpointStore:
    """The checkpoints of one training, under a directory of any file system that fsspec knows."""

    def __init__(self, url: str) -> None:
        """Opens the directory, which need not exist.

        Raises:
            PersistenceError: The file system is unknown, or its package is not installed.
        """
        import fsspec  # which only those who save have to wait for
        from fsspec.implementations.local import LocalFileSystem

        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise PersistenceError(f"checkpointDir {url!r} cannot be opened: {error}", param="checkpointDir") from error
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._root = self._root.rstrip("/")

    def write_share(self, step: int, rank: int, share: Share) -> dict[str, dict[str, Any]]:
        """Writes a rank's files; returns size and SHA-256 of each."""
        from safetensors.torch import save
        from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

        places = {name: {SAVED_OFFSETS_KEY: offset} for name, offset in share.offsets.items()}
        contents = {f"rank-{rank:05d}.pt": share.rest}
        if share.tensors:
            contents[f"rank-{rank:05d}.safetensors"] = save(share.tensors, {CUSTOM_METADATA_KEY: json.dumps(places)})
        for name, content in contents.items():
            self._put(f"{self._directory(step)}/{name}", content)
        return {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        }

    def write_manifest(self, manifest: Manifest) -> None:
        """Makes a checkpoint of the files that all ranks have written."""
        values = asdict(manifest)
        content = json.dumps({"manifest": values, "sha256": _digest(values)}, indent=1).encode()
        self._put(f"{self._directory(manifest.step)}/{_MANIFEST}", content)

    def claim(self, owner: str) -> None:
        """Takes the directory for one fit, or renews the claim; to be called every few seconds.

        Raises:
            PersistenceError: Another fit has claimed it, and not long ago.
        """
        path = f"{self._root}/{_CLAIM}"
        there: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError):  # a claim that cannot be read is none
            self._fs.invalidate_cache()
            there = json.loads(self._fs.cat_file(path))
        age = time.time() - float(there.get("time", 0))
        if there.get("owner", owner) != owner and age < _CLAIM_SECONDS:
            raise PersistenceError(
                f"{self._root} is being written by another fit, {age:.0f} s ago from {there.get('host')}",
                hint="give each fit a directory of its own; if that fit is dead, try again in "
                f"{_CLAIM_SECONDS - age:.0f} s",
                param="checkpointDir",
            )
        claim = {"owner": owner, "time": time.time(), "host": socket.gethostname()}
        self._put(path, json.dumps(claim).encode())

    def release(self, owner: str) -> None:
        """Gives the directory back, if it is this fit's."""
        path = f"{self._root}/{_CLAIM}"
        with suppress(FileNotFoundError, ValueError):
            if json.loads(self._fs.cat_file(path))["owner"] == owner:
                self._fs.rm_file(path)

    def finish(self, step: int) -> None:
        """Notes that the training has come to its end, so that none goes on from its checkpoints."""
        self._put(f"{self._root}/{_FINISHED}", json.dumps({"step": step}).encode())

    @property
    def finished(self) -> bool:
        """Whether the training that these checkpoints belong to has come to its end."""
        self._fs.invalidate_cache()
        return bool(self._fs.exists(f"{self._root}/{_FINISHED}"))

    def clear(self) -> None:
        """Removes all checkpoints."""
        self.keep(set())
        if self.finished:
            self._fs.rm_file(f"{self._root}/{_FINISHED}")

    def keep(self, steps: set[int], *, before: int | None = None) -> None:
        """Removes all checkpoints but those of the given steps, and what unfinished ones have left behind.

        Args:
            steps: What is kept.
            before: Where ranks may be writing later ones, remove only those of earlier steps.
        """
        for step in self.steps():
            if step not in steps and (before is None or step < before):
                manifest = f"{self._directory(step)}/{_MANIFEST}"
                if self._fs.exists(manifest):  # first, so that no half-removed checkpoint looks whole
                    self._fs.rm_file(manifest)
                self._fs.rm(self._directory(step), recursive=True)

    def steps(self) -> list[int]:
        """Returns the steps for which there are files, latest first."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._root):
            return []
        names = (path.rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
        found = (_NAME.fullmatch(name) for name in names)
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def read_manifest(self, step: int) -> Manifest:
        """Returns the manifest of a checkpoint.

        Raises:
            PersistenceError: It is missing, damaged, or names files that cannot belong to it.
        """
        where = f"{self._directory(step)}/{_MANIFEST}"
        try:
            content = json.loads(self._fs.cat_file(where))
            values = content["manifest"]
            if content["sha256"] != _digest(values):
                raise ValueError("it was changed after it was written")
            manifest = Manifest(**values)
        except FileNotFoundError as error:
            raise PersistenceError(f"checkpoint {where} was never finished") from error
        except OSError as error:
            raise PersistenceError(f"{where} cannot be read: {error}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise PersistenceError(f"{where} is damaged: {error}") from error
        if manifest.format > _FORMAT:
            raise PersistenceError(f"{where} was written by a newer version", hint="upgrade sparktorch")
        if not all(_FILE.fullmatch(name) for name in manifest.files):
            raise PersistenceError(f"{where} names files that no rank writes: {', '.join(manifest.files)}")
        if not all(f"rank-{rank:05d}.pt" in manifest.files for rank in range(manifest.world_size)):
            raise PersistenceError(f"{where} lacks files of some ranks")
        return manifest

    @contextmanager
    def local(self, manifest: Manifest) -> Iterator[Path]:
        """A local directory with the files of a checkpoint that has been checked."""
        directory = self._directory(manifest.step)
        if self._is_local:
            yield Path(directory)
            return
        with tempfile.TemporaryDirectory(prefix="sparktorch-") as folder:
            for name in manifest.files:
                self._fs.get_file(f"{directory}/{name}", f"{folder}/{name}")
            yield Path(folder)

    def check(self, manifest: Manifest) -> None:
        """Compares the files of a checkpoint with its manifest.

        Raises:
            PersistenceError: A file is missing, truncated or changed.
        """
        for name, wanted in manifest.files.items():
            what = f"{name} of the checkpoint at step {manifest.step}"
            try:
                found = self._measure(f"{self._directory(manifest.step)}/{name}")
            except OSError as error:
                raise PersistenceError(f"{what} cannot be read: {error}") from error
            if found != wanted:
                raise PersistenceError(
                    f"{what} is damaged: it has {found['bytes']:,} bytes of {wanted['bytes']:,}, or others than were "
                    "written"
                )

    def usable(self) -> tuple[Manifest | None, list[PersistenceError]]:
        """Returns the latest checkpoint whose files are whole, and why later ones are not."""
        problems: list[PersistenceError] = []
        for step in self.steps():
            with _kept(PersistenceError, problems):
                manifest = self.read_manifest(step)
                self.check(manifest)
                return manifest, problems
        return None, problems

    def _measure(self, path: str) -> dict[str, Any]:
        """Returns size and SHA-256 of a file."""
        digest, size = hashlib.sha256(), 0
        with self._fs.open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
                size += len(block)
        return {"bytes": size, "sha256": digest.hexdigest()}

    def _directory(self, step: int) -> str:
        return f"{self._root}/step-{step:09d}"

    def _put(self, path: str, content: bytes) -> None:
        """Writes a file that is there as a whole or not at all."""
        if not self._is_local:
            self._fs.pipe_file(path, content)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)  # the new name, too, outlives a power cut
        finally:
            os.close(directory)


def read_tensors(directory: Path, rank: int, prefix: str) -> dict[str, torch.Tensor]:
    """Returns the whole tensors that a rank kept under names with a prefix, by the rest of their names."""
    from safetensors import safe_open

    path = directory / f"rank-{rank:05d}.safetensors"
    if not path.exists():
        return {}
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - it is no mapping
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


@contextmanager
def _kept(kind: type[E], kept: list[E]) -> Iterator[None]:
    """Keeps errors of a kind in a list in place of raising them."""
    try:
        yield
    except kind as error:
        kept.append(error)


def read_rest(directory: Path, rank: int) -> dict[str, Any]:
    """Returns what a rank kept besides tensors."""
    rest: dict[str, Any] = torch.load(directory / f"rank-{rank:05d}.pt", weights_only=True, map_location="cpu")
    return rest


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

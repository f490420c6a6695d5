"""The weights that a training returns: those of rank 0, or a folder that ranks write who each hold a share of them."""

from __future__ import annotations

import errno
import json
import math
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparktorch.base.config import TrainConfig
from sparktorch.base.state_dict import apart
from sparktorch.base.weights_folder import INDEX, WeightsFolder
from sparktorch.base.world import World
from sparktorch.distributed.process_group import sum_over_ranks
from sparktorch.errors import PersistenceError
from sparktorch.train.loop.engine import Engine
from sparktorch.train.numerics.ema import MovingAverage
from sparktorch.train.sharding.dtensor import unadvised, whole

__all__ = ["ModelFolder", "Weights"]

_FILE_BYTES = 1 << 30
_LEAST_BYTES = 16 << 20
_SEEN_SECONDS = 10.0
# What file systems answer that cannot rename folders, as mounts of object stores; gcsfuse says EMFILE.
_NO_FOLDER_RENAME = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMFILE)


@dataclass(frozen=True)
class _Known:
    """What all ranks know of a tensor: shape and dtype of the whole, and the first rank that has it or a part of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ModelFolder:
    """A folder that rank 0 writes, and the driver and whoever scores read.

    The files are safetensors with an index, in the layout of Hugging Face's models. They are written into a folder of
    this attempt alone, whose name begins with a dot, and get their place when all of them are there: a training that
    fails leaves none, and ranks that outlive their job disturb no later attempt.
    """

    def __init__(self, path: str, world: World) -> None:
        """Takes an absolute path, whose last part identifies the training, and this rank's place."""
        self._path, self._token, self._world = Path(path), Path(path).name, world
        self._new = self._path.with_name(f".{self._token}.{secrets.token_hex(4)}")

    def check(self) -> None:
        """Checks that rank 0 can write, and that all ranks see it; removes what an earlier attempt has begun."""
        own = secrets.randbits(50) if self._world.is_main else 0
        mark = self._mark(own)
        try:
            if self._world.is_main:
                mark.parent.mkdir(parents=True, exist_ok=True)
                for left in mark.parent.glob(f".{self._token}.*"):  # of an earlier attempt, which may even write yet
                    if left.is_dir():
                        shutil.rmtree(left, ignore_errors=True)
                    else:
                        left.unlink(missing_ok=True)
                mark.touch()
            main = self._mark(int(sum_over_ranks(torch.tensor([own], dtype=torch.float64), self._world)))
            until = time.monotonic() + _SEEN_SECONDS
            while not main.is_file():  # a network file system may take a while
                if time.monotonic() > until:
                    raise FileNotFoundError(f"{main.parent} is not the folder that rank 0 has made under this path")
                time.sleep(0.1)
            self._wait()
        except OSError as error:
            raise PersistenceError(
                f"modelDir cannot be used: {error}",
                hint="name a folder on a file system that is mounted under the same path on all hosts",
                param="modelDir",
                code="ST-MODEL-DIR",
            ) from error
        finally:
            if self._world.is_main:
                with suppress(OSError):  # the error above says more
                    mark.unlink(missing_ok=True)

    def _mark(self, number: int) -> Path:
        return self._path.with_name(f".{self._token}.mark-{number}")

    def write(self, tensors: Mapping[str, torch.Tensor]) -> WeightsFolder:
        """Writes the model; see `_fill`."""
        with self._published():
            self._fill(tensors)
        self._wait()
        return WeightsFolder(str(self._path), self._token)

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the files and their index, from this rank's share, as `Strategy.shares` returns it.

        The ranks that have a tensor gather it, one at a time, and the first of them sends it to rank 0, which holds a
        file at a time, of about half its share of the model.
        """
        world, known = self._world, self._known(tensors)
        files = list(self._files({name: each.nbytes for name, each in known.items()}))
        places: dict[str, str] = {}
        for number, names in enumerate(files):
            file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            held: dict[str, torch.Tensor] = {}
            for name in names:
                tensor = self._at_main(known[name], tensors.get(name))
                if tensor is not None:
                    held[name] = tensor.cpu().contiguous()
                places[name] = file
            if world.is_main:
                self._write(file, held)
        self._wait()
        if world.is_main:
            size = sum(each.nbytes for each in known.values())
            index = {"metadata": {"total_size": size, "sparktorch": self._token}, "weight_map": places}
            (self._new / INDEX).write_text(json.dumps(index, indent=1))

    def _known(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, _Known]:
        """Returns what all ranks must know of each tensor that any of them has, in the same order in all ranks."""
        own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        every: list[Any] = [own]
        if self._world.world_size > 1:
            every = [None] * self._world.world_size
            dist.all_gather_object(every, own)
        found: dict[str, _Known] = {}
        for rank, held in enumerate(every):
            for name, (shape, dtype) in held.items():
                found.setdefault(name, _Known(shape, dtype, rank))
        return found

    def _files(self, sizes: Mapping[str, int]) -> Iterable[list[str]]:
        """Yields the names of the tensors in each file; `sizes` has their bytes."""
        # Half a share, because a mount of an object store has a file written from copies in memory: see `_write`.
        most = max(_LEAST_BYTES, min(_FILE_BYTES, sum(sizes.values()) // (2 * self._world.world_size)))
        names: list[str] = []
        held = 0
        for name, size in sizes.items():
            if names and held + size > most:
                yield names
                names, held = [], 0
            names.append(name)
            held += size
        yield names

    def _at_main(self, known: _Known, own: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a whole tensor in rank 0, `None` in other ranks; `own` is this rank's share, if it has one."""
        world = self._world
        found = None if own is None else self._whole(own)  # a collective of those that have one
        if known.rank == world.rank != 0:
            assert found is not None
            dist.send(found.to(world.device).contiguous(), 0)
        elif known.rank and world.is_main:
            found = torch.empty(known.shape, dtype=known.dtype, device=world.device)
            dist.recv(found, known.rank)
        return found if world.is_main else None

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the whole tensor; a collective for a `DTensor`, on the device of its ranks."""
        if not hasattr(tensor, "device_mesh"):
            return tensor.detach()
        with unadvised():
            return whole(tensor.detach().to(self._world.device))

    @contextmanager
    def _published(self) -> Iterator[None]:
        """Context in which rank 0 writes the files; then they get their place, or none is left."""
        from safetensors import SafetensorError

        if not self._world.is_main:
            yield
            return
        try:
            self._new.mkdir()
            yield
            try:
                _put_in_place(self._new, self._path)
            except OSError:
                if not (self._path / INDEX).is_file():  # an earlier attempt was lost after it had written the same
                    raise
        except (OSError, SafetensorError) as error:
            raise PersistenceError(
                f"the model cannot be written into modelDir: {error}",
                hint=f"{self._path.parent} needs room for the model, and must stay mounted and writable for rank 0",
                param="modelDir",
                code="ST-MODEL-DIR",
            ) from error
        finally:
            shutil.rmtree(self._new, ignore_errors=True)

    def _write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save, save_file

        tensors, metadata = apart(tensors), {"format": "pt"}
        try:
            save_file(tensors, self._new / file, metadata=metadata)
        except (OSError, SafetensorError):  # Mounts of object stores refuse the sparse file that it makes first.
            (self._new / file).write_bytes(save(tensors, metadata=metadata))  # `save` holds the file twice.

    def _wait(self) -> None:
        """Waits until all ranks are here."""
        sum_over_ranks(torch.zeros(1), self._world)


def _put_in_place(new: Path, target: Path) -> None:
    """Renames a folder of files; where folders cannot be renamed, moves its files, and last the index that names them.

    An `OSError` says that it cannot, or that there is a folder of that name already.
    """
    try:
        new.rename(target)
    except OSError as error:
        if error.errno not in _NO_FOLDER_RENAME:
            raise
        if (target / INDEX).is_file():
            raise FileExistsError(errno.EEXIST, "a model is there", str(target)) from error
        target.mkdir(exist_ok=True)  # an earlier attempt may have been lost while it moved files
        for file in sorted(new.iterdir(), key=lambda file: file.name == INDEX):
            file.replace(target / file.name)


class Weights:
    """The weights of an engine's module, averaged if the training averages them, without a frozen base.

    With a folder for the model, a rank never has more than its share of them; otherwise rank 0 has all.
    """

    def __init__(self, engine: Engine, config: TrainConfig, world: World) -> None:
        """Takes the engine; checks that the ranks share the folder and can write it, if there is one."""
        self._engine = engine
        self.average: MovingAverage | None = None
        if config.ema_decay is not None:
            self.average = MovingAverage(engine.module.parameters(), config.ema_decay)
        self._folder = ModelFolder(config.model_folder, world) if config.model_folder else None
        if self._folder is not None:
            self._folder.check()

    def copied(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the weights on the CPU: rank 0's of all, or each rank's of its share. A collective."""
        if self._folder is None:
            return self._whole(copy=True)
        with self.averaged():
            return self._engine.strategy.shares(self._engine.module, copy=True)

    def result(self, best: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | WeightsFolder:
        """Returns the best weights, or the current ones if none were kept, or the folder that holds them now.

        `best` is what `copied` returned.
        """
        if self._folder is None:
            return self._whole(copy=False) if best is None else best
        engine = self._engine
        engine.optimizer.zero_grad()  # the gradients' memory is that of the files
        with self.averaged():
            return self._folder.write(engine.strategy.shares(engine.module) if best is None else best)

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the module has the weights that the training would return now."""
        return nullcontext() if self.average is None else self.average.swapped_in()

    def _whole(self, *, copy: bool) -> dict[str, torch.Tensor]:
        """Returns the model's state dict on the CPU; with a moving average, always a copy."""
        engine, base = self._engine, self._engine.base
        with self.averaged():
            state = engine.strategy.state_dict(
                engine.module, copy=copy or self.average is not None, leave_out=base.names if base else ()
            )
        return base.without(state) if base else state

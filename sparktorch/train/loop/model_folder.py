"""The weights that a training returns: in rank 0, or in a folder if each rank holds a share of the model."""

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

# The limit for the size of a file lies between these two.
_LEAST_FILE_BYTES = 16 << 20
_MOST_FILE_BYTES = 1 << 30
# A network file system shows another host's new file after this time at the latest.
_VISIBLE_SECONDS = 10.0
# File systems that cannot rename folders, such as mounts of object stores, answer with these errors; gcsfuse with
# EMFILE.
_NO_FOLDER_RENAME = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMFILE)


@dataclass(frozen=True)
class _TensorMeta:
    """Shape and dtype of a whole tensor, and the first rank that has the tensor or a part of it.

    All ranks know them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ModelFolder:
    """A folder that rank 0 writes, and that the driver reads, and later whoever scores with the model.

    The files are safetensors with an index, in the layout of Hugging Face's models. Each attempt writes them into a
    folder of its own, whose name begins with a dot. The folder gets its final name when all files are there. So a
    training that fails leaves no files, and ranks that outlive their job disturb no later attempt.

    `check` is called before the training, and `write` after it, by all ranks.
    """

    def __init__(self, path: str, world: World) -> None:
        """Takes an absolute path, whose last part identifies the training, and this rank's world."""
        self._path = Path(path)
        self._token = self._path.name
        self._world = world
        self._temporary = self._path.with_name(f".{self._token}.{secrets.token_hex(4)}")

    def check(self) -> None:
        """Checks that rank 0 can write, and that all ranks see its files; removes what an earlier attempt has begun."""
        # Rank 0 writes an empty file, for which the other ranks look. The name of the file holds a random number, which
        # reaches them as a sum over ranks; numbers of 50 bits pass unchanged through the float64 of the sum.
        number = secrets.randbits(50) if self._world.is_main else 0
        mark = self._mark(number)
        try:
            if self._world.is_main:
                mark.parent.mkdir(parents=True, exist_ok=True)
                for leftover in mark.parent.glob(f".{self._token}.*"):
                    if leftover.is_dir():  # Ranks of the earlier attempt may still write into it: errors do not matter.
                        shutil.rmtree(leftover, ignore_errors=True)
                    else:
                        leftover.unlink(missing_ok=True)
                mark.touch()
            main_number = int(sum_over_ranks(torch.tensor([number], dtype=torch.float64), self._world))
            main_mark = self._mark(main_number)
            deadline = time.monotonic() + _VISIBLE_SECONDS
            while not main_mark.is_file():
                if time.monotonic() > deadline:
                    raise FileNotFoundError(
                        f"{main_mark.parent} is not the folder that rank 0 has made under this path"
                    )
                time.sleep(0.1)
            self._wait()  # Rank 0 removes its file only when all ranks have seen it.
        except OSError as error:
            raise PersistenceError(
                f"modelDir cannot be used: {error}",
                hint="name a folder on a file system that is mounted under the same path on all hosts",
                param="modelDir",
                code="ST-MODEL-DIR",
            ) from error
        finally:
            if self._world.is_main:
                with suppress(OSError):  # If this fails, so has the check above, whose error says more.
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

        The ranks that have parts of a tensor gather it, and the first of them sends it to rank 0: one tensor after the
        other. Rank 0 holds the tensors of one file at a time, which has at most half a rank's share of the model.
        """
        world = self._world
        metas = self._tensor_metas(tensors)
        files = list(self._files({name: meta.nbytes for name, meta in metas.items()}))
        file_of: dict[str, str] = {}
        # Ranks go through the tensors in the same order: gathering one is a collective of the ranks that have it.
        for number, names in enumerate(files):
            file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            whole_tensors: dict[str, torch.Tensor] = {}
            for name in names:
                tensor = self._bring_to_main(metas[name], tensors.get(name))
                if tensor is not None:
                    whole_tensors[name] = tensor.cpu().contiguous()
                file_of[name] = file
            if world.is_main:
                self._write(file, whole_tensors)
        self._wait()
        if world.is_main:
            size = sum(meta.nbytes for meta in metas.values())
            index = {"metadata": {"total_size": size, "sparktorch": self._token}, "weight_map": file_of}
            (self._temporary / INDEX).write_text(json.dumps(index, indent=1))

    def _tensor_metas(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, _TensorMeta]:
        """Returns metadata of every tensor that a rank has, in the same order in all ranks; it is a collective."""
        local = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        by_rank: list[Any] = [local]
        if self._world.world_size > 1:
            by_rank = [None] * self._world.world_size
            dist.all_gather_object(by_rank, local)
        metas: dict[str, _TensorMeta] = {}
        for rank, shapes_and_dtypes in enumerate(by_rank):
            for name, (shape, dtype) in shapes_and_dtypes.items():
                metas.setdefault(name, _TensorMeta(shape, dtype, rank))
        return metas

    def _files(self, sizes: Mapping[str, int]) -> Iterable[list[str]]:
        """Yields the names of the tensors in each file; `sizes` has the size of each tensor in bytes."""
        # A file has at most half a rank's share: `_write` holds the file twice if an object store is mounted.
        half_a_share = sum(sizes.values()) // (2 * self._world.world_size)
        most = max(_LEAST_FILE_BYTES, min(_MOST_FILE_BYTES, half_a_share))
        names: list[str] = []
        total = 0
        for name, size in sizes.items():
            if names and total + size > most:
                yield names
                names = []
                total = 0
            names.append(name)
            total += size
        yield names

    def _bring_to_main(self, meta: _TensorMeta, share: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a whole tensor in rank 0, `None` in other ranks; `share` is this rank's share, if it has one."""
        world = self._world
        tensor: torch.Tensor | None = None
        if share is not None and not hasattr(share, "device_mesh"):
            tensor = share.detach()
        elif share is not None:
            # This is a collective of the ranks that have a share, on their devices.
            with unadvised():
                tensor = whole(share.detach().to(world.device))
        if meta.rank == world.rank and not world.is_main:
            assert tensor is not None
            dist.send(tensor.to(world.device).contiguous(), 0)
        elif meta.rank != 0 and world.is_main:
            tensor = torch.empty(meta.shape, dtype=meta.dtype, device=world.device)
            dist.recv(tensor, meta.rank)
        return tensor if world.is_main else None

    @contextmanager
    def _published(self) -> Iterator[None]:
        """Context in which rank 0 writes the files; at its end, the folder gets its final name, or no file is left."""
        from safetensors import SafetensorError

        if not self._world.is_main:
            yield
            return
        try:
            self._temporary.mkdir()
            yield
            try:
                _put_in_place(self._temporary, self._path)
            except OSError:
                # There may be a model already: an earlier attempt has written the same one, and was lost just then.
                if not (self._path / INDEX).is_file():
                    raise
        except (OSError, SafetensorError) as error:
            raise PersistenceError(
                f"the model cannot be written into modelDir: {error}",
                hint=f"{self._path.parent} needs room for the model, and must stay mounted and writable for rank 0",
                param="modelDir",
                code="ST-MODEL-DIR",
            ) from error
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save, save_file

        tensors = apart(tensors)
        metadata = {"format": "pt"}
        try:
            save_file(tensors, self._temporary / file, metadata=metadata)
        except (OSError, SafetensorError):
            # `save_file` begins with a sparse file, which mounts of object stores refuse. `save` holds the file twice.
            (self._temporary / file).write_bytes(save(tensors, metadata=metadata))

    def _wait(self) -> None:
        """Waits until all ranks are here."""
        sum_over_ranks(torch.zeros(1), self._world)


def _put_in_place(temporary: Path, target: Path) -> None:
    """Renames a folder of files.

    If the file system cannot rename folders, it moves the files, and last the index that names them. An `OSError` says
    that this is impossible, too, or that there is a folder of the new name already.
    """
    try:
        temporary.rename(target)
    except OSError as error:
        if error.errno not in _NO_FOLDER_RENAME:
            raise
        if (target / INDEX).is_file():
            raise FileExistsError(errno.EEXIST, "a model is there", str(target)) from error
        target.mkdir(exist_ok=True)  # The folder exists if an earlier attempt was lost while it moved files.
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == INDEX):
            file.replace(target / file.name)


class Weights:
    """The weights of an engine's module, averaged if the training averages them, without a frozen base.

    With a folder for the model, a rank never has more than its share of the weights; otherwise rank 0 has all weights.

    Attributes:
        average: The moving average of the weights; `None` if the training has none.
    """

    def __init__(self, engine: Engine, config: TrainConfig, world: World) -> None:
        """Takes the engine; with a folder for the model, checks that rank 0 can write it and that all ranks see it."""
        self._engine = engine
        self.average: MovingAverage | None = None
        if config.ema_decay:
            self.average = MovingAverage(engine.module.parameters(), config.ema_decay)
        self._folder = ModelFolder(config.model_folder, world) if config.model_folder else None
        if self._folder is not None:
            self._folder.check()

    def copy(self) -> dict[str, torch.Tensor]:
        """Returns a copy on the CPU: of all weights in rank 0, or of its share in each rank. It is a collective."""
        if self._folder is None:
            return self._whole(copy=True)
        with self.averaged():
            return self._engine.strategy.shares(self._engine.module, copy=True)

    def result(self, best: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor] | WeightsFolder:
        """Returns the best weights, or the folder into which they have been written.

        `best` is the copy of the best weights, from `copy`; `None` means that the current weights are the best.
        """
        if self._folder is None:
            return self._whole(copy=False) if best is None else best
        engine = self._engine
        engine.optimizer.zero_grad()  # The files need the memory of the gradients.
        with self.averaged():
            return self._folder.write(engine.strategy.shares(engine.module) if best is None else best)

    def averaged(self) -> AbstractContextManager[None]:
        """Context in which the module has the weights that the training would return now."""
        return nullcontext() if self.average is None else self.average.swapped_in()

    def _whole(self, *, copy: bool) -> dict[str, torch.Tensor]:
        """Returns the model's state dict on the CPU; with a moving average, always a copy."""
        engine = self._engine
        base = engine.base
        copies = copy or self.average is not None
        with self.averaged():
            if base is None:
                return engine.strategy.state_dict(engine.module, copy=copies)
            state = engine.strategy.state_dict(engine.module, copy=copies, leave_out=base.names)
        return base.without(state)

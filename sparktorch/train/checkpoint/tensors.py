"""Module and optimizer as named tensors, sharded or not, as checkpoints hold them, and the files of these tensors."""

from __future__ import annotations

import json
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sparktorch.base.state_dict import WRAPPER, extra_states
from sparktorch.errors import PersistenceError
from sparktorch.train.checkpoint.directory import Directory
from sparktorch.train.sharding.dtensor import local_part

__all__ = [
    "OPTIMIZER",
    "Needs",
    "create_optimizer_state",
    "fetch_tensors",
    "foreign",
    "forget_optimizer_state",
    "load_buffers",
    "load_extra_state",
    "load_optimizer_values",
    "load_tensors",
    "named_tensors",
    "needed_parts",
    "optimizer_values",
    "own_buffers",
    "own_optimizer",
    "parameter_names",
    "storable",
]

Needs = Callable[[str, list[int], list[int]], bool]
"""A function that returns whether a part of a tensor is needed: name, offsets of the part, and shape of the part."""

OPTIMIZER = "optimizer."
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_BLOCK_BYTES = 16 << 20
# Reading a gap of this size between two tensors costs less than a second request.
_GAP_BYTES = 1 << 20


def named_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns the tensors of module and optimizer by name, sharded or not, without copying them.

    From a `ZeroRedundancyOptimizer`, it returns this rank's share only.
    """
    tensors = {f"module.{name}": value.detach() for name, value in module.state_dict().items()}
    names = parameter_names(module)
    for parameter, state in own_optimizer(optimizer).state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}{names[parameter]}.{key}"] = value
    return tensors


def own_buffers(module: nn.Module, *, main: bool) -> dict[str, torch.Tensor]:
    """Returns the buffers of this rank that rank 0's `named_tensors` does not cover, by name, without copying them.

    Each rank has its own buffers, such as running statistics of its rows. On `main` (rank 0), `named_tensors` covers
    the persistent ones. Non-persistent buffers that no file can hold (sparse, quantised, complex128) are left out: the
    module's constructor makes them again.
    """
    persistent = module.state_dict().keys()
    buffers = {}
    for name, value in module.named_buffers():
        is_needed = not main if name in persistent else _fits_a_file(value)
        if is_needed:
            buffers[name.replace(WRAPPER, "")] = value
    return buffers


def _fits_a_file(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and value.dtype is not torch.complex128


def load_buffers(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Sets buffers to the values of their names; a value of another shape replaces the buffer."""
    for path, part in module.named_modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            value = values.get(f"{path}.{name}".removeprefix(".").replace(WRAPPER, ""))
            if value is None:
                continue
            if value.numel() == buffer.numel() == 1 or value.shape == buffer.shape:
                buffer.copy_(value.view(buffer.shape))
            else:
                setattr(part, name, value.to(buffer.device))


def load_extra_state(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Sets the extra state of submodules, by name.

    `load_tensors` has filled the tensors that `get_extra_state` returned. They may be copies, so that is not enough.
    """
    for name, submodule in extra_states(module):
        if values.get(name) is not None:
            submodule.set_extra_state(values[name])


def needed_parts(tensors: Mapping[str, torch.Tensor]) -> Needs:
    """Returns a function that says whether a saved part of a tensor overlaps this rank's part of the tensor."""
    part_of = {name: local_part(tensor) for name, tensor in tensors.items()}

    def needs(name: str, first: list[int], shape: list[int]) -> bool:
        if name not in part_of:
            return False
        part, begin = part_of[name]
        # A scalar has no axis here, and one axis in the file.
        axes = zip(begin, part.shape, first, shape, strict=False)
        return all(
            start < saved_start + saved_size and saved_start < start + size
            for start, size, saved_start, saved_size in axes
        )

    return needs


def parameter_names(module: nn.Module) -> dict[torch.Tensor, str]:
    """Returns the name of each parameter, as in `state_dict`."""
    return {parameter: name.replace(WRAPPER, "") for name, parameter in module.named_parameters()}


def own_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer that steps this rank's share of the parameters."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def optimizer_values(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Returns the optimizer's non-tensor state, by parameter name."""
    names = parameter_names(module)
    values_of = {}
    for parameter, state in own_optimizer(optimizer).state.items():
        values = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        if values:
            values_of[names[parameter]] = values
    return values_of


def load_optimizer_values(
    module: nn.Module, optimizer: torch.optim.Optimizer, values: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restores what `optimizer_values` returned."""
    names = parameter_names(module)
    for parameter, state in own_optimizer(optimizer).state.items():
        state.update(values.get(names[parameter], {}))


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the optimizer's state for every parameter, by a step with gradients of zero.

    The step may change the parameters: load the parameters afterwards.
    """
    inner = own_optimizer(optimizer)
    # SparseAdam refuses dense gradients.
    layout = torch.sparse_coo if isinstance(inner, torch.optim.SparseAdam) else None
    for group in inner.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter, layout=layout)
    inner.step()
    inner.zero_grad()


def forget_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, saved_names: set[str]) -> None:
    """Deletes the optimizer's state of parameters that have no state in the checkpoint: they had no gradient yet."""
    names = parameter_names(module)
    state = own_optimizer(optimizer).state
    for parameter, values in list(state.items()):
        tensors = [f"{OPTIMIZER}{names[parameter]}.{key}" for key in values if isinstance(values[key], torch.Tensor)]
        if tensors and not saved_names.intersection(tensors):
            del state[parameter]


def storable(value: Any, path: str) -> Any:
    """Returns a value in a form that a checkpoint can store: NumPy's numbers become Python's.

    A `PersistenceError` names the path of a value that is neither a number, a string, bytes, a tensor, nor a list,
    tuple, set or dict of these.
    """
    value_type = type(value)
    if isinstance(value, np.generic):
        value = value.item()
        if type(value) in _PLAIN:
            return value
    if value_type in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if value_type in (dict, OrderedDict, Counter):
        return value_type({storable(key, path): storable(item, f"{path}[{key!r}]") for key, item in value.items()})
    if value_type in (list, tuple):
        return value_type(storable(item, f"{path}[{index}]") for index, item in enumerate(value))
    if value_type is set:
        return {storable(item, path) for item in value}
    raise PersistenceError(
        f"no checkpoint can hold {path}, a {value_type.__module__}.{value_type.__qualname__}",
        hint="a state_dict may hold numbers, strings, tensors, and lists and dicts of them: convert it there",
        param="checkpointDir",
    )


def fetch_tensors(directory: Directory, name: str, target: Path, size: int, needs: Needs) -> None:
    """Makes a safetensors file of `size` bytes available at the local path `target`, with header and needed tensors.

    Other tensors are holes in a sparse file, which take no space. A file that is local already is linked, because
    readers map the file into memory and read only what they need.
    """
    if directory.is_local:
        directory.link(name, target)
        _check_header(target)
        return
    length = directory.read(name, 0, 8)
    start = 8 + int.from_bytes(length, "little")
    header = directory.read(name, 8, min(start, size))
    with target.open("wb") as file:
        file.write(length + header)
        file.truncate(size)
        _check_header(target)  # From here on, all ranges in the header lie within the file.
        for first, end in _join(_needed_ranges(json.loads(header), needs)):
            file.seek(start + first)
            for block in range(first, end, _BLOCK_BYTES):
                file.write(directory.read(name, start + block, start + min(block + _BLOCK_BYTES, end)))


def foreign(name: str, reason: str) -> PersistenceError:
    """Returns the error for a checkpoint file that sparktorch cannot have written."""
    return PersistenceError(
        f"{name} of the checkpoint is refused: it is none that sparktorch writes ({reason})",
        hint="somebody else has written into checkpointDir: find out who before you go on",
        param="checkpointDir",
        code="ST-CHECKPOINT-DAMAGED",
    )


def _needed_ranges(header: dict[str, Any], needs: Needs) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges of the needed tensors, counted from the end of the header."""
    from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

    offsets = json.loads(header.pop("__metadata__", {}).get(CUSTOM_METADATA_KEY, "{}"))
    for name, entry in header.items():
        shape = entry["shape"]
        offset = offsets.get(name, {}).get(SAVED_OFFSETS_KEY, [0] * len(shape))
        if needs(name, offset, shape):
            first, end = entry["data_offsets"]
            yield first, end


def _join(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges in order; ranges with small gaps between them are merged."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if joined and first - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined


def _check_header(path: Path) -> None:
    """Checks that safetensors accepts a file's header: its length, and the ranges in it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise foreign(path.name, str(error)) from error


def load_tensors(directory: Path, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Fills tensors, sharded or not, from the files of a directory; returns the names of the tensors in the files.

    Every rank reads independently, and only the parts that it needs. The files have the layout of
    `torch.distributed.checkpoint`. A `PersistenceError` names a tensor that has another shape in the files, or a tensor
    of the module that they lack; they may lack tensors of the optimizer.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    reader = HuggingFaceStorageReader(str(directory))
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    readable = {name: _readable(value) for name, value in tensors.items() if name in saved}
    differences = []
    for name, value in readable.items():
        saved_shape = tuple(saved[name].size)
        shape = tuple(value.shape)
        if saved_shape != shape:
            differences.append(f"holds {name!r} of shape {saved_shape}, and the model has {shape}")
    differences += [f"lacks {name}" for name in tensors if name not in saved and not name.startswith(OPTIMIZER)]
    if differences:
        hint = "is the module the same as when it was saved?"
        raise PersistenceError(f"the checkpoint {', '.join(differences[:3])}", hint=hint, code="ST-CHECKPOINT-OTHER")
    with warnings.catch_warnings():
        # torch warns of `no_dist`, which is intended: each rank reads for itself.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(readable), storage_reader=reader, no_dist=True)
    return set(saved)


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a view of the tensor, in a form that torch's reader can fill."""
    if not tensor.dim():
        return tensor.view(1)  # The reader cannot slice scalars.
    return _LocalPart.of(tensor) if hasattr(tensor, "to_local") else tensor


class _LocalPart(torch.Tensor):
    """A sharded tensor as this rank's part and the part's offset, for which `torch.distributed.checkpoint` asks."""

    part: torch.Tensor
    offset: list[int]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _LocalPart:
        """Returns a tensor with the shape of a `DTensor`; its `part` is the `DTensor`'s shard."""
        # The reader asks for nothing but the shape, so one expanded element is enough, which takes no memory.
        view = torch.empty((), dtype=tensor.dtype).expand(tensor.shape).as_subclass(cls)
        view.part, view.offset = local_part(tensor)
        return view

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(self.offset), self.part.shape)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.part

"""Files of a checkpoint as local ones, of which only those bytes are fetched that somebody asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sparktorch.errors import PersistenceError
from sparktorch.train.checkpoint.directory import Directory

__all__ = ["Needs", "fetch_tensors", "foreign"]

Needs = Callable[[str, list[int], list[int]], bool]
"""Whether a part of a tensor is needed: its name, where in the whole tensor it begins, and its shape."""

_BLOCK_BYTES = 16 << 20
_GAP_BYTES = 1 << 20  # that cost less to read than to ask twice


def fetch_tensors(directory: Directory, name: str, target: Path, size: int, needs: Needs) -> None:
    """Makes a safetensors file available under a local path, with all of its header and the needed tensors.

    The rest are holes, which take no room. On a local file system it is a link, for the file is mapped in any case.

    Args:
        directory: Where the file is.
        name: Of the file.
        target: The local path.
        size: Of the file in bytes.
        needs: Which tensors are needed.

    Raises:
        PersistenceError: It is no such file.
        FileNotFoundError: There is none.
        ClusterError: The directory cannot be reached.
    """
    if directory.is_local:
        directory.fetch(name, target)
        _check_header(target)
        return
    length = directory.read_part(name, 0, 8)
    start = 8 + int.from_bytes(length, "little")
    header = directory.read_part(name, 8, min(start, size))
    with target.open("wb") as file:
        file.write(length + header)
        file.truncate(size)
        _check_header(target)  # from here on, all that the header names lies within the file
        for first, end in _joined(_needed(json.loads(header), needs)):
            file.seek(start + first)
            for block in range(first, end, _BLOCK_BYTES):
                file.write(directory.read_part(name, start + block, start + min(block + _BLOCK_BYTES, end)))


def foreign(name: str, reason: str) -> PersistenceError:
    """Returns the refusal of a file that cannot be one of a checkpoint."""
    return PersistenceError(
        f"{name} of the checkpoint is refused: it is none that sparktorch writes ({reason})",
        hint="somebody else has written into checkpointDir: find out who before you go on",
        param="checkpointDir",
    )


def _needed(header: dict[str, Any], needs: Needs) -> Iterator[tuple[int, int]]:
    """Yields where the bytes of the needed tensors are, after the header."""
    from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

    places = json.loads(header.pop("__metadata__", {}).get(CUSTOM_METADATA_KEY, "{}"))
    for name, entry in header.items():
        shape = entry["shape"]
        if needs(name, places.get(name, {}).get(SAVED_OFFSETS_KEY, [0] * len(shape)), shape):
            first, end = entry["data_offsets"]
            yield first, end


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ranges in their order, those that are next to each other as one."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first - found[-1][1] <= _GAP_BYTES:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


def _check_header(path: Path) -> None:
    """Refuses a file whose header is longer than the file, than safetensors allows, or says what cannot be."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise foreign(path.name, str(error)) from error

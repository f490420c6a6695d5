"""Makes checkpoint files available locally, and fetches only the bytes that are needed."""

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
_GAP_BYTES = 1 << 20  # reading a gap of this size costs less than a second request


def fetch_tensors(directory: Directory, name: str, target: Path, size: int, needs: Needs) -> None:
    """Makes a safetensors file of `size` bytes available at the local path `target`, with header and needed tensors.

    Other tensors are holes of a sparse file, which take no space. A file that is local already is linked, because
    readers map it into memory and read only what they need.
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
        _check_header(target)  # afterwards, all ranges in the header lie within the file
        for first, end in _joined(_needed(json.loads(header), needs)):
            file.seek(start + first)
            for block in range(first, end, _BLOCK_BYTES):
                file.write(directory.read_part(name, start + block, start + min(block + _BLOCK_BYTES, end)))


def foreign(name: str, reason: str) -> PersistenceError:
    """Returns the error for a checkpoint file that sparktorch cannot have written."""
    return PersistenceError(
        f"{name} of the checkpoint is refused: it is none that sparktorch writes ({reason})",
        hint="somebody else has written into checkpointDir: find out who before you go on",
        param="checkpointDir",
        code="ST-CHECKPOINT-DAMAGED",
    )


def _needed(header: dict[str, Any], needs: Needs) -> Iterator[tuple[int, int]]:
    """Yields the byte ranges of the needed tensors, counted from the end of the header."""
    from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

    places = json.loads(header.pop("__metadata__", {}).get(CUSTOM_METADATA_KEY, "{}"))
    for name, entry in header.items():
        shape = entry["shape"]
        if needs(name, places.get(name, {}).get(SAVED_OFFSETS_KEY, [0] * len(shape)), shape):
            first, end = entry["data_offsets"]
            yield first, end


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns sorted ranges; ranges with small gaps are merged."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first - found[-1][1] <= _GAP_BYTES:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


def _check_header(path: Path) -> None:
    """Checks that safetensors accepts a file's header: its length, and the ranges in it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise foreign(path.name, str(error)) from error

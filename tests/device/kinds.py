"""Every kind of column as a rank receives it, with a module that takes what it becomes."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from PIL import Image
from torch import nn

from sparktorch.data.columns import KEY, LABEL, VALIDATION, WEIGHT, Columns, TensorSpec, input_name
from sparktorch.data.preprocess import Preprocess
from sparktorch.data.sampling.plan import rank_of_key
from tests.support.nets import Unit

__all__ = ["KINDS", "ROWS", "Kind", "Net"]

ROWS = 61
_DRAW = np.random.default_rng(5)
_VECTOR = pa.struct({"size": pa.int32(), "indices": pa.list_(pa.int32()), "values": pa.list_(pa.float32())})


class Net(nn.Module):
    """Takes what a kind of column becomes, by its name, and returns one smooth number a row."""

    seen: ClassVar[set[str]] = set()

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self.table: Any = nn.Embedding(12, 6) if kind in ("tokens", "csr") else None
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.seen.add(str(inputs[0].device))
        x = self._features(*inputs)
        out: torch.Tensor = self.layers(x).squeeze(-1)
        return out

    def stages(self) -> list[nn.Module]:
        return [Unit(self._features, *([] if self.table is None else [self.table])), *self.layers, nn.Flatten(0)]

    def _features(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self._kind == "text":
            assert mask is not None
            return x * mask[:, None]
        if mask is not None:  # padded
            return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        if x.is_nested:
            return _sums(x.offsets(), x.values()) / x.offsets().diff()[:, None]  # type: ignore[attr-defined]  # torch's nested
        if x.layout is torch.sparse_csr:  # the simulated device has no sparse products
            return _sums(x.crow_indices(), x.values()[:, None] * self.table.weight[x.col_indices()])
        if x.dtype is torch.int64:
            features: torch.Tensor = self.table(x).mean(1)
            return features
        x = x.flatten(1).float() / (255 if x.dtype is torch.uint8 else 1)
        return x[:, :6]


def _sums(ends: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the elements of each row, which lie one after the other."""
    rows = torch.arange(len(ends) - 1, device=ends.device)
    row = torch.repeat_interleave(rows, ends.diff(), output_size=len(values))
    return values.new_zeros(len(ends) - 1, *values.shape[1:]).index_add(0, row, values)


@dataclass(frozen=True)
class Kind:
    """A kind of column: its specs, its rows, and what becomes of them."""

    specs: tuple[TensorSpec, ...]
    arrays: tuple[pa.Array, ...]
    preprocess: Callable[..., Any] | None = None
    returned: tuple[str, ...] = ("x",)

    def columns(self, *, validated: bool, weighted: bool) -> Columns:
        """Returns the description of its rows."""
        names = [spec.column for spec in self.specs]
        return Columns(
            inputs=self.specs,
            label=TensorSpec(name=LABEL, column="target", dtype="float32"),
            weight=TensorSpec(name=WEIGHT, column="importance", dtype="float32") if weighted else None,
            validation="held_out" if validated else None,
            preprocess=None if self.preprocess is None else Preprocess(self.preprocess, names, self.returned),
        )

    def parts(self, ranks: int) -> list[list[pa.RecordBatch]]:
        """Returns the record batches of every rank."""
        draw = np.random.default_rng(7)
        key = draw.integers(-(2**63), 2**63 - 1, ROWS, dtype=np.int64)
        arrays = {input_name(place): column for place, column in enumerate(self.arrays)}
        arrays |= {
            LABEL: pa.array(draw.normal(size=ROWS).astype(np.float32)),
            WEIGHT: pa.array(draw.uniform(0.5, 2, ROWS).astype(np.float32)),
            VALIDATION: pa.array(draw.random(ROWS) < 0.2),
            KEY: pa.array(key),
        }
        whole = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
        rank = rank_of_key(key, ranks)
        return [[whole.filter(pa.array(rank == number))] for number in range(ranks)]


def _spec(place: int = 0, **more: Any) -> TensorSpec:
    return TensorSpec(**{"name": input_name(place), "column": f"c{place}", "dtype": "float32", **more})


def _lists(rows: list[Any], inner: pa.DataType) -> pa.Array:
    return pa.array(rows, pa.list_(inner))


def _ragged() -> pa.Array:
    rows = [_DRAW.normal(size=(length, 6)).tolist() for length in _DRAW.integers(1, 5, ROWS)]
    return pa.array(rows, pa.list_(pa.list_(pa.float32(), 6)))


def _vectors(*, sparse: Callable[[int], bool]) -> pa.Array:
    rows = []
    for row in range(ROWS):
        places = sorted(_DRAW.choice(6, 3, replace=False).tolist()) if sparse(row) else []
        values = _DRAW.normal(size=3 if places else 6).tolist()
        rows.append({"size": 6 if places else None, "indices": places, "values": values})
    return pa.array(rows, _VECTOR)


def _images() -> pa.Array:
    def png() -> bytes:
        file = io.BytesIO()
        Image.fromarray(_DRAW.integers(0, 256, (5, 4, 3), dtype=np.uint8)).save(file, "PNG")
        return file.getvalue()

    return pa.array([png() for _ in range(ROWS)], pa.binary())


def _letters(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    counts = [pc.count_substring(columns["c0"], letter).to_numpy(zero_copy_only=False) for letter in "abcdef"]
    # What is the same for all rows need not lie in memory once for each.
    return {"x": torch.from_numpy(np.stack(counts, 1)).float(), "scale": torch.full((1,), 0.5).expand(len(counts[0]))}


def _means(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    padded, mask = columns["c0"]
    return {"x": (padded * mask[..., None]).sum(1)}


_TEXT = pa.array(["".join(_DRAW.choice(list("abcdef"), 9)) for _ in range(ROWS)])
_TOKENS = _lists(_DRAW.integers(0, 12, (ROWS, 4)).tolist(), pa.int64())
_NUMBERS = _lists(_DRAW.normal(size=(ROWS, 6)).tolist(), pa.float32())

KINDS: dict[str, Kind] = {
    "dense": Kind((_spec(shape=(6,)),), (_NUMBERS,)),
    "tokens": Kind((_spec(shape=(4,), dtype="int64"),), (_TOKENS,)),
    "sparse vectors": Kind((_spec(shape=(6,), kind="vector"),), (_vectors(sparse=lambda _: True),)),
    "mixed vectors": Kind((_spec(shape=(6,), kind="vector"),), (_vectors(sparse=lambda row: row % 3 == 0),)),
    "csr": Kind((_spec(shape=(6,), kind="vector", layout="sparse_csr"),), (_vectors(sparse=lambda _: True),)),
    "padded": Kind((_spec(shape=(6,), layout="padded"),), (_ragged(),)),
    "jagged": Kind((_spec(shape=(6,), layout="jagged"),), (_ragged(),)),
    "image": Kind((_spec(shape=(5, 4, 3), dtype="uint8", kind="binary", layout="image"),), (_images(),)),
    "text": Kind((_spec(kind="any", sql="string"),), (_TEXT,), _letters, ("x", "scale")),
    "padded, preprocessed": Kind((_spec(shape=(6,), layout="padded"),), (_ragged(),), _means),
}

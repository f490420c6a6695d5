"""Rows of every kind of column, what is fitted on them, and the tensors that they should become, made by hand."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from PIL import Image
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
from pyspark.sql import types as T

from sparktorch import TorchClassifier, TorchRegressor

ROWS, WIDTH, CLASSES = 48, 6, 3

_draw = np.random.default_rng(11)
X = _draw.integers(-8, 9, (ROWS, WIDTH)) / 4  # exact in every type, and as text
LENGTHS = _draw.integers(1, WIDTH + 1, ROWS)
PIXELS = _draw.integers(0, 256, (ROWS, 4, 5, 3), dtype=np.uint8)
TEXTS = ['a "b", c', "bab", "x", "aa, bb"]
START = datetime(2026, 1, 1)

Values = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of input columns."""

    types: dict[str, T.DataType]
    row: Callable[[int], Values]
    tensors: Callable[[list[int]], list[Any]]
    params: Values = field(default_factory=dict)
    width: int = WIDTH
    classes: bool = False
    module: str = "nets:Net"

    @property
    def schema(self) -> T.StructType:
        """Of the rows: `id`, `bucket`, the label `target`, and the inputs."""
        common = {"id": T.LongType(), "bucket": T.IntegerType(), "target": T.DoubleType()}
        return T.StructType([T.StructField(name, kind) for name, kind in {**common, **self.types}.items()])

    @property
    def inputs(self) -> list[str]:
        """The columns that the model takes, in their order."""
        return list(self.params.get("inputCols", [self.params.get("featuresCol", "features")]))

    def rows(self) -> list[tuple[Any, ...]]:
        """All rows."""
        return [(i, i % 3, _target(i, self.classes), *self.row(i).values()) for i in range(ROWS)]

    def estimator(self) -> Any:
        """What is fitted, on two ranks."""
        params: Values = {"labelCol": "target", "batchSize": 16, "learningRate": 0.05, "seed": 5, "numWorkers": 2}
        params |= self.params
        sizes = {"width": self.width, **({"outputs": CLASSES} if self.classes else {})}
        kind = TorchClassifier if self.classes else TorchRegressor
        return kind(module=self.module, moduleParams=sizes, **params)

    def expected(self, module: torch.nn.Module) -> dict[int, Values]:
        """Returns what a trained module says of each row, by `id`."""
        ids = list(range(ROWS))
        with torch.inference_mode():
            output = module(*map(torch.as_tensor, self.tensors(ids)))
        if not self.classes:
            return {i: {"prediction": float(output[i, 0])} for i in ids}
        raw, chances = output.double().numpy(), output.softmax(1).double().numpy()
        return {
            i: {"prediction": float(raw[i].argmax()), "rawPrediction": raw[i], "probability": chances[i]} for i in ids
        }


def _target(i: int, classes: bool) -> float:
    return float(i % CLASSES) if classes else float(X[i].sum())


def _floats(ids: list[int]) -> list[Any]:
    return [X[ids].astype(np.float32)]


def _vectors(i: int) -> Values:
    present = X[i].nonzero()[0]
    return {"full": DenseVector(X[i]), "thin": SparseVector(WIDTH, present, X[i][present])}


def _ragged(ids: list[int]) -> list[Any]:
    mask = np.arange(WIDTH) < LENGTHS[ids, None]
    return [np.where(mask, X[ids], 0).astype(np.float32), mask]


def _scalars(i: int) -> Values:
    whole, parts = [int(4 * x) for x in X[i]], X[i].tolist()
    numbers = {"tiny": whole[0], "small": whole[1], "whole": whole[2], "big": whole[3]}
    return {**numbers, "one": parts[4], "two": parts[5], "exact": Decimal(str(parts[0])), "flag": i % 2 == 0}


def _scalar_tensors(ids: list[int]) -> list[Any]:
    rows = [_scalars(i) for i in ids]
    whole = {"tiny", "small", "whole", "big"}
    return [np.array([row[name] for row in rows], np.int64 if name in whole else np.float32) for name in rows[0]]


def _png(i: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS[i]).save(file, "PNG")
    return file.getvalue()


def _time(i: int) -> datetime:
    return START + timedelta(minutes=37 * i, milliseconds=i)  # JSON and CSV keep no more


def _read(ids: list[int]) -> list[Any]:
    times = [divmod(37 * i, 60) for i in ids]
    texts = [[TEXTS[i % 4].count("a"), TEXTS[i % 4].count("b"), X[i, 0]] for i in ids]
    return [np.concatenate([np.array(texts), np.array(times) / 60], 1).astype(np.float32)]


_FLOATS, _DOUBLES = T.ArrayType(T.FloatType()), T.ArrayType(T.DoubleType())
_SCALARS = {
    **{"tiny": T.ByteType(), "small": T.ShortType(), "whole": T.IntegerType(), "big": T.LongType()},
    **{"one": T.FloatType(), "two": T.DoubleType(), "exact": T.DecimalType(9, 2), "flag": T.BooleanType()},
}

KINDS = {
    "vectors": Kind(
        {"full": VectorUDT(), "thin": VectorUDT()},
        _vectors,
        lambda ids: 2 * _floats(ids),
        {"inputCols": ["full", "thin"]},
        2 * WIDTH,
        classes=True,
    ),
    "floats": Kind({"features": _FLOATS}, lambda i: {"features": X[i].tolist()}, _floats),  # of test_shipping.py
    "arrays": Kind(
        {"singles": _FLOATS, "doubles": _DOUBLES, "nested": T.ArrayType(_FLOATS)},
        lambda i: {"singles": X[i].tolist(), "doubles": X[i].tolist(), "nested": X[i].reshape(2, 3).tolist()},
        lambda ids: [*(2 * _floats(ids)), X[ids].reshape(-1, 2, 3).astype(np.float32)],
        {"inputCols": ["singles", "doubles", "nested"]},
        3 * WIDTH,
    ),
    "ragged": Kind(
        {"features": _FLOATS},
        lambda i: {"features": X[i, : LENGTHS[i]].tolist()},
        _ragged,
        {"inputLayouts": {"features": "padded"}},
        module="nets:Ragged",
    ),
    "scalars": Kind(_SCALARS, _scalars, _scalar_tensors, {"inputCols": list(_SCALARS)}, len(_SCALARS)),
    "unused": Kind(
        {"features": _FLOATS, "beside": VectorUDT()},
        lambda i: {"features": X[i].tolist(), "beside": DenseVector(-X[i])},
        _floats,
    ),
    "image": Kind(
        {"photo": T.BinaryType()},
        lambda i: {"photo": _png(i)},
        lambda ids: [(PIXELS[ids] / 255).astype(np.float32).transpose(0, 3, 1, 2)],
        {"featuresCol": "photo", "inputLayouts": {"photo": "image"}, "learningRate": 1e-3},
        PIXELS[0].size,
        module="nets:Wide",
    ),
    "read": Kind(
        {"text": T.StringType(), "extra": T.DoubleType(), "at": T.TimestampType()},
        lambda i: {"text": TEXTS[i % 4], "extra": float(X[i, 0]), "at": _time(i)},
        _read,
        {"inputCols": ["text", "extra", "at"], "preprocess": "nets:read"},
        5,
    ),
}

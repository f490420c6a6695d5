"""What the data sets of Petastorm in the tests hold, and pickled schemas, both made without Petastorm."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Written by `python -m tests.petastorm.datasets`, with the real package.
STORED = Path(__file__).parents[1] / "data" / "petastorm" / "everything"
ROWS = 8


@dataclass(frozen=True)
class Kind:
    """A field: `codec` is a type of Spark's for scalars, empty for none, or a codec's class with its arguments."""

    name: str
    dtype: Any
    shape: tuple[int | None, ...] = ()
    codec: str = ""
    nullable: bool = False


FIELDS = (
    Kind("id", np.int64, (), "LongType"),
    Kind("i8", np.int8, (), "ByteType"),
    Kind("u8", np.uint8, (), "ShortType"),
    Kind("i16", np.int16),
    Kind("u16", np.uint16),
    Kind("u32", np.uint32, (), "LongType"),
    Kind("narrow", np.int64, (), "IntegerType"),
    Kind("f32", np.float32, (), "FloatType", nullable=True),
    Kind("f64", np.float64, (), "DoubleType", nullable=True),
    Kind("flag", np.bool_, (), "BooleanType", nullable=True),
    Kind("name", np.str_, (), "StringType", nullable=True),
    Kind("price", decimal.Decimal, (), "DecimalType(10, 2)", nullable=True),
    Kind("day", np.datetime64, (), "DateType", nullable=True),
    Kind("part", np.str_, (), "StringType"),
    Kind("year", np.int64, (), "IntegerType"),
    Kind("matrix", np.float32, (2, 3), "NdarrayCodec"),
    Kind("fortran", np.int16, (2, 3), "NdarrayCodec"),
    Kind("tokens", np.int32, (None,), "NdarrayCodec", nullable=True),
    Kind("words", np.str_, (None,), "NdarrayCodec", nullable=True),
    Kind("half", np.float16, (3,), "NdarrayCodec"),
    Kind("wide", np.uint64, (2,), "NdarrayCodec"),
    Kind("mask", np.bool_, (2, 2), "CompressedNdarrayCodec"),
    Kind("cloud", np.float64, (None, 3), "CompressedNdarrayCodec", nullable=True),
    Kind("volume", np.uint8, (2, 2, 2), "CompressedNdarrayCodec"),
    Kind("colour", np.uint8, (4, 5, 3), "CompressedImageCodec('png')"),
    Kind("grey", np.uint8, (4, 5), "CompressedImageCodec('png')", nullable=True),
    Kind("deep", np.uint16, (4, 5), "CompressedImageCodec('png')"),
    Kind("photo", np.uint8, (None, None, 3), "CompressedImageCodec('jpeg', 95)", nullable=True),
)


def row(number: int) -> dict[str, Any]:
    """Returns the values of one row; in every fourth one, what may be null is."""
    draw = np.random.default_rng(number)
    values: dict[str, Any] = {
        "id": number,
        "i8": -number,
        "u8": 200 + number,
        "i16": np.int16(-1000 * number),
        "u16": np.uint16(65_000 + number),
        "u32": 2**32 - 1 - number,
        "narrow": number,
        "f32": np.float32(number / 3),
        "f64": number / 7,
        "flag": number % 2 == 1,
        "name": f"n{number}é",
        "price": decimal.Decimal(number) / 4,
        "day": datetime.date(2020, 1, 1 + number),
        "part": ("007", "b")[number % 2],
        "year": 2020 + number % 2,
        "matrix": draw.normal(size=(2, 3)).astype(np.float32),
        "fortran": np.asfortranarray(draw.integers(-9, 9, (2, 3)).astype(np.int16)),
        "tokens": draw.integers(0, 9, number).astype(np.int32),
        "words": np.array([f"w{i}" * i for i in range(number)], np.str_),
        "half": draw.normal(size=3).astype(np.float16),
        "wide": draw.integers(0, 2**62, 2).astype(np.uint64),
        "mask": draw.random((2, 2)) < 0.5,
        "cloud": draw.normal(size=(number, 3)),
        "volume": draw.integers(0, 256, (2, 2, 2)).astype(np.uint8),
        "colour": draw.integers(0, 256, (4, 5, 3)).astype(np.uint8),
        "grey": draw.integers(0, 256, (4, 5)).astype(np.uint8),
        "deep": draw.integers(0, 2**16, (4, 5)).astype(np.uint16),
        "photo": _smooth(6 + number, 9),
    }
    if number % 4 == 3:
        values |= {field.name: None for field in FIELDS if field.nullable}
    return values


def _smooth(height: int, width: int) -> Any:
    """A picture without edges, which JPEG keeps to a few grey levels."""
    y, x = np.mgrid[:height, :width]
    return np.stack([10 * y, 10 * x, 100 + 5 * (x - y)], axis=-1).clip(0, 255).astype(np.uint8)


def pickled(fields: Sequence[Kind]) -> bytes:
    """Pickles a Unischema as petastorm would, opcode by opcode, whatever it names: protocol 2."""
    named = [_text(field.name) + _field(field) for field in fields]
    items = b"ccollections\nOrderedDict\n)R(" + b"".join(named) + b"u"
    return b"\x80\x02" + _new("petastorm.unischema.Unischema") + b"}" + _text("_fields") + items + b"sb."


def _field(field: Kind) -> bytes:
    dtype = f"{field.dtype.__module__}.{field.dtype.__name__}" if isinstance(field.dtype, type) else field.dtype
    sizes = b"".join(b"N" if size is None else b"J" + size.to_bytes(4, "little") for size in field.shape)
    name, _, arguments = field.codec.partition("(")
    codec = b"N"
    if name.endswith("Type"):
        codec = _new("petastorm.codecs.ScalarCodec") + b"}" + _text("_spark_type") + _new(f"pyspark.sql.types.{name}")
        codec += b"sb"
    elif name:
        codec = _new(name if "." in name else f"petastorm.codecs.{name}")
        image_format = arguments.partition(",")[0].strip("')")
        codec += b"}" + _text("_image_codec") + _text("." + image_format) + b"sb" if arguments else b""
    content = _text(field.name) + _global(dtype) + b"(" + sizes + b"t" + codec + b"\x89"
    return _global("petastorm.unischema.UnischemaField") + b"(" + content + b"t\x81"


def _new(path: str) -> bytes:
    return _global(path) + b")\x81"


def _global(path: str) -> bytes:
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded

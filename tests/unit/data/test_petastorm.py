"""Data sets of Petastorm are read without it: values as they were written, and nothing runs that a pickle asks for."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from sparktorch.adapters.petastorm.decoder import Decoder, reader_batches, schema_in
from sparktorch.adapters.petastorm.unischema import UnischemaField, read_unischema
from sparktorch.data.columns import LABEL, Columns, TensorSpec
from sparktorch.errors import ColumnError, DatasetError
from tests.support.petastorm import FIELDS, ROWS, STORED, Kind, pickled, row

METADATA = (STORED / "_common_metadata").read_bytes()
SCHEMA, IN_FILES = schema_in(METADATA)
ENCODED = tuple(field for field in SCHEMA if field.codec != "plain")


def npy(values: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, **options)
    return stream.getvalue()


def npz(values: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, arr=values)
    return stream.getvalue()


def image(pixels: np.ndarray, mode: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, mode)
    return stream.getvalue()


def field(codec: Any = "ndarray", dtype: str = "float32", shape: Any = (2,), image_format: str = "") -> UnischemaField:
    return UnischemaField(name="x", dtype=dtype, shape=shape, codec=codec, image_format=image_format)


def batch_of(*blobs: bytes | None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"x": pa.array(blobs, pa.binary()), "n": pa.array(range(len(blobs)))})


def decode(of: UnischemaField, *blobs: bytes | None, layout: Any = "nested") -> pa.Table:
    decoder = Decoder(encoded=(of,), layout=layout)
    decoder.check()
    return pa.Table.from_batches(decoder([batch_of(*blobs)]))


# The schema


def test_the_schema_of_a_data_set_is_read_as_it_was_written() -> None:
    assert [found.name for found in SCHEMA] == [kind.name for kind in FIELDS]
    assert [found.shape for found in SCHEMA] == [kind.shape for kind in FIELDS]
    assert {kind.name for kind in FIELDS} - IN_FILES == {"part", "year"}
    by_name = {found.name: found for found in SCHEMA}
    assert by_name["photo"] == UnischemaField(
        name="photo", dtype="uint8", shape=(None, None, 3), codec="image", image_format="JPEG"
    )
    assert by_name["price"].describe() == "field 'price': Decimal of shape ()"
    codecs = [by_name[name].codec for name in ("i16", "id", "matrix", "mask")]
    assert codecs == ["plain", "plain", "ndarray", "compressed"]


@pytest.mark.parametrize(("version", "count"), [("0.4.3", 13), ("0.7.6", 17)])
def test_schemas_of_old_versions_under_python_2_are_read(version: str, count: int) -> None:
    fields = read_unischema((STORED.parent / f"unischema-{version}.pickle").read_bytes())
    assert len(fields) == count
    found = {found.name: found for found in fields}
    assert found["matrix_nullable"] == UnischemaField(
        name="matrix_nullable", dtype="uint16", shape=(32, 16, 3), codec="ndarray"
    )
    assert found["image_png"].image_format == "PNG"
    assert (found["decimal"].dtype, found["sensor_name"].dtype) == ("Decimal", "str")


def test_a_schema_of_the_package_s_former_name_is_read() -> None:
    kinds = [Kind("a", np.float32, (3,), "NdarrayCodec"), Kind("b", np.int64, (), "LongType")]
    old = pickled(kinds).replace(b"cpetastorm.", b"cav.ml.dataset_toolkit.")
    assert read_unischema(old) == read_unischema(pickled(kinds))


@pytest.mark.parametrize(("dtype", "name"), [("numpy.unicode_", "str"), ("numpy.longlong", "int64")])
def test_other_names_of_a_type_are_known(dtype: str, name: str) -> None:
    assert read_unischema(pickled([Kind("a", dtype)]))[0].dtype == name


class Payload:
    """Pickles as a call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def planted(content: bytes) -> bytes:
    """Puts a pickled object in place of a codec, in a schema that is sound otherwise."""
    schema = pickled([Kind("a", np.float32, (2,), "NdarrayCodec")])
    codec = b"cpetastorm.codecs\nNdarrayCodec\n)\x81"
    assert schema.count(codec) == 1
    return schema.replace(codec, content)


def body(value: Any) -> bytes:
    """Returns the pickle of a value without its first and last opcodes, to be put into another."""
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


CANARY = "canary-of-petastorm"
ATTACKS = {
    "os.system": lambda path: body(Payload(os.system, f"touch {path}")),
    "petastorm.unischema.os.system": lambda path: f"cpetastorm.unischema\nos.system\n(S'touch {path}'\ntR".encode(),
    "subprocess.Popen, by instance": lambda path: f"(S'touch'\nS'{path}'\nisubprocess\nPopen\n".encode(),
    "mine.Codec": lambda _: b"cmine\nCodec\n)\x81",
    # Classes that are admitted, called in ways that no schema does.
    "admitted and called": lambda path: f"cpetastorm.codecs\nNdarrayCodec\n(S'{path}'\ntR}}S'x'\nS'y'\nsb".encode(),
    "a state of names": lambda _: b"cpetastorm.codecs\nNdarrayCodec\n(N}S'__class__'\nN.stb",
    "a dictionary for a codec": lambda _: b"}",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_schema_that_asks_for_anything_else_is_refused_and_runs_nothing(attack: str, tmp_path: Path) -> None:
    canary = tmp_path / CANARY
    content = planted(ATTACKS[attack](str(canary)))
    if attack == "admitted and called":  # a record like any other
        assert read_unischema(content)[0].codec == "ndarray"
    else:
        with pytest.raises(DatasetError) as caught:
            read_unischema(content)
        assert caught.value.hint
    assert not canary.exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({}), pickled([])[:-9]])
def test_what_is_no_schema_is_refused(content: bytes) -> None:
    with pytest.raises(DatasetError, match="the pickled schema cannot be read"):
        read_unischema(content)


def test_a_footer_without_a_schema_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "plain.parquet")
    with pytest.raises(DatasetError, match=r"holds no Unischema\n.*spark\.read\.parquet"):
        schema_in((tmp_path / "plain.parquet").read_bytes())


# The values


def stored(*, batch_rows: int = 3) -> list[pa.RecordBatch]:
    """The rows as Spark hands them over: one batch after the other, slices of a table."""
    return pq.read_table(STORED).sort_by("id").combine_chunks().to_batches(max_chunksize=batch_rows)


def test_every_codec_gives_back_what_was_written() -> None:
    found = pa.Table.from_batches(Decoder(encoded=ENCODED)(stored())).to_pylist()
    assert [values["id"] for values in found] == list(range(ROWS))
    for number, values in enumerate(found):
        wanted = row(number)
        for encoded in ENCODED:
            value, want = values[encoded.name], wanted[encoded.name]
            if encoded.name == "photo" and value is not None:
                assert np.array(value).shape == want.shape
                assert np.abs(np.array(value) - want.astype(int)).mean() <= 4
            else:
                assert value == (want.tolist() if isinstance(want, np.ndarray) else want), (number, encoded.name)


def test_flat_columns_hold_the_same_values_with_their_shapes() -> None:
    nested = pa.Table.from_batches(Decoder(encoded=ENCODED)(stored())).to_pylist()
    flat = pa.Table.from_batches(Decoder(encoded=ENCODED, layout="flat")(stored()))
    shapes = [name for name in flat.column_names if name.endswith("_shape")]
    assert shapes == ["cloud_shape", "photo_shape"]  # of the rest, the schema or the length says it
    for deep, values in zip(nested, flat.to_pylist(), strict=True):
        for encoded in ENCODED:
            value = deep[encoded.name]
            if value is None:
                assert values[encoded.name] is None
                assert values.get(encoded.name + "_shape") is None
                continue
            shape = values.get(encoded.name + "_shape", [size or len(value) for size in encoded.shape])
            assert np.array(values[encoded.name]).reshape(shape).tolist() == value


@given(
    hnp.arrays(
        st.sampled_from(["?", "i1", "<i2", ">i4", "<i8", "u1", "<u2", ">u4", "<f4", ">f8"]),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
        elements=st.sampled_from([0, 1]),
    ),
    st.booleans(),
    st.booleans(),
)
def test_arrays_of_any_type_order_and_shape_are_decoded(values: np.ndarray, fortran: bool, ragged: bool) -> None:
    rows = [np.array(row, order="F" if fortran else "C") for row in values]
    dtype = values.dtype.newbyteorder("=").name
    for codec, save in (("ndarray", npy), ("compressed", npz)):
        shape = tuple(None if ragged else size for size in values.shape[1:])
        decoder = Decoder(encoded=(field(codec, dtype, shape),))
        found = [value for batch in decoder([batch_of(*map(save, rows))]) for value in batch["x"].to_pylist()]
        assert found == values.tolist()


@pytest.mark.parametrize("save", [npy, npz])
def test_nulls_slices_and_unequal_rows_stay_where_they_belong(save: Any) -> None:
    rows = [[1.0], None, [], [2.0, 3.0], None, [4.0]]
    blobs = [None if values is None else save(np.array(values, np.float32)) for values in rows]
    of = field("ndarray" if save is npy else "compressed", shape=(None,))
    decoder = Decoder(encoded=(of,))
    for start in range(6):
        for length in range(1, 7 - start):
            found = pa.Table.from_batches(decoder([batch_of(*blobs).slice(start, length)]))
            assert found["x"].to_pylist() == rows[start : start + length]
            assert found["n"].to_pylist() == list(range(start, start + length))
    assert decode(of, None, None)["x"].to_pylist() == [None, None]


def test_files_of_one_length_and_different_headers_are_decoded_each_by_its_own() -> None:
    rows = [np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([[1, 2], [3, 4], [5, 6]], ">f4")]
    for values in (rows, [np.asfortranarray(one) for one in rows], [rows[0], np.asfortranarray(rows[0])]):
        assert len({len(npy(one)) for one in values}) == 1
        assert decode(field(shape=(None, None)), *map(npy, values))["x"].to_pylist() == [one.tolist() for one in values]


def test_arrays_without_dimensions_are_scalars() -> None:
    table = decode(field(shape=()), npy(np.float32(1)), None, npy(np.float32(2)))
    assert table.schema.field("x").type == pa.float32()
    assert table["x"].to_pylist() == [1, None, 2]


def test_strings_of_any_width_are_decoded() -> None:
    rows = [np.array(["ä", ""]), np.array(["", ""]), np.array([]).astype(str), np.array(["long", "longer"])]
    assert decode(field(dtype="str", shape=(None,)), *map(npy, rows))["x"].to_pylist() == [r.tolist() for r in rows]
    raw = [np.array([b"a", b""]), np.array([b"bcd", b"e"])]
    assert decode(field(dtype="bytes", shape=(2,)), *map(npy, raw))["x"].to_pylist() == [r.tolist() for r in raw]


GOOD = npy(np.zeros(2, np.float32))
OBJECTS = npy(np.array([Payload(os.system, f"touch {CANARY}")], object), allow_pickle=True)
GREY = np.zeros((2, 3), np.uint8)
NOISE = image(np.random.default_rng(0).integers(0, 256, (32, 32), np.uint8))


@pytest.mark.parametrize(
    ("of", "blob", "message"),
    [
        (field(), b"", "EOF: reading magic string"),
        (field(), GOOD[:-4], "cannot reshape array of size 1 into shape (2,)"),
        (field(), npy(np.zeros((2, 1), np.float32)), "it is float32 of shape (2, 1)"),
        (field(), npy(np.zeros(2)), "it is float64 of shape (2,)"),
        (field(shape=(None,)), OBJECTS, "cannot create an OBJECT array"),
        (field("compressed"), npz(np.zeros(2, np.float32))[:-5], "BadZipFile"),
        (field("image", "uint8", (2, 3), "PNG"), image(GREY, "JPEG"), "UnidentifiedImageError: "),
        (field("image", "uint8", (32, 32), "PNG"), NOISE[:-100], "OSError"),
        (field("image", "uint8", (2, 3), "PNG"), image(GREY.astype(np.uint16)), "it is uint16 of shape (2, 3)"),
        (field("image", "uint8", (2, 3, 3), "PNG"), image(np.zeros((2, 3, 4), np.uint8)), "of the mode RGBA"),
    ],
)
def test_a_value_that_is_broken_or_not_what_the_schema_says_is_named(
    of: UnischemaField, blob: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ColumnError) as caught:
        decode(of, None, blob, None)
    assert message in caught.value.what
    assert caught.value.where == {"column": "x", "row_of_partition": 1}
    assert not Path(CANARY).exists()


def test_numbers_that_spark_has_no_type_for_are_refused() -> None:
    of = field(dtype="uint64", shape=(1,))
    assert decode(of, npy(np.array([2**63 - 1], np.uint64)))["x"].to_pylist() == [[2**63 - 1]]
    with pytest.raises(ColumnError, match="values that Spark has no type for"):
        decode(of, npy(np.array([2**63], np.uint64)))


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (field(dtype="object"), "object of shape (2,) cannot become a column"),
        (field(dtype="datetime64"), "cannot become a column"),
        (field("image", "uint16", (2, 2, 3), "PNG"), "is of 16-bit colours, which Pillow reads as 8-bit ones"),
    ],
)
def test_a_field_that_cannot_be_decoded_is_refused_without_a_row(of: UnischemaField, message: str) -> None:
    with pytest.raises(DatasetError) as caught:
        Decoder(encoded=(of,)).check()
    assert message in caught.value.what
    assert caught.value.where == ({"field": "x"})


# Petastorm's own readers, as batches for the worker

COLUMNS = Columns(
    inputs=(TensorSpec(name="x0", column="pair", dtype="float32", shape=(2,)),),
    label=TensorSpec(name=LABEL, column="target", dtype="float32"),
    validation="held_out",
)


@pytest.mark.parametrize("kind", ["named tuples", "dictionaries"])
def test_batches_of_a_reader_get_their_names_on_the_wire(kind: str) -> None:
    arrays = {
        "pair": np.arange(6, dtype=np.float32).reshape(3, 2),
        "target": np.ones(3, np.float32),
        "held_out": np.array([True, False, True]),
        "id": np.arange(3),
        "more": np.zeros(3),
    }
    batch = namedtuple("Row", arrays)(**arrays) if kind == "named tuples" else arrays
    _, found = reader_batches([batch, batch], COLUMNS, key="id")
    expected = {"x0": [[0, 1], [2, 3], [4, 5]], "y": [1, 1, 1], "v": [True, False, True], "k": [0, 1, 2]}
    assert found.to_pydict() == expected

"""What the real package writes, our reader and its own read alike, to the last bit."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from petastorm import make_reader
from pyspark.sql import SparkSession

from sparktorch import read_petastorm
from tests.support.petastorm import FIELDS, ROWS, STORED, row

pytestmark = pytest.mark.filterwarnings("ignore")  # petastorm warns of the pyarrow that it was written for


def read_by_petastorm(folder: Path) -> list[dict[str, Any]]:
    with make_reader(folder.as_uri(), reader_pool_type="dummy", shuffle_row_groups=False, num_epochs=1) as reader:
        return sorted((found._asdict() for found in reader), key=lambda found: found["id"])


def plain(value: Any) -> Any:
    if isinstance(value, np.datetime64):
        return value.astype("datetime64[D]").astype(datetime.date)
    if isinstance(value, np.floating) and np.isnan(value):  # what a null becomes on its way through pandas
        return None
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


@pytest.mark.parametrize("source", ["written", "stored"])
@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_both_readers_agree_on_every_value(spark: SparkSession, written: Path, source: str, layout: Any) -> None:
    folder = written if source == "written" else STORED
    found = read_petastorm(spark, str(folder), layout=layout).orderBy("id").collect()
    expected = read_by_petastorm(folder)
    assert len(found) == len(expected) == ROWS
    for ours, theirs in zip(found, expected, strict=True):
        for field in FIELDS:
            value, want = ours[field.name], theirs[field.name]
            if field.name == "year":
                # Petastorm numbers the folders of a second level in the order in which threads list them, and
                # may do so twice, differently: it then gives rows the value of another folder.
                want = row(ours["id"])["year"]
            if layout == "flat" and isinstance(want, np.ndarray):
                if field.name + "_shape" in ours:
                    assert ours[field.name + "_shape"] == list(want.shape)
                want = want.reshape(-1)
            assert value == plain(want), (field.name, ours["id"])


def test_a_subset_and_a_condition_read_the_rows_that_petastorm_finds(spark: SparkSession, written: Path) -> None:
    found = read_petastorm(spark, str(written), columns=["id", "matrix"], where="part = '007' and id > 2")
    url = written.as_uri()
    with make_reader(url, schema_fields=["id", "part", "matrix"], reader_pool_type="dummy", num_epochs=1) as reader:
        expected = {each.id: each.matrix.tolist() for each in reader if each.part == "007" and each.id > 2}
    assert {each["id"]: each["matrix"] for each in found.collect()} == expected
    assert len(expected) == 2

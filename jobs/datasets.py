"""Small data sets as DataFrames, built from what scikit-learn and pyspark bring along.

Each function takes a session, classic or Connect, and returns a DataFrame: what `data.source` names.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyspark
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.datasets import load_diabetes, load_digits, load_wine

__all__ = ["diabetes", "digits", "movielens", "wine"]


def digits(spark: SparkSession) -> DataFrame:
    """Returns 1,797 images of handwritten digits, 8 x 8 pixels.

    Columns: `features`, an array of 64 floats in `[0, 1]`; `label`, an int `0 ... 9`;
    `is_validation`, true for about a tenth of the rows, chosen by their contents.
    """
    pixels, labels = load_digits(return_X_y=True)
    table = pa.table({"features": _lists(pixels / 16), "label": pa.array(labels, pa.int32())})
    flag = F.pmod(F.xxhash64("features", "label"), F.lit(10)) == 0
    return spark.createDataFrame(table).withColumn("is_validation", flag)


def diabetes(spark: SparkSession) -> DataFrame:
    """Returns 442 patients: ten standardised measurements and the progress of the disease a year later.

    Columns: `features`, an ML vector of 10 values, each with mean 0 and standard deviation 1 over
    all patients; `label`, a double between 25 and 346.
    """
    measured, progress = load_diabetes(return_X_y=True, scaled=False)
    standard = (measured - measured.mean(axis=0)) / measured.std(axis=0)
    table = pa.table({"features": _lists(standard), "label": pa.array(progress, pa.float64())})
    return spark.createDataFrame(table).select(array_to_vector(F.col("features")).alias("features"), "label")


def movielens(spark: SparkSession) -> DataFrame:
    """Returns the 1,501 ratings of MovieLens that every pyspark carries with it.

    Columns: `user`, an int `0 ... 29`; `item`, an int `0 ... 99`; `rating`, a float between 1 and 5.
    """
    # spark-submit imports pyspark from a zip file, and says where the rest of Spark is.
    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    path = Path(home, "data", "mllib", "sample_movielens_data.txt")
    ratings = pd.read_csv(path, sep="::", engine="python", names=["user", "item", "rating"])
    schema = pa.schema({"user": pa.int32(), "item": pa.int32(), "rating": pa.float32()})
    return spark.createDataFrame(pa.Table.from_pandas(ratings, schema, preserve_index=False))


def wine(spark: SparkSession) -> DataFrame:
    """Returns 178 wines of three makers.

    Columns: 13 doubles such as `alcohol` and `color_intensity`; `maker`, a string.
    """
    wines = load_wine(as_frame=True)
    makers = pd.Categorical.from_codes(wines.target, categories=["Antinori", "Banfi", "Ceretto"])
    table = wines.data.assign(maker=makers.astype(str)).rename(columns=lambda name: name.replace("/", "_"))
    return spark.createDataFrame(table)


def _lists(values: npt.NDArray[np.float64]) -> pa.Array:
    """Returns an array of shape `(rows, width)` as a column of lists of float."""
    return pa.array(list(values.astype(np.float32)), pa.list_(pa.float32()))

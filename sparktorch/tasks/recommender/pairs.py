"""The columns of pairs: users, items, their features and their ratings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F

from sparktorch.errors import ColumnError
from sparktorch.ml.fit.values import Values
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.encoding import kept_as

__all__ = ["PairColumns", "Paired", "id_type", "structs"]

_IDS = ("string", "tinyint", "smallint", "int", "bigint")


@dataclass(frozen=True, kw_only=True)
class PairColumns:
    """The names of the columns of pairs.

    Attributes:
        user: The column of users.
        item: The column of items.
        user_features: The columns of numbers that describe users.
        item_features: The columns of numbers that describe items.
        rating: The column of ratings; empty if there is none. A model has none.
    """

    user: str
    item: str
    user_features: list[str]
    item_features: list[str]
    rating: str

    @classmethod
    def of(cls, instance: Any) -> PairColumns:
        """Returns the columns that the Params of a recommender, or of its model, name."""
        p = Values(instance)
        return cls(
            user=p["userCol"],
            item=p["itemCol"],
            user_features=p["userFeatures"],
            item_features=p["itemFeatures"],
            rating=p["ratingCol"] or "",
        )

    @property
    def inputs(self) -> list[str]:
        """The columns that a model reads: users, items and their features."""
        return [self.user, self.item, *self.user_features, *self.item_features]

    @property
    def numbers(self) -> list[str]:
        """The columns of numbers: features and, if there are any, ratings."""
        ratings = [self.rating] if self.rating else []
        return [*self.user_features, *self.item_features, *ratings]

    @property
    def read_by_fit(self) -> list[str]:
        """The columns that a fit reads: users, items and numbers."""
        return [self.user, self.item, *self.numbers]

    def is_complete(self, names: ColumnNames) -> Column:
        """Returns the condition that a row has a user, an item and finite numbers."""
        has_ids = names.column(self.user).isNotNull() & names.column(self.item).isNotNull()
        numbers = [names.column(name).cast("double") for name in self.numbers]
        is_finite = (F.coalesce(F.abs(number) < float("inf"), F.lit(False)) for number in numbers)
        return reduce(and_, is_finite, has_ids)


class Paired:
    """A mixin for columns of users, items and their features in place of `inputCols`."""

    def getInputCols(self) -> list[str]:
        """Gets the columns of users and items, and the columns of their features."""
        return PairColumns.of(self).inputs


def structs(table: pa.Table, names: Sequence[str]) -> pa.StructArray:
    """Returns an array of structs, whose fields are the columns of a table under other names."""
    return pa.StructArray.from_arrays([column.combine_chunks() for column in table.columns], names=list(names))


def id_type(names: ColumnNames, name: str) -> str:
    """Returns the SQL type of a column of users or items; refuses other types than strings and whole numbers."""
    kind = names.type_of(name)
    sql = kept_as(kind)
    if sql not in _IDS:
        hint = f"cast({names.sql(name)} as string), or as bigint"
        what = f"column {name!r} is {kind.simpleString()}, and users and items are strings or whole numbers"
        raise ColumnError(what, hint=hint, column=name)
    return sql

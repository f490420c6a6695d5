"""The columns of pairs: users, items, their features and ratings."""

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
    """The names of the columns of pairs; `rating` is empty where there is none, as in models."""

    user: str
    item: str
    user_features: list[str]
    item_features: list[str]
    rating: str

    @classmethod
    def of(cls, params: Any) -> PairColumns:
        """Returns the columns that the Params of a recommender, or of its model, name."""
        p = Values(params)
        return cls(
            user=p["userCol"],
            item=p["itemCol"],
            user_features=p["userFeatures"],
            item_features=p["itemFeatures"],
            rating=p["ratingCol"] or "",
        )

    @property
    def inputs(self) -> list[str]:
        """Users, items and their features."""
        return [self.user, self.item, *self.user_features, *self.item_features]

    @property
    def with_rating(self) -> list[str]:
        """The inputs and, if there are any, the ratings."""
        return [*self.inputs, *([self.rating] if self.rating else [])]

    def complete(self, names: ColumnNames) -> Column:
        """Returns whether a row has a user, an item and finite numbers."""
        user, item, *numbers = map(names.column, self.with_rating)
        finite = (F.coalesce(F.abs(number.cast("double")) < float("inf"), F.lit(False)) for number in numbers)
        return reduce(and_, finite, user.isNotNull() & item.isNotNull())


class Paired:
    """Has columns of users, items and their features in place of `inputCols`."""

    def getInputCols(self) -> list[str]:
        """Gets the columns of users and items, and those of their features."""
        return PairColumns.of(self).inputs


def structs(table: pa.Table, names: Sequence[str]) -> pa.StructArray:
    """Returns the columns of a table as the fields of one array."""
    return pa.StructArray.from_arrays([column.combine_chunks() for column in table.columns], names=list(names))


def id_type(names: ColumnNames, name: str) -> str:
    """Returns the SQL type of a column of users or items."""
    kind = names.type_of(name)
    sql = kept_as(kind)
    if sql not in _IDS:
        hint = f"cast({names.sql(name)} as string), or as bigint"
        what = f"column {name!r} is {kind.simpleString()}, and users and items are strings or whole numbers"
        raise ColumnError(what, hint=hint, column=name)
    return sql

"""Resolves the user's column names by Spark's rules, for every Param and function that accepts one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.data.columns import name_parts
from sparktorch.errors import ColumnError, nearest
from sparktorch.spark.session import switched_on

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ColumnNames", "quoted", "quoted_name"]


class ColumnNames:
    """The columns of a DataFrame, by the user's names.

    A name is first looked up as a top-level column, including any dots and backticks. If there is no such column, the
    name is a path into structs, `a.b`, whose parts may be in backticks. Case matters only if `spark.sql.caseSensitive`
    is true.

    Attributes:
        schema: The DataFrame's schema.
    """

    def __init__(self, schema: T.StructType, case_sensitive: Callable[[], bool]) -> None:
        """Takes a schema; `case_sensitive`, called only if needed, says whether case distinguishes names."""
        self.schema = schema
        self._case_sensitive = cache(case_sensitive)
        self._top = _by_lower(schema)

    @classmethod
    def of(cls, dataset: DataFrame) -> Self:
        """Returns the columns of a DataFrame; reads its schema once."""
        session = dataset.sparkSession
        return cls(dataset.schema, partial(switched_on, session, "spark.sql.caseSensitive"))

    def called(self, name: str) -> list[str]:
        """Returns the top-level columns to which Spark resolves a name, which is ambiguous if there are several."""
        return [field.name for field in self._alike(name, self._top)]

    def alike(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Returns two names that are equal to Spark although spelled differently; `None` if there are none."""
        by_lower: dict[str, str] = {}
        for name in names:
            earlier = by_lower.setdefault(name.lower(), name)
            if earlier != name and not self._case_sensitive():
                return earlier, name
        return None

    def repeated(self, names: Iterable[str]) -> str | None:
        """Returns the first name for a column that an earlier name stands for, too; `None` if there is none.

        Like the methods below, it refuses a name that no column has, or several.
        """
        columns = set[str]()
        for name in names:
            column = self.sql(name)
            if column in columns:
                return name
            columns.add(column)
        return None

    def type_of(self, name: str) -> T.DataType:
        """Returns the type of a column."""
        return self._resolve(name)[1]

    def column(self, name: str) -> Column:
        """Returns the expression for a column."""
        (top, *fields), _ = self._resolve(name)
        column = quoted(top)
        for field in fields:
            column = column.getField(field)
        return column

    def sql(self, name: str) -> str:
        """Returns the quoted name of a column in SQL, which is the same for all spellings of the column's name."""
        return ".".join(map(quoted_name, self._resolve(name)[0]))

    def _resolve(self, name: str) -> tuple[list[str], T.DataType]:
        """Returns the path to a column, from the top-level column down, and its type."""
        if self._alike(name, self._top):
            field = self._field(name, [], self.schema, name)
            return [field.name], field.dataType
        path: list[str] = []
        data_type: T.DataType = self.schema
        for part in name_parts(name):
            element = data_type.elementType if isinstance(data_type, T.ArrayType) else None
            if isinstance(element, T.StructType):
                # In Spark, a field of an array of structs is an array of the field's values; deeper arrays have none.
                field = self._field(part, path, element, name)
                data_type = T.ArrayType(field.dataType)
            else:
                field = self._field(part, path, data_type, name)
                data_type = field.dataType
            path.append(field.name)
        return path, data_type

    def _field(self, part: str, path: list[str], data_type: T.DataType, name: str) -> T.StructField:
        """Returns the field to which `part` of `name` refers: in the struct `data_type` at `path`, or at the top."""
        fields = data_type if isinstance(data_type, T.StructType) else T.StructType()
        matches = self._alike(part, _by_lower(fields) if path else self._top)
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise _ambiguous(name, [".".join([*path, field.name]) for field in matches])
        missing = f": {'.'.join(path)!r} has no field {part!r}" if path else ""
        hint = f"its type is {data_type.simpleString()}"
        if data_type is fields:
            hint = nearest(part if path else name, fields.names)
        raise ColumnError(f"there is no column {name!r}{missing}", hint=hint, column=name, code="ST-COLUMN-MISSING")

    def _alike(self, name: str, fields: dict[str, list[T.StructField]]) -> list[T.StructField]:
        """Returns the fields, of those by lower-case name, that Spark takes for `name`."""
        alike = fields.get(name.lower(), [])
        exact = [field for field in alike if field.name == name]
        return exact if len(exact) == len(alike) or self._case_sensitive() else alike


def _by_lower(data_type: T.StructType) -> dict[str, list[T.StructField]]:
    """Returns the fields of a struct by their names in lower case."""
    by_lower: dict[str, list[T.StructField]] = {}
    for field in data_type.fields:
        by_lower.setdefault(field.name.lower(), []).append(field)
    return by_lower


def _ambiguous(name: str, columns: list[str]) -> ColumnError:
    """Returns the error for a name that may stand for several columns."""
    if len(set(columns)) > 1:
        problem = f"{name!r} may be {' or '.join(map(repr, columns))}, which differ in case alone"
        hint = "rename or drop all but one, or set spark.sql.caseSensitive=true"
    else:
        problem = f"{len(columns)} columns are called {name!r}"
        hint = (
            "drop or rename all but one before: a join by name, left.join(right, 'id'), keeps one 'id'; "
            "drop(right['x']) after a join leaves one side's out; toDF(...) names all anew"
        )
    return ColumnError(problem, hint=hint, column=name, code="ST-COLUMN-MISSING")


def quoted(name: str) -> Column:
    """Returns the top-level column whose name is exactly `name`, including any dots."""
    return F.col(quoted_name(name))


def quoted_name(name: str) -> str:
    """Returns a name in backticks for SQL, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"

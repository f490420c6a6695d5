"""Converts times and structs of pandas, JSON and Spark's rows to Arrow, with instants in UTC at any depth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from sparktorch.errors import ConfigError

__all__ = [
    "TIMES_HINT",
    "fits_times",
    "has_instants",
    "has_structs",
    "has_times",
    "in_utc",
    "read_time",
    "values_as",
    "zone_named",
]

TIMES_HINT = "give times of pandas or Python, or text as ISO 8601 has it, such as 2024-01-31T17:05:00+01:00"

_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?:(:\d\d)(?:[.,](\d{1,9}))?)? ?(?:(Z)|([+-]\d\d):?(\d\d)?)?)?", re.IGNORECASE
)
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d\d?)(?::?(\d\d)(?::?(\d\d))?)?")


def has_times(kind: pa.DataType) -> bool:
    """Whether a type is or holds dates or timestamps."""
    if pa.types.is_struct(kind):
        return any(has_times(field.type) for field in kind)
    return has_times(kind.value_type) if _is_list(kind) else bool(pa.types.is_temporal(kind))


def has_instants(kind: pa.DataType) -> bool:
    """Whether a type is or holds timestamps that have a time zone."""
    # The text of a type shows the types inside it, too.
    return "tz=" in str(kind)


def has_structs(kind: pa.DataType) -> bool:
    """Whether a type is a struct or lists of structs."""
    return has_structs(kind.value_type) if _is_list(kind) else bool(pa.types.is_struct(kind))


def in_utc(kind: pa.DataType) -> pa.DataType:
    """Returns a type whose timestamps, at any depth, have UTC in place of another time zone."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(in_utc(field.type)) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(in_utc(kind.value_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(in_utc(kind.value_type)))
    return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz else kind


def fits_times(column_type: pa.DataType, kind: pa.DataType) -> bool:
    """Whether a column of type `column_type` has the times that `kind` is or holds; names of fields may differ."""
    if pa.types.is_null(column_type):
        return True
    if pa.types.is_struct(kind):
        if not pa.types.is_struct(column_type) or column_type.num_fields != kind.num_fields:
            return False
        fields = zip(column_type, kind, strict=True)
        return all(fits_times(column_field.type, field.type) for column_field, field in fields)
    if _is_list(kind):
        return _is_list(column_type) and fits_times(column_type.value_type, kind.value_type)
    return not pa.types.is_temporal(kind) or bool(in_utc(column_type) == kind)


def zone_named(name: str) -> tzinfo:
    """Returns a time zone by its name in Spark, a region or an offset such as "+02:00".

    A `ConfigError` refuses other names.
    """
    # `timezone.utc` needs no files of zones, and `values_as` converts whole columns at once if the zone is this object.
    if name in ("UTC", "Z", "UT", "GMT"):
        return timezone.utc
    offset = _OFFSET.fullmatch(name)
    if offset is None:
        try:
            return ZoneInfo(name)
        except (KeyError, OSError, ValueError) as error:
            raise ConfigError(
                f"{name!r} is no time zone that Python has",
                hint="name a region, such as 'America/Los_Angeles' for Java's 'PST', 'UTC' or an offset such as "
                "'+02:00'; a system without the files of zones needs the package tzdata",
            ) from error
    sign, *numbers = offset.groups()
    hours, minutes, seconds = (int(number or 0) for number in numbers)
    distance = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    return timezone(distance if sign == "+" else -distance)


def values_as(kind: pa.DataType, values: Any, zone: tzinfo | None) -> pa.Array:
    """Converts values to a type that holds times or structs; text is read as ISO 8601.

    Times without a time zone are in `zone`. `None` stands for rows of Spark: their times are in the zone of this
    process, and their NaN is no null.

    Raises:
        ValueError: A text is no time.
        TypeError: A value is no time, such as a number, which names neither a unit nor a beginning. Or a time has a
            zone, and the times of the column have none.
    """
    dtype = getattr(values, "dtype", None)
    # pandas' columns of times are converted at once, all other values one by one.
    if getattr(dtype, "kind", "") == "M" and hasattr(values, "dt") and pa.types.is_timestamp(kind):
        if kind.tz and values.dt.tz:
            values = values.dt.tz_convert(None)
            zone = timezone.utc
        if values.dt.tz is None and (not kind.tz or zone is timezone.utc):
            return pa.array(values.to_numpy().astype("datetime64[us]")).cast(kind)
    rows = values.to_pylist() if hasattr(values, "to_pylist") else values
    return pa.array([_as_arrow_takes(row, kind, zone) for row in rows], kind)


def _as_arrow_takes(value: Any, kind: pa.DataType, zone: tzinfo | None) -> Any:
    """Returns a value in the form that Arrow takes for a type, with instants in UTC."""
    if _is_missing(value):
        is_nan_from_spark = zone is None and isinstance(value, float) and pa.types.is_floating(kind)
        return value if is_nan_from_spark else None
    if pa.types.is_struct(kind):
        # A row of Spark's is a tuple, and no mapping.
        fields = value.asDict() if hasattr(value, "asDict") else value
        if not isinstance(fields, Mapping):
            raise TypeError(f"{value!r} is no struct of {kind}")
        return {field.name: _as_arrow_takes(fields.get(field.name), field.type, zone) for field in kind}
    if _is_list(kind):
        if isinstance(value, str | bytes | Mapping):
            raise TypeError(f"{value!r} is no list of {kind.value_type}")
        return [_as_arrow_takes(item, kind.value_type, zone) for item in value]
    # Spark sends decimals as Decimal, and the model has them as double.
    if isinstance(value, Decimal) and pa.types.is_floating(kind):
        return float(value)
    return _time(value, kind, zone) if pa.types.is_temporal(kind) else value


def _time(value: Any, kind: pa.DataType, zone: tzinfo | None) -> date:
    """Returns a date, or a time without a zone.

    The time is an instant in UTC if `kind` has a zone, otherwise the time of a wall clock.
    """
    moment = value
    if isinstance(value, str):
        moment = read_time(value)
    elif isinstance(value, np.datetime64):
        moment = value.astype("datetime64[us]").item()
    if not isinstance(moment, date):
        raise TypeError(
            f"{value!r} is a number or another value, of which nothing says which time it is: numbers may count "
            "milliseconds, as df.to_json() writes them by default, seconds or days; df.to_json(date_format='iso') "
            "writes text"
        )
    # A date is taken as it is written, whatever its zone is.
    if pa.types.is_date(kind):
        return moment.date() if isinstance(moment, datetime) else moment
    if not isinstance(moment, datetime):
        moment = datetime.combine(moment, time())
    if kind.tz is None:
        if moment.tzinfo is not None:
            raise TypeError(f"{value!r} has a time zone, and the column's times are of a clock without one")
    elif moment.tzinfo is not None or zone is not timezone.utc:
        aware = moment if moment.tzinfo is not None else _localised(moment, zone)
        moment = aware.astimezone(timezone.utc)
    # A Timestamp of pandas becomes a datetime: its nanoseconds are cut off.
    return datetime.combine(moment.date(), moment.time())


def _localised(moment: datetime, zone: tzinfo | None) -> datetime:
    """Returns a time with a zone. In the hour that clocks repeat in autumn, it is the first, as Spark reads text."""
    plain = datetime.combine(moment.date(), moment.time())
    if zone is None:
        # Python has no local time in the first and the last year of the calendar.
        year = min(max(plain.year, 2), 9998)
        offset = plain.replace(year=year).astimezone().utcoffset()
        zone = timezone(offset or timedelta())
    return plain.replace(tzinfo=zone)


def read_time(text: str) -> datetime:
    """Returns the time in a text in the form of ISO 8601, with its zone if there is one.

    A `ValueError` refuses other texts.
    """
    parts = _ISO.fullmatch(text.strip())
    try:
        if parts is None:
            raise ValueError("it is not year-month-day")
        day, minute, second, fraction, utc, hours, minutes = parts.groups()
        moment = datetime.fromisoformat(f"{day} {minute or '00:00'}{second or ':00'}")
        offset = timedelta(hours=abs(int(hours or 0)), minutes=int(minutes or 0))
        zone = timezone(-offset if (hours or "").startswith("-") else offset)
    except ValueError as error:
        raise ValueError(f"{text!r} is no time as ISO 8601 writes it: {error}") from None
    moment = moment.replace(microsecond=int((fraction or "")[:6].ljust(6, "0")))
    return moment.replace(tzinfo=zone) if utc or hours else moment


def _is_missing(value: Any) -> bool:
    """Whether a value is `None`, NaN, or pandas' `NaT` or `NA`."""
    if value is None or type(value).__name__ in ("NaTType", "NAType"):
        return True
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    return isinstance(value, float | np.floating) and bool(value != value)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))

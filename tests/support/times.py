"""A model that answers with the hours and days of its times, and rows of such times, each with its answer."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

FLAT = ("at", "wall", "day")
NESTED = ("visits", "stay")
SCHEMA = "id int, at timestamp, wall timestamp_ntz, day date, visits array<timestamp>, stay struct<begin: timestamp>"
# Instants in UTC. Some have a fraction, one is a midnight, and clocks of Europe and America change between them.
INSTANTS = (
    datetime(2024, 1, 2, 3, 4, 5, 250_000),
    datetime(2024, 7, 2),
    datetime(2024, 3, 10, 23, 59, 59),
    datetime(2024, 11, 3, 17, 30),
    None,
)


class Sum(nn.Module):
    """Returns the sum of each row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)


def clock(columns: dict[str, Any], *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns the parts of each column, in digits of their own; null is 77."""
    parts = {
        "at": lambda of: pc.hour(of),
        "wall": lambda of: pc.hour(of),
        "day": lambda of: pc.day(of),
        "visits": lambda of: pc.hour(pc.list_element(of, 0)),
        "stay": lambda of: pc.hour(pc.struct_field(of, 0)),
    }
    kinds = {name: str(of.type) for name, of in columns.items()}
    utc = "timestamp[us, tz=UTC]"
    expected = {"at": utc, "wall": "timestamp[us]", "day": "date32[day]", "stay": f"struct<begin: {utc}>"}
    assert all(kinds[name] == expected.get(name, kinds[name]) for name in kinds), kinds
    assert utc in kinds.get("visits", utc), kinds
    digits = [pc.fill_null(parts[name](of), 77).to_numpy(zero_copy_only=False) for name, of in columns.items()]
    return {"x": torch.from_numpy(np.stack([part * 100.0**place for place, part in enumerate(digits)], 1))}


clock.takes_nulls = True  # type: ignore[attr-defined]


def wall(instant: datetime | None) -> datetime | None:
    """Returns the time in the column of a clock without a zone: another hour of the same day."""
    return None if instant is None else instant.replace(hour=(instant.hour + 13) % 24)


def rows() -> list[dict[str, Any]]:
    """The rows, with instants that have their zone."""
    results = []
    for number, instant in enumerate(INSTANTS):
        aware = None if instant is None else instant.replace(tzinfo=timezone.utc)
        day = None if instant is None else instant.date()
        visits, stay = (None, None) if aware is None else ([aware, aware], {"begin": aware})
        results.append({"id": number, "at": aware, "wall": wall(instant), "day": day, "visits": visits, "stay": stay})
    return results


def answers(names: tuple[str, ...]) -> list[float]:
    """What the model with these inputs answers."""
    results = []
    for instant in INSTANTS:
        digits = [77.0] * len(names)
        if instant is not None:
            clock_without_zone = wall(instant)
            assert clock_without_zone is not None
            of = {"day": instant.day, "wall": clock_without_zone.hour}
            digits = [float(of.get(name, instant.hour)) for name in names]
        results.append(sum(digit * 100.0**place for place, digit in enumerate(digits)))
    return results


def table() -> pa.Table:
    """The rows in Arrow."""
    instant = pa.timestamp("us", "UTC")
    kinds = [pa.int32(), instant, pa.timestamp("us"), pa.date32(), pa.list_(instant), pa.struct([("begin", instant)])]
    names = ("id", *FLAT, *NESTED)
    return pa.Table.from_pylist(rows(), pa.schema(list(zip(names, kinds, strict=True))))

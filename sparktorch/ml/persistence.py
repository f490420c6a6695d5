"""Saving and loading through Spark: JSON metadata in Spark ML's format, and files in a Parquet data set.

`Pipeline` and `CrossValidator` read `<path>/metadata` of any stage. `<path>/data` holds the files of the
artifact as rows `(batch, name, part, content)`: Spark can write a DataFrame to every file system that it
supports, also on Connect, whose client cannot reach a file system otherwise. Data is written and read in
batches, so a model may be larger than the result of a job.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import pyarrow as pa
from pyspark.ml import Model
from pyspark.ml.param import Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter
from pyspark.ml.wrapper import JavaWrapper
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sparktorch.base.imports import import_path, load_object
from sparktorch.base.json_values import is_json, tuples_made, tuples_marked
from sparktorch.base.moved import MOVED
from sparktorch.base.weights_folder import WeightsFolder
from sparktorch.errors import PersistenceError
from sparktorch.ml.fit.summary import TrainingSummary
from sparktorch.ml.params.mixins import ModelParams
from sparktorch.model.trained_module import TrainedModule
from sparktorch.spark.compat import frame_of, ml_session
from sparktorch.spark.replace import save_beside
from sparktorch.spark.session import is_connect, switched_on
from sparktorch.train.recipe.adapter import adapter_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "FOR_ALL",
    "EstimatorReader",
    "EstimatorWriter",
    "ModelReader",
    "ModelWriter",
    "read_local",
    "write_local",
]

R = TypeVar("R", bound=Any)

# Pipelines and cross-validators do not pass options to the writers and readers of their stages.
FOR_ALL = "spark.sparktorch.allowPickle"
_PART_BYTES = 16 << 20
_BATCH_BYTES = 128 << 20
_PICKLED = "params.pkl"


class _Writer(MLWriter):
    """Base class of the writers."""

    def __init__(self, instance: Params) -> None:
        """Stores the instance to save."""
        super().__init__()
        self._instance = instance

    @property
    def _allow_pickle(self) -> bool:
        option = self.optionMap.get("allowpickle")
        return str(option).lower() == "true" if option else switched_on(self.sparkSession, FOR_ALL)

    def save(self, path: str) -> None:
        """Saves to a path that Spark can write; fails if it exists, unless `overwrite()` was called.

        With `overwrite()`, the new files are written beside the old ones, which stay until the new ones are complete.
        On Connect, whose client reaches no file system, Spark replaces `data` and then `metadata` under the path.

        Raises:
            PersistenceError: The path holds the model's weights, or the file system refuses to replace what is there.
            Exception: The path exists, or, on Connect, `data` or `metadata` under the path; this exception is Spark's.
        """
        spark = self.sparkSession
        weights = getattr(getattr(self._instance, "trained", None), "weights", None)
        if isinstance(weights, WeightsFolder) and Path(weights.path).is_relative_to(
            path.removeprefix("file://").removeprefix("file:")
        ):
            raise PersistenceError(f"{path} holds the model's own weights, in {weights.path}", hint="save it elsewhere")
        if is_connect(spark):
            self.saveImpl(path)
        elif self.shouldOverwrite:
            save_beside(spark, path, self.saveImpl)
        else:
            files = JavaWrapper(JavaWrapper._new_java_obj("org.apache.spark.ml.util.FileSystemOverwrite"))
            files._call_java("handleOverwrite", path, False, spark._jsparkSession)
            self.saveImpl(path)

    def _write_metadata(self, path: str, values: dict[str, Any], extra: dict[str, Any]) -> None:
        text = DefaultParamsWriter._get_metadata_to_save(self._instance, ml_session(self.sparkSession), extra, values)
        row = self.sparkSession.createDataFrame([(text,)], "value string").coalesce(1)
        row.write.mode(self._mode).text(os.path.join(path, "metadata"))

    def _write_files(self, path: str, directory: Path) -> None:
        mode = self._mode
        for number, chunks in enumerate(_grouped(directory)):
            names, parts, contents = zip(*chunks, strict=True)
            table = pa.table(
                {
                    "batch": pa.array([number] * len(parts), pa.int32()),
                    "name": list(names),
                    "part": pa.array(parts, pa.int32()),
                    "content": list(contents),
                }
            )
            frame_of(self.sparkSession, table).write.mode(mode).parquet(os.path.join(path, "data"))
            mode = "append"

    @property
    def _mode(self) -> str:
        return "overwrite" if self.shouldOverwrite else "error"


class _Reader(MLReader[R]):
    """Base class of the readers."""

    def __init__(self, cls: type[R]) -> None:
        """Stores the expected class."""
        super().__init__()
        self._cls = cls
        self._option: str | None = None

    def option(self, key: str, value: Any) -> Self:
        """Sets an option. With `allowPickle` = `true`, pickled code is run; set it only for sources that you trust."""
        if key.lower() == "allowpickle":
            self._option = str(value)
        return self

    @property
    def _allow_pickle(self) -> bool:
        option = self._option
        return option.lower() == "true" if option else switched_on(self.sparkSession, FOR_ALL)

    def _check_class(self, path: str) -> dict[str, Any]:
        metadata = DefaultParamsReader.loadMetadata(path, ml_session(self.sparkSession))
        expected = f"{self._cls.__module__}.{self._cls.__name__}"
        module, _, name = metadata["class"].rpartition(".")
        if expected not in {f"{home}.{name}" for home in MOVED.get(module, (module,))}:
            raise PersistenceError(
                f"{path} holds a {metadata['class']}",
                hint=f"load it with that class, not {expected}",
                code="ST-NOT-A-MODEL",
            )
        return metadata


def _grouped(directory: Path) -> Iterator[list[tuple[str, int, bytes]]]:
    """Yields the files of a directory as lists of `(name, part, content)` of about `_BATCH_BYTES` each."""
    group: list[tuple[str, int, bytes]] = []
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            for part in range(max(1, math.ceil(path.stat().st_size / _PART_BYTES))):
                group.append((path.name, part, file.read(_PART_BYTES)))
                if sum(len(content) for _, _, content in group) >= _BATCH_BYTES:
                    yield group
                    group = []
    if group:
        yield group


def read_files(spark: SparkSession, path: str, directory: Path) -> None:
    """Copies the files that were saved under `path` into a local directory."""
    data = spark.read.parquet(os.path.join(path, "data"))
    last = data.agg(F.max("batch")).head()
    for batch in range(0 if last is None else last[0] + 1):
        parts = data.where(F.col("batch") == batch).orderBy("name", "part").select("name", "content")
        for name, content in parts.collect():
            # The names may come from an attacker: `.name` keeps the file inside the directory.
            with (directory / Path(name).name).open("ab") as file:
                file.write(content)


def write_local(model: Any, directory: Path, *, allow_pickle: bool) -> None:
    """Writes a `TorchModelBase` with Params and summary as plain files into an empty local directory.

    A `PersistenceError` says that code could only be pickled, and `allow_pickle` is not set.
    """
    model.trained.save(directory, allow_pickle=allow_pickle, layers=bool(model.getOutputLayers()))
    form = {
        "class": f"{type(model).__module__}:{type(model).__qualname__}",
        "uid": model.uid,
        "params": {param.name: value for param, value in model._paramMap.items()},
        "defaults": {param.name: value for param, value in model._defaultParamMap.items() if is_json(value)},
        "summary": model.summary.to_dict() if model.hasSummary else None,
    }
    (directory / "model.json").write_text(json.dumps(form, indent=1))


def read_local(directory: Path, *, allow_pickle: bool, cls: type[Any] | None = None, code: Path | None = None) -> Any:
    """Reads a model that `write_local` wrote, as an instance of `cls`, or by default of the saved class.

    `code` is for `TrainedModule.load`. A `PersistenceError` says that there is no model of sparktorch, that the model
    has a newer format, or that it is pickled and `allow_pickle` is not set.
    """
    form = json.loads((directory / "model.json").read_text())
    cls = cls or load_object(form["class"])
    if not (isinstance(cls, type) and issubclass(cls, Model) and issubclass(cls, ModelParams)):
        raise PersistenceError(f"{form['class']} is no model of sparktorch", code="ST-NOT-A-MODEL")
    model = cls()
    model._resetUid(form["uid"])
    model._setDefault(**form.get("defaults", {}))
    model._set(**form["params"])
    summary = TrainingSummary(**form["summary"]) if form["summary"] else None
    trained = TrainedModule.load(directory, allow_pickle=allow_pickle, code=code)
    # All models have `_with` from their common base, which imports this file.
    return model._with(trained, summary)  # type: ignore[attr-defined]


class ModelWriter(_Writer):
    """Saves a fitted model."""

    def saveImpl(self, path: str) -> None:
        """Writes Params, summary and module under `path`."""
        with tempfile.TemporaryDirectory() as temporary:
            write_local(self._instance, Path(temporary), allow_pickle=self._allow_pickle)
            values = {param.name: value for param, value in self._instance._paramMap.items()}
            self._write_files(path, Path(temporary))
            self._write_metadata(path, values, {})  # The metadata comes last, because nothing loads without it.


class ModelReader(_Reader[R]):
    """Loads a fitted model."""

    def load(self, path: str) -> R:
        """Loads the model saved under `path`.

        Raises:
            PersistenceError: The model has another class or a newer format, or is pickled.
        """
        self._check_class(path)
        with tempfile.TemporaryDirectory() as temporary:
            read_files(self.sparkSession, path, Path(temporary))
            model: R = read_local(Path(temporary), allow_pickle=self._allow_pickle, cls=self._cls)
        return model


class EstimatorWriter(_Writer):
    """Saves an estimator: Params as JSON, classes and functions as import paths."""

    def saveImpl(self, path: str) -> None:
        """Writes the Params under `path`.

        Raises:
            PersistenceError: A Param has no import path, and `allowPickle` is not set.
        """
        values: dict[str, Any] = {}
        pickled: dict[str, Any] = {}
        for param, value in self._instance._paramMap.items():
            form = _json_form(value)
            if form is None and value is not None:
                pickled[param.name] = value
            else:
                values[param.name] = form
        if pickled and not self._allow_pickle:
            name = next(iter(pickled))
            raise PersistenceError(
                f"{name} has no import path that works outside this session",
                hint="put it into a module file, or allow pickled code with .write().option('allowPickle', 'true'); "
                f"for the stages of a pipeline, with spark.conf.set({FOR_ALL!r}, 'true')",
                param=name,
                code="ST-PICKLE",
            )
        if pickled:
            with tempfile.TemporaryDirectory() as temporary:
                (Path(temporary) / _PICKLED).write_bytes(cloudpickle.dumps(pickled))
                self._write_files(path, Path(temporary))
        self._write_metadata(path, values, {"pickled": sorted(pickled)})


class EstimatorReader(_Reader[R]):
    """Loads an estimator."""

    def load(self, path: str) -> R:
        """Loads the estimator saved under `path`.

        Raises:
            PersistenceError: The estimator has another class, or pickled Params.
        """
        metadata = self._check_class(path)
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        for name, value in metadata["paramMap"].items():
            if isinstance(value, dict) and value.keys() == {"$import"}:
                metadata["paramMap"][name] = load_object(value["$import"])
            elif isinstance(value, dict) and value.keys() == {"$tuples"}:
                metadata["paramMap"][name] = tuples_made(value["$tuples"])
            elif isinstance(value, dict) and value.keys() == {"$config", "values"}:
                metadata["paramMap"][name] = _config(value["$config"], value["values"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        if metadata["pickled"]:
            if not self._allow_pickle:
                raise PersistenceError(
                    f"the Params {', '.join(metadata['pickled'])} were pickled, and loading a pickle runs "
                    "whatever is in it",
                    hint="if you trust where it comes from: .read().option('allowPickle', 'true').load(path); for the "
                    f"stages of a pipeline, spark.conf.set({FOR_ALL!r}, 'true')",
                    code="ST-PICKLE",
                )
            with tempfile.TemporaryDirectory() as temporary:
                read_files(self.sparkSession, path, Path(temporary))
                with (Path(temporary) / _PICKLED).open("rb") as file:
                    instance._set(**pickle.load(file))
        loaded: R = instance
        return loaded


def _json_form(value: Any) -> Any:
    """Returns a Param's value as JSON; `None` if it has none, or is `None`."""
    if is_json(value):
        return value
    with_marks = tuples_marked(value)
    if is_json(with_marks):
        return {"$tuples": with_marks}
    path = import_path(value)
    if path is not None:
        return {"$import": path}
    config, path_of_class = adapter_of(value).to_json(value), import_path(type(value))
    return {"$config": path_of_class, "values": config} if config and path_of_class is not None else None


def _config(path: str, values: dict[str, Any]) -> Any:
    """Returns a configuration of the class that `path` names; refuses any other class, and does not call it."""
    kind = load_object(path)
    config = adapter_of(kind).from_json(kind, values)
    if config is None:
        raise PersistenceError(f"{path} is no configuration of transformers, and loading does not call it")
    return config

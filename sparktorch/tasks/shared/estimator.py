"""The base class of estimators for one task: they learn from the rows, hold some out, and choose "auto" settings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparktorch.base.config import at_least
from sparktorch.errors import ConfigError, counted
from sparktorch.ml.estimator import TorchEstimatorBase
from sparktorch.ml.fit.checks import naming_params
from sparktorch.ml.fit.prepared_data import PreparedData, Source, needs_other_rows
from sparktorch.ml.fit.translate import translate
from sparktorch.ml.fit.values import Values
from sparktorch.spark.column_names import ColumnNames
from sparktorch.spark.frame.equal_rows import NUMBER, tell_apart
from sparktorch.spark.frame.refusals import no_boolean
from sparktorch.spark.rdd import dataframe_of
from sparktorch.tasks.shared.held_out import (
    MOST_HELD_OUT,
    Sample,
    free_name,
    hashable,
    in_share,
    marked,
    too_few,
    without_nulls,
)
from sparktorch.tasks.shared.params import AUTOMATIC
from sparktorch.tasks.shared.settings import AutomaticSettings, TaskSettings, automatic_settings, fixed_settings

if TYPE_CHECKING:
    from pyspark.ml._typing import ParamMap
    from typing_extensions import Self

__all__ = ["LearningEstimator"]

_LOG = logging.getLogger(__name__)
# Each of these dict Params has the arguments of another Param.
_ARGUMENTS_OF = {"moduleParams": "module", "optimizerParams": "optimizer"}
# These Params need validation rows if they are set.
_VALIDATING = ("validationFraction", "earlyStoppingPatience", "earlyStoppingMetric", "metrics")
_NAMES = ("scheduler", "validationUnit")  # These Params also take text other than "auto".
_MANY_ROWS = 1 << 20  # Before the rows are counted, settings are checked for this number of rows.


class LearningEstimator(TorchEstimatorBase[Any]):
    """An estimator that learns from the rows before it trains on them.

    It also chooses settings by the number of its samples, and holds out some of them to see when to end a training.

    `fit`, `prepare` and `plan` call `_learn_from`. Where `_learns` is true, it calls these hooks in order:

    1. `_mark_held_out` if `_holds_out` is true: it marks rows;
    2. `_learn_rows`: it keeps in `_learned` what `_learn` returns;
    3. `_count` if `_needs_count` is true: it counts the samples, which `_capped` then bounds;
    4. `_training_rows`: it returns the rows as they are trained.

    From then on, `completed` returns a copy in which each Param that is "auto" has a number for its default. A subclass
    defines `_learn`, and its `completed` sets the Params that follow from `_learned`.

    Attributes:
        _task_settings: The constants of the task; in most estimators, a class attribute.
        _unit: What a sample is, in the plural.
        _learns_from: The Params besides `validationFraction` that decide what is learned from the rows.
        _searched: The choices of a TorchTuner without a space besides the defaults, by name as in its spaces.
        _searched_rates: Factors of the default learning rate, which are choices of a TorchTuner, too.
        _marks: The column that marks the held-out rows; empty if none are held out.
        _sample: The number of samples; `None` before they are counted.
        _learned: What `_learn` has returned; `None` before.
    """

    _unit = "rows"
    _learns_from: tuple[str, ...] = ("validationIndicatorCol",)
    _searched: Mapping[str, Sequence[Any]] = {}
    _searched_rates: Sequence[float] = (0.3, 3.0)
    _marks = ""
    _sample: Sample | None = None
    _learned: Any = None

    @property
    def _task_settings(self) -> TaskSettings:
        raise NotImplementedError

    def completed(self) -> Self:
        """Returns the estimator, or a copy with a number for each Param that is "auto"."""
        estimator = super().completed()
        p = Values(self)
        _check_values(p)
        automatic = [name for name in AUTOMATIC if _is_auto(p[name])]
        if not (automatic or self._holds_out):
            return estimator
        estimator = estimator.copy()
        if self._holds_out:  # Before the rows are marked, the column of marks has no name yet.
            estimator._set(validationIndicatorCol=self._marks or "_held_out")
        chosen = estimator._settings(held_out=self._holds_out or bool(self._marks))
        settings = chosen.params
        for name in automatic:
            estimator.clear(estimator.getParam(name))
            estimator._setDefault(**{name: settings[name]})
        if "scheduler" in automatic and settings["scheduler"] is not None:
            estimator._setDefault(schedulerInterval="step", warmupSteps=chosen.warmup_steps)
        return estimator

    def _settings(self, *, held_out: bool) -> AutomaticSettings:
        """Returns what "auto" stands for; `held_out` says whether the estimator holds out rows itself."""
        p = Values(self)
        task = self._task_settings
        if not (held_out or _is_auto(p["epochs"])):
            return fixed_settings(task)
        if p.brings_its_training:  # A LightningModule has schedules of its own.
            task = replace(task, scheduler=None, warmup=0.0)
        return automatic_settings(
            _MANY_ROWS if self._sample is None else self._sample.trained,
            task,
            # A LightningModule may log no val_loss.
            validates=p.validated and not p.brings_its_training,
            batch_size=None if _is_auto(p["batchSize"]) else p["batchSize"],
            least_batch=p.sharing,
            workers=p.rows_are_divided_by,
        )

    @property
    def _holds_out(self) -> bool:
        """Whether a fit is to mark rows that it holds out."""
        p = Values(self)
        if self._sample is not None or self._marks or p.validated or not p["validationFraction"]:
            return False
        if p.brings_its_training and not p.is_set("validationFraction"):
            return False  # A LightningModule may have no validation_step.
        return _is_auto(p["epochs"]) or p.is_set("validationFraction")

    @property
    def _asks_for_validation(self) -> bool:
        """Whether a Param that the user has set needs validation rows."""
        p = Values(self)
        return any(p.is_set(name) and p[name] not in (None, "auto") for name in _VALIDATING) or p.follows_loss

    @property
    def _needs_count(self) -> bool:
        """Whether settings depend on the number of samples."""
        return _is_auto(Values(self)["epochs"]) or self._holds_out

    @property
    def _learns(self) -> bool:
        return True

    def _holding_out(self) -> Self:
        """Returns a copy that holds out rows whatever its epochs are, if the estimator does."""
        estimator = self.copy()
        return estimator._set(validationFraction=Values(self)["validationFraction"]) if self._holds_out else estimator

    def _learn_from(self, dataset: DataFrame) -> tuple[Self, DataFrame]:
        if not self._learns or self._has_learned:
            return self, dataset
        translate(self, self._task)  # Params that contradict each other are refused before there is a job.
        with naming_params(self):
            estimator, rows = self._learn_and_hold_out(dataset)
        if estimator._sample is not None and (estimator._marks or _is_auto(Values(self)["epochs"])):
            _LOG.info("%s: %s", type(self).__name__, estimator._description())
        return estimator, estimator._training_rows(rows)

    @property
    def _has_learned(self) -> bool:
        return self._learned is not None

    def _learn_and_hold_out(self, dataset: DataFrame) -> tuple[Self, DataFrame]:
        """Returns a copy with what it has learned from the rows, and the rows, in which held-out rows are marked.

        If the held-out rows would be too few, it learns from the rows once more, and holds none out.
        """
        names = ColumnNames.of(dataset)
        marks = Values(self)["validationIndicatorCol"]
        if marks and not isinstance(names.type_of(marks), T.BooleanType):
            raise no_boolean(names.type_of(marks), marks)
        share = float(Values(self)["validationFraction"]) if self._holds_out else 0.0
        estimator = self.copy()
        rows = dataset
        counts = None
        if share:
            estimator._marks = free_name(names)
            rows, counts = estimator._mark_held_out(dataset, names, share)
            estimator._set(validationIndicatorCol=estimator._marks)
        estimator._learn_rows(rows)
        if not self._needs_count:
            return estimator, rows
        trained, held_out = counts or estimator._count(rows)
        if share and too_few(trained, held_out, self._task_settings):
            estimator = self.copy()
            rows = dataset
            estimator._learn_rows(rows)
            trained, held_out = estimator._count(rows)
        elif share and counts is None and held_out > MOST_HELD_OUT:
            factor, trained = estimator._capped(trained, held_out)
            rows, _ = estimator._mark_held_out(dataset, names, share * factor)
            held_out = MOST_HELD_OUT
        chosen_by = estimator._chosen_by if estimator._marks else ""
        estimator._sample = Sample(trained=trained, held_out=held_out, chosen_by=chosen_by)
        return estimator, rows

    @property
    def _chosen_by(self) -> str:
        """By what the held-out rows are chosen, for the log and the summary."""
        key = Values(self)["idCol"]
        return f"a hash of {key!r}" if key else "a hash of their contents"

    def _mark_held_out(
        self, dataset: DataFrame, names: ColumnNames, share: float
    ) -> tuple[DataFrame, tuple[int, int] | None]:
        """Returns the rows with a share of them marked in `_marks`, and the numbers of samples if it knows them.

        The numbers are of the samples that train and that are held out.
        """
        key = Values(self)["idCol"]
        columns = hashable(names, [key] if key else self._distinguishing_columns(names))
        if not key:
            dataset, columns = tell_apart(dataset, columns, hashable(names, names.schema.names))
        return marked(dataset, in_share(columns, share), self._marks).drop(NUMBER), None

    def _distinguishing_columns(self, names: ColumnNames) -> Sequence[str]:
        """Returns the columns that tell rows apart: inputs and label."""
        p = Values(self)
        inputs = p["inputCols"] or [self.getFeaturesCol()]
        label = [p["labelCol"]] if p["labelCol"] else []
        return [*inputs, *(p["labelCols"] or label)]

    def _required_columns(self, names: ColumnNames) -> Sequence[str]:
        """Returns the columns in which a null drops the row from a training if `nullPolicy` is "drop"."""
        return self._distinguishing_columns(names)

    def _without_dropped(self, rows: DataFrame) -> DataFrame:
        """Returns the rows that the fit will not drop. It does not look into arrays and vectors."""
        p = Values(self)
        if p["nullPolicy"] != "drop":
            return rows
        required = list(self._required_columns(ColumnNames.of(rows)))
        return without_nulls(rows, [*required, p["weightCol"]] if p["weightCol"] else required)

    def _learn_rows(self, rows: DataFrame) -> None:
        """Learns from the rows, and keeps what it has learned."""
        self._learned = self._learn(rows)

    def _learn(self, dataset: DataFrame) -> Any:
        """Returns what follows from the rows; a subclass defines it."""
        raise NotImplementedError

    def _count(self, rows: DataFrame) -> tuple[int, int]:
        """Returns how many samples train, and how many are marked for validation."""
        rows = self._without_dropped(rows)
        name = Values(self)["validationIndicatorCol"]
        marks = ColumnNames.of(rows).column(name) if name else F.lit(False)
        trained, held_out = rows.agg(F.count(F.when(~marks, 1)), F.count(F.when(marks, 1))).collect()[0]
        return trained, held_out

    def _capped(self, trained: int, held_out: int) -> tuple[float, int]:
        """Returns the factor of the share with which `MOST_HELD_OUT` samples are held out, and how many train then."""
        return MOST_HELD_OUT / held_out, trained + held_out - MOST_HELD_OUT

    def _training_rows(self, dataset: DataFrame) -> DataFrame:
        """Returns the rows as they are trained, after the estimator has learned from them."""
        return dataset

    def _description(self) -> str:
        """Returns what was chosen, in a line for the log."""
        assert self._sample is not None
        sample = self._sample
        p = Values(self.completed())
        steps = -(-sample.trained // p["batchSize"])
        patience = p["earlyStoppingPatience"]
        parts = [
            f"batchSize {p['batchSize']:,}, learningRate {p['learningRate']:g}",
            f"{'' if patience is None else 'at most '}{p['epochs']:,} epochs of {counted(steps, 'step', 'steps')}",
            f"{sample.trained:,} {self._unit} train",
        ]
        if self._marks:
            parts.append(f"{sample.held_out:,} are held out by {sample.chosen_by}")
        elif patience is None:
            why = f" ({self._why_none_are_held_out})" if Values(self)["validationFraction"] else ""
            parts.append(f"none are held out{why}")
        if patience is not None:
            parts.append(f"the training ends after {patience} validations without a better one")
        return ", ".join(parts)

    @property
    def _why_none_are_held_out(self) -> str:
        """Returns why a training that could hold samples out did not."""
        assert self._sample is not None
        least = self._task_settings.least_trained
        if self._sample.trained < least:
            return f"fewer than {least}"
        return "too few would train, or be held out"

    def _search_space(self) -> dict[str, list[Any]]:
        rate = Values(self.completed())["learningRate"]
        rates = {"learningRate": [float(f"{rate * factor:.3g}") for factor in self._searched_rates]}
        searched = {**rates, **self._searched}
        return {name: [None, *choices] for name, choices in searched.items() if not self._is_decided(name)}

    def _is_decided(self, name: str) -> bool:
        """Whether the user has decided on a Param, or on an entry of a dict Param: on the entry, or on its object."""
        p = Values(self)
        param, _, entry = name.partition(".")
        if p.brings_its_training and param != "moduleParams":
            return True
        if entry:
            return entry in p[param] or p.is_set(_ARGUMENTS_OF[param])
        return p.is_set(param) and not _is_auto(p[param])

    def _chosen(self) -> dict[str, Any]:
        """Returns what was chosen, as fields of the summary; nothing before the samples are counted."""
        sample = self._sample
        if sample is None:
            return {}
        p = Values(self)
        fields: dict[str, Any] = {"settings": {name: _as_json(p[name]) for name in AUTOMATIC}}
        if sample.chosen_by:
            fields["heldOut"] = {"unit": self._unit, "by": sample.chosen_by}
        return fields

    def _knowing(self, other: Any) -> Self:
        """Returns a copy with what another estimator has learned from the same rows, if it has learned anything."""
        if not isinstance(other, LearningEstimator) or not other._has_learned or self._has_learned:
            return self
        estimator = self.copy()
        estimator._sample = other._sample
        estimator._marks = other._marks
        estimator._learned = other._learned
        if estimator._marks and not self.isSet("validationIndicatorCol"):
            estimator._set(validationIndicatorCol=estimator._marks)
        differing = estimator._differing(other)
        if differing:
            raise needs_other_rows(differing)
        return estimator

    def _differing(self, other: Any) -> list[str]:
        """Returns the Params by which this estimator learns something else from the rows than another one."""
        ours, theirs = Values(self), Values(other)
        compared = [*self._learns_from, *(["validationFraction"] if self.isSet("validationFraction") else [])]
        return [name for name in compared if ours[name] != theirs[name]]

    def _fit_on(self, source: Source, judge: Callable[[dict[str, Any]], bool] | None = None) -> Any:
        estimator = self._knowing(getattr(source, "estimator", None))
        return super(LearningEstimator, estimator)._fit_on(source, judge)

    def fitMultiple(
        self, dataset: DataFrame | PreparedData, paramMaps: Sequence[ParamMap]
    ) -> Iterator[tuple[int, Any]]:
        """Trains a model for each of several settings of Params; see `TorchClassifier.fitMultiple`.

        Settings that change what is learned from the rows, or which rows are held out, are fitted one by one.
        """
        copies = [self.copy(params) for params in paramMaps]
        learning = next((copy for copy in copies if copy._learns), None)
        if isinstance(dataset, PreparedData) or self._has_learned or learning is None:
            return super().fitMultiple(dataset, paramMaps)
        changes = {*self._learns_from, "validationFraction"}
        differ = any(copy._holds_out != learning._holds_out for copy in copies)
        if differ or any(param.name in changes for params in paramMaps for param in params):
            return Estimator.fitMultiple(self, dataset, paramMaps)
        estimator, rows = learning._learn_from(dataframe_of(dataset, "fit"))
        return super(LearningEstimator, self._knowing(estimator)).fitMultiple(rows, paramMaps)


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _as_json(value: Any) -> Any:
    """Returns a value that JSON has, and any other value as text."""
    return value if value is None or isinstance(value, int | float | str) else str(value)


def _check_values(p: Values) -> None:
    """Refuses text other than "auto" in place of a number, and a share that leaves no rows to train on."""
    for name in AUTOMATIC:
        if name not in _NAMES and isinstance(p[name], str) and not _is_auto(p[name]):
            raise ConfigError(f"{name} is {p[name]!r}", hint="set a number, or 'auto'", param=name, code="ST-VALUE")
    share = p["validationFraction"] or 0.0
    at_least("validationFraction", share, 0)
    if share >= 1:
        what = f"validationFraction must be less than 1, got {share}"
        raise ConfigError(what, hint="0.1 holds out a tenth", param="validationFraction", code="ST-VALUE")

"""Validation metrics of torchmetrics, over the rows of all ranks."""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.config import Task
from sparktorch.base.imports import load_object
from sparktorch.errors import ConfigError, nearest, refusing
from sparktorch.train.recipe.lookup import signature_of

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["Metrics", "has_metric", "ones_for", "quiet", "reduce_over_ranks", "try_metrics"]

_MODULES = ("torchmetrics", "torchmetrics.classification", "torchmetrics.regression")
_RESERVED_NAMES = {"loss", "accuracy"}  # A validation reports these values itself.


class Metrics:
    """The additional metrics of a validation, in one rank."""

    def __init__(self, metrics: Mapping[str, Any], task: Task, device: str) -> None:
        """Builds the metrics by name; a `ConfigError` names a metric that cannot be built.

        A value is a class name in torchmetrics, a factory, an import path, or an instance; or a mapping that has one of
        the first three under "name", and its parameters.
        """
        self._task = task
        self._metrics = {name: _build(name, value).to(device) for name, value in metrics.items()}
        for metric in self._metrics.values():
            reduce_over_ranks(metric)

    def update(self, output: Any, label: torch.Tensor | None) -> None:
        """Adds validation rows; `output` and `label` are as from `align`."""
        if not self._metrics:
            return
        if self._task == "classification" and label is not None:
            # Given scores, torchmetrics would guess for each batch whether they are probabilities.
            output = output.sigmoid() if output.dim() == label.dim() else output.softmax(1)
            label = label.long()
        for metric in self._metrics.values():
            metric.update(output) if label is None else metric.update(output, label)

    def compute(self) -> dict[str, float]:
        """Returns the values over the rows of all ranks, and resets the metrics; it is a collective of all ranks."""
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            with quiet():  # torchmetrics warns if `update` was not called, as in a rank without rows.
                values |= _numbers(name, metric.compute())
            metric.reset()
        return values

    def check(self) -> None:
        """Refuses a metric with a state that cannot be reduced over ranks; the error has the metric's name."""
        from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

        for name, metric in self._metrics.items():
            for part in _parts(metric):
                for state, reduction in part._reductions.items():
                    is_plain_list = isinstance(part._defaults[state], list) and reduction is not dim_zero_cat
                    if not (is_plain_list or reduction is dim_zero_mean):
                        continue
                    form = "a list that is not concatenated" if is_plain_list else "a mean of means"
                    what = f"cannot be computed over several workers: {type(part).__name__} keeps {state!r} as {form}"
                    raise _metric_error(name, what, "keep sums, counts or lists with dist_reduce_fx='cat'")


def has_metric(name: str, task: Task, metrics: Iterable[str]) -> bool:
    """Returns whether a validation computes `name` from the module's output, for its task or for one of the metrics."""
    if name == "val_accuracy" and task == "classification":
        return True
    # If a metric has several numbers, an index or a key is added to its name: see `_numbers`.
    return any(name == f"val_{metric}" or name.startswith(f"val_{metric}_") for metric in metrics)


def ones_for(tensor: torch.Tensor) -> torch.Tensor:
    """Returns values for a tensor that has none, to try metrics on: ones, or zeros for integers."""
    return torch.full(tensor.shape, 1 if tensor.is_floating_point() else 0, dtype=tensor.dtype)


def try_metrics(
    metrics: Mapping[str, Any], task: Task, classes: int | None, output: Any, label: torch.Tensor | None
) -> dict[str, Any]:
    """Computes the metrics for a few rows, on the driver; a `ConfigError` names a metric that fails.

    `output` and `label` are as from `align`. Returns the metrics, in which a classifier's have `task` and `num_classes`
    filled in if they take these parameters.
    """
    complete = {}
    for name, value in metrics.items():
        if not name or name in _RESERVED_NAMES:
            raise ConfigError(f"metrics cannot hold one named {name!r}", hint="choose another name", param="metrics")
        complete[name] = value if classes is None else _fill_in(name, value, classes, output, label)
        built = Metrics({name: complete[name]}, task, "cpu")
        built.check()
        hint = (
            "a classifier's metrics get probabilities, of shape (rows,) or (rows, classes), and int64 labels; a "
            "regressor's get values and labels"
        )
        explaining = refusing(f"metric {name!r} failed on the first row", hint, param="metrics", code="ST-METRIC")
        with explaining, quiet(), torch.no_grad():
            built.update(output, label)
            built.compute()
    return complete


def _fill_in(name: str, value: Any, classes: int, output: torch.Tensor, label: torch.Tensor | None) -> Any:
    """Returns a metric with `task` and `num_classes`, if it takes them and the user has not set them."""
    if isinstance(value, nn.Module):
        return value
    factory, params = _resolve(name, value)
    has_one_score = label is not None and output.dim() == label.dim()
    defaults: dict[str, Any] = {"task": "binary"} if has_one_score else {"task": "multiclass", "num_classes": classes}
    accepted = inspect.signature(factory).parameters
    filled_in = {key: setting for key, setting in defaults.items() if key in accepted}
    return {"name": value["name"] if isinstance(value, Mapping) else value, **filled_in, **params}


def _build(name: str, value: Any) -> Metric:
    if isinstance(value, nn.Module):
        built = copy.deepcopy(value)
    else:
        factory, params = _resolve(name, value)
        hint = f"its parameters are {signature_of(factory)}"
        with refusing(f"metric {name!r} cannot be built", hint, param="metrics", code="ST-METRIC"):
            built = factory(**params)
    if not _is_metric(built):
        what = f"is a {type(built).__name__}, no torchmetrics.Metric"
        raise _metric_error(name, what, "name the metrics of a collection one by one")
    return cast("Metric", built)


def _metric_error(name: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"metric {name!r} {what}", hint=hint, param="metrics", code="ST-METRIC")


def _resolve(name: str, value: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns the factory and the parameters of a metric that is not an instance."""
    params = dict(value) if isinstance(value, Mapping) else {"name": value}
    factory = params.pop("name", None)
    if callable(factory):
        return factory, params
    if isinstance(factory, str) and ":" in factory:
        return load_object(factory), params
    base = _torchmetrics().Metric
    classes: dict[str, Any] = {}
    for module in _MODULES:
        members = vars(importlib.import_module(module))
        classes |= {
            key: member
            for key, member in members.items()
            if isinstance(member, type) and issubclass(member, base) and member is not base
        }
    if str(factory) not in classes:
        hint = nearest(str(factory), classes)
        raise ConfigError(f"metric {factory!r} is unknown", hint=hint, param="metrics", code="ST-UNKNOWN-NAME")
    return classes[str(factory)], params


def _torchmetrics() -> Any:
    try:
        return importlib.import_module("torchmetrics")
    except ImportError as error:
        raise ConfigError(
            f"metrics are computed by torchmetrics, which cannot be imported: {error}",
            hint="pip install sparktorch-estimator[metrics], on the executors too",
            param="metrics",
            code="ST-NOT-INSTALLED",
        ) from error


def _is_metric(value: Any) -> bool:
    return isinstance(value, _torchmetrics().Metric)


def reduce_over_ranks(metric: Metric) -> None:
    """Makes a metric reduce its states over ranks even if some ranks have no rows."""
    for part in _parts(metric):
        part.dist_sync_fn = _gather


def _parts(metric: Metric) -> Iterator[Metric]:
    """Yields the metric and the metrics that it wraps."""
    for part in metric.modules():
        if _is_metric(part):
            yield part  # type: ignore[misc]


def _numbers(name: str, value: Any) -> dict[str, float]:
    """Returns a metric's result as named numbers; for vectors and mappings, the index or key is added to the name."""
    if isinstance(value, Mapping):
        numbers: dict[str, float] = {}
        for key, part in value.items():
            numbers |= _numbers(f"{name}_{key}", part)
        return numbers
    values = torch.as_tensor(value)
    if values.dim() > 1:
        shape = tuple(values.shape)
        raise _metric_error(name, f"gives a tensor of shape {shape}", "only numbers and vectors can be reported")
    if values.dim() == 0:
        return {name: float(values)}
    return {f"{name}_{i}": float(number) for i, number in enumerate(values)}


def _gather(values: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """Returns the tensors of all ranks in rank order; empty tensors are left out, unless all are empty.

    torchmetrics' own function needs tensors of the same dtype and number of axes in all ranks, and a rank without rows
    does not know them.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    # A view is cloned, because otherwise the tensor that it is a part of would be sent as a whole.
    dist.all_gather_object(gathered, values.detach().cpu().clone(), group)
    parts = [part.to(values.device) for part in gathered]
    with_values = [part for part in parts if part.numel()]
    return with_values or parts


@contextmanager
def quiet() -> Iterator[None]:
    """Context without torchmetrics' warnings, such as the one about metrics that got no rows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torchmetrics")
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        yield

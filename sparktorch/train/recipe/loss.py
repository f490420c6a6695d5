"""Loss reduction: weighted sums of per-row losses and metrics, and their means over batches and ranks.

No other file weighs or divides losses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.world import World
from sparktorch.errors import ColumnError, ModuleError
from sparktorch.train.recipe.lookup import building, look_up, name_of, parameters_of
from sparktorch.train.recipe.task import each_tensor

__all__ = [
    "Loss",
    "Means",
    "Step",
    "Sums",
    "TrainingStep",
    "check_mean",
    "full_precision",
    "mean_of",
    "step_scales",
    "weigh",
    "with_tensors",
]

_ROWWISE = "return one loss per row: a tensor of shape (rows,)"
_NOISE = 1e-6  # About this much is left of float32 sums that cancel each other.

# The weighted sum of a metric, and the sum of its weights, by the metric's name.
Sums = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]]
# A step computes the sum of a batch's weighted losses, and the sums of its metrics, by calling a module.
Step = Callable[[nn.Module, Batch], tuple[torch.Tensor, Sums]]


def step_scales(weights: torch.Tensor, divisor: int) -> npt.NDArray[np.float64]:
    """Returns, for each step, the factor of a rank's weighted loss sum that makes gradients those of the mean loss.

    `weights` has the weight of each step's rows over all ranks, float64 of shape `(steps,)`; `divisor` is the number by
    which the strategy divides summed gradients.
    """
    if not weights.any():
        raise ColumnError("all rows have the weight 0", hint="see weightCol and classWeights", code="ST-WEIGHT")
    sums: npt.NDArray[np.float64] = weights.numpy()
    scales = np.zeros_like(sums)
    np.divide(divisor, sums, out=scales, where=sums > 0)
    return scales


def mean_of(total: float, weight: float) -> float:
    """Returns a weighted mean from the weighted sum and the sum of weights; NaN if the weights sum to zero."""
    return total / weight if weight else math.nan


def full_precision(output: Any) -> Any:
    """Returns a module's output for the loss: tensors of half precision become float32."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return _wide(tensor) if tensor.is_floating_point() else tensor

    return each_tensor(widen, output)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in float32 at least: sums in half precision keep three digits only."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def weigh(
    losses: Any, rows: int, weight: torch.Tensor | None, *, what: str, param: str, rowwise: str = _ROWWISE
) -> torch.Tensor:
    """Returns the weighted sum of the rows' losses, a scalar tensor.

    `losses` has the shape `(rows, ...)`, or is the mean of the rows' losses, a scalar. `weight` is float32 of shape
    `(rows,)`. For messages, `what` names the function that computed the losses, `param` its Param, and `rowwise` says
    what to do if the function should return a loss per row.
    """
    returned = ""
    if not isinstance(losses, torch.Tensor):
        returned = f"{type(losses).__name__}, which is no tensor"
    elif losses.dim() and len(losses) != rows:
        returned = f"shape {tuple(losses.shape)} for {rows} rows"
    if returned:
        hint = "return one loss per row, shape (rows,), or their mean; a trainingStep may add a dict of metrics"
        raise ModuleError(f"{what} returned {returned}", hint=hint, param=param, code="ST-LOSS")
    losses = _wide(losses)
    if losses.dim() == 0:
        if weight is not None and weight.any():
            what = f"{what} returns one number for the batch, so rows cannot be weighted"
            raise ModuleError(what, hint=rowwise, param=param)
        # The weights of placeholder rows are zero, and so is their sum.
        total: torch.Tensor = losses * (rows if weight is None else 0)
        return total
    row_losses: torch.Tensor = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
    return row_losses.sum() if weight is None else (row_losses * weight).sum()


def check_mean(
    losses: Sequence[Any], rows: Sequence[int], *, what: str, param: str, rowwise: str = _ROWWISE, rough: bool = False
) -> None:
    """Raises a `ModuleError` if a loss that is one number is not the mean of its rows' losses.

    `losses` has the loss of all rows, the loss of all rows computed again, and the loss of each part of the rows, and
    `rows` the number of rows of each part. The losses are `rough` in half precision. They are not compared if the loss
    is not finite, or differs when it is computed again. Messages are as for `weigh`.
    """
    if any(not isinstance(loss, torch.Tensor) or loss.dim() for loss in losses):
        return
    loss_of_all, repeated, *parts = map(float, losses)
    mean = mean_of(sum(loss * count for loss, count in zip(parts, rows, strict=True)), sum(rows))
    rounding = 3e-2 if rough or losses[0].dtype in (torch.bfloat16, torch.float16) else 1e-3
    size = max((abs(loss) for loss in (loss_of_all, *parts) if math.isfinite(loss)), default=0.0)
    # Dropout, for example, gives another loss for the same rows.
    repeats = abs(loss_of_all - repeated) <= 1e-5 * size
    if repeats and not abs(loss_of_all - mean) <= rounding * size + _NOISE:
        raise ModuleError(
            f"{what} is no mean over rows: it is {loss_of_all:.6g} for {sum(rows)} rows, and {mean:.6g} on average for "
            "parts of them, so it would change with the number of workers",
            hint=f"{rowwise}, as torch's losses do with reduction='none'; in weightCol, rows with several labels have "
            "the number of these, and rows that do not count 0. A loss of all rows of a worker at once, such as a "
            "contrastive one: loss.expand(rows)",
            param=param,
            code="ST-LOSS-MEAN",
        )


class TrainingStep:
    """The user's own forward pass and loss, a callable `(module, batch)`.

    Attributes:
        what: The step's name in messages.
        param: The Param that names the step.
        rowwise: What to do if the step should return a loss per row.
        hint: How the step is called, for the message if it fails on the first row; empty for `(module, batch)`.
        logs_validation: Whether its metrics "val_loss" and "val_accuracy" replace those that validation measures.
        has_metrics: Whether the step may return metrics besides the loss.
    """

    param = "trainingStep"
    rowwise = _ROWWISE
    hint = ""
    logs_validation = False
    has_metrics = True
    # The callable if it is a module, or the module that it holds.
    _module: nn.Module | None = None

    def __init__(self, function: Callable[[nn.Module, Batch], Any]) -> None:
        """Takes a callable that returns a loss per row, or the mean of these, and perhaps a mapping of metrics."""
        self.what = f"trainingStep {getattr(function, '__qualname__', type(function).__qualname__)}"
        self._function = function
        if isinstance(function, nn.Module):
            self._module = function

    def is_mean(self, module: nn.Module) -> bool:
        """Returns whether it is known before a pass that the loss is one number for a batch, the mean of its rows."""
        return False

    def check(self, module: nn.Module, batch: Batch) -> None:
        """Checks, in the dry run after a pass, what losses of single rows do not show; raises a `ModuleError`."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers of the callable by name, if it is a module."""
        return {} if self._module is None else dict(self._module.named_buffers())

    def means(self, prefix: str) -> Means:
        """Returns an empty collection for the values of the step's metrics."""
        return Means(prefix)

    def evaluate(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor | None, Sums]:
        """Returns what a call returns, for a batch of validation rows; the loss is `None` if there is none for them."""
        return self(module, batch)

    def __call__(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """Returns the weighted sum of the rows' losses, a scalar tensor, and the sums of the metrics."""
        with nullcontext() if batch.rows else _sending_nothing_back(module):
            losses, metrics = self.per_row(module, batch)
        rows = batch.rows or batch.sample_count  # Placeholder rows have losses, too, of weight zero.
        if isinstance(losses, torch.Tensor):
            losses = _without_filler(losses, batch)
        total = weigh(losses, rows, batch.loss_weight, what=self.what, param=self.param, rowwise=self.rowwise)
        if not batch.rows:  # The loss of a placeholder may be NaN, and stays NaN with a weight of zero.
            return total.nan_to_num(0.0, 0.0, 0.0), {}
        return total, {name: self._sums(name, value, batch) for name, value in metrics.items()}

    def per_row(self, module: nn.Module, batch: Batch) -> tuple[Any, Mapping[str, Any]]:
        """Returns the loss as the callable returned it, and its metrics."""
        returned = self._function(module, batch.complete())
        has_metrics = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
        return returned if has_metrics else (returned, {})

    def _sums(self, name: str, value: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | int]:
        """Returns the weighted sum of a metric and the sum of its weights; a scalar counts for all rows."""
        value = torch.as_tensor(value).detach().float()
        count = batch.rows if batch.weight is None else batch.weight.sum()
        if value.dim() == 0:
            return value * count, count
        what = f"metric {name!r} of {self.what}"
        return weigh(_without_filler(value, batch), batch.rows, batch.weight, what=what, param=self.param), count


@contextmanager
def _sending_nothing_back(module: nn.Module) -> Iterator[None]:
    """Context in which a module's outputs get gradients of zero, whatever a loss computes from the outputs."""

    def hook(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        return tensor

    def listen(_module: nn.Module, _arguments: Any, output: Any) -> None:
        each_tensor(hook, output)

    with module.register_forward_hook(listen):
        yield


def _without_filler(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns a batch's values without the values of rows that fill the batch up to the minimum of rows."""
    is_filled_up = 0 < batch.rows < batch.sample_count
    if is_filled_up and values.dim() and len(values) == batch.sample_count:
        return values[: batch.rows]
    return values


class Means:
    """Weighted means of named values over batches and ranks."""

    def __init__(self, prefix: str = "") -> None:
        """Starts without values; `prefix` is added to their names in `over_ranks`."""
        self._prefix = prefix
        self._sums: dict[str, tuple[Any, Any]] = {}

    def add(self, metrics: Sums) -> None:
        """Adds the sums of a batch."""
        for name, (value, weight) in metrics.items():
            value_sum, weight_sum = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (value_sum + _double(value), weight_sum + _double(weight))

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """Returns this rank's sums by name, for `load_state_dict`."""
        return {name: (float(value), float(weight)) for name, (value, weight) in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, tuple[float, float]]) -> None:
        """Adds the sums that `state_dict` returned."""
        self.add(state)

    def clear(self) -> None:
        """Removes all sums."""
        self._sums = {}

    def over_ranks(self, world: World) -> dict[str, float]:
        """Returns the mean of each name over all ranks, in which some may lack the name; it is a collective."""
        totals: dict[str, tuple[float, float]] = {}
        for sums in self._gather_sums(world):
            for name, (value, weight) in sums.items():
                value_sum, weight_sum = totals.get(name, (0, 0))
                totals[name] = (value_sum + value, weight_sum + weight)
        return {f"{self._prefix}{name}": mean_of(value, weight) for name, (value, weight) in totals.items()}

    def _gather_sums(self, world: World) -> list[Any]:
        """Returns the sums of each rank; ranks may have different names, so tensors of sums would not match."""
        sums = self.state_dict()
        if world.world_size == 1:
            return [sums]
        gathered: list[Any] = [None] * world.world_size
        dist.all_gather_object(gathered, sums)
        return gathered


def _double(value: torch.Tensor | float) -> torch.Tensor | float:
    return value.double() if isinstance(value, torch.Tensor) else value


class Loss:
    """The user's loss, built to return one loss per row.

    Attributes:
        name: The loss's name in messages.
        takes_probabilities: Whether it is torch's loss for the probabilities of two classes.
        ignored: The label that the loss leaves out of its own mean, such as `ignore_index`; `None` if there is none.
        rowwise: Whether the loss surely returns one value per row.
    """

    def __init__(self, loss: str | Callable[..., torch.Tensor] | None, params: Mapping[str, Any]) -> None:
        """Resolves a name, class or callable; classes with a `reduction` are made with "none"."""
        self.name = loss if isinstance(loss, str) else name_of(loss)
        function = look_up(loss, "loss")
        takes_reduction = "reduction" in parameters_of(function)
        loss_class = function if isinstance(function, type) else type(function)
        self.rowwise = takes_reduction and function.__module__.startswith("torch.nn.")
        self.takes_probabilities = issubclass(loss_class, nn.BCELoss) or function is nn.functional.binary_cross_entropy
        self.ignored = _ignored_label(function, params) if takes_reduction or hasattr(function, "reduction") else None
        if isinstance(function, type):
            function = self._make(function, params, takes_reduction=takes_reduction)
        elif params:
            raise ModuleError("lossParams are given, but loss is not a class", param="lossParams")
        elif isinstance(function, nn.Module):
            self._check(type(function), getattr(function, "weight", None), getattr(function, "reduction", None))
            function = copy.copy(function)
            if hasattr(function, "reduction"):
                vars(function)["reduction"] = "none"
        elif takes_reduction:  # The functions of torch.nn.functional do.
            function = partial(function, reduction="none")
        self._function: Callable[..., torch.Tensor] = function
        self._with_tensors = with_tensors(function)

    def _make(self, loss_class: type, params: Mapping[str, Any], *, takes_reduction: bool) -> Any:
        """Makes a loss of a class so that it returns one loss per row, if it has a `reduction`."""
        options = dict(params)
        self._check(loss_class, options.get("weight"), options.get("reduction") if takes_reduction else None)
        if issubclass(loss_class, nn.modules.loss._Loss):
            for name in ("weight", "pos_weight"):
                if isinstance(options.get(name), list | tuple):
                    options[name] = torch.tensor(options[name], dtype=torch.float32)
        if takes_reduction:
            options["reduction"] = "none"
        with building("loss", loss_class):
            return loss_class(**options)

    def _check(self, loss_class: type, weight: Any, reduction: Any) -> None:
        """Refuses options with which the loss is not the mean over a batch's rows."""
        what = ""
        hint = ""
        if reduction == "sum":
            what = "with reduction 'sum' would make the step depend on the batch size"
            hint = "leave 'reduction' out: the gradient is that of the mean"
        # torch divides by the sum of the classes' weights over the batch, which a single rank does not know.
        elif weight is not None and issubclass(loss_class, nn.CrossEntropyLoss | nn.NLLLoss):
            what = "has a weight for each class, by which the mean over a batch would not be divided"
            hint = "give the weights as classWeights"
        if what:
            raise ModuleError(f"loss {self.name} {what}", hint=hint, param="loss", code="ST-LOSS-MEAN")

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the loss's buffers by name; there are none if it is no module."""
        return {} if self._with_tensors is None else dict(self._with_tensors.named_buffers())

    def __call__(self, output: Any, label: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
        """Returns the weighted sum of the rows' losses, a scalar tensor; raises what `weigh` does."""
        losses = self.per_row(output, label)
        return weigh(losses, len(_first_tensor(output)), weight, what=f"loss {self.name}", param="loss")

    def per_row(self, output: Any, label: torch.Tensor | None) -> torch.Tensor:
        """Returns what the user's loss returns: shape `(rows, ...)`, or a scalar mean."""
        if self._with_tensors is not None:
            self._with_tensors.to(_first_tensor(output).device)
        return self._function(output) if label is None else self._function(output, label)


def _ignored_label(loss: Any, params: Mapping[str, Any]) -> int | None:
    """Returns the `ignore_index` of a loss: of an instance, or of a class or function with its parameters."""
    declared = parameters_of(loss).get("ignore_index")
    default = None if declared is None else declared.default
    ignored = params.get("ignore_index", getattr(loss, "ignore_index", default))
    return ignored if isinstance(ignored, int) else None


def _first_tensor(output: Any) -> torch.Tensor:
    """Returns an output that is a tensor, or the first tensor in a tuple or mapping."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def with_tensors(loss: Any) -> nn.Module | None:
    """Returns the loss if it is a module with tensors, which must be moved to the device of the output; else `None`."""
    if not isinstance(loss, nn.Module):
        return None
    has_tensors = any(True for _ in chain(loss.parameters(), loss.buffers()))
    return loss if has_tensors else None

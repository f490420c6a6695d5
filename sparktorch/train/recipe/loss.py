"""Loss reduction: weighted sums of per-row losses and metrics, and their means over batches and ranks.

No other file weighs or divides losses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    *("Loss", "Means", "Step", "Sums", "TrainingStep"),
    *("check_mean", "full_precision", "mean_of", "step_scales", "weigh", "with_tensors"),
]

_ROWWISE = "return one loss per row: a tensor of shape (rows,)"
_NOISE = 1e-6  # Sums in float32 that cancel leave about so much.

# Each name has a weighted sum, and the sum of its weights.
Sums = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]]
# A step computes the sum of the weighted losses of a batch, and sums of metrics, with a module that it is given.
Step = Callable[[nn.Module, Batch], tuple[torch.Tensor, Sums]]


def step_scales(weights: torch.Tensor, divisor: int) -> npt.NDArray[np.float64]:
    """Returns the factor of a rank's weighted loss sum, by step, with which gradients are those of the mean loss.

    `weights` are those of the rows of each step over all ranks, float64 of shape `(steps,)`; `divisor` is the number by
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
    """Returns what a module returned, with tensors of half precision in float32, for the loss."""

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        return _wide(tensor) if tensor.is_floating_point() else tensor

    return each_tensor(widened, output)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in float32, or in float64 if it is: sums of half precision lose all but three digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def weigh(
    losses: Any, rows: int, weight: torch.Tensor | None, *, what: str, param: str, rowwise: str = _ROWWISE
) -> torch.Tensor:
    """Returns the weighted sum of the rows' losses, a scalar tensor.

    Losses have the shape `(rows, ...)`, or are a scalar, their mean; weights are float32 of shape `(rows,)`. Messages
    name the function that computed the losses, its Param, and what to do if it should return a loss per row.
    """
    tensor = isinstance(losses, torch.Tensor)
    if not tensor or (losses.dim() and len(losses) != rows):
        returned = (
            f"shape {tuple(losses.shape)} for {rows} rows" if tensor else f"{type(losses).__name__}, which is no tensor"
        )
        hint = "return one loss per row, shape (rows,), or their mean; a trainingStep may add a dict of metrics"
        raise ModuleError(f"{what} returned {returned}", hint=hint, param=param, code="ST-LOSS")
    losses = _wide(losses)
    if losses.dim() == 0:
        if weight is not None and weight.any():
            what = f"{what} returns one number for the batch, so rows cannot be weighted"
            raise ModuleError(what, hint=rowwise, param=param)
        total: torch.Tensor = losses * (rows if weight is None else 0)
        return total
    of_rows: torch.Tensor = losses.flatten(1).mean(1) if losses.dim() > 1 else losses
    return of_rows.sum() if weight is None else (of_rows * weight).sum()


def check_mean(
    losses: Sequence[Any], rows: Sequence[int], *, what: str, param: str, rowwise: str = _ROWWISE, rough: bool = False
) -> None:
    """Compares a loss that is one number with the mean of those of parts of its rows, of which `rows` has the sizes.

    Losses are those of all rows, again of all rows, and of each part, `rough` in half precision. A loss that is not
    finite, or another one for the same rows, is not compared. Messages are as for `weigh`.
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
        what: Its name in messages.
        param: The Param that named it.
        rowwise: What to do if it should return a loss per row.
        hint: How it is called, for the message of a failure on the first row; empty for a function `(module, batch)`.
        logs_validation: Whether metrics "val_loss" and "val_accuracy" of it are those of a validation.
        has_metrics: Whether it may return metrics besides the loss.
    """

    param, rowwise, hint = "trainingStep", _ROWWISE, ""
    logs_validation = False
    has_metrics = True
    _module: nn.Module | None = None  # The callable, if it is one or holds one.

    def __init__(self, function: Callable[[nn.Module, Batch], Any]) -> None:
        """Takes a callable that returns a loss per row or their mean, or such a loss and a mapping of metrics."""
        self.what = f"trainingStep {getattr(function, '__qualname__', type(function).__qualname__)}"
        self._function = function
        if isinstance(function, nn.Module):
            self._module = function

    def is_mean(self, module: nn.Module) -> bool:
        """Whether the loss is known to be one number for a batch, the mean of its rows, before it is computed."""
        return False

    def check(self, module: nn.Module, batch: Batch) -> None:
        """Checks in the dry run, after a pass, what rows one by one do not show; raises a `ModuleError`."""

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers of the callable by name, if it is a module."""
        return {} if self._module is None else dict(self._module.named_buffers())

    def means(self, prefix: str) -> Means:
        """Returns an empty collection for the values of its metrics."""
        return Means(prefix)

    def evaluate(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor | None, Sums]:
        """Returns the same as a call for a batch of validation rows; no loss if it computes none for them."""
        return self(module, batch)

    def __call__(self, module: nn.Module, batch: Batch) -> tuple[torch.Tensor, Sums]:
        """Returns the weighted sum of the rows' losses, a scalar tensor, and the sums of the metrics."""
        with nullcontext() if batch.rows else _sending_nothing_back(module):
            losses, metrics = self.per_row(module, batch)
        rows = batch.rows or batch.sample_count  # Placeholder rows are complete, with weight zero.
        if isinstance(losses, torch.Tensor):
            losses = _without_filler(losses, batch)
        total = weigh(losses, rows, batch.loss_weight, what=self.what, param=self.param, rowwise=self.rowwise)
        if not batch.rows:  # The loss of a placeholder may be NaN, which no weight of zero hides.
            return total.nan_to_num(0.0, 0.0, 0.0), {}
        return total, {name: self._sums(name, value, batch) for name, value in metrics.items()}

    def per_row(self, module: nn.Module, batch: Batch) -> tuple[Any, Mapping[str, Any]]:
        """Returns the loss as the callable returned it, and its metrics."""
        returned = self._function(module, batch.complete())
        with_metrics = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
        return returned if with_metrics else (returned, {})

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
    """Context in which the outputs of a module pass gradients of zero back, whatever a loss makes of them."""

    def hook(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        return tensor

    def listen(_module: nn.Module, _arguments: Any, output: Any) -> None:
        each_tensor(hook, output)

    with module.register_forward_hook(listen):
        yield


def _without_filler(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns a batch's values without those of rows added to reach the minimum rows."""
    filled = 0 < batch.rows < batch.sample_count
    return values[: batch.rows] if filled and values.dim() and len(values) == batch.sample_count else values


class Means:
    """Weighted means of named values over batches and ranks."""

    def __init__(self, prefix: str = "") -> None:
        """Starts without values; `prefix` is added to their names in `over_ranks`."""
        self._prefix = prefix
        self._sums: dict[str, tuple[Any, Any]] = {}

    def add(self, metrics: Sums) -> None:
        """Adds the sums of a batch."""
        for name, (value, weight) in metrics.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = before[0] + _double(value), before[1] + _double(weight)

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """Returns this rank's sums by name, for `load_state_dict`."""
        return {name: (float(value), float(weight)) for name, (value, weight) in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, tuple[float, float]]) -> None:
        """Adds such sums."""
        self.add(state)

    def clear(self) -> None:
        """Removes all sums."""
        self._sums = {}

    def over_ranks(self, world: World) -> dict[str, float]:
        """Returns the means, each over the rows that have its name; a collective, called by every rank."""
        every = self._of_ranks(world)
        names: Iterable[str] = dict.fromkeys(name for sums in every for name in sums)
        means = {}
        for name in names:
            value, weight = (sum(part) for part in zip(*(s[name] for s in every if name in s), strict=True))
            means[f"{self._prefix}{name}"] = mean_of(value, weight)
        return means

    def _of_ranks(self, world: World) -> list[Any]:
        """Returns the sums of each rank, which may have different names, so that tensors of sums would not match."""
        every: list[Any] = [self.state_dict()] * world.world_size
        if world.world_size > 1:
            dist.all_gather_object(every, self.state_dict())
        return every


def _double(value: torch.Tensor | float) -> torch.Tensor | float:
    return value.double() if isinstance(value, torch.Tensor) else value


class Loss:
    """The user's loss, built to return one loss per row.

    Attributes:
        name: Its name in messages.
        takes_probabilities: Whether it is torch's loss of probabilities of two classes.
        ignored: The label that a mean by the loss itself would not count, as `ignore_index`; `None` if there is none.
        rowwise: Whether it is known to return one loss per row.
    """

    def __init__(self, loss: str | Callable[..., torch.Tensor] | None, params: Mapping[str, Any]) -> None:
        """Resolves a name, class or callable; classes with a `reduction` are made with "none"."""
        self.name = loss if isinstance(loss, str) else name_of(loss)
        function = look_up(loss, "loss")
        reducing = "reduction" in parameters_of(function)
        kind = function if isinstance(function, type) else type(function)
        self.rowwise = reducing and function.__module__.startswith("torch.nn.")
        self.takes_probabilities = issubclass(kind, nn.BCELoss) or function is nn.functional.binary_cross_entropy
        self.ignored = _ignored(function, params) if reducing or hasattr(function, "reduction") else None
        if isinstance(function, type):
            options = dict(params)
            self._refuse(function, options.get("weight"), options.get("reduction") if reducing else None)
            for name in ("weight", "pos_weight") if issubclass(function, nn.modules.loss._Loss) else ():
                if isinstance(options.get(name), list | tuple):
                    options[name] = torch.tensor(options[name], dtype=torch.float32)
            options |= {"reduction": "none"} if reducing else {}
            with building("loss", function):
                function = function(**options)
        elif params:
            raise ModuleError("lossParams are given, but loss is not a class", param="lossParams")
        elif isinstance(function, nn.Module):
            self._refuse(type(function), getattr(function, "weight", None), getattr(function, "reduction", None))
            function = copy.copy(function)
            if hasattr(function, "reduction"):
                vars(function)["reduction"] = "none"
        elif reducing:  # These are the functions of torch.nn.functional.
            function = partial(function, reduction="none")
        self._function: Callable[..., torch.Tensor] = function
        self._with_tensors = with_tensors(function)

    def _refuse(self, kind: type, weight: Any, reduction: Any) -> None:
        what = hint = ""
        if reduction == "sum":
            what = "with reduction 'sum' would make the step depend on the batch size"
            hint = "leave 'reduction' out: the gradient is that of the mean"
        # torch divides by the sum of the classes' weights, which is not known in one rank.
        elif weight is not None and issubclass(kind, nn.CrossEntropyLoss | nn.NLLLoss):
            what = "has a weight for each class, by which the mean over a batch would not be divided"
            hint = "give the weights as classWeights"
        if what:
            raise ModuleError(f"loss {self.name} {what}", hint=hint, param="loss", code="ST-LOSS-MEAN")

    def buffers(self) -> dict[str, torch.Tensor]:
        """Returns the buffers of a loss that is a module, by name."""
        return {} if self._with_tensors is None else dict(self._with_tensors.named_buffers())

    def __call__(self, output: Any, label: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
        """Returns the weighted sum of the rows' losses, a scalar tensor; raises as `weigh`."""
        losses = self.per_row(output, label)
        return weigh(losses, len(_first(output)), weight, what=f"loss {self.name}", param="loss")

    def per_row(self, output: Any, label: torch.Tensor | None) -> torch.Tensor:
        """Returns what the user's loss returns: shape `(rows, ...)`, or a scalar mean."""
        if self._with_tensors is not None:
            self._with_tensors.to(_first(output).device)
        return self._function(output) if label is None else self._function(output, label)


def _ignored(loss: Any, params: Mapping[str, Any]) -> int | None:
    """Returns the `ignore_index` of a loss: an instance, or a class or function with its parameters."""
    declared = parameters_of(loss).get("ignore_index")
    ignored = params.get("ignore_index", getattr(loss, "ignore_index", declared.default if declared else None))
    return ignored if isinstance(ignored, int) else None


def _first(output: Any) -> torch.Tensor:
    """Returns an output that is a tensor, or the first one in a tuple or mapping."""
    while not isinstance(output, torch.Tensor):
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output


def with_tensors(loss: Any) -> nn.Module | None:
    """Returns a loss that is a module made with tensors of its own, which go to the device of the output."""
    has = isinstance(loss, nn.Module) and any(True for _ in chain(loss.parameters(), loss.buffers()))
    return loss if has else None

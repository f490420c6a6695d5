"""One forward pass and one loss on the first row, before the job starts."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sparktorch.base.batch import Batch
from sparktorch.base.config import Task
from sparktorch.base.deferred import PartialWeights
from sparktorch.base.state_dict import check_state
from sparktorch.base.world import World
from sparktorch.errors import ModuleError, SparkTorchError, line_of_user, refusing
from sparktorch.train.recipe.adapter import adapter_of
from sparktorch.train.recipe.hints import hints_for
from sparktorch.train.recipe.loss import Loss, TrainingStep, check_mean, full_precision
from sparktorch.train.recipe.loss_tensors import check_parameters, unchanged_buffers
from sparktorch.train.recipe.metrics import ones_for, try_metrics
from sparktorch.train.recipe.module_hooks import call_plainly
from sparktorch.train.recipe.recipe import Recipe
from sparktorch.train.recipe.task import (
    align,
    are_shares,
    check_rows,
    classes_in,
    described,
    each_tensor,
    prediction,
    rows_of,
)

__all__ = ["ArgumentSpec", "DryRunResult", "OutputSpec", "arguments_of", "describe_outputs", "dry_run", "try_forward"]

_LOG = logging.getLogger(__name__)

_WITH_VALUES = (
    "with modelDir, the driver tries shapes alone; dryRun='worker' tries values, in one worker, which then holds the "
    "whole model"
)
_STEPS = 100  # The dry run supposes that an epoch has so many steps.


@dataclass(frozen=True)
class OutputSpec:
    """One tensor that `forward` returns: its key or index, empty if it is alone, and the shape of one row."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ArgumentSpec:
    """One tensor that `forward` gets.

    Attributes:
        name: Its name in messages, such as `column 'x'`.
        dtype: Its dtype, without "torch.".
        shape: The shape of one row: of the first, if rows differ; empty for jagged tensors.
        layout: "strided", "sparse_csr" or "jagged".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = "strided"


@dataclass(frozen=True)
class DryRunResult:
    """The result of the dry run.

    Attributes:
        outputs: One spec per tensor that `forward` returned.
        classes: Number of a classifier's classes, `None` for other tasks.
        unused_parameters: Whether a trainable parameter got no gradient.
        ignored: The label that the loss leaves out; see `Loss`. `None` where it is none of the classes.
        state_bytes: Size of the module's state dict in bytes.
        aligned: Output and label as from `align`; removed once the metrics have been tried on them.
        metrics: The recipe's metrics, with `task` and `num_classes` filled in; see `complete`.
        arguments: One spec per argument that `forward` got.
        layers: Names of the modules in the module.
    """

    outputs: tuple[OutputSpec, ...]
    classes: int | None
    unused_parameters: bool
    ignored: int | None = None
    state_bytes: int = 0
    aligned: tuple[Any, torch.Tensor | None] = (None, None)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[ArgumentSpec, ...] = ()
    layers: tuple[str, ...] = ()

    def packed(self) -> tuple[dict[str, Any], bytes]:
        """Returns the result without metrics as what a rank returns: no metadata, and `torch.save` bytes."""
        content, aligned = io.BytesIO(), _shipped(self.aligned)
        torch.save(replace(self, aligned=aligned, metrics={}), content)
        return {}, content.getvalue()

    @classmethod
    def unpacked(cls, _: Mapping[str, Any], content: bytes) -> DryRunResult:
        """Rebuilds a result from `packed`; unpickles only it, and tensors in plain containers."""
        torch.serialization.add_safe_globals([cls, OutputSpec, ArgumentSpec])  # This is for all threads.
        result: DryRunResult = torch.load(io.BytesIO(content), weights_only=True)
        return result


def dry_run(
    recipe: Recipe,
    task: Task,
    seed: int,
    inputs: Mapping[str, torch.Tensor],
    label: torch.Tensor | None,
    *,
    names: tuple[str, ...] = (),
    weighted: bool = False,
    grouped: bool = False,
    device: str = "cpu",
    check: Callable[[nn.Module, Batch], None] | None = None,
    values: bool = True,
    clips: bool = False,
) -> DryRunResult:
    """Builds everything the ranks will build and runs it forward and backward on a few rows.

    `inputs` has a tensor of shape `(rows, ...)` for each argument of `forward`, by its label in messages, such as
    `column 'x'`; `names` are as in `Batch.names`. Rows will have weights if `weighted`; samples are groups, here of one
    row each, if `grouped`; gradients will be clipped if it `clips`. `check` raises if the module, or what it does with
    the rows, does not suit the strategy. Without `values`, only shapes are tried, and the module takes no memory.
    """
    device, built = (device, None) if values else ("meta", recipe.build_deferred(seed))
    if built is not None:
        if isinstance(built.saved, PartialWeights):
            built.saved.log_differences(built)
        jagged = [name for name, tensor in inputs.items() if tensor.is_nested]
        if jagged:
            what = f"{jagged[0]} is jagged, which has no shape to try alone"
            raise ModuleError(what, hint=_WITH_VALUES, param="modelDir")
    module = _with_values(recipe.build_module(seed), device) if built is None else built.module
    try:
        with nullcontext() if values else torch.device(device):
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            arguments, rows = tuple(inputs.values()), len(next(iter(inputs.values())))
            sizes = torch.ones(rows, dtype=torch.int64, device="cpu") if grouped else None
            batch = Batch(arguments, None if label is None else label.to(device), None, rows, names=names, sizes=sizes)
            if check is not None:
                check(module, batch)
            weight = torch.ones(rows, device=device) if weighted else None
            batch = replace(batch, weight=weight, loss_weight=weight)
            result = _tried(recipe, task, module, inputs, batch, values=values, clips=clips)
    except ModuleError as error:
        if values or "meta" not in str(error.__cause__):
            raise
        raise ModuleError(error.what, hint=_WITH_VALUES, code=error.code, **error.where) from error
    if built is None:
        return result
    built.check_reset()
    return replace(result, aligned=each_tensor(ones_for, result.aligned))


def _shipped(value: Any) -> Any:
    """Returns tensors without their graph on the CPU, in tuples and dicts, which are all that `unpacked` takes."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _shipped(item) for name, item in value.items()}
    return tuple(map(_shipped, value)) if isinstance(value, tuple | list) else value


def _with_values(module: nn.Module, device: str) -> nn.Module:
    """Moves a module to a device; refuses one that has tensors without values, or computed parameters."""
    _check_leaves(module)
    try:
        return module.to(device)
    except NotImplementedError as error:  # torch raises it for tensors on "meta".
        raise ModuleError(
            f"{type(module).__name__} has tensors on the device 'meta', without values: {error}",
            hint="make it without torch.device('meta'): with modelDir, no process ever makes the whole model",
            param="module",
        ) from error


def _check_leaves(module: nn.Module) -> None:
    """Refuses a parameter that is computed from others: torch trains none, and fails in the second step."""
    computed = [name for name, parameter in module.named_parameters() if not parameter.is_leaf]
    if computed:
        raise ModuleError(
            f"the module has written a value that needs a gradient into its parameter {computed[0]!r}",
            hint="write it under torch.no_grad(), or without its gradient, as value.detach()",
            param="module",
        )


def _tried(
    recipe: Recipe,
    task: Task,
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    batch: Batch,
    *,
    values: bool,
    clips: bool,
) -> DryRunResult:
    """Runs a module forward and backward on a few rows, of which `inputs` have the names for messages."""
    device, rows, label = str(batch.inputs[0].device), batch.rows, batch.label
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trainable:
        what = "the module has no parameters that require a gradient"
        hint = "freeze leaves none; take some out again with '!pattern'" if recipe.freeze else ""
        raise ModuleError(what, hint=hint, param="module", code="ST-NO-PARAMETERS")
    check_state(module.state_dict())
    hooks = recipe.build_hooks(module, World(device=device), _STEPS)
    training_step = hooks.training_step(call_plainly) or recipe.build_training_step()
    loss = None if training_step else recipe.build_loss()
    recipe.check_optimizer(module)
    recipe.check_scheduler()
    module.eval()  # A few equal rows have no batch statistics.
    output = _forward(module, inputs, batch.names)
    outputs = describe_outputs(output)
    classes = _check_classes(task, output, rows, loss)
    if label is not None and classes is not None:
        label = label.to(torch.int64).clamp(0, classes - 1)  # The ranks check every label.
    batch = replace(batch, label=label)
    if loss is not None:
        with unchanged_buffers(loss, f"loss {loss.name}", "loss", values=values):
            total = _try_loss(loss, task, output, label, batch.weight, values=values)
        check_parameters(total, module, f"loss {loss.name}", "loss")
    else:
        assert training_step is not None
        hooks.begin_fit(0, 0)
        with unchanged_buffers(training_step, training_step.what, training_step.param, values=values):
            total = _try_step(training_step, module, batch, values=values)
        check_parameters(total, module, training_step.what, training_step.param)
        if values:
            training_step.check(module, batch)
    _check_leaves(module)
    unused = any(parameter.grad is None for parameter in trainable)
    hooks.try_validation(batch)
    recipe.check_scored(module)
    if values:
        recipe.try_sparse(module, clips=clips)
    return DryRunResult(
        outputs,
        classes,
        unused_parameters=unused,
        ignored=None if loss is None or (classes and loss.ignored not in range(classes)) else loss.ignored,
        state_bytes=sum(tensor.nbytes for tensor in module.state_dict().values()),
        aligned=align(task, output, label),
        arguments=arguments_of(inputs),
        layers=tuple(name for name, _ in module.named_modules() if name),
    )


def _forward(module: nn.Module, inputs: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> Any:
    """Calls a module with a few rows; an error says how they arrive."""
    try:
        return full_precision(prediction(adapter_of(module).call(module, tuple(inputs.values()), names)))
    except SparkTorchError:
        raise
    except Exception as error:
        mapping = "".join(
            f"\n     argument {i} of forward <- {name}: {described(tensor)}"
            for i, (name, tensor) in enumerate(inputs.items())
        )
        raise ModuleError(
            f"forward of {type(module).__qualname__} failed on the first row{line_of_user(error)}: "
            f"{type(error).__name__}: {error}",
            hint=f"the columns arrive as{mapping}{hints_for(error, inputs)}",
            param="module",
            code="ST-FORWARD",
        ) from error


@torch.no_grad()
def try_forward(
    module: nn.Module, task: Task, inputs: Mapping[str, torch.Tensor], names: tuple[str, ...]
) -> tuple[tuple[OutputSpec, ...], int | None]:
    """Returns what a module in evaluation mode makes of a few rows, and the number of classes of a classifier."""
    output = _forward(module, inputs, names)
    return describe_outputs(output), _check_classes(task, output, len(next(iter(inputs.values()))), None)


def arguments_of(inputs: Mapping[str, torch.Tensor]) -> tuple[ArgumentSpec, ...]:
    """Returns one spec per argument of `forward`, of a few rows by a name for messages."""
    specs = []
    for name, tensor in inputs.items():
        dtype, layout = str(tensor.dtype).removeprefix("torch."), str(tensor.layout).removeprefix("torch.")
        specs.append(ArgumentSpec(name, dtype, () if tensor.is_nested else tuple(tensor.shape[1:]), layout))
    return tuple(specs)


def complete(trial: DryRunResult, metrics: Mapping[str, Any], task: Task) -> DryRunResult:
    """Tries the metrics on the dry run's output; returns its result with the metrics. Errors name the metric."""
    return replace(trial, metrics=try_metrics(metrics, task, trial.classes, *trial.aligned), aligned=(None, None))


def _try_loss(
    loss: Loss, task: Task, output: Any, label: torch.Tensor | None, weight: torch.Tensor | None, *, values: bool
) -> torch.Tensor:
    """Runs a loss forward and backward on a few rows, and forward on the first one and two; returns it."""
    labels = "" if label is None else f" and labels {described(label)}"
    hint = f"the module returned {described(output)}{labels}"
    if task == "classification":
        hint += "; CrossEntropyLoss takes a score for each class, BCEWithLogitsLoss one a row, for two classes"
    elif label is not None and not label.is_floating_point() and getattr(output, "shape", None) == label.shape:
        hint += "; losses of numbers, such as BCEWithLogitsLoss, take labels that are cast as float or array<float>"

    def of_rows(start: int, end: int) -> Any:
        return loss.per_row(*align(task, rows_of(output, start, end), None if label is None else label[start:end]))

    with refusing(f"loss {loss.name} failed on the first row", hint, param="loss", code="ST-LOSS"):
        _check_rows(of_rows, f"loss {loss.name}", "loss", hint, values=values)
        total = loss(*align(task, output, label), weight)
        total.backward()  # type: ignore[no-untyped-call]
    return total


def _try_step(step: TrainingStep, module: nn.Module, batch: Batch, *, values: bool) -> torch.Tensor:
    """Runs a training step forward and backward on a few rows, and forward on one and two; returns its loss."""
    inputs = ", ".join(described(tensor) for tensor in batch.inputs)
    label = "" if batch.label is None else f" and label {described(batch.label)}"
    hint = f"{step.hint or 'it is called with the module and a batch'}; inputs ({inputs}){label}"

    def of_rows(start: int, end: int) -> Any:
        return step.per_row(module, batch.slice(start, end))[0]

    with refusing(f"{step.what} failed on the first row", hint, param=step.param, code="ST-LOSS"):
        _check_rows(of_rows, step.what, step.param, hint, values=values)
        total, _ = step(module, batch)
        total.backward()  # type: ignore[no-untyped-call]
    return total


def _check_rows(per_row: Callable[[int, int], Any], what: str, param: str, hint: str, *, values: bool) -> None:
    """Refuses a loss that pairs every row with every other by broadcasting `(rows, 1)` with `(rows,)`, and a sum."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")  # torch's own losses report it so.
        losses = [per_row(0, rows) for rows in (1, 2)]
        if values:
            check_mean([losses[1], per_row(0, 2), losses[0], per_row(1, 2)], (1, 1), what=what, param=param)
    if all(isinstance(loss, torch.Tensor) for loss in losses) and losses[0].shape[1:] != losses[1].shape[1:]:
        raise ModuleError(
            f"{what} pairs every row with every other: its shape grows with the square of the rows",
            hint=f"{hint}: squeeze or unsqueeze one of them",
            param=param,
        )


def describe_outputs(output: Any) -> tuple[OutputSpec, ...]:
    """Returns one spec per tensor of what `forward` returned."""
    named: dict[Any, Any] = {}
    if isinstance(output, torch.Tensor):
        named = {"": output}
    elif isinstance(output, Mapping):
        named = dict(output)
    elif isinstance(output, tuple | list):
        named = dict(enumerate(output))
    if not named or not all(isinstance(t, torch.Tensor) and t.dim() for t in named.values()):
        hint = "return a tensor with one row per row of the input, or a tuple or dict of such tensors"
        raise ModuleError(f"forward returned {described(output)}", hint=hint, code="ST-OUTPUT")
    return tuple(OutputSpec(str(name), tuple(tensor.shape[1:])) for name, tensor in named.items())


def _check_classes(task: Task, output: Any, rows: int, loss: Loss | None) -> int | None:
    """Returns a classifier's number of classes, else `None`; raises if the output cannot be scores or values."""
    if task == "generic":
        return None
    if not isinstance(output, torch.Tensor) or output.dim() > 2:
        hint = (
            "a classifier returns scores of shape (rows, classes), a regressor (rows,) or (rows, values); for anything "
            "else there is TorchEstimator"
        )
        raise ModuleError(f"the module returned {described(output)}", hint=hint, param="module", code="ST-OUTPUT")
    check_rows(output, rows)
    if task == "regression":
        return None
    wrong = ""
    if loss is not None and loss.takes_probabilities:
        wrong = f"loss {loss.name} takes probabilities, and a classifier's module returns scores (logits)"
    elif loss is not None and loss.name == "CrossEntropyLoss" and (output.dim() == 1 or output.shape[1] == 1):
        wrong = "the module returns one score a row, which CrossEntropyLoss cannot train"
    if wrong:
        raise ModuleError(
            wrong,
            hint="for two classes, use loss='BCEWithLogitsLoss' and one score a row, and leave the sigmoid out of the "
            "module: scoring applies it; for more, return one score per class",
            param="loss",
        )
    if output.device.type != "meta" and output.dim() == 2 and are_shares(output):
        _LOG.warning(
            "the module's scores of the first row are at least 0 and sum to 1: if it ends with a softmax, take that "
            "out; scoring applies one, and so does CrossEntropyLoss"
        )
    return classes_in(tuple(output.shape[1:]))

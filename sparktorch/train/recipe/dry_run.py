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
from sparktorch.base.deferred import Deferred, PartialWeights
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
_STEPS = 100  # The dry run supposes that an epoch has this number of steps.


@dataclass(frozen=True)
class OutputSpec:
    """One tensor that `forward` returns.

    Attributes:
        name: The tensor's key or index in what `forward` returns; empty if `forward` returns only this tensor.
        shape: The shape of one row.
    """

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ArgumentSpec:
    """One tensor that `forward` gets.

    Attributes:
        name: The tensor's name in messages, such as `column 'x'`.
        dtype: The tensor's dtype, without "torch.".
        shape: The shape of one row; if rows differ, that of the first row. It is empty for jagged tensors.
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
        classes: Number of a classifier's classes; `None` for other tasks.
        unused_parameters: Whether a trainable parameter got no gradient.
        ignored: The label that the loss leaves out, see `Loss`; `None` if there is none, or if a classifier has no such
            class.
        state_bytes: Size of the module's state dict in bytes.
        aligned: Output and label as from `align`, on which metrics are tried; removed afterwards.
        metrics: The recipe's metrics, with `task` and `num_classes` filled in; see `complete`.
        arguments: One spec per argument that `forward` got.
        layers: Paths of the parts of the module.
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
        """Returns the result without metrics as a rank returns results: empty metadata, and bytes of `torch.save`."""
        content = io.BytesIO()
        aligned = _on_host(self.aligned)
        torch.save(replace(self, aligned=aligned, metrics={}), content)
        return {}, content.getvalue()

    @classmethod
    def unpacked(cls, _: Mapping[str, Any], content: bytes) -> DryRunResult:
        """Returns the result that was `packed`; unpickles nothing but results, and tensors in plain containers."""
        torch.serialization.add_safe_globals(
            [cls, OutputSpec, ArgumentSpec]
        )  # They are safe in all threads from now on.
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

    Args:
        recipe: The factories of module, loss and the rest.
        task: What the labels mean.
        seed: The seed of the training.
        inputs: A tensor of shape `(rows, ...)` for each argument of `forward`, by its name in messages, such as
            `column 'x'`.
        label: The labels of the rows, if there are any.
        names: As in `Batch.names`.
        weighted: Whether rows will have weights.
        grouped: Whether samples are groups, which have one row each here.
        device: The device on which to try the module.
        check: Raises an error if the module, or what the module does with the rows, does not suit the strategy.
        values: Whether the module has values; otherwise only shapes are tried, and the module takes no memory.
        clips: Whether gradients will be clipped.
    """
    built: Deferred | None = None
    if values:
        module = _move_with_values(recipe.build_module(seed), device)
    else:
        built = _build_without_values(recipe, seed, inputs)
        module = built.module
        device = "meta"
    try:
        with nullcontext() if values else torch.device(device):
            inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
            arguments = tuple(inputs.values())
            rows = len(next(iter(inputs.values())))
            sizes = torch.ones(rows, dtype=torch.int64, device="cpu") if grouped else None
            batch = Batch(arguments, None if label is None else label.to(device), None, rows, names=names, sizes=sizes)
            if check is not None:
                check(module, batch)
            weight = torch.ones(rows, device=device) if weighted else None
            batch = replace(batch, weight=weight, loss_weight=weight)
            result = _try_passes(recipe, task, module, inputs, batch, values=values, clips=clips)
    except ModuleError as error:
        if values or "meta" not in str(error.__cause__):
            raise
        # The module needs values for its forward pass, as for a condition.
        raise ModuleError(error.what, hint=_WITH_VALUES, code=error.code, **error.where) from error
    if built is None:
        return result
    built.check_reset()
    return replace(result, aligned=each_tensor(ones_for, result.aligned))


def _build_without_values(recipe: Recipe, seed: int, inputs: Mapping[str, torch.Tensor]) -> Deferred:
    """Builds the module without values; logs what its saved weights lack, and refuses inputs without a shape."""
    built = recipe.build_deferred(seed)
    if isinstance(built.saved, PartialWeights):
        built.saved.log_differences(built)
    for name, tensor in inputs.items():
        if tensor.is_nested:
            what = f"{name} is jagged, which has no shape to try alone"
            raise ModuleError(what, hint=_WITH_VALUES, param="modelDir")
    return built


def _on_host(value: Any) -> Any:
    """Returns tensors without their graphs on the CPU; lists and mappings become tuples and dicts, for `unpacked`."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _on_host(item) for name, item in value.items()}
    return tuple(map(_on_host, value)) if isinstance(value, tuple | list) else value


def _move_with_values(module: nn.Module, device: str) -> nn.Module:
    """Moves a module to a device; refuses tensors without values, and parameters that are computed."""
    _check_leaves(module)
    try:
        return module.to(device)
    except NotImplementedError as error:  # torch raises it for tensors without values.
        raise ModuleError(
            f"{type(module).__name__} has tensors on the device 'meta', without values: {error}",
            hint="make it without torch.device('meta'): with modelDir, no process ever makes the whole model",
            param="module",
        ) from error


def _check_leaves(module: nn.Module) -> None:
    """Refuses a parameter that is computed from other tensors: torch cannot train it, and fails in the second step."""
    computed = [name for name, parameter in module.named_parameters() if not parameter.is_leaf]
    if computed:
        raise ModuleError(
            f"the module has written a value that needs a gradient into its parameter {computed[0]!r}",
            hint="write it under torch.no_grad(), or without its gradient, as value.detach()",
            param="module",
        )


def _try_passes(
    recipe: Recipe,
    task: Task,
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    batch: Batch,
    *,
    values: bool,
    clips: bool,
) -> DryRunResult:
    """Runs a module forward and backward on a few rows; `inputs` has the inputs of the batch by names for messages."""
    device = str(batch.inputs[0].device)
    rows = batch.rows
    label = batch.label
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
    module.eval()  # Batch statistics make no sense for a few equal rows.
    output = _forward(module, inputs, batch.names)
    outputs = describe_outputs(output)
    classes = _check_classes(task, output, rows, loss)
    if label is not None and classes is not None:
        # The ranks check every label; here, any label does.
        label = label.to(torch.int64).clamp(0, classes - 1)
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
        ignored=_ignored_class(loss, classes),
        state_bytes=sum(tensor.nbytes for tensor in module.state_dict().values()),
        aligned=align(task, output, label),
        arguments=arguments_of(inputs),
        layers=tuple(name for name, _ in module.named_modules() if name),
    )


def _ignored_class(loss: Loss | None, classes: int | None) -> int | None:
    """Returns the label that a loss leaves out; `None` if there is none, or if a classifier has no such class."""
    if loss is None:
        return None
    if classes and loss.ignored not in range(classes):
        return None
    return loss.ignored


def _forward(module: nn.Module, inputs: Mapping[str, torch.Tensor], names: tuple[str, ...]) -> Any:
    """Calls a module with a few rows; an error says in which form the columns arrive."""
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
    """Calls a module in evaluation mode with a few rows; returns specs of its outputs, and a classifier's classes."""
    output = _forward(module, inputs, names)
    return describe_outputs(output), _check_classes(task, output, len(next(iter(inputs.values()))), None)


def arguments_of(inputs: Mapping[str, torch.Tensor]) -> tuple[ArgumentSpec, ...]:
    """Returns one spec per argument of `forward`; `inputs` has a few rows of each, by names for messages."""
    specs = []
    for name, tensor in inputs.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout = str(tensor.layout).removeprefix("torch.")
        specs.append(ArgumentSpec(name, dtype, () if tensor.is_nested else tuple(tensor.shape[1:]), layout))
    return tuple(specs)


def complete(trial: DryRunResult, metrics: Mapping[str, Any], task: Task) -> DryRunResult:
    """Tries the metrics on the dry run's output; returns the result with the metrics. Errors name the metric."""
    return replace(trial, metrics=try_metrics(metrics, task, trial.classes, *trial.aligned), aligned=(None, None))


def _try_loss(
    loss: Loss, task: Task, output: Any, label: torch.Tensor | None, weight: torch.Tensor | None, *, values: bool
) -> torch.Tensor:
    """Runs a loss forward and backward on a few rows, and forward on one and on two rows; returns its value."""
    labels = "" if label is None else f" and labels {described(label)}"
    hint = f"the module returned {described(output)}{labels}"
    if task == "classification":
        hint += "; CrossEntropyLoss takes a score for each class, BCEWithLogitsLoss one a row, for two classes"
    elif label is not None and not label.is_floating_point() and getattr(output, "shape", None) == label.shape:
        hint += "; losses of numbers, such as BCEWithLogitsLoss, take labels that are cast as float or array<float>"

    def loss_between(start: int, end: int) -> Any:
        return loss.per_row(*align(task, rows_of(output, start, end), None if label is None else label[start:end]))

    with refusing(f"loss {loss.name} failed on the first row", hint, param="loss", code="ST-LOSS"):
        _check_rows(loss_between, f"loss {loss.name}", "loss", hint, values=values)
        total = loss(*align(task, output, label), weight)
        total.backward()  # type: ignore[no-untyped-call]
    return total


def _try_step(step: TrainingStep, module: nn.Module, batch: Batch, *, values: bool) -> torch.Tensor:
    """Runs a training step forward and backward on a few rows, and forward on one and on two; returns its loss."""
    inputs = ", ".join(described(tensor) for tensor in batch.inputs)
    label = "" if batch.label is None else f" and label {described(batch.label)}"
    hint = f"{step.hint or 'it is called with the module and a batch'}; inputs ({inputs}){label}"

    def loss_between(start: int, end: int) -> Any:
        losses, _ = step.per_row(module, batch.slice(start, end))
        return losses

    with refusing(f"{step.what} failed on the first row", hint, param=step.param, code="ST-LOSS"):
        _check_rows(loss_between, step.what, step.param, hint, values=values)
        total, _ = step(module, batch)
        total.backward()  # type: ignore[no-untyped-call]
    return total


def _check_rows(loss_between: Callable[[int, int], Any], what: str, param: str, hint: str, *, values: bool) -> None:
    """Refuses a loss that is a sum over rows, and one that pairs every row with every other row.

    The latter happens if `(rows, 1)` and `(rows,)` are broadcast to `(rows, rows)`. `loss_between` returns the loss of
    the rows from `start` to `end`.
    """
    with torch.no_grad(), warnings.catch_warnings():
        # With this warning, torch's own losses say that they broadcast.
        warnings.filterwarnings("error", message="Using a target size")
        first = loss_between(0, 1)
        both = loss_between(0, 2)
        if values:
            check_mean([both, loss_between(0, 2), first, loss_between(1, 2)], (1, 1), what=what, param=param)
    are_tensors = isinstance(first, torch.Tensor) and isinstance(both, torch.Tensor)
    if are_tensors and first.shape[1:] != both.shape[1:]:
        raise ModuleError(
            f"{what} pairs every row with every other: its shape grows with the square of the rows",
            hint=f"{hint}: squeeze or unsqueeze one of them",
            param=param,
        )


def describe_outputs(output: Any) -> tuple[OutputSpec, ...]:
    """Returns one spec per tensor that `forward` returned; refuses an output without rows."""
    tensors: dict[Any, Any] = {}
    if isinstance(output, torch.Tensor):
        tensors = {"": output}
    elif isinstance(output, Mapping):
        tensors = dict(output)
    elif isinstance(output, tuple | list):
        tensors = dict(enumerate(output))
    if not tensors or not all(isinstance(value, torch.Tensor) and value.dim() for value in tensors.values()):
        hint = "return a tensor with one row per row of the input, or a tuple or dict of such tensors"
        raise ModuleError(f"forward returned {described(output)}", hint=hint, code="ST-OUTPUT")
    return tuple(OutputSpec(str(name), tuple(tensor.shape[1:])) for name, tensor in tensors.items())


def _check_classes(task: Task, output: Any, rows: int, loss: Loss | None) -> int | None:
    """Returns a classifier's number of classes; refuses an output that cannot be a classifier's or a regressor's."""
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
    problem = ""
    if loss is not None and loss.takes_probabilities:
        problem = f"loss {loss.name} takes probabilities, and a classifier's module returns scores (logits)"
    elif loss is not None and loss.name == "CrossEntropyLoss" and (output.dim() == 1 or output.shape[1] == 1):
        problem = "the module returns one score a row, which CrossEntropyLoss cannot train"
    if problem:
        raise ModuleError(
            problem,
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

"""Matches outputs with labels for the loss and for validation, as the task says what labels mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sparktorch.base.config import Precision, Task
from sparktorch.errors import ModuleError, counted

__all__ = [
    "align",
    "are_shares",
    "autocast",
    "check_rows",
    "classes_in",
    "correct",
    "described",
    "each_tensor",
    "predicted",
    "prediction",
    "rows_of",
]


def align(task: Task, output: Any, label: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
    """Brings output and label into the shapes and dtypes that losses expect.

    Labels are int64 classes, or float values, of shape `(rows, ...)`.

    - If the output has a last axis of length one that the label lacks, the axis is dropped: torch's element-wise losses
      would broadcast `(rows, 1)` against `(rows,)` to `(rows, rows)` without an error.
    - A classifier with one score per row has two classes, and the losses for these need labels of the score's dtype.
    - For an output `{"members": (rows, members, ...)}`, the label is repeated for each member, so that a row's loss is
      the mean of its members' losses. An axis of classes becomes the second axis, where torch's losses expect it.
    """
    if isinstance(output, Mapping) and set(output) == {"members"} and label is not None:
        output = output["members"]
        label = label.unsqueeze(1).expand(-1, output.shape[1], *label.shape[1:])
        if task == "classification" and output.shape[-1] > 1:
            return output.movedim(-1, 1), label
    if task == "generic" or label is None or not isinstance(output, torch.Tensor):
        return output, label
    if output.dim() == 0:
        check_rows(output, len(label))
    if output.dim() == label.dim() + 1 and output.shape[-1] == 1:
        output = output.squeeze(-1)
    if task == "classification" and output.dim() == label.dim():
        label = label.to(output.dtype)
    return output, label


def check_rows(output: torch.Tensor, rows: int) -> None:
    """Refuses an output that does not have one row per row of the input; the dry run does not notice all of these."""
    if output.dim() == 0 or len(output) != rows:
        raise ModuleError(
            f"forward returned {counted(len(output), 'row', 'rows') if output.dim() else 'a scalar'} for "
            f"{counted(rows, 'row', 'rows')}",
            hint="return one row for each row of the input, in the same order; squeeze() drops the axis of rows, too, "
            "where a batch has one row: squeeze(-1) does not",
            param="module",
            code="ST-OUTPUT",
        )


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Returns a reusable context in which modules compute in this precision."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return _Autocast(device.type, dtype) if dtype else nullcontext()


class _Autocast(torch.autocast):
    """Autocast without torch's fused kernels for transformer layers.

    On CPUs, these kernels fail under autocast with masks of padding, or return other dtypes than the layers. torch
    itself leaves them out only on CUDA.
    """

    def __enter__(self) -> Any:
        self._fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        torch.backends.mha.set_fastpath_enabled(self._fused)
        return super().__exit__(*error)


def classes_in(shape: tuple[int, ...]) -> int:
    """Returns a classifier's number of classes, from the shape of its output for one row."""
    return max(2, shape[0] if shape else 1)


def prediction(output: Any) -> Any:
    """Returns the logits, if a model of transformers returned them among named outputs; any other output as it is."""
    has_names = isinstance(output, Mapping) and hasattr(output, "to_tuple")
    return output["logits"] if has_names and "logits" in output else output


def predicted(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Returns the class that a classifier predicts for each row, int64; `output` and `label` are as from `align`."""
    return (output > 0).long() if output.dim() == label.dim() else output.argmax(1)


def correct(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Returns whether a classifier is right, per row, as bool; `output` and `label` are as from `align`."""
    return predicted(output, label) == label


def rows_of(output: Any, start: int, end: int) -> Any:
    """Returns the rows from `start` to `end` of a module's output: a tensor, or a mapping or tuple of tensors."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[start:end]

    return each_tensor(cut, output)


def each_tensor(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Applies a function to a tensor, or to all tensors in mappings, tuples and lists; other values stay as they are.

    A container in which nothing changes is returned itself. A container with changes keeps its class, because losses
    may read attributes of a `NamedTuple` or of a mapping; a mapping that cannot be built from its items becomes a
    `dict`.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {name: each_tensor(function, item) for name, item in value.items()}
        if all(items[name] is item for name, item in value.items()):
            return value
        try:
            return type(value)(**items)
        except TypeError:
            return items
    if not isinstance(value, tuple | list):
        return value
    parts = [each_tensor(function, item) for item in value]
    if all(part is item for part, item in zip(parts, value, strict=True)):
        return value
    return getattr(value, "_make", type(value))(parts)


def are_shares(output: torch.Tensor) -> bool:
    """Returns whether the scores of each row are probabilities, as a softmax returns them."""
    sums = output.detach().double().sum(1)
    return bool((output >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-4))


def described(value: Any) -> str:
    """Returns dtype and shape of a tensor, or of all tensors in a mapping or sequence, for messages."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(("rows", *map(str, value.shape[1:]))) if value.dim() else ""
        layout = "" if value.layout == torch.strided else f" {str(value.layout).removeprefix('torch.')}"
        return f"{str(value.dtype).removeprefix('torch.')}{layout} of shape ({shape})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {described(item)}" for key, item in value.items()) + "}"
    return f"({', '.join(map(described, value))})" if isinstance(value, tuple | list) else type(value).__name__

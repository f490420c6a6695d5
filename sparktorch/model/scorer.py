"""Scores Arrow columns with a trained module: in Spark's Python workers, on the driver, and in MLflow."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sparktorch.base.batch import cut
from sparktorch.base.config import Device, Invalid, Precision
from sparktorch.base.devices import let_go
from sparktorch.data.convert.checks import present, refuse_nulls
from sparktorch.data.convert.tensors import packed, to_arrow
from sparktorch.data.fields.base import Field
from sparktorch.data.fields.kinds import kind_of
from sparktorch.data.preprocess import Preprocess
from sparktorch.data.storage import RowStorage
from sparktorch.errors import ModuleError
from sparktorch.model.trained_module import TrainedModule
from sparktorch.train.numerics.determinism import tf32_allowed
from sparktorch.train.numerics.torch_errors import is_out_of_memory
from sparktorch.train.recipe.adapter import adapter_of
from sparktorch.train.recipe.task import align, autocast, check_rows, prediction

__all__ = ["Scorer", "Scoring", "first_batch_size"]

_FIRST_ROWS = 2048

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a model scores.

    Attributes:
        batch_size: Most rows per call of the module; "auto" begins with `first_batch_size`, and halves them where the
            device's memory is full, for later calls, too.
        device: The device that is asked for; whoever makes a `Scorer` chooses the torch device. "cpu"; or an
            accelerator's type, such as "cuda": the device that Spark assigned to the task, otherwise one of the
            machine's; or "auto": the device that Spark assigned, in local mode otherwise one of the machine's,
            otherwise the CPU.
        precision: "bf16" and "fp16" run the module under autocast.
        compiled: Whether to compile the module with `torch.compile`.
        invalid: "keep" gives rows with a null null results, and "skip" also those with NaN or infinity; "error"
            refuses them.
        thresholds: One per class of a classifier: predicts the class with the largest probability / threshold. `None`
            predicts the class with the largest score.
        layers: Pairs of the name of a result and the layer of the module that adds it: what the layer returns,
            flattened to `(rows, values)`, float32; of several tensors, the first, and of several calls, the last.
    """

    batch_size: int | str = 2048
    device: Device = "auto"
    precision: Precision = "fp32"
    compiled: bool = False
    invalid: Invalid = "error"
    thresholds: tuple[float, ...] | None = None
    layers: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form of what results depend on, whatever the machine: not of sizes and devices."""
        return {"invalid": self.invalid, "thresholds": self.thresholds, "layers": dict(self.layers)}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Scoring:
        """Returns the options that `to_dict` has written, with any other entries beside them, and batches of "auto".

        Models of older versions have `keep_null`: whether a row with a null gets null results.
        """
        thresholds = form.get("thresholds")
        return cls(
            batch_size="auto",
            invalid=form.get("invalid", "keep" if form.get("keep_null") else "error"),
            thresholds=None if thresholds is None else tuple(thresholds),
            layers=tuple((form.get("layers") or {}).items()),
        )


class Scorer:
    """Scores columns with one built module."""

    def __init__(
        self,
        trained: TrainedModule,
        scoring: Scoring | None = None,
        *,
        device: str = "cpu",
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Builds the module.

        Args:
            trained: The trained module.
            scoring: How it scores; by default as `Scoring` has it.
            device: Torch device.
            weights: State dict to use in place of that in `trained`.
        """
        self._trained = trained
        self._scoring = scoring = scoring or Scoring()
        self._device = torch.device(device)
        self._searches = scoring.batch_size == "auto"
        self._batch_size = first_batch_size(scoring.batch_size)
        thresholds = scoring.thresholds
        self._thresholds = None if thresholds is None else torch.tensor(thresholds, dtype=torch.float64)
        names = [spec.column for spec in trained.inputs]
        self._preprocess = (
            None if trained.preprocess is None else Preprocess(trained.preprocess, names, trained.returned)
        )
        self._autocast = autocast(self._device, scoring.precision)
        self._names = trained.names
        self._plain = trained.build(weights).to(self._device)
        self._adapter = adapter_of(self._plain)
        self._layers = dict(scoring.layers)
        self._layer_outputs: dict[str, Any] = {}
        # Hooks of another thread would put their outputs into the same dict.
        self._one_at_a_time = Lock() if self._layers else nullcontext()
        for field, name in self._layers.items():
            self._plain.get_submodule(name).register_forward_hook(partial(_keep_output, self._layer_outputs, field))
        self._module: Any = self._plain
        if scoring.compiled:
            self._module = torch.compile(self._module, dynamic=True)

    def score_arrow(self, columns: Sequence[pa.Array], names: Sequence[str]) -> list[pa.Array]:
        """Scores one Arrow array per input, or one per source column where inputs are packed; returns one per name.

        `names` are as in `score`. Rows are invalid as `Scoring.invalid` says.
        """
        inputs, invalid = self._inputs(columns), self._scoring.invalid
        rows = None if invalid == "error" else present(inputs, self._trained.inputs, finite=invalid == "skip")
        if rows is not None:
            inputs = [column.filter(rows) for column in inputs]
        results = self._score(inputs)
        scored = [to_arrow(results[name]) for name in names]
        if rows is None:
            return scored
        # `take` gives rows that were left out null results, because their position is null.
        positions = pc.if_else(rows, pc.subtract(pc.cumulative_sum(rows.cast(pa.int64())), 1), None)
        return [column.take(positions) for column in scored]

    def score(self, columns: Sequence[pa.Array]) -> dict[str, Array]:
        """Scores one Arrow array per input.

        Returns for a classifier `scores` and `probability` of shape `(rows, classes)` and `prediction` of shape
        `(rows,)`, all float64; the scores of two classes sum to 0, and `prediction` is NaN if a score is NaN. For a
        regressor, `prediction`, float64. Otherwise one array per output name, or `prediction` for a single output.
        """
        return self._score(self._inputs(columns))

    def score_tensors(self, inputs: Sequence[torch.Tensor]) -> dict[str, Array]:
        """Scores the arguments of `forward`; returns the same as `score`."""
        rows = len(inputs[0])

        def part(start: int, stop: int) -> tuple[torch.Tensor, ...]:
            parts_of_inputs = inputs if stop - start == rows else [cut(tensor, start, stop) for tensor in inputs]
            return tuple(tensor.to(self._device) for tensor in parts_of_inputs)

        return self._in_parts(rows, part)

    def _inputs(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Returns one array per input, given one per input or one per source column."""
        specs = self._trained.inputs
        names = [name for spec in specs for name in spec.sources or (spec.column,)]
        if len(columns) != len(names):
            return [kind_of(spec).as_fitted(column, spec) for column, spec in zip(columns, specs, strict=True)]
        remaining, inputs = list(columns), []
        for spec in specs:
            count = len(spec.sources) or 1
            parts, remaining = remaining[:count], remaining[count:]
            single = not spec.sources or pa.types.is_nested(parts[0].type)
            inputs.append(kind_of(spec).as_fitted(parts[0], spec) if single else packed(parts, spec))
        return inputs

    def _score(self, inputs: Sequence[pa.Array]) -> dict[str, Array]:
        rows = len(inputs[0])
        if not rows:  # Modules need not take a batch without rows.
            return self._score_no_rows()
        fields = []
        for column, spec in zip(inputs, self._trained.inputs, strict=True):
            refuse_nulls(column, spec)
            field = kind_of(spec).field(spec, RowStorage())
            field.append(column)
            field.finish()
            if self._preprocess is None and not self._searches:
                field.to(self._device)
            fields.append(field)
        return self._in_parts(rows, partial(self._arguments, fields))

    def _score_no_rows(self) -> dict[str, Array]:
        """Returns the results of no rows."""
        output = {spec.name: torch.empty(0, *spec.shape) for spec in self._trained.outputs}
        results = self._results(output if len(output) > 1 else next(iter(output.values())), 0)
        return {**results, **{name: np.empty((0, 0), np.float32) for name in self._layers}}

    def _in_parts(self, rows: int, arguments: Callable[[int, int], tuple[torch.Tensor, ...]]) -> dict[str, Array]:
        """Scores rows, at most the batch size at a time, with the arguments from a first to before a last row."""
        parts: list[dict[str, Array]] = []
        start, size = 0, _even(rows, self._batch_size)
        while not parts or start < rows:
            stop = min(rows, start + size)
            results = self._score_part(arguments, start, stop)
            if results is None:
                size = _even(rows - start, self._batch_size)
            else:
                parts.append(results)
                start = stop
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _score_part(
        self, arguments: Callable[[int, int], tuple[torch.Tensor, ...]], start: int, stop: int
    ) -> dict[str, Array] | None:
        """Scores the rows from `start` to `stop`; `None` if the device was full, and batches are smaller now."""
        try:
            return self._forward(arguments(start, stop))
        except Exception as error:
            if not self._searches or stop - start < 2 or not is_out_of_memory(error):
                raise
            # The frames of the failed call hold tensors.
            traceback.clear_frames(error.__traceback__)
        self._batch_size = (stop - start) // 2
        let_go(str(self._device))
        return None

    def _arguments(self, fields: Sequence[Field], start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Returns the arguments of `forward` for the rows from `start` to `stop`."""
        columns = [field.part(start, stop) for field in fields]
        if self._preprocess is None:
            return tuple(argument.to(self._device) for column in columns for argument in column)
        return tuple(tensor.to(self._device) for tensor in self._preprocess(columns, stop - start).values())

    @torch.inference_mode()
    def _forward(self, inputs: tuple[torch.Tensor, ...]) -> dict[str, Array]:
        rows = len(inputs[0])
        with self._one_at_a_time, self._autocast, tf32_allowed(False, self._device):
            try:
                output = prediction(self._adapter.call(self._module, inputs, self._names, self._plain))
                of_layers = {
                    field: _by_row(self._layer_outputs.get(field), layer, rows) for field, layer in self._layers.items()
                }
            finally:
                # They hold the device's memory, so they go where forward fails, too.
                self._layer_outputs.clear()
        return {**self._results(output, rows), **of_layers}

    def _results(self, output: Any, rows: int) -> dict[str, Array]:
        """Returns the results of what the module has returned."""
        if self._trained.task != "generic":
            check_rows(output, rows)
        if self._trained.task == "classification":
            return _classify(output.cpu().double(), self._thresholds)
        if self._trained.task == "regression":
            like = torch.empty(len(output)) if output.dim() == 1 or output.shape[1] == 1 else output
            return {"prediction": align("regression", output, like)[0].cpu().double().numpy()}
        if isinstance(output, torch.Tensor):
            output = (output,)
        named: Mapping[Any, torch.Tensor] = output if isinstance(output, Mapping) else dict(enumerate(output))
        single = len(self._trained.outputs) == 1
        return {"prediction" if single else str(name): tensor.float().cpu().numpy() for name, tensor in named.items()}


def first_batch_size(batch_size: int | str) -> int:
    """Returns the most rows of the first call of the module."""
    return _FIRST_ROWS if isinstance(batch_size, str) else batch_size


def _even(rows: int, most: int) -> int:
    """Returns the size of equal batches of at most `most` rows, which avoid a tiny last one."""
    return max(1, math.ceil(rows / max(1, math.ceil(rows / most))))


def _classify(scores: torch.Tensor, thresholds: torch.Tensor | None) -> dict[str, Array]:
    if scores.dim() == 1 or scores.shape[1] == 1:  # A single score is the logit of the second class.
        logit = scores.reshape(-1)
        scores = torch.stack([-logit, logit], dim=1)
        positive = torch.sigmoid(logit)
        probability = torch.stack([1 - positive, positive], dim=1)
    else:
        probability = torch.softmax(scores, dim=1)
    if thresholds is None:
        prediction = scores.argmax(1).double()
    else:  # A class with 0 / 0 is never predicted, as in Spark.
        prediction = (probability / thresholds).nan_to_num(nan=-math.inf, posinf=math.inf).argmax(1).double()
    prediction[scores.isnan().any(1)] = math.nan  # It is no class.
    if scores.shape[1] == 2:  # The scores are centred, because Spark's evaluators order rows by the second one alone.
        scores = (scores - scores.flip(1)) / 2
    return {"scores": scores.numpy(), "probability": probability.numpy(), "prediction": prediction.numpy()}


def _keep_output(outputs: dict[str, Any], field: str, module: torch.nn.Module, arguments: Any, output: Any) -> None:
    """Keeps what a layer has returned, as a hook of that layer."""
    while isinstance(output, Mapping | tuple | list) and output:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    # It keeps a copy: ReLU(inplace=True), or `out += x`, changes what the layer has returned.
    outputs[field] = output.clone() if isinstance(output, torch.Tensor) else output


def _by_row(output: Any, layer: str, rows: int) -> Array:
    """Returns what a layer has returned as `(rows, values)`, float32."""
    what = ""
    if output is None:
        what = f"forward does not call the layer {layer!r}"
    elif not isinstance(output, torch.Tensor):
        what = f"the layer {layer!r} returns a {type(output).__name__}, and no tensor"
    elif not output.dim() or len(output) != rows:
        what = f"the layer {layer!r} returns a tensor of shape {tuple(output.shape)} for {rows} rows"
    if what:
        hint = "name a layer that returns a tensor with one entry for each row"
        raise ModuleError(what, hint=hint, param="outputLayers")
    values: Array = output.reshape(rows, output[:1].numel() if rows else 0).float().cpu().numpy()
    return values

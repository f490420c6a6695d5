"""Scores Arrow columns with a trained module: in Spark's Python workers, on the driver, and in MLflow."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
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
from sparktorch.data.convert.checks import complete_rows, refuse_nulls
from sparktorch.data.convert.tensors import pack, to_arrow
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

_DEFAULT_BATCH_SIZE = 2048

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a model scores.

    Attributes:
        batch_size: Largest number of rows per call of the module; "auto" begins with `first_batch_size`, and halves the
            number where the device's memory is full, for later calls, too.
        device: The device that the user asks for, from which the caller of `Scorer` chooses the torch device:

            - "cpu";
            - an accelerator's type, such as "cuda": the device that Spark assigned to the task, otherwise a device of
              the machine;
            - "auto": the device that Spark assigned to the task, otherwise in local mode a device of the machine,
              otherwise the CPU.
        precision: "bf16" and "fp16" run the module under autocast.
        compiled: Whether to compile the module with `torch.compile`.
        invalid: What happens to a row with a null in an input whose nulls the model does not take:

            - "error" refuses the row;
            - "keep" gives it null results;
            - "skip" gives it null results, by which the caller leaves it out, and also a row with NaN or infinity in
              such an input.
        thresholds: One threshold per class of a classifier, which predicts the class with the largest probability /
            threshold. `None` predicts the class with the largest score.
        layers: Pairs of the name of a result and the name of the layer whose output becomes this result, flattened to
            `(rows, values)`, float32. If a layer returns several tensors, it is the first one; if it is called several
            times, the last output.
    """

    batch_size: int | str = _DEFAULT_BATCH_SIZE
    device: Device = "auto"
    precision: Precision = "fp32"
    compiled: bool = False
    invalid: Invalid = "error"
    thresholds: tuple[float, ...] | None = None
    layers: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready form of the options that results depend on, which batch size and device are not."""
        return {"invalid": self.invalid, "thresholds": self.thresholds, "layers": dict(self.layers)}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Scoring:
        """Returns the options that `to_dict` has written, with the batch size "auto"; ignores other entries.

        Models of older versions have an entry `keep_null`: whether a row with a null gets null results.
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
            scoring: How it scores; by default with the defaults of `Scoring`.
            device: Torch device.
            weights: State dict to use in place of the weights in `trained`.
        """
        self._trained = trained
        self._scoring = scoring = scoring or Scoring()
        self._device = torch.device(device)
        self._halves_batches = scoring.batch_size == "auto"
        self._batch_size = first_batch_size(scoring.batch_size)
        thresholds = scoring.thresholds
        self._thresholds = None if thresholds is None else torch.tensor(thresholds, dtype=torch.float64)
        self._preprocess: Preprocess | None = None
        if trained.preprocess is not None:
            columns = [spec.column for spec in trained.inputs]
            self._preprocess = Preprocess(trained.preprocess, columns, trained.returned)
        self._autocast = autocast(self._device, scoring.precision)
        self._input_names = trained.names
        self._uncompiled = trained.build(weights).to(self._device)
        self._adapter = adapter_of(self._uncompiled)
        self._layers = dict(scoring.layers)
        self._layer_outputs: dict[str, Any] = {}
        # Two threads that call the module at once would put outputs of layers into the same dict.
        self._layer_lock = Lock() if self._layers else nullcontext()
        for result, layer in self._layers.items():
            keep_output = partial(_keep_output, self._layer_outputs, result)
            self._uncompiled.get_submodule(layer).register_forward_hook(keep_output)
        self._module: Any = self._uncompiled
        if scoring.compiled:
            self._module = torch.compile(self._module, dynamic=True)

    def score_arrow(self, columns: Sequence[pa.Array], names: Sequence[str]) -> list[pa.Array]:
        """Scores one Arrow array per input, or one per source column where inputs are packed; returns one per name.

        `names` are names of results, as in `score`. `Scoring.invalid` says what happens to rows with nulls.
        """
        inputs = self._inputs(columns)
        valid: pa.BooleanArray | None = None
        if self._scoring.invalid != "error":
            valid = complete_rows(inputs, self._trained.inputs, finite=self._scoring.invalid == "skip")
        if valid is not None:
            inputs = [column.filter(valid) for column in inputs]
        results = self._score(inputs)
        scored = [to_arrow(results[name]) for name in names]
        if valid is None:
            return scored
        # The position of a row that was left out is null, for which `take` returns null.
        positions = pc.if_else(valid, pc.subtract(pc.cumulative_sum(valid.cast(pa.int64())), 1), None)
        return [column.take(positions) for column in scored]

    def score(self, columns: Sequence[pa.Array]) -> dict[str, Array]:
        """Scores one Arrow array per input; refuses rows with nulls that the model does not take.

        Returns:
            For a classifier, `scores` and `probability` of shape `(rows, classes)` and `prediction` of shape `(rows,)`,
            all float64; the scores of two classes sum to 0, and `prediction` is NaN if a score is NaN. For a regressor,
            `prediction`, float64. Otherwise one array per output name, or `prediction` for a single output. Results of
            `Scoring.layers` come in addition.
        """
        return self._score(self._inputs(columns))

    def score_tensors(self, inputs: Sequence[torch.Tensor]) -> dict[str, Array]:
        """Scores the arguments of `forward`; returns the same as `score`."""
        rows = len(inputs[0])

        def arguments(start: int, stop: int) -> tuple[torch.Tensor, ...]:
            part = inputs if stop - start == rows else [cut(tensor, start, stop) for tensor in inputs]
            return tuple(tensor.to(self._device) for tensor in part)

        return self._score_in_parts(rows, arguments) if rows else self._score_no_rows()

    def _inputs(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Returns one array per input, with the types of the fit.

        `transform` passes one column per input, and SQL functions and MLflow one per source column. The number of
        columns says which; where both are the same, so is the result.
        """
        specs = self._trained.inputs
        if len(columns) == sum(len(spec.sources) or 1 for spec in specs):
            return self._inputs_from_sources(columns)
        return [kind_of(spec).as_fitted(column, spec) for column, spec in zip(columns, specs, strict=True)]

    def _inputs_from_sources(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Returns one array per input from one array per source column."""
        sources = iter(columns)
        inputs = []
        for spec in self._trained.inputs:
            parts = list(islice(sources, len(spec.sources) or 1))
            # The only source of an input may be packed already.
            if spec.sources and not pa.types.is_nested(parts[0].type):
                inputs.append(pack(parts, spec))
            else:
                inputs.append(kind_of(spec).as_fitted(parts[0], spec))
        return inputs

    def _score(self, inputs: Sequence[pa.Array]) -> dict[str, Array]:
        rows = len(inputs[0])
        if not rows:
            return self._score_no_rows()
        fields = []
        for column, spec in zip(inputs, self._trained.inputs, strict=True):
            refuse_nulls(column, spec)
            field = kind_of(spec).field(spec, RowStorage())
            field.append(column)
            field.finish()
            # All rows go to the device at once, except where `preprocess` takes them from the host, or where the device
            # may be too small for them.
            if self._preprocess is None and not self._halves_batches:
                field.to(self._device)
            fields.append(field)
        return self._score_in_parts(rows, partial(self._arguments, fields))

    def _score_no_rows(self) -> dict[str, Array]:
        """Returns results without rows, and does not call the module: it need not take a batch without rows."""
        output = {spec.name: torch.empty(0, *spec.shape) for spec in self._trained.outputs}
        results = self._results(output if len(output) > 1 else next(iter(output.values())), 0)
        return {**results, **{result: np.empty((0, 0), np.float32) for result in self._layers}}

    def _score_in_parts(self, rows: int, arguments: Callable[[int, int], tuple[torch.Tensor, ...]]) -> dict[str, Array]:
        """Scores at least one row, at most the batch size at a time.

        `arguments(start, stop)` returns the arguments of `forward` for the rows from `start` to before `stop`.
        """
        parts: list[dict[str, Array]] = []
        done = 0
        size = _even_size(rows, self._batch_size)
        while done < rows:
            stop = min(rows, done + size)
            results = self._score_part(arguments, done, stop)
            if results is None:
                size = _even_size(rows - done, self._batch_size)
            else:
                parts.append(results)
                done = stop
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _score_part(
        self, arguments: Callable[[int, int], tuple[torch.Tensor, ...]], start: int, stop: int
    ) -> dict[str, Array] | None:
        """Scores the rows from `start` to `stop`; if the device is full, halves the batch size and returns `None`."""
        try:
            return self._forward(arguments(start, stop))
        except Exception as error:
            if not self._halves_batches or stop - start < 2 or not is_out_of_memory(error):
                raise
            # The frames of the failed call hold tensors, which would stay in the device's memory.
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
        with self._layer_lock, self._autocast, tf32_allowed(False, self._device):
            try:
                output = prediction(self._adapter.call(self._module, inputs, self._input_names, self._uncompiled))
                layer_results = {
                    result: _layer_values(self._layer_outputs.get(result), layer, rows)
                    for result, layer in self._layers.items()
                }
            finally:
                # The outputs hold the device's memory, so they are dropped even if `forward` fails.
                self._layer_outputs.clear()
        return {**self._results(output, rows), **layer_results}

    def _results(self, output: Any, rows: int) -> dict[str, Array]:
        """Returns the results, by name, from the output of the module."""
        if self._trained.task != "generic":
            check_rows(output, rows)
        if self._trained.task == "classification":
            return _classify(output.cpu().double(), self._thresholds)
        if self._trained.task == "regression":
            # A single value per row becomes a number, as its label was.
            is_single = output.dim() == 1 or output.shape[1] == 1
            label = torch.empty(len(output)) if is_single else output
            values, _ = align("regression", output, label)
            return {"prediction": values.cpu().double().numpy()}
        if isinstance(output, torch.Tensor):
            output = (output,)
        named: Mapping[Any, torch.Tensor] = output if isinstance(output, Mapping) else dict(enumerate(output))
        is_single = len(self._trained.outputs) == 1
        return {
            "prediction" if is_single else str(name): values.float().cpu().numpy() for name, values in named.items()
        }


def first_batch_size(batch_size: int | str) -> int:
    """Returns the largest number of rows in the first call of the module."""
    return _DEFAULT_BATCH_SIZE if isinstance(batch_size, str) else batch_size


def _even_size(rows: int, most: int) -> int:
    """Returns the size of batches of at most `most` rows that are about equal, which avoids a tiny last batch."""
    batches = math.ceil(rows / most)
    return math.ceil(rows / batches)


def _classify(scores: torch.Tensor, thresholds: torch.Tensor | None) -> dict[str, Array]:
    """Returns the results of a classifier; see `Scorer.score`."""
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
    prediction[scores.isnan().any(1)] = math.nan  # `argmax` would return the class whose score is NaN.
    if scores.shape[1] == 2:
        # Spark's evaluators order rows by the second score alone, so both scores are centred.
        scores = (scores - scores.flip(1)) / 2
    return {
        "scores": scores.numpy(),
        "probability": probability.numpy(),
        "prediction": prediction.numpy(),
    }


def _keep_output(outputs: dict[str, Any], result: str, module: torch.nn.Module, arguments: Any, output: Any) -> None:
    """Keeps the output of a layer, or its first tensor, under the name of a result, as a forward hook of the layer."""
    while isinstance(output, Mapping | tuple | list) and output:
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    # A copy, because ReLU(inplace=True) or `out += x` may change the output afterwards.
    outputs[result] = output.clone() if isinstance(output, torch.Tensor) else output


def _layer_values(output: Any, layer: str, rows: int) -> Array:
    """Returns the output of a layer as float32 of shape `(rows, values)`; refuses outputs without an entry per row."""
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

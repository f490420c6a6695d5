"""The rows of a rank whose samples are groups of rows, or windows of groups, by the number of the sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparktorch.base.batch import Batch
from sparktorch.base.devices import upload
from sparktorch.data.columns import Columns, Window
from sparktorch.data.dataset.rows import Rows
from sparktorch.data.fields.base import Field
from sparktorch.data.preprocess import EVALUATION, StepContext
from sparktorch.data.sampling.groups import Samples
from sparktorch.data.sampling.plan import Numbers
from sparktorch.data.storage import RowStorage, Runs

__all__ = ["SampledRows", "windowed"]


class SampledRows(Rows):
    """Rows from which batches of samples are taken: in all methods, an index has numbers of samples.

    A batch of whole groups has their rows one after the other, and `Batch.sizes`; one of windows has them on an axis of
    their own, after that of the samples.
    """

    def __init__(
        self, fields: Mapping[str, Field], columns: Columns, *given: Any, samples: Samples, **options: Any
    ) -> None:
        """Takes what `Rows` does, and the samples."""
        super().__init__(fields, columns, *given, by_length=False, **options)
        assert columns.groups is not None
        self._samples, self._window = samples, columns.groups.window
        self.varies = self.varies or self._window is None
        self._weighed: tuple[torch.Tensor, npt.NDArray[np.float64]] | None = None  # of rows, and of samples

    @property
    def item_bytes(self) -> float:
        """Size of a sample, on average."""
        return super().item_bytes * float(self._samples.sizes.mean())

    def load(self, numbers: Numbers | range, *, inputs: bool = True) -> Rows:
        """Returns some samples, copied into memory, and what fills up batches; rows of several are read once."""
        samples, rows = self._samples.only(np.asarray(numbers))
        fields, columns = self._read(Runs.of(rows), inputs=inputs)
        return SampledRows(fields, columns, RowStorage(), count=len(rows), size=0, samples=samples)._opened()

    def _runs(self, numbers: Numbers | range) -> Runs:
        return Runs.of(self._samples.only(np.asarray(numbers))[1])

    def take(self, index: torch.Tensor, *, min_rows: int = 0, context: StepContext = EVALUATION) -> Batch:
        """Returns the batch of the samples `index`, int64 on the CPU; its last one again fills it up to `min_rows`."""
        count, missing = len(index), max(0, min_rows - len(index))
        if missing:
            last = index[-1:] if count else index.new_tensor([self._samples.count])
            index = torch.cat([index, last.expand(missing)])
        rows, sizes = self._samples.locate(index)
        batch = super().take(rows, context=context)
        window = self._window
        if window is None:
            batch = replace(batch, sizes=sizes)
        else:
            inputs, label = windowed(window, batch.inputs, batch.label)
            batch = replace(batch, inputs=inputs, label=label, tokens=None)
        weight = None if batch.weight is None else self._means(batch.weight, sizes)
        loss_weight = weight
        if batch.loss_weight is not None and batch.loss_weight is not batch.weight:
            loss_weight = self._means(batch.loss_weight, sizes)
        batch = replace(batch, rows=len(index), weight=weight, loss_weight=loss_weight)
        return batch.filled_from(count) if missing else batch

    def loss_weights(self, index: torch.Tensor) -> npt.NDArray[np.float64] | None:
        """Returns the loss weights of samples, float64; `None` means all ones."""
        if self._loss_weight is None:
            return None
        if self._weighed is None or self._weighed[0] is not self._loss_weight:
            skipped = 0 if self._window is None else self._window.context
            self._weighed = self._loss_weight, self._samples.means(self._loss_weight.numpy(), skipped=skipped)
        found: npt.NDArray[np.float64] = self._weighed[1][index.numpy()]
        return found

    def _means(self, weights: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Returns what samples weigh: the mean over the rows of a group, or over the horizon of a window."""
        if self._window is not None:
            return weights.view(-1, self._window.rows)[:, self._window.context :].mean(1)
        return torch.segment_reduce(weights, "mean", lengths=upload(sizes, weights.device))


def windowed(
    window: Window, inputs: Sequence[torch.Tensor], label: torch.Tensor | None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Returns what a module sees of the rows of windows, and the labels; see `Window.known`.

    Tensors of shape `(samples * window.rows, ...)` become `(samples, rows of the window that are seen, ...)`.
    """

    def of_samples(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(-1, window.rows, *tensor.shape[1:])

    seen = tuple(
        of_samples(tensor)[:, : None if place in window.known else window.context]
        for place, tensor in enumerate(inputs)
    )
    return seen, None if label is None else of_samples(label)[:, window.context :]

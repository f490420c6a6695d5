"""The interface between data and training: a rank's part of a batch, and the data set that yields it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from sparktorch.base.devices import jagged

__all__ = [
    "IGNORED",
    "MASK",
    "Batch",
    "RankDataset",
    "components",
    "count_tokens",
    "cut",
    "micro_batches",
    "padding",
    "rebuilt",
]

MASK = "attention_mask"
IGNORED = -100  # Losses of models leave a token with this label out, as torch's do.
# Tokenizers give these names to tensors of shape (rows, tokens).
_TOKENS = ("input_ids", MASK, "token_type_ids", "position_ids", "labels")


@dataclass(frozen=True)
class Batch:
    """A rank's part of a global batch, or a micro-batch of it.

    Attributes:
        inputs: One tensor of shape `(rows, ...)` per argument of `forward`.
        label: Tensor of shape `(rows, ...)`, or `None`.
        weight: float32 sample weights of shape `(rows,)`; `None` means all ones.
        rows: Number of real rows; of groups, if there are `sizes`. If they are fewer than the module's minimum rows,
            the inputs have extra rows at the end. A rank without rows in a step has placeholder rows only, so that it
            joins every collective: then label and weights are as long as the inputs, and the weights are zero.
        loss_weight: float32 weights in the loss of shape `(rows,)`: sample weight times class weight; `None` means all
            ones.
        lengths: Number of elements of each row, int64 of shape `(rows,)` on the CPU, by the position of the padded,
            jagged or sparse input. The mask of a padded input is the next input.
        names: One name per input: those under which `preprocess` returned them, or of their columns.
        tokens: Number of tokens of each row of the inputs, up to its last one, int64 of shape `(rows,)` on the CPU, if
            `preprocess` returned an attention mask.
        pads: The padding value of each padded input, by its position.
        sizes: Number of rows of each group, int64 of shape `(groups,)` on the CPU, if samples are whole groups: inputs
            and label have their rows, one group after the other, and weights are those of groups.
    """

    inputs: tuple[torch.Tensor, ...]
    label: torch.Tensor | None
    weight: torch.Tensor | None
    rows: int
    loss_weight: torch.Tensor | None = None
    lengths: Mapping[int, torch.Tensor] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    tokens: torch.Tensor | None = None
    pads: Mapping[int, float] = field(default_factory=dict)
    sizes: torch.Tensor | None = None

    @property
    def sample_count(self) -> int:
        """Number of samples, placeholders included."""
        return len(self.inputs[0]) if self.sizes is None else len(self.sizes)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The inputs by name."""
        return dict(zip(self.names, self.inputs, strict=True))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Inputs, label and weights."""
        named = (*self.inputs, self.label, self.weight, self.loss_weight)
        return [tensor for tensor in named if tensor is not None]

    @property
    def nbytes(self) -> int:
        """Size of its tensors in bytes."""
        return sum(part.nbytes for tensor in self.tensors for part in components(tensor))

    def complete(self) -> Batch:
        """Returns a batch whose label and weight are as long as its inputs; in weights, added rows have zero."""
        count, label, weight = self.sample_count, self.label, self.weight
        if 0 < self.rows < count:
            if label is not None:
                # Added rows are copies of the last sample, and have its label.
                last = label[-1:] if self.sizes is None else label[-int(self.sizes[-1]) :]
                label = torch.cat([label, *[last] * (count - self.rows)])
            if weight is not None:
                weight = torch.cat([weight, weight.new_zeros(count - self.rows)])
        return replace(self, label=label, weight=weight, rows=count, loss_weight=None)

    def filled_from(self, count: int) -> Batch:
        """Returns the batch with `count` real samples; the others are placeholders, of weight zero if all of them are.

        Label and weights are those of the real samples, if there are any.
        """
        if not count:
            zeros = torch.zeros(self.sample_count, device=self.inputs[0].device)
            return replace(self, rows=0, weight=zeros, loss_weight=zeros)
        real = self.slice(0, count)
        return replace(self, rows=count, label=real.label, weight=real.weight, loss_weight=real.loss_weight)

    def slice(self, start: int, end: int) -> Batch:
        """Returns the samples from `start` to `end`."""
        first, last = start, end
        if self.sizes is not None:
            first, last = int(self.sizes[:start].sum()), int(self.sizes[:end].sum())

        def part(tensor: torch.Tensor | None, *, of_samples: bool = False) -> torch.Tensor | None:
            if tensor is None:
                return None
            return tensor[start:end] if of_samples else tensor[first:last]

        inputs = [cut(tensor, first, last, self.lengths.get(position)) for position, tensor in enumerate(self.inputs)]
        lengths = {position: counts[first:last] for position, counts in self.lengths.items()}
        # A padded input and its mask, which is the next input, are as long as the longest of these rows.
        for position, longest in self._padded_to(lengths).items():
            inputs[position] = inputs[position][:, :longest]
            inputs[position + 1] = inputs[position + 1][:, :longest]
        return replace(
            self,
            inputs=tuple(inputs),
            label=part(self.label),
            weight=part(self.weight, of_samples=True),
            rows=end - start,
            loss_weight=part(self.loss_weight, of_samples=True),
            lengths=lengths,
            tokens=part(self.tokens),
            sizes=part(self.sizes, of_samples=True),
        )

    def padded(self, lengths: Mapping[int, int]) -> Batch:
        """Returns the batch with padded inputs and their masks of those lengths, by the position of the input."""
        inputs = list(self.inputs)
        for position, length in lengths.items():
            inputs[position] = _lengthened(inputs[position], length, self.pads[position])
            inputs[position + 1] = _lengthened(inputs[position + 1], length, False)
        return replace(self, inputs=tuple(inputs))

    def trimmed(self) -> Batch:
        """Returns the batch with its token tensors cut off after the last token of its longest row."""
        if self.tokens is None:
            return self
        width, longest = self.named[MASK].shape[1], max(1, int(self.tokens.max()))
        tensors = [tensor for name, tensor in self.named.items() if name not in _TOKENS]
        tensors += [] if self.label is None else [self.label]
        # Another tensor that is as wide as the mask may hold a value for each token, and must stay as wide as these.
        if any(tensor.shape[1:2] == (width,) for tensor in tensors):
            return self
        inputs = [
            tensor[:, :longest] if name in _TOKENS and tensor.shape[1:2] == (width,) else tensor
            for name, tensor in self.named.items()
        ]
        return replace(self, inputs=tuple(inputs))

    def _padded_to(self, lengths: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """Returns the padded length that rows of those lengths need, by the position of the padded input."""
        strided = [position for position in lengths if self.inputs[position].layout is torch.strided]
        return {at: max(1, int(lengths[at].max())) if len(lengths[at]) else 1 for at in strided}


class RankDataset(ABC):
    """The rows of one rank, as the training loop reads them.

    `varies` says that as many rows may take more memory in one batch than in another: ragged and sparse ones, and what
    `preprocess` returns.
    """

    varies: bool = False

    @abstractmethod
    def epoch(self, epoch: int, *, min_rows: int = 1, first: int = 0) -> Generator[Batch]:
        """Yields this rank's part of every global batch of an epoch (from 0), in step order, from step `first` on.

        Parts of less than `min_rows` are filled up. Closing the generator ends the thread that reads ahead.
        """

    @abstractmethod
    def validation(self, size: int, *, batches: int = 0) -> Generator[Batch]:
        """Yields this rank's validation rows, at most `size` in a batch; close the generator as that of `epoch`.

        There are at least `batches`; those without rows hold a placeholder row of weight zero.
        """

    @abstractmethod
    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of an epoch, float64 of shape `(steps,)`."""

    @abstractmethod
    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns this rank's number of rows in each step of an epoch, int64 of shape `(steps,)`."""


def _lengthened(tensor: torch.Tensor, length: int, value: float) -> torch.Tensor:
    """Returns a tensor of shape `(rows, length, ...)`, with a value after the positions that it has."""
    missing = tensor.new_full((len(tensor), length - tensor.shape[1], *tensor.shape[2:]), value)
    return torch.cat([tensor, missing], 1)


def count_tokens(named: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns `Batch.tokens` of what `preprocess` returned; `None` without a mask of shape `(rows, tokens)`."""
    mask = named.get(MASK)
    if mask is None or mask.dim() != 2 or not mask.shape[1]:
        return None
    counted = mask != 0
    labels = named.get("labels")
    if labels is not None and labels.shape == mask.shape:
        counted = counted | (labels != IGNORED)
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (counted * positions).amax(1).cpu()


def micro_batches(batch: Batch, parts: int, *, min_rows: int) -> list[Batch]:
    """Splits a rank's part of a step into `parts` micro-batches of at least `min_rows`.

    If rows are too few, the last micro-batches hold placeholder rows of weight zero.
    """
    if parts == 1:
        return [batch]
    filled = min(parts, batch.rows // min_rows)
    edges = [batch.rows * i // filled for i in range(filled + 1)] if filled else [0]
    batches = [batch.slice(start, end) for start, end in pairwise(edges)] or [batch]
    if len(batches) == parts:
        return batches
    zeros = torch.zeros(min_rows, device=batch.inputs[0].device)
    empty = replace(batch.complete().slice(0, min_rows), weight=zeros, loss_weight=zeros, rows=0)
    return [*batches, *[empty] * (parts - len(batches))]


def padding(batches: Sequence[Batch]) -> tuple[int, int]:
    """Returns the number of positions in the padded inputs of some batches, and how many of them hold data."""
    padded_size = real_size = 0
    for batch in batches:
        for position, longest in batch._padded_to(batch.lengths).items():
            padded_size += longest * len(batch.lengths[position])
            real_size += int(batch.lengths[position].sum())
        if batch.tokens is not None:
            padded_size += batch.named[MASK].numel()
            real_size += int(batch.tokens.sum())
    return padded_size, real_size


def cut(tensor: torch.Tensor, start: int, end: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Returns rows `start` to before `end` of an input of any layout; torch cannot slice jagged and sparse tensors.

    `lengths` are as in `Batch.lengths`; `None` reads them from the tensor.
    """
    nested, sparse = tensor.is_nested, tensor.layout == torch.sparse_csr
    if not nested and not sparse:
        return tensor[start:end]
    ends: torch.Tensor = tensor.offsets() if nested else tensor.crow_indices()  # type: ignore[attr-defined]  # torch's nested
    counts = ends.diff().cpu() if lengths is None else lengths
    first = int(counts[:start].sum())
    last = first + int(counts[start:end].sum())
    offsets, values = ends[start : end + 1] - ends[start], tensor.values()[first:last]
    if nested:
        return jagged(values, offsets, counts[start:end])
    shape = (end - start, *tensor.shape[1:])
    return torch.sparse_csr_tensor(offsets, tensor.col_indices()[first:last], values, shape, check_invariants=False)


def components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the strided tensors that a tensor consists of, several if it is sparse or jagged."""
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout is torch.jagged:
        return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]  # torch's nested
    return (tensor,)


def rebuilt(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Applies `change` to the components of a tensor, and returns a tensor of the same layout made of the results.

    The tensor is strided, sparse CSR or jagged; `lengths` as in `Batch.lengths`, `None` reads them from the tensor.
    """
    first, *more = (change(part) for part in components(tensor))
    if tensor.layout is torch.sparse_csr:
        columns, values = more
        return torch.sparse_csr_tensor(first, columns, values, tensor.shape, check_invariants=False)
    if tensor.layout is torch.jagged:
        return jagged(first, more[0], components(tensor)[1].diff() if lengths is None else lengths)
    return first

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
        rows: Number of real rows; of groups, if there are `sizes`. If there are fewer real rows than the module's
            minimum rows, the inputs have extra rows at the end. A rank without rows in a step has placeholder rows
            only, so that it joins every collective: then label and weights are as long as the inputs, and the weights
            are zero.
        loss_weight: float32 weights in the loss of shape `(rows,)`: sample weight times class weight; `None` means all
            ones.
        lengths: Number of elements in each row, int64 of shape `(rows,)` on the CPU, by the position of the padded,
            jagged or sparse input. The mask of a padded input is the next input.
        names: One name per input: the name of its column, or the name under which `preprocess` returned it.
        tokens: Number of tokens in each row of the inputs, up to its last token, int64 of shape `(rows,)` on the CPU;
            `None` unless `preprocess` returned an attention mask.
        pads: The padding value of each padded input, by its position.
        sizes: Number of rows in each group, int64 of shape `(groups,)` on the CPU; `None` unless samples are whole
            groups. Then inputs and label have the rows of one group after the other, and a group has one weight.
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
        """Size of the tensors in bytes."""
        return sum(part.nbytes for tensor in self.tensors for part in components(tensor))

    def complete(self) -> Batch:
        """Returns a batch whose label and weight are as long as its inputs; the weight of an added row is zero."""
        count = self.sample_count
        label = self.label
        weight = self.weight
        if 0 < self.rows < count:
            if label is not None:
                # Added rows are copies of the last sample, and have its label.
                last = label[-1:] if self.sizes is None else label[-int(self.sizes[-1]) :]
                added = [last] * (count - self.rows)
                label = torch.cat([label, *added])
            if weight is not None:
                weight = torch.cat([weight, weight.new_zeros(count - self.rows)])
        return replace(self, label=label, weight=weight, rows=count, loss_weight=None)

    def filled_from(self, count: int) -> Batch:
        """Returns the batch with `count` real samples; the samples after them are placeholders.

        Label and weights have the real samples only. If there are none, they have the placeholders, whose weights are
        zero.
        """
        if not count:
            nothing = torch.zeros(self.sample_count, device=self.inputs[0].device)
            return replace(self, rows=0, weight=nothing, loss_weight=nothing)
        real = self.slice(0, count)
        return replace(self, rows=count, label=real.label, weight=real.weight, loss_weight=real.loss_weight)

    def slice(self, start: int, end: int) -> Batch:
        """Returns the samples from `start` to before `end`."""
        first_row = start
        end_row = end
        if self.sizes is not None:
            first_row = int(self.sizes[:start].sum())
            end_row = int(self.sizes[:end].sum())

        def samples_in(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[start:end]

        def rows_in(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[first_row:end_row]

        inputs = [
            cut(tensor, first_row, end_row, self.lengths.get(position)) for position, tensor in enumerate(self.inputs)
        ]
        lengths = {position: counts[first_row:end_row] for position, counts in self.lengths.items()}
        # A padded input and its mask, which is the next input, are as long as the longest of these rows.
        for position, longest in self._padded_lengths(lengths).items():
            inputs[position] = inputs[position][:, :longest]
            inputs[position + 1] = inputs[position + 1][:, :longest]
        return replace(
            self,
            inputs=tuple(inputs),
            label=rows_in(self.label),
            weight=samples_in(self.weight),
            rows=end - start,
            loss_weight=samples_in(self.loss_weight),
            lengths=lengths,
            tokens=rows_in(self.tokens),
            sizes=samples_in(self.sizes),
        )

    def padded(self, lengths: Mapping[int, int]) -> Batch:
        """Returns the batch with padded inputs and their masks lengthened; `lengths` are by the input's position."""
        inputs = list(self.inputs)
        for position, length in lengths.items():
            inputs[position] = _lengthen(inputs[position], length, self.pads[position])
            inputs[position + 1] = _lengthen(inputs[position + 1], length, False)
        return replace(self, inputs=tuple(inputs))

    def trimmed(self) -> Batch:
        """Returns the batch with its token tensors cut off after the last token of its longest row."""
        if self.tokens is None:
            return self
        width = self.named[MASK].shape[1]
        longest = max(1, int(self.tokens.max()))
        others = [tensor for name, tensor in self.named.items() if name not in _TOKENS]
        if self.label is not None:
            others.append(self.label)
        # Another tensor that is as wide as the mask may hold a value for each token, and must stay as wide as the mask.
        if any(tensor.shape[1:2] == (width,) for tensor in others):
            return self
        inputs = [
            tensor[:, :longest] if name in _TOKENS and tensor.shape[1:2] == (width,) else tensor
            for name, tensor in self.named.items()
        ]
        return replace(self, inputs=tuple(inputs))

    def _padded_lengths(self, lengths: Mapping[int, torch.Tensor]) -> dict[int, int]:
        """Returns the padded length that rows need, from their `lengths`, by the position of the padded input."""
        padded_lengths = {}
        for position, counts in lengths.items():
            # Jagged and sparse inputs have another layout.
            if self.inputs[position].layout is torch.strided:
                padded_lengths[position] = max(1, int(counts.max())) if len(counts) else 1
        return padded_lengths


class RankDataset(ABC):
    """The rows of one rank, as the training loop reads them.

    Attributes:
        varies: Whether batches of equally many rows may differ in memory. Batches do if inputs are ragged or sparse, or
            if there is a `preprocess`.
    """

    varies: bool = False

    @abstractmethod
    def epoch(self, epoch: int, *, min_rows: int = 1, first: int = 0) -> Generator[Batch]:
        """Yields this rank's part of every global batch of an epoch, in the order of steps, from step `first` on.

        Epochs count from 0. Parts of fewer rows than `min_rows` are filled up. Closing the generator ends the thread
        that reads ahead.
        """

    @abstractmethod
    def validation(self, size: int, *, batches: int = 0) -> Generator[Batch]:
        """Yields this rank's validation rows, at most `size` in a batch; close the generator as with `epoch`.

        There are at least `batches` batches. A batch without rows holds a placeholder row of weight zero.
        """

    @abstractmethod
    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of an epoch, float64 of shape `(steps,)`."""

    @abstractmethod
    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns this rank's number of rows in each step of an epoch, int64 of shape `(steps,)`."""


def _lengthen(tensor: torch.Tensor, length: int, value: float) -> torch.Tensor:
    """Returns a tensor of shape `(rows, length, ...)`, with `value` at the positions that it lacked."""
    missing = tensor.new_full((len(tensor), length - tensor.shape[1], *tensor.shape[2:]), value)
    return torch.cat([tensor, missing], 1)


def count_tokens(named: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns `Batch.tokens` for the tensors of `preprocess`; `None` without a mask of shape `(rows, tokens)`."""
    mask = named.get(MASK)
    if mask is None or mask.dim() != 2 or not mask.shape[1]:
        return None
    is_token = mask != 0
    labels = named.get("labels")
    if labels is not None and labels.shape == mask.shape:
        is_token = is_token | (labels != IGNORED)
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    # The largest position of a token is the number of tokens up to the last one.
    return torch.where(is_token, positions, 0).amax(1).cpu()


def micro_batches(batch: Batch, parts: int, *, min_rows: int) -> list[Batch]:
    """Splits a rank's part of a step into `parts` micro-batches of at least `min_rows` rows.

    If there are too few rows, the last micro-batches hold placeholder rows of weight zero.
    """
    if parts == 1:
        return [batch]
    filled = min(parts, batch.rows // min_rows)
    batches = [batch]
    if filled:
        edges = [batch.rows * number // filled for number in range(filled + 1)]
        batches = [batch.slice(start, end) for start, end in pairwise(edges)]
    if len(batches) == parts:
        return batches
    nothing = torch.zeros(min_rows, device=batch.inputs[0].device)
    empty = replace(batch.complete().slice(0, min_rows), weight=nothing, loss_weight=nothing, rows=0)
    return [*batches, *[empty] * (parts - len(batches))]


def padding(batches: Sequence[Batch]) -> tuple[int, int]:
    """Returns the number of positions in the padded inputs of some batches, and how many of them hold data."""
    padded_size = real_size = 0
    for batch in batches:
        for position, longest in batch._padded_lengths(batch.lengths).items():
            padded_size += longest * len(batch.lengths[position])
            real_size += int(batch.lengths[position].sum())
        if batch.tokens is not None:
            padded_size += batch.named[MASK].numel()
            real_size += int(batch.tokens.sum())
    return padded_size, real_size


def cut(tensor: torch.Tensor, start: int, end: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the rows from `start` to before `end` of an input of any layout.

    torch cannot slice jagged and sparse tensors. `lengths` are as in `Batch.lengths`; `None` reads them from the
    tensor.
    """
    if tensor.is_nested:
        all_offsets: torch.Tensor = tensor.offsets()  # type: ignore[attr-defined]  # Torch types a nested tensor as a plain one.
    elif tensor.layout == torch.sparse_csr:
        all_offsets = tensor.crow_indices()
    else:
        return tensor[start:end]
    counts = all_offsets.diff().cpu() if lengths is None else lengths
    first = int(counts[:start].sum())
    last = first + int(counts[start:end].sum())
    offsets = all_offsets[start : end + 1] - all_offsets[start]
    values = tensor.values()[first:last]
    if tensor.is_nested:
        return jagged(values, offsets, counts[start:end])
    shape = (end - start, *tensor.shape[1:])
    return torch.sparse_csr_tensor(offsets, tensor.col_indices()[first:last], values, shape, check_invariants=False)


def components(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the strided tensors that make up a tensor; a sparse or jagged tensor has several."""
    if tensor.layout is torch.sparse_csr:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout is torch.jagged:
        return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]  # Torch types a nested tensor as a plain one.
    return (tensor,)


def rebuilt(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Applies `change` to the components of a tensor, and returns a tensor of the same layout with the results.

    The tensor is strided, sparse CSR or jagged. `lengths` are as in `Batch.lengths`; `None` reads them from the tensor.
    """
    parts = [change(part) for part in components(tensor)]
    if tensor.layout is torch.sparse_csr:
        offsets, columns, values = parts
        return torch.sparse_csr_tensor(offsets, columns, values, tensor.shape, check_invariants=False)
    if tensor.layout is torch.jagged:
        values, offsets = parts
        return jagged(values, offsets, components(tensor)[1].diff() if lengths is None else lengths)
    return parts[0]

"""A rank's rows, handed out as the rank's part of each global batch."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from sparktorch.base.devices import free_bytes, is_host, upload
from sparktorch.data.columns import KEY, VALIDATION, Columns, TensorSpec
from sparktorch.data.convert.checks import Screen, check_labels, check_weights
from sparktorch.data.convert.preprocess import EVALUATION, Moment
from sparktorch.data.dataset.feed import Feed, OutOfCore, Resident, Schedule
from sparktorch.data.fields.base import Dense, Field, Ragged
from sparktorch.data.fields.registry import field_of
from sparktorch.data.sampling.plan import SamplingPlan
from sparktorch.data.sampling.row_digest import RowDigests
from sparktorch.data.sampling.row_keys import Arrivals
from sparktorch.data.storage import InMemory, Runs, Spooler
from sparktorch.errors import ColumnError, ConfigError

__all__ = ["Batch", "Rows", "Shard", "balanced"]

_DEVICE_SHARE = 0.25  # of an accelerator's free memory, for rows


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch.

    Attributes:
        inputs: One tensor of shape `(rows, ...)` per argument of `forward`.
        label: Tensor of shape `(rows, ...)`, or `None`.
        weight: float32 sample weights of shape `(rows,)`; `None` means all ones.
        rows: Number of real rows. The inputs may hold more, to fill them up; where the rank has no
            row at this step, so that it can join every collective, label and weights hold them too,
            the weights zero.
        loss_weight: What each row counts for in the loss: its weight times that of its class.
        lengths: By the place of an input that is padded, jagged or sparse, number of elements of each row, int64 on
            the CPU. The mask of a padded one is the input after it.
    """

    inputs: tuple[torch.Tensor, ...]
    label: torch.Tensor | None
    weight: torch.Tensor | None
    rows: int
    loss_weight: torch.Tensor | None = None
    lengths: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Rows:
    """Tensors of equal length, addressed by row number.

    Attributes:
        device: Where they are, and what is taken of them.
        count: Number of rows.
    """

    def __init__(self, fields: Mapping[str, Field], columns: Columns, count: int, *, by_length: bool = False) -> None:
        """Takes the rows.

        Args:
            fields: Finished, by wire name, on the CPU.
            columns: What they are.
            count: Number of rows.
            by_length: Whether rows that are taken at a time come in the order of their lengths.
        """
        ragged = [found for found in (fields[spec.name] for spec in columns.inputs) if isinstance(found, Ragged)]
        self._sorted_by = ragged[0] if ragged and by_length else None
        self._inputs = tuple(fields[spec.name] for spec in columns.inputs)
        self._label = _tensor(fields, columns.label)
        self._weight = _tensor(fields, columns.weight)
        self._loss_weight = self._weight
        self._preprocess = columns.preprocess
        self._uneven: dict[int, Field] = {}  # by the places of their arguments
        place = 0
        for column in self._inputs if self._preprocess is None else ():
            if column.uneven:
                self._uneven[place] = column
            place += column.arguments
        self.count = count
        self.device = torch.device("cpu")
        self._copy()

    def to(self, device: torch.device) -> None:
        """Moves what batches are taken of; label and weights stay on the CPU, too."""
        for taken in self._inputs:
            taken.to(device)
        self.device = device
        self._copy()

    def _copy(self) -> None:
        """Copies label and weights to the device."""
        label, weight, loss_weight = (
            None if tensor is None else tensor.to(self.device)
            for tensor in (self._label, self._weight, self._loss_weight)
        )
        self._here = label, weight, weight if self._loss_weight is self._weight else loss_weight

    def take(self, index: torch.Tensor, *, least: int = 0, moment: Moment = EVALUATION) -> Batch:
        """Returns the rows with those numbers.

        Args:
            index: Row numbers of shape `(rows,)`, on the CPU.
            least: Fill the inputs up to this many rows.
            moment: When that is.
        """
        rows = len(index)
        if self._sorted_by is not None:  # so that micro-batches hold rows of about the same length
            index = index[self._sorted_by.lengths(index).argsort(stable=True)]
        if rows < least:
            index = torch.cat([index, index.new_full((least - rows,), self.count - 1)])
        here = upload(index, self.device)
        shown = here[:rows] if 0 < rows < least else here
        label, weight, loss_weight = self._here
        if not rows and least:  # what fills up is shown, at no weight
            weight = loss_weight = torch.zeros(least, device=self.device)
        else:
            same, weight = loss_weight is weight, None if weight is None else weight.index_select(0, shown)
            loss_weight = weight if same or loss_weight is None else loss_weight.index_select(0, shown)
        inputs, lengths = self._arguments(index, here, moment)
        label = None if label is None else label.index_select(0, shown)
        return Batch(inputs, label, weight, rows, loss_weight, lengths)

    def _arguments(
        self, index: torch.Tensor, here: torch.Tensor, moment: Moment
    ) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
        """Returns what the rows with those numbers are to `forward`, and `Batch.lengths`."""
        if self._preprocess is not None:
            taken = [column.take(index, here) for column in self._inputs]
            return tuple(self._preprocess(taken, len(index), moment).values()), {}
        arguments = tuple(argument for column in self._inputs for argument in column.take(index, here))
        return arguments, {place: column.lengths(index) for place, column in self._uneven.items()}

    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Makes each row count in the loss for its weight times that of its class."""
        assert self._label is not None
        of_class = torch.tensor(weights, dtype=torch.float32)[self._label]
        self._loss_weight = of_class if self._weight is None else of_class * self._weight
        self._copy()

    def weight_by_class(self, index: torch.Tensor, classes: int) -> npt.NDArray[np.float64]:
        """Returns the sum of the weights of those rows by class, of shape `(classes,)`."""
        assert self._label is not None
        weights = None if self._weight is None else self._weight.double()[index].numpy()
        return np.bincount(self._label[index].numpy(), weights, classes).astype(np.float64)

    def loss_weights(self, index: torch.Tensor | None = None) -> npt.NDArray[np.float64] | None:
        """Returns what rows count for in the loss, all of them or those of an index; `None` means all ones."""
        if self._loss_weight is None:
            return None
        weights = self._loss_weight if index is None else self._loss_weight[index]
        return weights.double().numpy()


class Shard:
    """The rows of one rank: training rows addressed by position, validation rows in key order.

    Attributes:
        dropped: Number of rows that were left out because they hold nulls.
        storage: Where rows are: on "disk", in "memory", or on the "device".
    """

    dropped = 0

    def __init__(
        self,
        batches: Iterable[pa.RecordBatch],
        columns: Columns,
        *,
        spare: pa.RecordBatch | None = None,
        spooler: Spooler | None = None,
        budget: int = 1 << 30,
        by_key: bool = True,
        by_length: bool = False,
    ) -> None:
        """Reads the batches of one partition and checks every row.

        Args:
            batches: Record batches with the wire names of `columns` and an int64 column `k`, which `keyed` says may
                be missing.
            columns: Which columns become which tensors.
            spare: A row for a rank without any to stand in with; zeros without it.
            spooler: Where the rows are kept; by default in memory.
            budget: Bytes that rows from disk may take in memory.
            by_key: Whether the positions of the rows are those of their keys. Otherwise they are the
                rows' places. On disk, rows that arrive in the order of their positions, validation
                rows last, are read in runs; others one by one, and cost 4 bytes of memory each.
            by_length: Whether the rows of a step come in the order of the lengths of the first ragged input.

        Raises:
            ColumnError: A row cannot be trained on; says column, count and first row.
            ClusterError: There is no room on disk.
        """
        self._columns, self._by_length = columns, by_length
        self._spooler = spooler = spooler or InMemory()
        self._fields = {spec.name: _field(spec, columns, spooler) for spec in columns.tensors}
        self._loss_fields = tuple(spec for spec in (columns.label, columns.weight) if spec is not None)
        try:
            arrivals = Arrivals(spooler, by_key=by_key)
            self._read(batches, arrivals, budget)
            self.bytes = sum(field.nbytes for field in self._fields.values())
            if not arrivals.count:
                self._stand_in(spare)
        except BaseException:
            spooler.close()
            raise
        self.rows, self.validation_rows = arrivals.count - arrivals.held_out, arrivals.held_out
        self.fingerprint = arrivals.fingerprint
        self.last = max(1, arrivals.count) - 1
        self.bytes_per_row = self.bytes / (self.last + 1)
        self.weighted = columns.weight is not None
        self.storage = "disk" if spooler.on_disk else "memory"
        self.decodes = columns.preprocess is not None or any(self._fields[spec.name].decodes for spec in columns.inputs)
        order, validation_order = arrivals.orders()
        self._feed: Feed
        if spooler.on_disk:
            self._feed = OutOfCore(self, order, validation_order, budget=budget)
        else:
            for column in self._fields.values():
                column.finish()
            rows = Rows(self._fields, columns, self.last + 1, by_length=by_length)
            self._feed = Resident(rows, order, validation_order, decoding=self.decodes, budget=budget)

    def to(self, device: str) -> None:
        """Has batches come on a device.

        Rows in memory move to an accelerator where they take no more than a quarter of what is free there, validation
        rows included: most of it is for the module and its activations. Otherwise, and where they are decoded or given
        to a `preprocess`, they stay, and each batch is copied while the one before is trained.
        """
        stay = is_host(device) or self.on_disk or self.decodes or self.bytes > free_bytes(device) * _DEVICE_SHARE
        self._feed.to(torch.device(device), stay=stay)
        self.storage = "disk" if self.on_disk else "memory" if stay else "device"

    @property
    def on_disk(self) -> bool:
        """Whether the rows are on disk."""
        return self._spooler.on_disk

    def place(self, first: int, plan: SamplingPlan, *, epochs: int = 1) -> None:
        """Tells the shard the position of its first row, the plan it trains by, and for how many epochs."""
        self._steps = plan.steps
        seeded = self._columns.preprocess is not None
        self._feed.place(Schedule(plan, first, self.rows, epochs, seeded=seeded))

    def weight_by_class(self, classes: int) -> list[float]:
        """Returns the sum of the weights of this rank's training rows by class."""
        sums: list[float] = self._feed.weight_by_class(classes).tolist()
        return sums

    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Makes each row count in the loss for its weight times that of its class."""
        self._feed.weigh_classes(weights)

    def step_weights(self, epoch: int) -> torch.Tensor:
        """Returns this rank's weight in each step of the epoch, float64 of shape `(steps,)`."""
        return torch.from_numpy(self._feed.step_weights(epoch))

    def step_rows(self, epoch: int) -> torch.Tensor:
        """Returns how many rows this rank has in each step of the epoch, int64 of shape `(steps,)`."""
        return torch.from_numpy(self._feed.step_rows(epoch))

    def epoch(self, epoch: int, *, least: int = 1, first: int = 0) -> Generator[Batch]:
        """Yields this rank's part of every global batch of the epoch, in the order of the steps.

        To close the generator ends the thread that works ahead, where there is one.

        Args:
            epoch: Number of the epoch, from 0.
            least: Fill the inputs of each part up to this many rows.
            first: The step to begin with.
        """
        return self._feed.epoch(epoch, least=least, first=first)

    def validation(self, size: int, *, batches: int = 0) -> Generator[Batch]:
        """Yields this rank's validation rows, at most `size` at a time; to be closed like `epoch`.

        Args:
            size: The most rows of a batch.
            batches: Yield at least so many; those without rows hold a row of weight zero.
        """
        return self._feed.validation(size, batches=batches)

    def load(self, runs: Runs, *, inputs: bool = True) -> Rows:
        """Returns a copy in memory of rows that are on disk.

        Args:
            runs: Their numbers.
            inputs: Whether with their inputs, or only what they count for.
        """
        wanted = self._columns.tensors if inputs else self._loss_fields
        columns = self._columns if inputs else replace(self._columns, inputs=())
        fields = {spec.name: self._fields[spec.name].read(runs) for spec in wanted}
        return Rows(fields, columns, runs.count, by_length=self._by_length)

    def close(self) -> None:
        """Ends threads and frees what is on disk; closing twice is fine."""
        self._feed.close()
        self._spooler.close()

    def _read(self, batches: Iterable[pa.RecordBatch], arrivals: Arrivals, budget: int) -> None:
        """Reads all batches into the fields."""
        screen = Screen(self._columns)
        row = 0
        for batch in batches:
            rows = screen.rows_of(batch, first_row=row)
            before = sum(field.nbytes for field in self._fields.values())
            digests = self._digests(rows)
            try:
                for spec in self._columns.tensors:
                    added = digests if spec.digestible else None
                    self._fields[spec.name].append(rows.column(spec.name), first_row=row, digests=added)
            except ColumnError as error:
                raise screen.placed(error, first_row=row) from None
            grown = sum(field.nbytes for field in self._fields.values()) - before
            if self._spooler.on_disk and grown > budget * rows.num_rows:
                raise _too_large(grown / rows.num_rows, budget, row)
            if self._columns.validation:
                # Null ones are an error in the end.
                held_out = rows.column(VALIDATION).fill_null(False).to_numpy(zero_copy_only=False)
            else:
                held_out = np.zeros(rows.num_rows, np.bool_)
            arrivals.append(rows.column(KEY).to_numpy() if digests is None else digests.finish(), held_out)
            row += batch.num_rows
        screen.close()
        self.dropped = screen.dropped

    def _digests(self, rows: pa.RecordBatch) -> RowDigests | None:
        """Returns what the columns of some rows are to add to; `None` where their keys are there already."""
        if self._columns.keyed:
            return None
        keys = rows.column(KEY).to_numpy() if KEY in rows.schema.names else np.zeros(rows.num_rows, np.int64)
        return RowDigests(keys.view(np.uint64))

    def _stand_in(self, spare: pa.RecordBatch | None) -> None:
        """Gives a rank without rows one to stand in with."""
        for spec in self._columns.tensors:
            if spare is None:
                self._fields[spec.name].stand_in()
            else:
                self._fields[spec.name].append(spare.column(spec.name))


def balanced(sums: Sequence[float]) -> list[float]:
    """Returns the weights that make all classes count the same: `rows / (classes * rows of the class)`.

    Args:
        sums: Rows, or the sum of their weights, by class. Classes without any are not counted; their
            weight is 1, the mean over all rows.
    """
    present = sum(1 for count in sums if count)
    return [sum(sums) / (present * count) if count else 1.0 for count in sums]


def _tensor(fields: Mapping[str, Field], spec: TensorSpec | None) -> torch.Tensor | None:
    """Returns all rows of a label or of weights."""
    if spec is None:
        return None
    field = fields[spec.name]
    assert isinstance(field, Dense)
    return field.values


def _field(spec: TensorSpec, columns: Columns, spooler: Spooler) -> Field:
    """Returns an empty field for a column, which checks its rows for what they are to be."""

    def label(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return check_labels(values, columns)

    def weight(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        check_weights(values, spec)
        return values

    if spec is columns.label:
        return Dense(spec, spooler, label, dtype=None if columns.classes is None else np.int64)
    return Dense(spec, spooler, weight) if spec is columns.weight else field_of(spec, spooler)


def _too_large(size: float, budget: int, row: int) -> ConfigError:
    return ConfigError(
        f"a row takes {size / 1e6:.1f} MB, more than the {budget / 1e6:.1f} MB that rows may take in memory",
        hint="set a larger memoryBudget (in MB, of each worker)",
        param="memoryBudget",
        row=row,
    )

"""What a rank is told to do, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pyarrow as pa

from sparktorch.base.config import CheckpointConfig, StorageConfig, TrainConfig
from sparktorch.data.columns import Columns
from sparktorch.train.recipe.lr_schedule import fixed_epochs
from sparktorch.train.recipe.recipe import Recipe

__all__ = ["FunctionJob", "GroupJob", "RankResult", "RowsJob", "TrainJob"]


@dataclass(frozen=True, kw_only=True)
class RowsJob:
    """How a rank reads its rows; see `GroupJob`.

    `by_length` sorts the rows of a step by the length of the first ragged input. `checkpoint` is where there may be a
    training to go on with.
    """

    columns: Columns
    storage: StorageConfig
    placeholder: pa.RecordBatch | None
    by_key: bool
    by_length: bool
    by_place: bool
    max_imbalance: float | None
    checkpoint: CheckpointConfig | None


@dataclass(frozen=True, kw_only=True)
class GroupJob:
    """What ranks need to work on their rows together, besides the rows and their `World`.

    Attributes:
        needs_group: Whether a single rank has a process group, too.
        max_imbalance: Largest share by which a rank's rows may exceed the mean. Above it, the ranks stop and ask for a
            better split; `None` accepts any split.
        placeholder: One row of the training set, the placeholder row of ranks without rows.
        by_key: Whether training orders rows by their row keys; otherwise by their position in the partitions.
        by_place: Whether the row's position in the source is mixed into its key, so that equal rows have other keys.
        collective_seconds: Seconds that a rank waits for the others in a collective.
    """

    needs_group: ClassVar[bool] = False

    columns: Columns
    config: TrainConfig
    max_imbalance: float | None = 0.1
    checkpoint: CheckpointConfig | None = None
    placeholder: pa.RecordBatch | None = None
    storage: StorageConfig = field(default_factory=StorageConfig)
    by_key: bool = True
    by_place: bool = False
    collective_seconds: float = 1800.0

    @property
    def fixed_epochs(self) -> str:
        """Why its training cannot go on with another number of epochs; empty if it can."""
        return "what a function does may depend on it"

    @property
    def rows(self) -> RowsJob:
        """How the rank reads its rows."""
        config = self.config
        return RowsJob(
            columns=self.columns,
            storage=self.storage,
            placeholder=self.placeholder,
            by_key=self.by_key,
            by_length=config.micro_batch_size is not None or config.accumulation_steps > 1,
            by_place=self.by_place,
            max_imbalance=self.max_imbalance,
            checkpoint=self.checkpoint,
        )


@dataclass(frozen=True, kw_only=True)
class TrainJob(GroupJob):
    """What ranks need to train a model."""

    recipe: Recipe

    @property
    def fixed_epochs(self) -> str:
        """Why its training cannot go on with another number of epochs; empty if it can."""
        return fixed_epochs(self.recipe)


@dataclass(frozen=True, kw_only=True)
class FunctionJob(GroupJob):
    """What ranks need to run a user's function, which is called with its `RunContext` and the arguments."""

    needs_group = True  # loops by hand use it

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class RankResult:
    """What a rank returns to the driver.

    Attributes:
        meta: JSON-ready values, such as rows and times in seconds. One rank (rank 0, or the best of independent ones)
            adds history, confusion matrix and fingerprint.
        payload: Of a training, the model's weights from that rank, as `packed_weights` returns them, empty from all
            others; of a user's function, its pickled result.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""

"""What a rank is told to do, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import pyarrow as pa

from sparktorch.base.config import CheckpointConfig, StorageConfig, TrainConfig
from sparktorch.data.columns import Columns
from sparktorch.train.recipe.lr_schedule import fixed_epochs
from sparktorch.train.recipe.recipe import Recipe

__all__ = ["RankJob", "RankResult", "TrainJob"]


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """What ranks need to work on their rows together, besides the rows and their `World`.

    Attributes:
        columns: Those of the rows; without inputs if there are none.
        max_imbalance: Largest share by which a rank's rows may exceed the mean. Above it, the ranks stop and ask for a
            better split; `None` accepts any split.
        placeholder: One row of the training set, the placeholder row of ranks without rows.
        by_key: Whether training orders rows by their row keys; otherwise by their position in the partitions.
        by_place: Whether the row's position in the source is mixed into its key, so that equal rows have other keys.
        collective_seconds: Seconds that a rank waits for the others in a collective.
    """

    config: TrainConfig
    columns: Columns = field(default_factory=partial(Columns, inputs=()))
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


@dataclass(frozen=True, kw_only=True)
class TrainJob(RankJob):
    """What ranks need to train a model."""

    recipe: Recipe

    @property
    def fixed_epochs(self) -> str:
        """Why its training cannot go on with another number of epochs; empty if it can."""
        return fixed_epochs(self.recipe)

    @property
    def without_recipe(self) -> RankJob:
        """What ranks need to read the rows."""
        return RankJob(**{each.name: getattr(self, each.name) for each in fields(RankJob)})


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

"""The job that a rank gets, and the result that it returns."""

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
    """The job that ranks do with their rows: everything that they need besides the rows and their `World`.

    Attributes:
        config: How the ranks train.
        columns: The columns of the rows; it has no inputs if there are no rows.
        max_imbalance: Largest share by which a rank's rows may exceed the mean. If they exceed it by more, the ranks
            stop and ask for a better split; `None` accepts any split.
        checkpoint: Where checkpoints are saved, and how often; `None` saves none.
        placeholder: One row of the training set, which is the placeholder row of ranks without rows.
        storage: Where ranks hold their rows.
        order_by_key: Whether training orders rows by their row keys; otherwise by their position in the partitions.
        by_position: Whether each row's position in the source is mixed into its key, so that equal rows have different
            keys.
        collective_seconds: Seconds that a rank waits for the other ranks in a collective.
    """

    config: TrainConfig
    columns: Columns = field(default_factory=partial(Columns, inputs=()))
    max_imbalance: float | None = 0.1
    checkpoint: CheckpointConfig | None = None
    placeholder: pa.RecordBatch | None = None
    storage: StorageConfig = field(default_factory=StorageConfig)
    order_by_key: bool = True
    by_position: bool = False
    collective_seconds: float = 1800.0

    @property
    def fixed_epochs(self) -> str:
        """Says why the training cannot go on with another number of epochs; empty if it can."""
        return "what a function does may depend on it"


@dataclass(frozen=True, kw_only=True)
class TrainJob(RankJob):
    """The job of ranks that train a model."""

    recipe: Recipe

    @property
    def fixed_epochs(self) -> str:
        """Says why the training cannot go on with another number of epochs; empty if it can."""
        return fixed_epochs(self.recipe)

    @property
    def without_recipe(self) -> RankJob:
        """The job without the recipe, for ranks that read their rows and get recipes later."""
        return RankJob(**{field.name: getattr(self, field.name) for field in fields(RankJob)})


@dataclass
class RankResult:
    """The result that a rank returns to the driver.

    Attributes:
        meta: JSON-ready values, such as rows and times in seconds. After a training, one rank adds history, confusion
            matrix and fingerprint: rank 0, or the best one of independent ranks.
        payload: After a training, the same rank's payload is the model's weights, as `packed_weights` returns them, and
            that of other ranks is empty. After a user's function, it is the pickled result.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""

"""How a rank splits its part of a step into micro-batches, and how `"auto"` finds the size that fits its device."""

from __future__ import annotations

import logging

import torch

from sparktorch.base.batch import RankDataset
from sparktorch.base.config import TrainConfig
from sparktorch.base.world import World
from sparktorch.distributed.process_group import max_over_ranks

__all__ = ["MicroBatches"]

_LOG = logging.getLogger(__name__)
# The first steps with a size say nothing about the memory of later steps: the optimizer makes its state in them, and
# allocators settle.
_SETTLING_STEPS = 4


class MicroBatches:
    """The micro-batches of each step of an epoch.

    With `"auto"`, the size begins at the whole batch, and all ranks make it smaller together when one of them has no
    memory for it. A step is tried if a rank may need more memory in it than in the steps before: then the gradients
    stay in each rank until every rank has computed its own. All ranks know these steps in advance, from the numbers of
    rows. If rows differ in size, all steps are tried.

    The engine calls `begin` for each epoch, then reads `parts` and `tried` for each step. In a tried step it calls
    `fits` after each try, which plans the rest of the epoch anew if the step did not fit.

    Attributes:
        searches: Whether the size is searched for ("auto").
        size: Most rows of a micro-batch; `None` if `accumulation_steps` splits the rows.
        parts: Number of micro-batches in each step of the epoch.
        tried: For each step of the epoch, whether it is tried.
    """

    def __init__(self, config: TrainConfig, world: World, *, steps: int, min_rows: int, same_count: bool) -> None:
        """Takes the configuration, the rank's world, and the number of steps in an epoch.

        A micro-batch has at least `min_rows`. With `same_count`, all ranks have the same number of micro-batches in a
        step.
        """
        self._world = world
        self._min_rows = min_rows
        self._same_count = same_count
        self._steps = steps
        self._count = config.accumulation_steps
        self.searches = config.micro_batch_size == "auto"
        self.size = config.batch_size if config.micro_batch_size == "auto" else config.micro_batch_size
        self.parts: list[int] = []
        self.tried: list[bool] = []
        self._settling_steps_left = _SETTLING_STEPS
        # The most rows of a micro-batch that have fitted after the steps in which memory settles.
        self._proven_rows = 0

    @property
    def splits(self) -> bool:
        """Whether a step may have more than one micro-batch."""
        return self.size is not None or self._count > 1

    def begin(self, dataset: RankDataset, epoch: int, first: int) -> None:
        """Plans an epoch from its step `first` on; it is a collective with "auto", and with `same_count`."""
        self.parts = [1] * self._steps
        self.tried = [False] * self._steps
        if self.splits:
            self._rows = dataset.step_rows(epoch)
            self._varies = dataset.varies
            self._plan(first)

    def safe_count(self, rows: int) -> int:
        """Returns into how many micro-batches to split rows so that the first surely fits; its result is not used."""
        if self.searches:
            return max(1, rows // self._min_rows)
        return int(self._parts_of(torch.tensor(rows)))

    def cannot_split_further(self, step: int) -> bool:
        """Returns whether this rank's micro-batches of a step have the fewest rows already."""
        return int(self._rows[step]) // self._min_rows <= self.parts[step]

    def fits(self, step: int, *, ran_out: bool) -> bool:
        """Returns whether every rank had memory for its part of a step; otherwise makes micro-batches smaller.

        `ran_out` says whether this rank ran out of memory. It is a collective of all ranks.
        """
        rows = int(self._largest[step])
        # Ranks have micro-batches of different sizes: the largest of those that were too large counts.
        too_large = int(max_over_ranks(torch.tensor([rows if ran_out else 0]), self._world))
        if not too_large:
            if self._settling_steps_left:
                self._settling_steps_left -= 1
            else:
                self._proven_rows = max(self._proven_rows, rows)
            return True
        self.size = max(self._min_rows, too_large // 2)
        self._settling_steps_left = _SETTLING_STEPS
        self._proven_rows = 0
        if self._world.is_main:
            _LOG.info("microBatchSize='auto': micro-batches have %d rows at most from now on", self.size)
            if self._min_rows > 1:
                _LOG.warning("microBatchSize='auto': batch normalisation takes its statistics of %d rows", self.size)
        self._plan(step)
        return False

    def _parts_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the number of micro-batches for each number of rows."""
        parts = torch.full_like(rows, self._count)
        if self.size is not None:
            parts = -(-rows // self.size)  # This division rounds up.
        return parts.minimum(rows // self._min_rows).clamp(min=1)

    def _plan(self, first: int) -> None:
        """Plans the steps of the epoch from step `first` on; the steps before it are over."""
        parts = self._parts_of(self._rows)
        if self._same_count:
            parts = max_over_ranks(parts, self._world)
        self.parts = parts.tolist()
        if self.searches:
            # Rows of the largest micro-batch of each step: the division rounds up.
            self._largest = (-(-self._rows // parts)).clamp(min=self._min_rows)
            self.tried = [True] * len(parts) if self._varies else self._needs_a_try(first)

    def _needs_a_try(self, first: int) -> list[bool]:
        """Returns, for each step, whether a rank's micro-batch has more rows in it than have fitted before the step."""
        fitting_rows = self._largest.clone()
        fitting_rows[: first + self._settling_steps_left] = 0
        proven_rows = fitting_rows.new_tensor([self._proven_rows])
        proven_before = torch.cat([proven_rows, fitting_rows[:-1]]).cummax(0).values
        return max_over_ranks((self._largest > proven_before).long(), self._world).bool().tolist()

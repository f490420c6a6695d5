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
# So many steps prove nothing for later ones: the optimizer makes its state, and allocators settle.
_SETTLING = 4


class MicroBatches:
    """The micro-batches of each step of an epoch.

    With `"auto"`, the size begins at the whole batch, and all ranks make it smaller together where one of them has no
    memory for it. A step is tried, that is, its gradients stay in the rank until every rank has computed them, if a
    rank may need more memory in it than in the steps before. All ranks know these steps in advance, from the number of
    rows. Where rows differ in size, all steps are tried.

    Attributes:
        searches: Whether the size is found ("auto").
        size: Most rows of a micro-batch; `None` if `accumulation_steps` splits the rows.
        parts: Number of micro-batches of each step of the epoch.
        tried: Whether each step of the epoch is tried.
    """

    def __init__(self, config: TrainConfig, world: World, *, steps: int, min_rows: int, same_count: bool) -> None:
        """Takes the configuration, the rank's world, and the number of steps in an epoch.

        A micro-batch has at least `min_rows`. With `same_count`, all ranks have the same number of micro-batches in a
        step.
        """
        self._world, self._min_rows, self._same_count = world, min_rows, same_count
        self._steps, self._count = steps, config.accumulation_steps
        self.searches = config.micro_batch_size == "auto"
        self.size = config.batch_size if config.micro_batch_size == "auto" else config.micro_batch_size
        self.parts: list[int] = []
        self.tried: list[bool] = []
        self._settling = _SETTLING
        # The most rows of a micro-batch for which there surely is memory.
        self._proven = 0

    @property
    def splits(self) -> bool:
        """Whether a step may have more than one micro-batch."""
        return self.size is not None or self._count > 1

    def begin(self, dataset: RankDataset, epoch: int, first: int) -> None:
        """Plans an epoch from its step `first` on; a collective with "auto", and with `same_count`."""
        self.parts, self.tried = [1] * self._steps, [False] * self._steps
        if self.splits:
            self._rows, self._varies = dataset.step_rows(epoch), dataset.varies
            self._plan(first)

    def safe_count(self, rows: int) -> int:
        """Returns the number of micro-batches of which the first surely fits, for a pass whose result is not used."""
        if self.searches:
            return max(1, rows // self._min_rows)
        return int(self._parts_of(torch.tensor(rows)))

    def smallest(self, step: int) -> bool:
        """Whether this rank cannot split a step further."""
        return int(self._rows[step]) // self._min_rows <= self.parts[step]

    def fits(self, step: int, *, full: bool) -> bool:
        """Returns whether no rank's device was full in a step; otherwise makes micro-batches smaller. A collective.

        `full` says whether this rank's device was.
        """
        rows = int(self._largest[step])
        # Ranks have micro-batches of different sizes: the largest that was too large for its device counts.
        too_large = int(max_over_ranks(torch.tensor([rows if full else 0]), self._world))
        if not too_large:
            if self._settling:
                self._settling -= 1
            else:
                self._proven = max(self._proven, rows)
            return True
        self.size = max(self._min_rows, too_large // 2)
        self._settling, self._proven = _SETTLING, 0
        if self._world.is_main:
            _LOG.info("microBatchSize='auto': micro-batches have %d rows at most from now on", self.size)
            if self._min_rows > 1:
                _LOG.warning("microBatchSize='auto': batch normalisation takes its statistics of %d rows", self.size)
        self._plan(step)
        return False

    def _parts_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the number of micro-batches for each number of rows."""
        parts = torch.full_like(rows, self._count) if self.size is None else -(-rows // self.size)
        return parts.minimum(rows // self._min_rows).clamp(min=1)

    def _plan(self, first: int) -> None:
        """Plans the steps of the epoch, whose steps before `first` are over."""
        parts = self._parts_of(self._rows)
        if self._same_count:
            parts = max_over_ranks(parts, self._world)
        self.parts = parts.tolist()
        if self.searches:
            self._largest = (-(-self._rows // parts)).clamp(min=self._min_rows)
            self.tried = [True] * len(parts) if self._varies else self._records(first)

    def _records(self, first: int) -> list[bool]:
        """Returns, for each step, whether a rank has a larger micro-batch in it than in all steps since it settled."""
        proving = self._largest.clone()
        proving[: first + self._settling] = 0
        proven_before = torch.cat([proving.new_tensor([self._proven]), proving[:-1]]).cummax(0).values
        return max_over_ranks((self._largest > proven_before).long(), self._world).bool().tolist()

"""The scorers that a process keeps."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

from torch import nn

from sparktorch.model.scorer import Scoring
from sparktorch.spark import scoring_udf
from tests.unit.model.test_trained_module import trained


class Cyclic(nn.Linear):
    """Refers to itself, and is told of."""

    alive: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__(5, 1)
        self.itself = [self]
        self.alive.add(self)


def test_scorers_that_leave_the_cache_are_freed_also_where_modules_are_in_cycles() -> None:
    try:
        model = trained(Cyclic)
        for key in range(8):
            sent: Any = SimpleNamespace(key=str(key), load=lambda: model)
            scoring_udf.scorer_here(sent, Scoring(device="cpu"), local=True)
        assert len(scoring_udf._scorers) == scoring_udf._KEPT_SCORERS
        assert len(Cyclic.alive) <= scoring_udf._KEPT_SCORERS + 1  # and the one that was trained
    finally:
        scoring_udf._scorers.clear()
        gc.unfreeze()


def test_what_the_first_task_of_a_scorer_has_imported_is_not_looked_at_after_every_later_task() -> None:
    model, left = trained(nn.Linear, params={"in_features": 5, "out_features": 1}), []
    sent: Any = SimpleNamespace(key="one", load=lambda: model)
    try:
        for _ in range(3):
            scoring_udf.scorer_here(sent, Scoring(device="cpu"), local=True)
            left.append(["an object that the collector knows"])
        known = {id(each) for each in gc.get_objects()}
        assert [id(each) in known for each in left] == [False, True, True]
    finally:
        scoring_udf._scorers.clear()
        gc.unfreeze()

"""Progress of a training: this rank's epoch counters, and the results that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import download
from sparktorch.train.loop.validation import Best

__all__ = ["EpochCounters", "Progress"]


@dataclass
class EpochCounters:
    """Counters of one rank over the steps of an epoch.

    Attributes:
        losses: Sum of this rank's weighted losses in each step, float64 of shape `(steps,)`.
        norms: Gradient norm of each step before clipping, float32 of shape `(steps,)`; NaN if it was not measured.
            `None` in checkpoints of earlier versions.
        taken: Steps taken, skipped ones included.
        waited: Seconds spent waiting for rows.
        seconds: Seconds that the epoch had taken when its last checkpoint was saved.
        validating: Seconds spent in validation.
        skipped: Indices of the steps that were skipped.
        validations: Metrics of each validation.
        untrained: Metrics of the validation before the first step, in the first epoch; empty without one.
        positions: Positions in padded inputs, padding included.
        elements: Positions that hold data.
    """

    losses: torch.Tensor
    taken: int = 0
    rows: int = 0
    waited: float = 0.0
    seconds: float = 0.0
    validating: float = 0.0
    skipped: list[int] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    untrained: dict[str, Any] = field(default_factory=dict)
    positions: int = 0
    elements: int = 0
    norms: torch.Tensor | None = None

    def sums(self) -> torch.Tensor:
        """Returns the counters to sum over ranks for `Progress.record`, float64 of shape `(7,)`."""
        norms = self._norms()
        sums = [float(self.losses.sum()), self.rows, self.waited, self.positions, self.elements]
        return torch.tensor([*sums, float(norms.sum()), len(norms)], dtype=torch.float64)

    def largest_norm(self) -> torch.Tensor:
        """Returns the largest gradient norm, float64 of shape `(1,)`; 0 if none was measured."""
        return torch.cat([self._norms(), torch.zeros(1, dtype=torch.float64)]).max().reshape(1)

    def _norms(self) -> torch.Tensor:
        """Returns the measured norms that are finite, float64 on the CPU."""
        if self.norms is None:
            return torch.zeros(0, dtype=torch.float64)
        norms = self.norms.double().cpu()
        return norms[norms.isfinite()]

    def add(self, other: EpochCounters) -> None:
        """Adds the counters of another rank over the same steps."""
        self.losses += other.losses.to(self.losses.device)
        if self.norms is not None and other.norms is not None:
            self.norms = torch.fmax(self.norms, other.norms.to(self.norms.device))
        self.rows += other.rows
        self.waited += other.waited
        self.positions += other.positions
        self.elements += other.elements


class Progress:
    """Counters and results of a training, in one rank.

    Attributes:
        history: Records of the finished epochs.
        best: The best validation, and how many have followed it.
        confusion: Confusion matrix of the weights that the training would return now, `None` without one.
        validated_step: The step after which the last validation ran, -1 before the first one, 0 in checkpoints of
            earlier versions.
        ended: Whether training stops before its last epoch.
    """

    def __init__(self, steps: int, config: TrainConfig, device: torch.device) -> None:
        """Starts with empty counters; `steps` is the number of steps in an epoch, `config` is passed to `Best`."""
        self._steps, self._device = steps, device
        self.best = Best(config)
        self.history: list[dict[str, Any]] = []
        self.confusion: torch.Tensor | None = None
        self.validated_step = -1
        self.ended = False
        self.counters = self._zero_counters()

    def end_epoch(self, record: dict[str, Any]) -> None:
        """Adds an epoch's record to the history, and resets the epoch counters."""
        self.history.append(record)
        self.counters = self._zero_counters()

    def last_validation(self) -> dict[str, Any]:
        """Returns the last validation of this epoch, or else the previous epoch's record; empty without either."""
        return (self.counters.validations or self.history or [{}])[-1]

    def record(
        self,
        sums: torch.Tensor,
        weights: torch.Tensor,
        seconds: float,
        ranks: int,
        *,
        number: int,
        learning_rate: float,
        largest_norm: float = 0.0,
    ) -> dict[str, Any]:
        """Returns the epoch's record, the same on every rank except for what depends on `seconds`, those of its steps.

        `sums` are `EpochCounters.sums` of all ranks, `weights` those of each step over all ranks, float64 of shape
        `(steps,)`; `number` counts epochs from 1, and `largest_norm` is the largest gradient norm of any rank.
        """
        loss_sum, rows, waited, positions, elements, norm_sum, norms = sums.tolist()
        weights = weights.clone()
        weights[self.counters.skipped] = 0
        weight = float(weights[: self.counters.taken].sum())  # An epoch may end early.
        record = {
            "epoch": number,
            "loss": loss_sum / max(weight, torch.finfo(torch.float64).tiny),
            "learning_rate": learning_rate,
            "seconds": seconds,
            "rows_per_second": rows / seconds,
            "data_wait_share": waited / (seconds * ranks),
        }
        if norms:
            record |= {"gradient_norm": norm_sum / norms, "gradient_norm_max": largest_norm}
        if self.counters.untrained:
            record["untrained"] = self.counters.untrained
        if positions:
            record["padding_share"] = 1 - elements / positions
        return record

    def state(self) -> dict[str, Any]:
        """Returns the progress without the best weights, on the CPU, for `merge`."""
        counters = self.counters
        on_device = {"losses": counters.losses}
        if counters.norms is not None:
            on_device["norms"] = counters.norms
        on_host: dict[str, Any] = download(on_device)
        tally = asdict(replace(counters, **on_host))
        tally["places"] = tally.pop("positions")  # The name in checkpoints is that of their first version.
        return {
            "best": self.best.state_dict(),
            "confusion": self.confusion,
            "validated_step": self.validated_step,
            "history": self.history,
            "ended": self.ended,
            "tally": tally,
        }

    def merge(
        self, main: Mapping[str, Any], states: Iterable[Mapping[str, Any]], weights: dict[str, torch.Tensor]
    ) -> None:
        """Restores the progress from the states of ranks, whose number may have changed.

        The counters of each old rank go to one new rank: `states` are the results of `state` in the old ranks for this
        one, and `main` that of the old rank 0, which may have further keys. `weights` are the best ones.
        """
        self.best.load_state_dict(main["best"], weights)
        self.confusion, self.validated_step = main["confusion"], main["validated_step"]
        self.history, self.ended = main["history"], main["ended"]
        # What all ranks share comes from the old rank 0; what is summed up comes from the old ranks of this one.
        zeros = self._zero_counters()
        self.counters = replace(
            _counters_of(main), losses=zeros.losses, norms=zeros.norms, rows=0, waited=0, positions=0, elements=0
        )
        for state in states:
            self.counters.add(_counters_of(state))

    def _zero_counters(self) -> EpochCounters:
        losses = torch.zeros(self._steps, dtype=torch.float64, device=self._device)
        return EpochCounters(losses, norms=torch.full((self._steps,), math.nan, device=self._device))


def _counters_of(state: Mapping[str, Any]) -> EpochCounters:
    """Returns the epoch counters in a state of a rank."""
    tally = dict(state["tally"])
    return EpochCounters(positions=tally.pop("places", 0), **tally)

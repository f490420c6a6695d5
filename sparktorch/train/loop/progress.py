"""Progress of a training: this rank's epoch counters, and the results that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from sparktorch.base.config import TrainConfig
from sparktorch.base.devices import download
from sparktorch.train.loop.validation import Best

__all__ = ["EpochCounters", "Progress"]


class EpochSums(NamedTuple):
    """The counters of an epoch, summed over ranks.

    Attributes:
        loss: Sum of the weighted losses.
        rows: Number of rows.
        waited: Seconds spent waiting for rows.
        positions: Number of positions in padded inputs, including padding.
        elements: Number of these positions that hold data.
        norm: Sum of the measured gradient norms.
        norms: Number of measured gradient norms.
    """

    loss: float
    rows: float
    waited: float
    positions: float
    elements: float
    norm: float
    norms: float


@dataclass
class EpochCounters:
    """Counters of one rank over the steps of an epoch.

    Checkpoints hold them under the names of these attributes.

    Attributes:
        losses: Sum of this rank's weighted losses in each step, float64 of shape `(steps,)`.
        taken: Steps taken, including skipped steps.
        rows: Rows of this rank in the steps that were taken.
        waited: Seconds spent waiting for rows.
        seconds: Seconds that the epoch had taken when its last checkpoint was saved.
        validating: Seconds spent in validation.
        skipped: Indices of the steps that were skipped.
        validations: Metrics of each validation.
        untrained: Metrics of the validation before the first step of the training; empty if there was none.
        positions: Number of positions in padded inputs, including padding.
        elements: Number of these positions that hold data.
        norms: Gradient norm of each step before clipping, float32 of shape `(steps,)`; NaN if it was not measured.
            `None` in checkpoints of earlier versions.
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
        """Returns the counters to sum over ranks, in the order of `EpochSums`, float64 of shape `(7,)`."""
        norms = self._measured_norms()
        sums = EpochSums(
            loss=float(self.losses.sum()),
            rows=self.rows,
            waited=self.waited,
            positions=self.positions,
            elements=self.elements,
            norm=float(norms.sum()),
            norms=len(norms),
        )
        return torch.tensor(sums, dtype=torch.float64)

    def largest_norm(self) -> torch.Tensor:
        """Returns the largest gradient norm, float64 of shape `(1,)`; 0 if none was measured."""
        return torch.cat([self._measured_norms(), torch.zeros(1, dtype=torch.float64)]).max().reshape(1)

    def _measured_norms(self) -> torch.Tensor:
        """Returns the norms that were measured and are finite, float64 on the CPU."""
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
        best: The best validation, and the number of validations since then.
        confusion: Confusion matrix of the weights that the training would return now; `None` if there is none.
        validated_step: The step after which the last validation ran; -1 before the first validation, which is 0 in
            checkpoints of earlier versions.
        ended: Whether training stops before its last epoch.
        counters: The counters of the current epoch.
    """

    def __init__(self, steps: int, config: TrainConfig, device: torch.device) -> None:
        """Starts with empty counters; `steps` is the number of steps in an epoch, and `config` is passed to `Best`."""
        self._steps = steps
        self._device = device
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
        """Returns the last validation of this epoch, or else the previous epoch's record; empty if there is neither."""
        if self.counters.validations:
            return self.counters.validations[-1]
        return self.history[-1] if self.history else {}

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
        """Returns the epoch's record, which is the same on every rank except for what depends on time.

        `sums` is the sum of `EpochCounters.sums` over all ranks. `weights` has the weight of each step's rows over all
        ranks, float64 of shape `(steps,)`. `seconds` is the time that the steps have taken, `ranks` the number of
        ranks, `number` the number of the epoch from 1, and `largest_norm` the largest gradient norm of any rank.
        """
        total = EpochSums(*sums.tolist())
        weights = weights.clone()
        weights[self.counters.skipped] = 0
        weight = float(weights[: self.counters.taken].sum())  # Steps are missing if the epoch has ended early.
        record: dict[str, Any] = {
            "epoch": number,
            "loss": total.loss / max(weight, torch.finfo(torch.float64).tiny),
            "learning_rate": learning_rate,
            "seconds": seconds,
            "rows_per_second": total.rows / seconds,
            "data_wait_share": total.waited / (seconds * ranks),
        }
        if total.norms:
            record |= {"gradient_norm": total.norm / total.norms, "gradient_norm_max": largest_norm}
        if self.counters.untrained:
            record["untrained"] = self.counters.untrained
        if total.positions:
            record["padding_share"] = 1 - total.elements / total.positions
        return record

    def state(self) -> dict[str, Any]:
        """Returns the progress on the CPU, without the best weights, for `merge`."""
        counters = self.counters
        on_device = {"losses": counters.losses}
        if counters.norms is not None:
            on_device["norms"] = counters.norms
        on_host: dict[str, Any] = download(on_device)
        tally = asdict(replace(counters, **on_host))
        tally["places"] = tally.pop("positions")  # Checkpoints keep the name that the first version used.
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
        """Restores the progress from the states of the old ranks, whose number may have been another.

        The counters of each old rank go to one new rank: `states` has what `state` returned in the old ranks that are
        assigned to this rank. `main` is the state of the old rank 0, which may have further keys. `weights` are the
        best weights.
        """
        self.best.load_state_dict(main["best"], weights)
        self.confusion = main["confusion"]
        self.validated_step = main["validated_step"]
        self.history = main["history"]
        self.ended = main["ended"]
        # Numbers that all ranks share come from the old rank 0. Numbers that the ranks sum up come from `states`.
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
    """Returns the epoch counters from the state of a rank."""
    tally = dict(state["tally"])
    return EpochCounters(positions=tally.pop("places", 0), **tally)

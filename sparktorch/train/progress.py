"""What has come of a training so far: this rank's sums over the epoch it is in, and what all ranks know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from sparktorch.base.devices import download
from sparktorch.train.validation import Best

__all__ = ["EpochCounters", "Progress"]


@dataclass
class EpochCounters:
    """What adds up over the steps of an epoch in this rank.

    Attributes:
        losses: This rank's weighted losses of each step, float64 of shape `(steps,)`.
        norms: Of the gradient of each step before clipping, float32 of shape `(steps,)`; NaN where it was not looked
            at. Checkpoints of earlier versions hold none.
        taken: Number of steps.
        rows: Number of rows.
        waited: Seconds waited for rows.
        seconds: Seconds of the steps that were taken before the training was interrupted.
        validating: Seconds in validation.
        skipped: Steps that were left out.
        validations: What each validation found.
        places: Of the padded inputs.
        elements: In these places.
    """

    losses: torch.Tensor
    taken: int = 0
    rows: int = 0
    waited: float = 0.0
    seconds: float = 0.0
    validating: float = 0.0
    skipped: list[int] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    places: int = 0
    elements: int = 0
    norms: torch.Tensor | None = None

    def sums(self) -> torch.Tensor:
        """Returns what adds up over ranks, for `Progress.record`."""
        norms = self._norms()
        sums = [float(self.losses.sum()), self.rows, self.waited, self.places, self.elements]
        return torch.tensor([*sums, float(norms.sum()), len(norms)], dtype=torch.float64)

    def largest_norm(self) -> torch.Tensor:
        """Returns the largest norm of a gradient, float64 of shape `(1,)`; 0 where none was looked at."""
        return torch.cat([self._norms(), torch.zeros(1, dtype=torch.float64)]).max().reshape(1)

    def _norms(self) -> torch.Tensor:
        """Returns the norms that were looked at and are finite, float64 on the CPU."""
        if self.norms is None:
            return torch.zeros(0, dtype=torch.float64)
        norms = self.norms.double().cpu()
        return norms[norms.isfinite()]

    def add(self, other: EpochCounters) -> None:
        """Adds the tally of another rank over the same steps."""
        self.losses += other.losses.to(self.losses.device)
        if self.norms is not None and other.norms is not None:
            self.norms = torch.fmax(self.norms, other.norms.to(self.norms.device))
        self.rows += other.rows
        self.waited += other.waited
        self.places += other.places
        self.elements += other.elements


class Progress:
    """What a training has come to, in one rank.

    Attributes:
        tally: Of the epoch that the training is in.
        history: The records of the epochs before it.
        best: The best validation, and how many came after it.
        confusion: Of the weights that the model would have now, where there is one.
        validated_step: The last after which the training was validated, 0 before any.
        ended: Whether it is over before its last epoch.
    """

    def __init__(self, steps: int, patience: int | None, device: torch.device) -> None:
        """Begins at nothing; `steps` are those of an epoch, `patience` that of `Best`."""
        self._steps, self._device = steps, device
        self.best = Best(patience)
        self.history: list[dict[str, Any]] = []
        self.confusion: torch.Tensor | None = None
        self.validated_step = 0
        self.ended = False
        self.tally = self._nothing()

    def end_epoch(self, record: dict[str, Any]) -> None:
        """Adds the record of an epoch to the history, and begins to count anew."""
        self.history.append(record)
        self.tally = self._nothing()

    def last_validation(self) -> dict[str, Any]:
        """Returns a record with the metrics of the last validation, if this epoch or the one before was validated."""
        return (self.tally.validations or self.history or [{}])[-1]

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
        """Returns the record of the epoch, the same on every rank but for the seconds.

        Args:
            sums: `EpochCounters.sums`, added over all ranks.
            weights: Of each step, over all ranks.
            seconds: That the steps have taken.
            ranks: Number of ranks.
            number: Of the epoch, from 1.
            learning_rate: Of the last step.
            largest_norm: Of a gradient of any rank, where `sums` counts some.
        """
        loss_sum, rows, waited, places, elements, norm_sum, norms = sums.tolist()
        weights = weights.clone()
        weights[self.tally.skipped] = 0
        weight = float(weights[: self.tally.taken].sum())
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
        if places:
            record["padding_share"] = 1 - elements / places
        return record

    def state(self) -> dict[str, Any]:
        """Returns all of it but the best weights, for `merge`, on the CPU."""
        tally = self.tally
        held = {"losses": tally.losses} | ({} if tally.norms is None else {"norms": tally.norms})
        own: dict[str, Any] = download(held)
        return {
            "best": self.best.state_dict(),
            "confusion": self.confusion,
            "validated_step": self.validated_step,
            "history": self.history,
            "ended": self.ended,
            "tally": asdict(replace(tally, **own)),
        }

    def merge(
        self, main: Mapping[str, Any], states: Iterable[Mapping[str, Any]], weights: dict[str, torch.Tensor]
    ) -> None:
        """Goes on from the states of ranks, of which there may have been another number.

        Each old rank's sums go to one of those that there are now.

        Args:
            main: What `state` returned in rank 0, among other things.
            states: What it returned in those ranks whose sums go to this one.
            weights: The best ones.
        """
        self.best.load_state_dict(main["best"], weights)
        self.confusion, self.validated_step = main["confusion"], main["validated_step"]
        self.history, self.ended = main["history"], main["ended"]
        sums: dict[str, Any] = dict.fromkeys(("rows", "waited", "places", "elements"), 0)
        nothing = self._nothing()
        self.tally = replace(EpochCounters(**main["tally"]), losses=nothing.losses, norms=nothing.norms, **sums)
        for state in states:
            self.tally.add(EpochCounters(**state["tally"]))

    def _nothing(self) -> EpochCounters:
        losses = torch.zeros(self._steps, dtype=torch.float64, device=self._device)
        return EpochCounters(losses, norms=torch.full((self._steps,), math.nan, device=self._device))
